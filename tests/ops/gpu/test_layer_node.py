"""A layer's call on the GPU as one autograd node, against the same in several nodes."""

import copy
import importlib

import pytest
import torch

import rbn
import rbn.nn.recurrence
from rbn.ops.dispatch import run
from rbn.ops.input_term import input_product

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import plan

gpu = importlib.import_module("rbn.ops.gpu")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_a_card = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test
LENGTHS = [3, 1, 2, 3]


@pytest.fixture
def nodes(monkeypatch):
    """How many directions each node had; Triton's interpreter also runs several in one."""
    found = []
    implementation = gpu._LSTM.implementation

    def counted(calls, separate):
        found.append(len(calls))
        return implementation.forward(calls, separate)

    monkeypatch.setattr(gpu._LSTM, "implementation", implementation._replace(forward=counted))
    if DEVICE == "cpu":
        monkeypatch.setattr(plan, "_fits_side_by_side", lambda a, count: True)
    with rbn.backend("gpu"):
        yield found


def run_in_several_nodes(definition, calls, group):
    """PyTorch computes the input terms and states for all rows, outside the operator."""
    parts = []
    for a in calls:
        rows = a.input.shape[1], a.weight_hh.shape[1]
        term = input_product(a.input, a.weight_ih)
        states = {"h0": a.h0.expand(rows), "c0": a.c0.expand(rows)}
        parts.append(a._replace(input=term, weight_ih=None, **states))
    return run(definition, parts, group)


def made(layer_class=rbn.BatchNormLSTM, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = layer_class(3, 4, **options).to(DEVICE, dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("h0", "c0", "beta", "bias")):
                parameter.normal_()
    return layer


def results(layer, x, hx=None, lengths=None):
    """Everything that a call returns, with gradients and statistics, by name."""
    torch.manual_seed(1)
    output, states = layer(x, hx, lengths)
    torch.manual_seed(2)
    loss = sum((v * torch.randn(v.shape, device=DEVICE)).sum() for v in (output, *states))
    loss.backward()
    found = {"output": output, "h_n": states[0], "c_n": states[1], "x": x.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    if hx is not None:
        found |= {"given h": hx[0].grad, "given c": hx[1].grad}
    return found


OPTIONS = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "zeros": {"initial_state": "zeros", "bias": False},
    "noise": {"hidden_noise": 0.1, "weight_dropout": 0.3},
    "joint terms": {"ablations": ["joint_terms"]},
    "raw output": {"ablations": ["raw_output"]},
    "sequence": {"input_stats": "sequence"},
    "baseline": {"layer_class": rbn.LSTM},
    "baseline in bfloat16": {"layer_class": rbn.LSTM, "dtype": torch.bfloat16},
}


@pytest.mark.no_cover
@on_a_card
@pytest.mark.parametrize(
    ("name", "given", "bidirectional"),
    [
        (name, given, (i + j) % 2 == 0)  # each option and each argument with both
        for i, name in enumerate(OPTIONS)
        for j, given in enumerate(("nothing", "lengths", "states"))
        # In the interpreter, which is slow, options other than none have one argument each.
        if DEVICE == "cuda" or name in ("plain", "baseline") or i % 3 == j
    ],
)
def test_same_numbers_as_in_several_nodes(name, given, bidirectional, nodes, monkeypatch):
    layer = made(bidirectional=bidirectional, **OPTIONS[name])
    dtype, directions = next(layer.parameters()).dtype, 1 + bidirectional
    frozen = layer.weight_ih_l0 if given == "lengths" else None
    found = []
    for one_node in (True, False):
        own = copy.deepcopy(layer)
        if frozen is not None:
            own.weight_ih_l0.requires_grad_(False)
        torch.manual_seed(3)
        x = torch.randn(3, 4, 3, device=DEVICE).to(dtype).requires_grad_(given == "states")
        hx = None
        if given == "states":
            hx = [torch.randn(directions, 4, 4, device=DEVICE).to(dtype) for _ in range(2)]
            hx = tuple(state.requires_grad_() for state in hx)
        if not one_node:
            monkeypatch.setattr(rbn.nn.recurrence, "run", run_in_several_nodes)
        found.append(results(own, x, hx, LENGTHS if given == "lengths" else None))
    # On a GPU, the CUDA C++ kernels, which lack this ablation, run side by side.
    alone = DEVICE == "cuda" and name == "joint terms"
    assert nodes == ([1] * directions if alone else [directions]) * 2
    one, several = found
    for name, value in one.items():
        want = several[name]
        if value is None or want is None:
            assert value is want, name
        elif DEVICE == "cuda" and name.startswith(("h0", "c0")):
            # One node sums the rows before rounding, several round each row first.
            limit = float(want.abs().max()) * 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(value, want, rtol=0, atol=limit, msg=name)
        else:
            assert torch.equal(value, want), name


@on_a_card
def test_inference_has_no_node(nodes):
    layer = made()
    x = torch.randn(3, 4, 3, device=DEVICE)
    with torch.no_grad():
        layer(x)
        layer.eval()
        del nodes[1:]  # of refreshed statistics
        output, states = layer(x)
    assert nodes == [1, 1]
    assert not any(v.requires_grad for v in (output, *states))
    layer.requires_grad_(False)
    assert not layer(x)[0].requires_grad


@on_a_card
def test_a_node_can_be_passed_twice_but_not_be_differentiated_twice(nodes):
    layer = made()
    x = torch.randn(3, 4, 3, device=DEVICE)
    output, _ = layer(x)
    parameters = list(layer.parameters())
    first = torch.autograd.grad(output.sum(), parameters, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    output, _ = layer(x)
    (gradient,) = torch.autograd.grad(output.sum(), [layer.weight_ih_l0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
    assert nodes == [1, 1]


@on_a_card
def test_states_may_be_changed_in_place_and_outputs_not_unnoticed(nodes):
    layer = made()
    output, (h_n, c_n) = layer(torch.randn(3, 4, 3, device=DEVICE))
    h_n.zero_()
    c_n.zero_()
    output.sum().backward()
    output, _ = layer(torch.randn(3, 4, 3, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"in-?place"):
        output.add_(1).sum().backward()
    assert nodes == [1, 1]


@on_a_card
def test_what_does_not_fit_is_named(nodes):
    layer = made()
    layer.gamma_h_l0 = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"gamma_h.*shape"):
        layer(torch.randn(3, 4, 3, device=DEVICE))
    assert nodes == []
