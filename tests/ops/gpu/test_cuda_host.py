"""The host's side of the CUDA C++ kernels: tilings, compilation and caches."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import workspace
from rbn.ops.gpu.lstm.input_moments import input_moments
from rbn.ops.gpu.lstm.portable.portable_kernels import choose, shared_bytes
from rbn.ops.gpu.runtime import driver, nvrtc, precision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [2, 8, 100, 240, 256, 258, 512, 1000, 1056])
@pytest.mark.parametrize("batch", [1, 16, 17, 64, 65, 100, 128])
def test_a_cut_covers_the_batch_and_fits_the_card(dtype, hidden, batch):
    for direction in ("forward", "backward"):
        cut = choose(direction, dtype, batch, hidden)
        if cut is None:  # the Triton kernels run
            assert hidden > 240
            continue
        assert 16 * cut.tiles >= batch
        assert cut.tiles % cut.row_warps == 0
        assert 96 <= cut.threads <= 1024  # a thread for each sum over the batch
        assert shared_bytes(direction, cut, dtype, hidden) <= 227 * 1024


def test_the_shapes_of_the_paper_are_cut():
    for batch, hidden in ((100, 100), (64, 240), (64, 1000)):
        for dtype in TYPES:
            assert choose("forward", dtype, batch, hidden) is not None
            assert choose("backward", dtype, batch, hidden) is not None
    assert choose("forward", torch.float32, 129, 100) is None


def test_a_card_with_less_shared_memory():
    limit = 99 * 1024
    assert choose("forward", torch.bfloat16, 100, 100, limit) is not None
    assert choose("forward", torch.bfloat16, 64, 1000, limit) is None


def test_what_is_saved_has_space_for_pairs_of_rows():
    for batch, rows in ((1, 2), (7, 8), (100, 100)):
        assert workspace.saved_rows(batch) == rows


@pytest.mark.parametrize(
    "name",
    [
        *("portable_forward", "portable_backward", "grid_forward", "grid_backward"),
        *("cluster_forward", "cluster_backward", "rnn_forward", "rnn_backward"),
    ],
)
def test_sources_are_whole(name):
    text = nvrtc.source(name)
    assert "#include" not in text
    threads = "LAUNCHED" if name.startswith("cluster") else "THREADS"
    assert f'extern "C" __global__ void __launch_bounds__({threads}, 1) {name}(' in text


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    calls = []

    def compile_source(text, name, defines, arch):
        calls.append((name, defines, arch))
        return b"code"

    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert nvrtc.compiled("portable_forward", {"H": 8}, "sm_90") == b"code"
    assert calls == [("portable_forward", {"H": 8}, "sm_90")]
    nvrtc.compiled("portable_forward", {"H": 8}, "sm_80")
    nvrtc.compiled("portable_forward", {"H": 16}, "sm_90")
    assert len(calls) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    assert nvrtc.compiled("portable_forward", {"H": 8}, "sm_90") == b"code"


@pytest.mark.parametrize(
    "damage", [lambda code: b"", lambda code: code[:-1], lambda code: b"x" * 9]
)
def test_damaged_code_is_compiled_again(damage, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RBN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    nvrtc.compiled("portable_forward", {"H": 8}, "sm_90")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert nvrtc.compiled("portable_forward", {"H": 8}, "sm_90") == b"code"
    assert "damaged" in caplog.text
    assert path.read_bytes() == whole


def test_code_that_cannot_be_kept_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(one, other):
        raise OSError("no space left on device")

    monkeypatch.setenv("RBN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    monkeypatch.setattr(nvrtc.os, "replace", fail)
    assert nvrtc.compiled("portable_forward", {"H": 8}, "sm_90") == b"code"
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    for name in ("RBN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvrtc.Path, "home", fail)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    monkeypatch.setattr(nvrtc, "_keep", lambda *args: pytest.fail("kept where others can write"))
    assert nvrtc.cache_folder() is None
    assert nvrtc.compiled("portable_forward", {"H": 8}, "sm_90") == b"code"


@pytest.mark.parametrize("shared", ["file", "folder"])
def test_code_that_others_can_write_is_not_used(shared, tmp_path, caplog):
    path = tmp_path / "x.cubin"
    nvrtc._keep(b"code", path)
    assert nvrtc._kept(path) == b"code"
    (path if shared == "file" else tmp_path).chmod(0o777)
    assert nvrtc._kept(path) is None
    assert "can be written by other users" in caplog.text


@pytest.fixture
def ahead(monkeypatch, tmp_path):
    """Nothing was compiled ahead. Returns a function that makes the compiler call a function."""
    monkeypatch.setenv("RBN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_AHEAD", {})

    def given(compile_source):
        monkeypatch.setattr(nvrtc, "compile_source", compile_source)

    return given


def test_kernels_are_compiled_ahead_at_the_same_time(ahead):
    both, names = threading.Barrier(2, timeout=60), []

    def compile_source(text, name, defines, arch):
        both.wait()
        names.append(name)
        return name.encode()

    ahead(compile_source)
    for name in ("rnn_forward", "rnn_backward", "rnn_forward"):  # the last one is known
        nvrtc.compile_ahead(name, {"H": 8, "TYPE": 1}, "sm_90")
    for name in ("rnn_forward", "rnn_backward"):
        assert nvrtc.compiled(name, {"TYPE": 1, "H": 8}, "sm_90") == name.encode()
        nvrtc.compile_ahead(name, {"H": 8, "TYPE": 1}, "sm_90")  # loaded: not needed again
        assert nvrtc.compiled(name, {"H": 8, "TYPE": 1}, "sm_90") == name.encode()  # from disk
    assert sorted(names) == ["rnn_backward", "rnn_forward"]


def test_errors_ahead_are_raised_where_the_kernel_is_needed(ahead):
    def compile_source(*args):
        raise RuntimeError("NVRTC refused rnn_forward: an error")

    ahead(compile_source)
    nvrtc.compile_ahead("rnn_forward", {"H": 8}, "sm_90")
    with pytest.raises(RuntimeError, match="NVRTC refused rnn_forward: an error"):
        nvrtc.compiled("rnn_forward", {"H": 8}, "sm_90")
    ahead(lambda *args: b"code")
    assert nvrtc.compiled("rnn_forward", {"H": 8}, "sm_90") == b"code"  # the next call tries again


def test_without_threads_kernels_are_compiled_when_needed(ahead, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    ahead(lambda *args: b"code")
    monkeypatch.setattr(threading.Thread, "start", start)
    nvrtc.compile_ahead("rnn_forward", {"H": 8}, "sm_90")
    assert nvrtc.compiled("rnn_forward", {"H": 8}, "sm_90") == b"code"


ENDS = """
import os, signal, sys, threading, time
from rbn.ops.gpu.runtime import nvrtc

