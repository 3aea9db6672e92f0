"""The CUDA C++ kernels with PyTorch's features: graphs, compilation, streams, threads."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cuda_cases import HALVES, UNITS, needs_hopper, on_a_card
from recurrence_cases import calm, differentiate, fresh_seed, make_case

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.runtime import driver, nvrtc

pytestmark = on_a_card


def test_a_thread_that_has_used_no_cuda_loads_code():
    """A new thread has no CUDA context until torch runs work in it."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    code = nvrtc.compile_source(nvrtc.source("empty"), "empty", {}, arch)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(driver.Kernel, code, "empty", 32, 0).result().at_once > 0


def train_step(layer, x):
    layer.zero_grad(set_to_none=False)
    layer(x)[0].square().mean().backward()


def test_a_graph_of_a_training_step(capture):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64, max_length=12).cuda()
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 8, device="cuda")
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph, _ = capture(lambda: train_step(layer, x))
    fresh = torch.randn_like(x)
    x.copy_(fresh)
    graph.replay()
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train_step(twin, fresh)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # from the compiler
def test_compiled_as_one_graph():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64, max_length=12).cuda()
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 8, device="cuda")
    compiled = torch.compile(lambda v: layer(v)[0].square().mean(), fullgraph=True)
    compiled(x).backward()
    twin(x)[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype, calls):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64).cuda()
    x = torch.randn(12, 32, 8, device="cuda")
    with torch.autocast("cuda", dtype):
        output, _ = layer(x)
    assert output.dtype == dtype
    output.float().square().mean().backward()
    assert calls == ["forward", "backward"]
    twin = copy.deepcopy(layer).cpu().double()
    twin.zero_grad()
    twin(x.cpu().double())[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        want = twin.get_parameter(name).grad
        error = (parameter.grad.double().cpu() - want).norm()
        assert error <= 16 * UNITS[dtype] * want.norm().clamp(min=1e-2), name


def test_two_streams_at_once():
    torch.manual_seed(0)
    cases = [
        make_case("bn_lstm", 50, 64, 100, seed, dtype=torch.float32).on("cuda") for seed in (0, 1)
    ]
    alone = [differentiate(case, "gpu") for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    together = []
    for case, stream in zip(cases, streams, strict=True):
        with torch.cuda.stream(stream):
            together.append(differentiate(case, "gpu"))
    torch.cuda.synchronize()
    for one, other in zip(alone, together, strict=True):
        for name, value in one[1].items():
            assert torch.equal(value, other[1][name]), name


def test_long_sequences_in_inference():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(2, 16).cuda()
    layer(torch.randn(10, 8, 2, device="cuda"))
    layer.eval()
    x = torch.randn(100_000, 2, 2, device="cuda")
    with torch.no_grad():
        output, _ = layer(x)
        head, _ = layer(x[:50])
    assert torch.equal(output[:50], head)
    assert output.isfinite().all()


# Every kernel family: units, rows, dtype, and its name in the log.
FAMILIES = {
    "cluster": (100, 64, torch.float32, "in CUDA, cluster"),
    "cluster, 16 units": (240, 64, torch.bfloat16, "in CUDA, cluster"),
    "portable": (300, 20, torch.float32, "in CUDA, portable: PortableTiling"),
    "grid": (1000, 64, torch.bfloat16, "in CUDA, grid"),
    "grid, float32": (1000, 64, torch.float32, "in CUDA, grid"),
    "steps": (33, 20, torch.bfloat16, "a product and a kernel for each step"),
    "steps, float32": (22, 600, torch.float32, "a product and a kernel for each step"),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@needs_hopper
@every_family
def test_a_graph_of_a_training_step_in_every_family(family, capture, caplog):
    hidden, batch, dtype, words = FAMILIES[family]
    torch.manual_seed(fresh_seed())
    layer = rbn.BatchNormLSTM(8, hidden, max_length=12).to("cuda", dtype)
    twin = copy.deepcopy(layer)
    x = torch.randn(12, batch, 8, device="cuda", dtype=dtype)
    for parameter in (*layer.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        graph, _ = capture(lambda: train_step(layer, x))
    assert words in caplog.text
    for _ in range(2):
        x.normal_()
        graph.replay()
        train_step(twin, x)
        for name, parameter in layer.named_parameters():
            want = twin.get_parameter(name).grad.float()
            error = (parameter.grad.float() - want).norm()
            assert error <= UNITS[dtype] * want.norm(), name


@needs_hopper
@every_family
def test_two_streams_at_once_in_every_family(family, caplog):
    """Launches that do not fit on the GPU together wait for each other, and do not mix."""
    hidden, batch, dtype, words = FAMILIES[family]
    cases = [
        make_case("bn_lstm", 30, batch, hidden, fresh_seed(), dtype=dtype, **calm("bn_lstm"))
        for _ in range(2)
    ]
    cases = [case.on("cuda") for case in cases]
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        alone = [differentiate(case, "gpu") for case in cases]
    assert words in caplog.text
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    together = []
    for _ in range(3):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(differentiate(case, "gpu"))
    torch.cuda.synchronize()
    # cuBLAS may sum in another order on a stream with another workspace.
    for one, other in zip(alone * 3, together, strict=True):
        for name, value in (one[0] | one[1]).items():
            error = (value.float() - (other[0] | other[1])[name].float()).norm()
            near = UNITS[dtype] if "steps" in family or name in ("weight_hh", "h0") else 0.0
            assert error <= near * value.float().norm(), name


def test_what_was_compiled_is_found_on_disk(tmp_path, monkeypatch):
    """As in the next process, which compiles nothing."""
    monkeypatch.setenv("RBN_CACHE", str(tmp_path))
    caches = (
        cluster_kernels.cluster_of,
        cluster_kernels.kernel,
        grid_kernels.kernel,
        portable_kernels.kernel,
    )
    cases = [
        make_case("bn_lstm", 3, 40, hidden, dtype=torch.bfloat16, **calm("bn_lstm")).on("cuda")
        for hidden in (40, 264, 1058)  # the last one in Triton
    ]
    found = []
    for again in (False, True):
        for cache in caches:
            cache.cache_clear()
        if again:
            assert list(tmp_path.glob("*.cubin"))
            monkeypatch.setattr(nvrtc, "compile_source", lambda *args: pytest.fail("compiled"))
        found.append([differentiate(case, "gpu") for case in cases])
    for one, other in zip(*found, strict=True):
        for results, same in zip(one, other, strict=True):
            for name, value in results.items():
                assert torch.equal(value, same[name]), name
