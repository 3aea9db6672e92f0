"""Independent recurrences of one shape in one launch on a GPU, with the same results as alone."""

import importlib

import pytest
import torch
from recurrence_cases import (
    CALM,
    OPS,
    RESULTS,
    arguments,
    calm,
    definition_of,
    fresh_seed,
    make_case,
)

import rbn
from rbn.ops import Statistics
from rbn.ops.definition import LSTM, RNN
from rbn.ops.dispatch import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": [3, 1, 2]},
    "few rows": {"lengths": [3, 1, 2], "min_rows": 2},
    "sequencewise": {"input_stats": "sequence", "lengths": [3, 2, 1], "padding": "include"},
    "population": {"population": (2, 4, 3)},
    "zoneout": {"zoneout": ("mask", 0.3)},
    "joint": {"absent": ("gamma_x", "bias"), "population": (1, 2, 3)},
    "raw output": {"absent": ("gamma_c", "beta_c")},
}


def two_calls(op, dtype, **options):
    """The arguments, whose tensors are leaves, and the cotangents."""
    calls, cotangents = [], []
    for _ in range(2):
        case = make_case(op, 3, 3, 4, fresh_seed(), **calm(op), **options).to(dtype).on(DEVICE)
        leaves = {name: v.requires_grad_() for name, v in case.present().items()}
        given = arguments(case.with_tensors(**leaves))
        if calls and "lengths" in options:
            given = given._replace(lengths=calls[0].lengths)
        calls.append(given)
        cotangents.append(case.cotangents)
    return calls, cotangents


def flat(op, found):
    for call in found:
        yield from zip(RESULTS[op], call, strict=False)
        if isinstance(call[-1], Statistics):
            yield from call[-1]._asdict().items()


def gradients(op, calls, found, cotangents):
    pairs = [
        (value, given[name])
        for results, given in zip(found, cotangents, strict=True)
        for name, value in zip(RESULTS[op], results, strict=False)
    ]
    leaves = [v for call in calls for v in call if getattr(v, "requires_grad", False)]
    return torch.autograd.grad([p[0] for p in pairs], leaves, [p[1] for p in pairs])


@pytest.mark.parametrize("op", OPS)
def test_one_by_one_where_there_is_no_launch_to_share(op):
    calls, _ = two_calls(op, torch.float64)
    definition = definition_of(op)
    found = run(definition, calls)
    alone = [run(definition, [call])[0] for call in calls]
    for (name, value), (_, want) in zip(flat(op, found), flat(op, alone), strict=True):
        assert (value is None and want is None) or torch.equal(value, want), name


pytest.importorskip("triton", reason="the GPU's kernels need triton")
on_a_card = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test

from rbn.ops.gpu.lstm import cuda_kernels, plan  # noqa: E402
from rbn.ops.gpu.lstm.term import Term  # noqa: E402

gpu = importlib.import_module("rbn.ops.gpu")


@pytest.fixture
def launches(monkeypatch):
    """How many calls each launch runs; Triton's interpreter also runs several in one."""
    found = []
    implementation = gpu._LSTM.implementation

    def counted(calls, separate):
        found.append(len(calls))
        return implementation.forward(calls, separate)

    monkeypatch.setattr(gpu._LSTM, "implementation", implementation._replace(forward=counted))
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "_fits_side_by_side", lambda a, count: True)
    return found


@pytest.mark.slow
@on_a_card
@pytest.mark.parametrize(
    ("op", "name"), [*(("bn_lstm", name) for name in OPTIONS), ("lstm", "lengths")]
)
def test_together_as_alone(op, name, launches):
    calls, cotangents = two_calls(op, torch.float32, **OPTIONS[name])
    with rbn.backend("gpu"):
        found = run(LSTM, calls)
        # On a GPU, the CUDA C++ kernels, which lack these options, run side by side.
        together = [1, 1] if DEVICE == "cuda" and name in ("sequencewise", "joint") else [2]
        assert launches == together
        alone = [run(LSTM, [call])[0] for call in calls]
    assert launches == [*together, 1, 1]
    # Products may sum in another order: tf32 on a GPU, float32 in the interpreter.
    near = {"rtol": 4e-3, "atol": 4e-3} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    for (what, value), (_, want) in zip(flat(op, found), flat(op, alone), strict=True):
        if want is None:
            assert value is None, what
        else:
            torch.testing.assert_close(value, want, **near)
    for one, other in zip(
        gradients(op, calls, found, cotangents),
        gradients(op, calls, alone, cotangents),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **near)


@on_a_card
def test_inference_together_as_alone(launches):
    calls, _ = two_calls("bn_lstm", torch.float32)
    with rbn.backend("gpu"), torch.no_grad():
        found = run(LSTM, calls)
        alone = [run(LSTM, [call])[0] for call in calls]
    assert launches == [2, 1, 1]
    near = {"rtol": 4e-3, "atol": 4e-3} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    pairs = zip(flat("bn_lstm", found), flat("bn_lstm", alone), strict=True)
    for (what, value), (_, want) in pairs:
        assert not value.requires_grad, what
        torch.testing.assert_close(value, want, **near)