def compile_source(text, name, defines, arch):
    time.sleep(seconds)
    return b"code"

end, seconds = sys.argv[1], 1.0
nvrtc.compile_source = compile_source
nvrtc.compile_ahead("rnn_forward", {"H": 8}, "sm_90")
if end == "fork":
    child = os.fork()
    if not child:  # has no thread that compiles
        seconds = 0.0
        assert nvrtc.compiled("rnn_forward", {"H": 8}, "sm_90") == b"code"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
if end == "interrupt":
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        nvrtc.compiled("rnn_forward", {"H": 8}, "sm_90")
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "fork", "interrupt"])
def test_a_process_ends_while_it_compiles(end, tmp_path):
    """At its end it waits for the compiler; what that wrote is whole."""
    forks = "ignore:This process:DeprecationWarning"  # a warning about any fork beside threads
    command = [sys.executable, "-W", "error", "-W", forks, "-c", ENDS, end]
    caches = {"RBN_CACHE": str(tmp_path)}
    run = subprocess.run(
        command, env=os.environ | caches, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == ("interrupted\n" if end == "interrupt" else "")
    (path,) = tmp_path.iterdir()
    assert nvrtc._kept(path) == b"code"


class Compiler:
    """NVRTC 12.8, which may reject all programs."""

    def __init__(self, refuses=False):
        self.refuses = refuses

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 12, 8
        return 0

    def nvrtcGetNumSupportedArchs(self, count):
        count._obj.value = 4
        return 0

    def nvrtcGetSupportedArchs(self, found):
        found[:] = [80, 86, 90, 100]
        return 0

    def __getattr__(self, name):
        return lambda *args: int(self.refuses and name == "nvrtcCompileProgram")


@pytest.fixture
def compiler(monkeypatch):
    def given(library):
        monkeypatch.setattr(nvrtc, "library", lambda: library)
        for cache in caches:
            cache.cache_clear()

    caches = (nvrtc.version, nvrtc.architectures, nvrtc.works)
    yield given
    for cache in caches:
        cache.cache_clear()


def test_what_to_compile_for(compiler):
    """The GPU's own architecture, or the previous one of its generation."""
    compiler(Compiler())
    assert nvrtc.version() == (12, 8)
    expected = {(8, 0): "sm_80", (8, 9): "sm_86", (9, 0): "sm_90", (10, 3): "sm_100"}
    assert {number: nvrtc.architecture(number) for number in expected} == expected
    assert nvrtc.architecture((7, 5)) is nvrtc.architecture((12, 0)) is None
    assert nvrtc.works((9, 0))
    assert not nvrtc.works((12, 0))
    compiler(None)
    assert nvrtc.version() == (0, 0)
    assert not nvrtc.works((9, 0))


def test_a_compiler_that_refuses_everything_is_none(compiler, caplog):
    """E.g. one whose second library is missing."""
    compiler(Compiler(refuses=True))
    assert not nvrtc.works((9, 0))
    assert "left out: NVRTC refused empty" in caplog.text


@pytest.mark.parametrize("cluster", [0, 2])
def test_a_thread_that_has_used_no_cuda_enters_a_context(cluster, drive, monkeypatch):
    entered, statuses = [], [201, 0]
    launch = {"cuLaunchKernelEx": lambda *args: statuses.pop(0)}
    launch["cuLaunchCooperativeKernel"] = launch["cuLaunchKernel"] = launch["cuLaunchKernelEx"]
    drive(**launch, cuOccupancyMaxActiveClusters=lambda *args: 1)
    monkeypatch.setattr(driver, "enter", lambda: entered.append(True))
    monkeypatch.setattr(driver.Kernel, "_blocks", lambda self, name: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernel = driver.Kernel(b"", "empty", 32, 0, cluster)
    entered.clear()
    kernel.launch((1, 1), b"")
    assert (statuses, len(entered)) == ([], 1)
    statuses += [201, 0]
    driver.starter_on_stream(1, (1, 1, 1), 32, 0)((ctypes.c_void_p * 1)())
    assert (statuses, len(entered)) == ([], 2)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    with pytest.raises(RuntimeError, match="no NVRTC library"):
        nvrtc.compile_source("", "empty", {}, "sm_90")


@pytest.mark.parametrize("rows", [16, 2])  # a tile for the batch, or several
@pytest.mark.parametrize("padded", [False, True])
def test_moments_of_the_input_term(padded, rows):
    R, T, B, F = 2, 5, 7, 70
    torch.manual_seed(0)
    wx = torch.randn(R, T, B, F, device=DEVICE) + 100  # too large a mean for a one-pass variance
    lengths = torch.tensor([3, 1, 4, 4, 2, 1, 3] if padded else [T] * B, device=DEVICE)
    valid = torch.arange(T, device=DEVICE)[:, None] < lengths
    mean, var = torch.full((2, R, T, F), torch.nan, device=DEVICE)
    input_moments[(R * T, 2)](
        wx,
        mean,
        var,
        lengths.to(torch.int32),
        T,
        B,
        F=F,
        ROWS=rows,
        COLUMNS=64,
        LENGTHS=padded,
    )
    for t in range(T):
        counted = wx[:, t, valid[t]].double()
        if len(counted[0]) == 0:
            assert mean[:, t].abs().max() == 0
            assert var[:, t].abs().max() == 0
            continue
        expected_var, expected_mean = torch.var_mean(counted, dim=1, correction=0)
        torch.testing.assert_close(mean[:, t].double(), expected_mean, rtol=1e-6, atol=0)
        # float32 represents a deviation from 100 to within 4e-6.
        torch.testing.assert_close(var[:, t].double(), expected_var, rtol=1e-4, atol=1e-4)


def test_tf32_follows_the_setting_for_recurrent_networks():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        for allowed in (True, False):
            cudnn.allow_tf32 = allowed
            assert precision.tf32_allowed() is allowed
        if not hasattr(cudnn, "rnn"):
            return  # a torch without settings of its own for them
        for rnn, conv in (("tf32", "ieee"), ("ieee", "tf32")):
            cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision = rnn, conv
            with pytest.raises(RuntimeError, match="TF32"):
                cudnn.allow_tf32  # noqa: B018
            assert precision.tf32_allowed() is (rnn == "tf32")
    finally:
        cudnn.allow_tf32 = before
