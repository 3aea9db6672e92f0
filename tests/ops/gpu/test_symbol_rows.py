"""The lookup of rows by symbols and its gradient: on a GPU, or in Triton's interpreter."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import poisoned_memory

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE

from rbn.ops import reference, symbol_rows
from rbn.ops.gpu.symbols import look_up as gpu_symbols

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
TYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = [1, 2, 50, 256]


def inputs(rows, columns, count, dtype, seed=0):
    """Symbols and the gradients of their rows."""
    g = torch.Generator().manual_seed(seed)
    symbols = torch.randint(count, (rows,), generator=g).to(DEVICE)
    return symbols, torch.randn(rows, columns, generator=g).to(DEVICE, dtype)


def sums(symbols, grad, count):
    """In float64, ``[columns, count]``."""
    zeros = torch.zeros(count, grad.shape[1], dtype=torch.float64, device=grad.device)
    return zeros.index_add_(0, symbols, grad.double()).t()


def compare(symbols, grad, count):
    """Tolerance of sums of n numbers: one float32 rounding per addition.

    Tensor cores truncate instead of rounding, hence a full unit; float32 comes in three parts.
    """
    with poisoned_memory():
        found = gpu_symbols.gradient(symbols, grad, count, torch.float32)
    assert found.shape == (grad.shape[1], count)
    assert found.is_contiguous()
    n = torch.bincount(symbols, minlength=count)[None, :]
    parts = 3 if grad.dtype == torch.float32 else 1
    bound = n * parts * torch.finfo(torch.float32).eps * sums(symbols, grad.abs(), count)
    assert ((found - sums(symbols, grad, count)).abs() <= bound).all()
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_as_in_float64(count, dtype):
    compare(*inputs(300, 140, count, dtype), count)


@pytest.mark.slow
@pytest.mark.no_cover
@settings(max_examples=8)  # a compilation each
@given(
    st.integers(0, 400),
    st.integers(1, 300),
    st.sampled_from(COUNTS),
    st.sampled_from(TYPES),
    st.integers(0, 1000),
)
def test_any_shape(rows, columns, count, dtype, seed):
    compare(*inputs(rows, columns, count, dtype, seed), count)


@pytest.mark.parametrize("dtype", TYPES)
def test_all_rows_of_one_symbol(dtype):
    symbols, grad = inputs(500, 24, 27, dtype)
    found = compare(symbols.fill_(7), grad, 27)
    assert found[:, torch.arange(27) != 7].eq(0).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_symbol_that_comes_once_has_the_row_itself(dtype):
    """No part of a number is lost, even if float32 comes in parts of 8 bits."""
    symbols = torch.randperm(50, device=DEVICE)
    grad = (
        torch.randn(50, 20, device=DEVICE)
        * 10 ** torch.linspace(-20, 20, 50, device=DEVICE)[:, None]
    )
    grad = (grad if dtype == torch.float32 else grad.clamp(-6e4, 6e4)).to(dtype)
    found = gpu_symbols.gradient(symbols, grad, 50, torch.float32)
    expected = torch.empty_like(found)
    expected[:, symbols] = grad.float().t()
    unit = torch.finfo(torch.float32).eps if ON_GPU and dtype == torch.float32 else 0.0
    torch.testing.assert_close(found, expected, rtol=unit, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once(dtype):
    symbols, grad = inputs(200, 36, 27, dtype)
    found = gpu_symbols.gradient(symbols, grad, 27, dtype)
    exact = gpu_symbols.gradient(symbols, grad, 27, torch.float32)
    # The interpreter truncates where it should round to bfloat16.
    unit = 0.0 if ON_GPU or dtype == torch.float16 else torch.finfo(dtype).eps
    torch.testing.assert_close(found, exact.to(dtype), rtol=unit, atol=0.0)


@pytest.mark.slow
@pytest.mark.no_cover
def test_rows_far_beyond_the_shares():
    """Several tiles in each of many shares, the last of which are shorter or empty."""
    symbols, grad = inputs(64 * 264 * 2 + 70, 4, 2, torch.bfloat16)
    with mock.patch.object(gpu_symbols, "_PROGRAMS", 19):
        compare(symbols, grad, 2)


def weights(columns, count, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(columns, count, device=DEVICE, dtype=dtype).requires_grad_()


def differentiated(backend, symbols, weight, dtype):
    with rbn.backend(backend):
        rows = symbol_rows(symbols, weight, dtype)
    (found,) = torch.autograd.grad(rows.float().square().sum(), weight)
    return rows.detach(), found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_as_the_reference(dtype, transposed):
    weight = weights(36, 27)
    symbols = torch.randint(27, (4, 9), device=DEVICE)
    symbols = symbols.t() if transposed else symbols
    rows, found = differentiated("gpu", symbols, weight, dtype)
    expected, wanted = differentiated("reference", symbols, weight, dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows, expected)
    assert found.dtype == torch.float32
    # The reference sums and rounds in `dtype`, once for each of some rows.
    torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(dtype).eps, atol=0.0)


def test_gradients_that_are_one_number():
    weight = weights(8, 3)
    symbols = torch.tensor([[0, 2], [2, 2]], device=DEVICE)
    with rbn.backend("gpu"):
        symbol_rows(symbols, weight, torch.float32).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([1.0, 0.0, 3.0], device=DEVICE).expand(8, 3))


def test_no_rows():
    weight = weights(8, 3)
    with rbn.backend("gpu"):
        rows = symbol_rows(
            torch.empty(4, 0, dtype=torch.int64, device=DEVICE), weight, weight.dtype
        )
    rows.sum().backward()
    assert rows.shape == (4, 0, 8)
    assert weight.grad.eq(0).all()


@pytest.mark.parametrize(
    ("count", "weight_type", "dtype"),
    [
        (gpu_symbols.MOST + 1, torch.float32, torch.bfloat16),
        (3, torch.float64, torch.float64),
        (3, torch.float64, torch.bfloat16),
    ],
)
def test_what_the_kernel_does_not_take(count, weight_type, dtype):
    weight = weights(8, count, weight_type)
    symbols = torch.randint(count, (5, 4), device=DEVICE)
    with mock.patch.object(gpu_symbols, "gradient", side_effect=AssertionError):
        rows, found = differentiated("gpu", symbols, weight, dtype)
    expected, wanted = differentiated("reference", symbols, weight, dtype)
    assert torch.equal(rows, expected)
    torch.testing.assert_close(found, wanted)


def test_no_gradient_asked_for():
    weight = weights(8, 3)
    symbols = torch.tensor([[0, 2]], device=DEVICE)
    with rbn.backend("gpu"):
        assert not symbol_rows(symbols, weight.detach(), torch.float32).requires_grad
        with torch.no_grad():
            rows = symbol_rows(symbols, weight, torch.float32)
    assert torch.equal(rows, weight.detach().t()[symbols])


def test_second_derivative():
    weight = weights(8, 3)
    symbols = torch.tensor([[0, 2], [2, 2]], device=DEVICE)
    found = []
    for backend in ("gpu", "reference"):
        with rbn.backend(backend):
            rows = symbol_rows(symbols, weight, torch.float32)
        (first,) = torch.autograd.grad(rows.pow(3).sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found)


def test_compiled():
    torch._dynamo.reset()
    weight = weights(8, 3)
    symbols = torch.tensor([[0, 2], [2, 2]], device=DEVICE)
    compiled = torch.compile(symbol_rows, fullgraph=True, backend="aot_eager")
    with rbn.backend("gpu"):
        rows = compiled(symbols, weight, torch.float32)
    rows.square().sum().backward()
    expected, wanted = differentiated("reference", symbols, weight, torch.float32)
    assert torch.equal(rows, expected)
    torch.testing.assert_close(weight.grad, wanted)


def test_under_torch_func():
    weight = weights(8, 3).detach()
    symbols = torch.tensor([[0, 2], [2, 2]], device=DEVICE)

    def loss(w):
        return symbol_rows(symbols, w, torch.float32).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(each[1], 2 * each[0])
    torch.testing.assert_close(each[0], torch.tensor([2.0, 0.0, 6.0], device=DEVICE) * weight)


def test_on_the_cpu_nothing_changes():
    assert rbn.ops.cpu.symbol_rows is reference.symbol_rows
    weight = torch.randn(8, 3)
    symbols = torch.tensor([[0, 2], [2, 2]])
    rows = symbol_rows(symbols, weight, torch.bfloat16)
    assert torch.equal(rows, weight.bfloat16().t()[symbols])
    with pytest.raises(IndexError):
        symbol_rows(torch.tensor([[3]]), weight, torch.float32)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]


@pytest.fixture(params=["ptb", "text8"])
def paper(request):
    return {"ptb": (6400, 4000, 50), "text8": (23040, 8000, 27)}[request.param]


class TestOnTheCard:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", TYPES)
    def test_same_bits(self, paper, dtype):
        rows, columns, count = paper
        symbols, grad = inputs(rows, columns, count, dtype)
        first = compare(symbols, grad, count)
        for _ in range(50):
            assert torch.equal(gpu_symbols.gradient(symbols, grad, count, torch.float32), first)

    def test_in_a_cuda_graph(self, capture):
        weight = weights(400, 50)
        symbols = torch.randint(50, (30, 16), device=DEVICE)

        def step():
            return differentiated("gpu", symbols, weight, torch.bfloat16)

        graph, found = capture(step)
        for _ in range(3):
            symbols.random_(50)
            graph.replay()
            for one, other in zip(found, step(), strict=True):
                assert torch.equal(one, other)


def test_launches_for_other_types_of_symbols_are_others(monkeypatch):
    from rbn.ops.gpu.runtime import launch_cache

    seen = []
    monkeypatch.setattr(
        launch_cache, "launch_by_key", lambda kernel, known, *rest: seen.append(known)
    )
    given = torch.randint(0, 5, (6, 4))
    for each in (given, given.int()):
        gpu_symbols.gradient(each, torch.randn(6, 4, 8), 5, torch.float32)
    assert seen[0] != seen[2]
    assert seen[1] == seen[3]
