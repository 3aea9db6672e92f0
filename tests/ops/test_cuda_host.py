"""The host's side of the CUDA kernels: how the work is cut, what is compiled and kept."""

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu import cuda_lstm, nvrtc, plan, signature
from rbn.ops.gpu.input_moments import input_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [2, 8, 100, 240, 256, 258, 512, 1000, 1056])
@pytest.mark.parametrize("batch", [1, 16, 17, 64, 65, 100, 128])
def test_a_cut_covers_the_batch_and_fits_the_card(dtype, hidden, batch):
    for make, columns, pitch, sums in (
        (cuda_lstm.cut_forward, 4, 40, 64),
        (cuda_lstm.cut_backward, 1, 8, 96),
    ):
        cut = make(dtype, batch, hidden)
        if cut is None:  # the Triton kernels run
            assert hidden > 240
            continue
        assert 16 * cut.tiles >= batch
        assert cut.tiles % cut.row_warps == 0
        assert 96 <= cut.threads <= 1024  # a thread for each sum over the batch
        width = hidden if columns == 4 else 4 * hidden
        blocks = -(-width // (16 if dtype == torch.float32 else 32))
        assert cut.shared(blocks, columns, pitch, sums) <= 227 * 1024


def test_the_shapes_of_the_paper_are_cut():
    for batch, hidden in ((100, 100), (64, 240), (64, 1000)):
        for dtype in TYPES:
            assert cuda_lstm.cut_forward(dtype, batch, hidden) is not None
            assert cuda_lstm.cut_backward(dtype, batch, hidden) is not None
    assert cuda_lstm.cut_forward(torch.float32, 129, 100) is None


def test_a_card_with_less_shared_memory():
    limit = 99 * 1024
    assert cuda_lstm.cut_forward(torch.bfloat16, 100, 100, limit) is not None
    assert cuda_lstm.cut_forward(torch.bfloat16, 64, 1000, limit) is None


@pytest.mark.parametrize(
    ("hidden", "itemsize", "stages"),
    [(1056, 2, (3, 3)), (1058, 2, (1, 3)), (1055, 2, (1, 1)), (1058, 4, (1, 3)), (1056, 4, (3, 3))],
)
def test_rows_that_begin_anywhere_are_not_read_in_the_background(hidden, itemsize, stages):
    found = plan.make_plan(1, 9, hidden, 132, itemsize, 227 * 1024)
    assert (found.stages_forward, found.stages_backward) == stages


@pytest.mark.parametrize("shared", [48, 64, 96, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("batch", [1, 64, 129, 400, 1000, 2000])
@pytest.mark.parametrize("hidden", [1, 24, 40, 100, 1000])
def test_the_tiles_of_triton_fit_the_card(shared, itemsize, batch, hidden):
    found = plan.make_plan(1, batch, hidden, 132, itemsize, 1024 * shared)
    rows = max(16, plan.power_of_two(batch))
    if found is None:
        # The smallest tile of four units does not fit, or the gates take too many registers.
        assert (rows + 16) * 16 * itemsize > 1024 * shared or rows * 16 * -(-hidden // 528) > 2**13
        return
    assert rows * 4 * found.units <= 2**13
    for k, stages, columns in (
        (found.k_forward, found.stages_forward, 4 * found.units),
        (found.k_backward, found.stages_backward, found.units),
    ):
        assert k >= 16
        assert stages * (rows + columns) * k * itemsize <= 1024 * shared


def test_what_is_saved_has_room_for_pairs_of_rows():
    for batch, rows in ((1, 2), (7, 8), (100, 100)):
        assert signature.saved_rows(batch) == rows


@pytest.mark.parametrize(
    "name",
    [
        *("lstm_forward", "lstm_backward", "wide_forward", "wide_backward"),
        *("small_forward", "small_backward"),
    ],
)
def test_sources_are_whole(name):
    text = nvrtc.source(name)
    assert "#include" not in text
    threads = "LAUNCHED" if name.startswith("small") else "THREADS"
    assert f'extern "C" __global__ void __launch_bounds__({threads}, 1) {name}(' in text


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    calls = []

    def compile_source(text, name, defines, arch):
        calls.append((name, defines, arch))
        return b"code"

    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert nvrtc.compiled("lstm_forward", {"H": 8}, "sm_90") == b"code"
    assert calls == [("lstm_forward", {"H": 8}, "sm_90")]
    nvrtc.compiled("lstm_forward", {"H": 8}, "sm_80")
    nvrtc.compiled("lstm_forward", {"H": 16}, "sm_90")
    assert len(calls) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    assert nvrtc.compiled("lstm_forward", {"H": 8}, "sm_90") == b"code"


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    with pytest.raises(RuntimeError, match="no NVRTC library"):
        nvrtc.compile_source("", "nothing", {}, "sm_90")


@pytest.mark.parametrize("rows", [16, 2])  # a tile for the batch, or several
@pytest.mark.parametrize("padded", [False, True])
def test_moments_of_the_input_term(padded, rows):
    R, T, B, F = 2, 5, 7, 70
    torch.manual_seed(0)
    wx = torch.randn(R, T, B, F, device=DEVICE) + 100  # a mean that one pass would not survive
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
        # float32 holds a deviation from 100 to 4e-6.
        torch.testing.assert_close(var[:, t].double(), expected_var, rtol=1e-4, atol=1e-4)


def test_tf32_follows_the_setting_for_recurrent_networks():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        for allowed in (True, False):
            cudnn.allow_tf32 = allowed
            assert plan.tf32_allowed() is allowed
        if not hasattr(cudnn, "rnn"):
            return  # a torch without settings of its own for them
        for rnn, conv in (("tf32", "ieee"), ("ieee", "tf32")):
            cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision = rnn, conv
            with pytest.raises(RuntimeError, match="TF32"):
                cudnn.allow_tf32  # noqa: B018
            assert plan.tf32_allowed() is (rnn == "tf32")
    finally:
        cudnn.allow_tf32 = before
