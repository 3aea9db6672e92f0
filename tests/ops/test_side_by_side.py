"""Independent recurrences of one shape: in one launch on a GPU, with the numbers of each alone."""

import functools
import importlib

import pytest
import torch
from recurrence_cases import ARGUMENTS, CALM, RESULTS, calm, fresh_seed, make_case

import rbn
from rbn.ops import Statistics, side_by_side

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": [3, 1, 2]},
    "sequencewise": {"input_stats": "sequence", "lengths": [3, 2, 1], "padding": "include"},
    "population": {"population": (2, 4, 3)},
    "zoneout": {"zoneout": ("mask", 0.3)},
    "joint": {"absent": ("gamma_x", "bias"), "population": (1, 2, 3)},
    "raw output": {"absent": ("gamma_c", "beta_c")},
}


def two_calls(op, dtype, **options):
    """The arguments by name, as leaves, and the cotangents."""
    calls, cotangents = [], []
    for _ in range(2):
        case = make_case(op, 3, 3, 4, fresh_seed(), **calm(op), **options).to(dtype).on(DEVICE)
        leaves = {name: v.requires_grad_() for name, v in case.present().items()}
        arguments = dict.fromkeys(ARGUMENTS[op]) | leaves | case.options
        if calls and "lengths" in options:
            arguments["lengths"] = calls[0]["lengths"]
        calls.append(arguments)
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
    leaves = [v for call in calls for v in call.values() if getattr(v, "requires_grad", False)]
    return torch.autograd.grad(
        *([p[k] for p in pairs] for k in (0,)), leaves, [p[1] for p in pairs]
    )


@pytest.mark.parametrize("op", ARGUMENTS)
def test_one_by_one_where_there_is_no_launch_to_share(op):
    calls, _ = two_calls(op, torch.float64)
    found = side_by_side(op, calls)
    for (name, value), (_, want) in zip(
        flat(op, found),
        flat(op, [getattr(rbn.ops, op)(**call) for call in calls]),
        strict=True,
    ):
        assert (value is None and want is None) or torch.equal(value, want), name


def test_an_unknown_recurrence_is_named():
    with pytest.raises(ValueError, match=r"op must be one of bn_lstm, lstm, .* got 'gru'"):
        side_by_side("gru", [])


pytest.importorskip("triton", reason="the GPU's kernels need triton")
on_a_card = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test


@pytest.fixture
def launches(monkeypatch):
    """Runs them together under Triton's interpreter too; calls of operator or node are counted."""
    found = []
    for name, called in (("together", "lstm_op"), ("layer", "_run")):
        module = importlib.import_module(f"rbn.ops.gpu.{name}")
        run = getattr(module, called)
        counted = functools.partial(lambda run, *args: found.append(args) or run(*args), run)
        monkeypatch.setattr(module, called, counted)
        if not torch.cuda.is_available():
            monkeypatch.setattr(module, "pays", lambda wx, calls: True)
    return found


@pytest.mark.slow
@on_a_card
@pytest.mark.parametrize(
    ("op", "name"), [*(("bn_lstm", name) for name in OPTIONS), ("lstm", "lengths")]
)
def test_together_as_alone(op, name, launches):
    calls, cotangents = two_calls(op, torch.float32, **OPTIONS[name])
    with rbn.backend("gpu"):
        found = side_by_side(op, calls)
        assert len(launches) == 1
        alone = [getattr(rbn.ops, op)(**call) for call in calls]
    assert len(launches) == 1
    # Products may add in another order: tf32 on a card, float32 in the interpreter.
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
def test_calls_that_differ_are_made_one_by_one(launches):
    calls, _ = two_calls("bn_lstm", torch.float32)
    different = [
        {"eps": 0.2},
        {"bias": None},
        {"zoneout_c": 0.5},
        {"lengths": torch.tensor([1, 2, 3], device=DEVICE)},
        {"wx": calls[1]["wx"][:2]},
    ]
    together = importlib.import_module("rbn.ops.gpu").together
    for change in different:
        assert together("bn_lstm", [calls[0], calls[1] | change]) is None
    assert together("ln_lstm", calls) is None
    assert together("bn_lstm", [call | {"something": "new"} for call in calls]) is None
    assert launches == []


@on_a_card
def test_bad_arguments_are_named(launches):
    calls, _ = two_calls("lstm", torch.float32)
    for call in calls:
        call["bias"] = call["bias"][:-1]
    with pytest.raises(ValueError, match="bias must have the shape"), rbn.backend("gpu"):
        side_by_side("lstm", calls)


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
    assert len(launches) == 2  # one for each layer
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
