"""LSTM batches and layers on a GPU that no CUDA C++ kernel supports."""

import copy
import logging

import pytest
import torch
from recurrence_cases import assert_same, calm, differentiate, fresh_seed, make_case

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import products

from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.plan import STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # float32 is tf32


@pytest.fixture(autouse=True)
def _tf32():
    with products(tf32=True):
        yield


def compare(case, dtype, caplog):
    """Results, and gradients by their norm, against the reference in float64 on the same GPU."""
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        found = differentiate(case.to(dtype).on("cuda"), "gpu")
    assert caplog.text.count(STEPS) == 2
    expected = differentiate(case.to(dtype).to(torch.float64).on("cuda"), "reference")
    expected = [{k: None if v is None else v.cpu() for k, v in part.items()} for part in expected]
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for name, want in expected[1].items():
        error = (found[1][name].double().cpu() - want).norm() / want.norm().clamp(min=1)
        assert error <= 8 * UNITS[dtype], f"gradient of {name}: {error:.2g}"


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("shape", [(3, 5000, 20), (3, 2049, 100), (2, 20000, 3), (2, 1025, 1000)])
@pytest.mark.parametrize("options", [{}, {"lengths": "random", "zoneout": ("mask", 0.3)}])
def test_batches_too_large_for_a_tile(shape, dtype, options, caplog):
    case = make_case("bn_lstm", *shape, fresh_seed(), **calm("bn_lstm"), **options)
    compare(case, dtype, caplog)


@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
def test_text8_in_tf32(op, caplog, monkeypatch):
    """As on GPUs without the grid kernels."""
    monkeypatch.setattr(grid_kernels, "TYPES", ())
    compare(make_case(op, 5, 128, 2000, fresh_seed(), **calm(op)), torch.float32, caplog)


def test_a_layer_of_4096_units(caplog):
    case = make_case("bn_lstm", 3, 64, 4096, fresh_seed(), **calm("bn_lstm"))
    compare(case, torch.bfloat16, caplog)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("shape", [(4, 2500, 50), (4, 96, 2304)])
def test_the_same_bits_every_time(shape, dtype):
    case = make_case("bn_lstm", *shape, fresh_seed(), dtype=dtype).on("cuda")
    first = differentiate(case, "gpu")
    for _ in range(30):
        for one, other in zip(first, differentiate(case, "gpu"), strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("batch", [2049, 9000])
def test_a_graph_of_a_training_step(batch):
    torch.manual_seed(fresh_seed())
    layer = rbn.BatchNormLSTM(4, 64, max_length=6).cuda()
    x = torch.randn(6, batch, 4, device="cuda")

    def train_step(module):
        module.zero_grad(set_to_none=False)
        module(x)[0].square().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train_step(layer)
    torch.cuda.current_stream().wait_stream(stream)
    twin = copy.deepcopy(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(layer)
    x.normal_()
    graph.replay()
    train_step(twin)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


def test_statistics_of_a_large_batch_cost_no_more_memory_than_the_results():
    """No gradient: only the input term, the output and one step's workspace."""
    T, B, H = 50, 4000, 100
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(1, H, max_length=T).cuda()
    x = torch.randn(T, B, 1, device="cuda")
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x)
    peak = torch.cuda.max_memory_allocated() - before
    # wx 4, h 1 with space for T + 1, the output's own copy 1; a tenth for one step and the rest.
    assert peak <= 1.1 * 6 * T * B * H * 4 + 32 * B * H * 4
