"""Inputs of one feature, which the compiled LSTM multiplies by W_x itself."""

import ctypes
import functools

import pytest
import torch

from rbn.ops.cpu import compiled_lstm, memory
from rbn.ops.cpu.lstm import IMPLEMENTATION
from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.operator import Incoming
from rbn.ops.reference import call as reference_call

pytestmark = pytest.mark.skipif(
    compiled_lstm.load() is None, reason="rbn was installed without a C compiler"
)
KINDS = ["none", "step", "sequence"]


def arguments(seed, T, B, H, kind, padded=False):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g)

    vectors = {"bias": 4 * H, "gamma_x": 4 * H, "gamma_h": 4 * H, "gamma_c": H, "beta_c": H}
    values = {name: randn(n) for name, n in vectors.items()}
    if kind == "none":
        values |= {"gamma_x": None, "gamma_h": None, "gamma_c": None}
    return LSTMArguments(
        input=2 * randn(T, B, 1) + 5,
        weight_ih=randn(4 * H, 1),
        weight_hh=randn(4 * H, H) / H**0.5,
        **values,
        h0=randn(B, H),
        c0=randn(B, H),
        lengths=torch.randint(1, T + 1, (B,), generator=g) if padded else None,
        norm="none" if kind == "none" else "batch",
        eps=1e-2,
        input_stats="sequence" if kind == "sequence" else "step",
        save=True,
    )


def reference(a, cotangents):
    """Results and gradients of the plain equations in float64."""
    names = [name for name in LSTM.gradients if getattr(a, name) is not None]
    leaves = {name: getattr(a, name).double().requires_grad_() for name in names}
    output, h_n, c_n, statistics = reference_call.run(LSTM, a._replace(**leaves), None)
    gradients = torch.autograd.grad((output, h_n, c_n), list(leaves.values()), cotangents)
    return (output, h_n, c_n, *statistics[:2]), dict(zip(names, gradients, strict=True))


def compiled(a, cotangents):
    results = IMPLEMENTATION.forward([a], False)
    assert results.plan
    assert results.saved.wx is None
    incoming = Incoming(cotangents[0], tuple(cotangents[1:]), input=False)
    (gradients,) = IMPLEMENTATION.backward([a], results.saved, results.plan, incoming)
    return (results.output, *results.states, *results.moments[:2]), gradients


def compare(a):
    B, H = a.input.shape[1], a.weight_hh.shape[1]
    shapes = (a.input.shape[0], B, H), (B, H), (B, H)
    cotangents = [torch.randn(shape) for shape in shapes]
    found, gradients = compiled(a, cotangents)
    expected, expected_gradients = reference(a, [c.double() for c in cotangents])
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    for name, other in expected_gradients.items():
        if name == "input":
            assert gradients[name] is None
            continue
        # Sums over rows and steps cancel, see `close` in test_kernel.py.
        error = (gradients[name].double() - other).norm()
        scale = max(other.norm(), 1e-2 * expected_gradients["bias"].norm())
        assert error <= 1e-4 * scale, f"{name}: {error / scale}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("T", "B", "H"), [(1, 3, 1), (4, 5, 17), (7, 64, 100), (3, 257, 20), (2, 130, 3)]
)
def test_results_and_gradients(T, B, H, kind):
    compare(arguments(T + B + H, T, B, H, kind))


@pytest.mark.parametrize("kind", ["none", "sequence"])
def test_sequences_of_different_lengths(kind):
    compare(arguments(0, 6, 9, 20, kind, padded=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_instruction_set(version, kind):
    library = compiled_lstm.load()
    try:
        if not library.rbn_use_version(ctypes.c_int64(version)):
            pytest.skip("this machine has fewer instruction sets")
        compare(arguments(1, 3, 7, 23, kind))
    finally:
        library.rbn_use_version(ctypes.c_int64(0))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_which_all_rows_are_equal(kind):
    """Blank leading pixels: their variance is 0, and the term is 0 if it has its own statistics."""
    a = arguments(2, 6, 10, 20, kind)
    a.input[:3] = 0.1
    compare(a._replace(h0=a.h0[0], c0=a.c0[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_saving_nothing_and_threads_change_no_bit(kind):
    a = arguments(3, 5, 64, 50, kind)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for save in (True, False):
                results.append(compiled_lstm.forward(a._replace(save=save))[0])
    finally:
        torch.set_num_threads(before)
    if compiled_lstm.load().rbn_panel_lanes():  # torch's products may depend on the threads
        assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_shows(kind):
    a = arguments(4, 3, 6, 20, kind)
    a.input[1, 2] = float("nan")
    output = IMPLEMENTATION.forward([a], False).output
    shown = output[1:, 2] if kind == "none" else output if kind == "sequence" else output[1:]
    assert shown.isnan().all()
    if kind != "sequence":
        assert output[0].isfinite().all()


def population(H):
    names = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")
    return {n: torch.ones(2, H if n.endswith("c") else 4 * H) for n in names}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("step", {"lengths": torch.tensor([1, 2, 2])}),
        ("step", population(4)),
        ("step", {"rate_h": 0.1}),
        ("none", {"input": torch.randn(2, 3, 1, requires_grad=True)}),
        ("none", {"input": torch.randn(2, 3, 1).bfloat16()}),
        ("none", {"input": torch.randn(2, 3, 2), "weight_ih": torch.randn(16, 2)}),
        ("none", {"input": torch.randn(2, 3, 16), "weight_ih": None}),
    ],
)
def test_what_needs_the_input_term(kind, changes):
    a = arguments(0, 2, 3, 4, kind)
    assert compiled_lstm.takes_input(a)
    assert not compiled_lstm.takes_input(a._replace(**changes))


def test_only_custom_operators_compute_the_term(monkeypatch):
    """Their backward pass, a separate operator, could not know whether it was."""
    made = []
    linear = memory.linear
    count = functools.wraps(linear)(lambda *args: made.append(args) or linear(*args))
    monkeypatch.setattr(memory, "linear", count)
    a = arguments(0, 2, 3, 4, "step")
    direct = IMPLEMENTATION.forward([a], False)
    assert not made
    term = IMPLEMENTATION.forward([a], True)
    assert len(made) == 1
    assert term.saved.wx is not None
    torch.testing.assert_close(direct.output, term.output)