@on_a_card
@pytest.mark.parametrize(("result", "of"), [("output", 1), ("h_n", 0), ("c_n", 1)])
def test_a_gradient_of_one_result_alone(result, of, launches):
    """The others have none, which counts as zero."""
    calls, cotangents = two_calls("bn_lstm", torch.float32)
    k, count = RESULTS["bn_lstm"].index(result), len(LSTM.gradients)
    with rbn.backend("gpu"):
        found, alone = run(LSTM, calls)[of], run(LSTM, [calls[of]])[0]
    assert launches == [2, 1]
    own, others = ([v for v in calls[c][:count] if v is not None] for c in (of, 1 - of))
    cotangent = cotangents[of][result]
    grads = torch.autograd.grad(found[k], [*own, *others], cotangent)
    expected = torch.autograd.grad(alone[k], own, cotangent)
    near = {"rtol": 4e-3, "atol": 4e-3} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    for grad, want in zip(grads[: len(own)], expected, strict=True):
        torch.testing.assert_close(grad, want, **near)
    assert not any(grad.any() for grad in grads[len(own) :])


@pytest.mark.slow
@on_a_card
def test_calls_that_differ_are_made_one_by_one(launches):
    calls = [call._replace(tf32=True) for call in two_calls("bn_lstm", torch.float32)[0]]
    assert gpu.joins(LSTM, calls)
    different = [
        {"eps": 0.2},
        {"bias": None},
        {"rate_c": 0.5},
        {"lengths": torch.tensor([1, 2, 3], device=DEVICE)},
        {"h0": calls[1].h0[0]},
        {"beta_c": calls[1].beta_c.bfloat16()},
        {"input": calls[1].input[:2]},
    ]
    for change in different:
        other = [calls[0], calls[1]._replace(**change)]
        assert not gpu.joins(LSTM, other), change
        with rbn.backend("gpu"), torch.no_grad():
            run(LSTM, other)
        assert launches == [1, 1]
        launches.clear()
    assert not gpu.joins(RNN, two_calls("bn_rnn", torch.float32)[0])


def test_what_has_no_room_or_no_kernel_is_made_one_by_one(monkeypatch):
    """By the sizes only, as if there were a GPU."""
    calls, _ = two_calls("bn_lstm", torch.float32)
    term, found = plan.term_of, {1: "cluster", 2: "cluster"}

    def on_card(a, count):
        return Term(term(a, count).shape, a.input.dtype, torch.device("cuda", 0))

    def several(term):
        return term.shape[0] if len(term.shape) == 4 else 1

    monkeypatch.setattr(plan, "term_of", on_card)
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: found[several(term)])

    def joins(calls=calls):
        monkeypatch.setattr(plan, "_CACHE", {})
        return gpu.joins(LSTM, calls)

    assert joins()
    assert not joins([call._replace(norm="layer") for call in calls])
    assert not joins([call._replace(input=call.input.double()) for call in calls])
    found[2] = "grid"
    assert not joins()
    found[2] = None
    assert not joins()
    found[1] = None
    assert not joins()


@on_a_card
def test_bad_arguments_are_named(launches):
    calls, _ = two_calls("lstm", torch.float32)
    calls = [calls[0], calls[1]._replace(bias=calls[1].bias[:-1])]
    with pytest.raises(ValueError, match=r"bias.*shape"), rbn.backend("gpu"):
        run(LSTM, calls)
    assert launches == []


@pytest.mark.slow
@on_a_card
@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM])
def test_the_directions_of_a_layer_are_one_launch(layer_class, launches):
    torch.manual_seed(0)
    options = {} if layer_class is rbn.LSTM else {"eps": CALM}
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, **options).to(DEVICE)
    x = torch.randn(3, 5, 3, device=DEVICE)
    lengths = torch.tensor([3, 1, 2, 3, 2], device=DEVICE)
    with rbn.backend("gpu"):
        output, (h, _) = layer(x, lengths=lengths)
        output.sum().backward()
    assert launches == [2, 2]  # one per layer
    twin = layer_class(3, 4, num_layers=2, bidirectional=True, **options).double()
    twin.load_state_dict(
        {k: v.cpu() for k, v in layer.state_dict().items() if "stats" not in k}, strict=False
    )
    expected, (h_twin, _) = twin(x.cpu().double(), lengths=lengths.cpu())
    near = {"rtol": 1e-2, "atol": 2e-3} if DEVICE == "cuda" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(output.cpu().double(), expected, **near)
    torch.testing.assert_close(h.cpu().double(), h_twin, **near)
    if layer_class is rbn.BatchNormLSTM:
        for name, buffer in twin.named_buffers():
            found = layer.get_buffer(name).cpu()
            torch.testing.assert_close(found.to(buffer.dtype), buffer, **near)
