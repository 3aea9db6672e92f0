"""The work around a recurrence in one launch, against PyTorch's operations."""

import copy
import importlib
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops import dispatch
from rbn.ops.definition import VECTORS
from rbn.ops.gpu import running_average
from rbn.ops.gpu.lstm import backward, forward, prepare
from rbn.ops.gpu.lstm.constant_terms import raised_variances
from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall
from rbn.ops.gpu.lstm.workspace import (
    Scratch,
    Workspace,
    laid_out,
    statistics_layout,
    steps_of,
    vector_size,
)
from rbn.ops.gpu.runtime import direct_launch, launch_cache
from rbn.ops.input_term import without_padding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def new(*shape, dtype=torch.float32):
    """Numbers that no dtype rounds: Triton's interpreter truncates where a GPU rounds."""
    return torch.randn(shape, device=DEVICE).bfloat16().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [3, 50, 129, 255, 260])
@pytest.mark.parametrize("whole", [True, False])
def test_factors_are_padded_at_once(columns, dtype, whole, monkeypatch):
    monkeypatch.setattr(prepare, "padding", lambda x: -x.shape[-1] % 8)
    monkeypatch.setattr(
        prepare, "factors", lambda *given: tuple(F.pad(v, (0, -columns % 8)) for v in given)
    )
    x, w = new(5, 7, columns, dtype=dtype), new(24, columns, dtype=dtype)
    if not whole:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    for given, found in zip((x, w), prepare.padded_factors(x, w), strict=True):
        assert torch.equal(found, F.pad(given, (0, -columns % 8)))
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0


def test_factors_that_need_no_padding():
    """Rows of the input can be viewed as rows of one matrix; gradients drop added columns."""
    x, w = new(5, 7, 16), new(24, 16)
    found = prepare.padded_factors(x, w)
    assert found[0] is x
    assert found[1] is w
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    rows, same = prepare.padded_factors(turned, w)
    assert torch.equal(rows, x)
    assert rows.view(-1, 16).shape == (35, 16)
    assert same is w
    assert without_padding(x, 16) is x
    gradient = without_padding(x, 13)
    assert torch.equal(gradient, x[..., :13])
    assert gradient.is_contiguous()


def call_of(lead, B, H, dtype, states, shared=(False, False), absent=(), T=2):
    """A call of CUDA C++ kernels, as far as the code around them is concerned."""
    R = lead[0] if lead else 1
    shapes = [() if one else (B,) for one in shared]
    h0, c0 = (new(*lead, *shape, H, dtype=states) for shape in shapes)
    sizes = dict(zip(VECTORS, (4 * H, 4 * H, 4 * H, H, H), strict=True))
    vectors = {
        name: None if name in absent else new(*lead, n, dtype=dtype) for name, n in sizes.items()
    }
    a = types.SimpleNamespace(h0=h0, c0=c0, lengths=None, mask_c=None, mask_h=None, **vectors)
    a.eps = 1e-5
    given = types.SimpleNamespace(a=a, lead=lead, R=R, T=T, B=B, H=H, w=None)
    given.term = new(*lead, T, B, 4 * H, dtype=dtype)
    given.shared = lambda state: LSTMCall.shared(given, state)
    given.given_vectors = lambda: LSTMCall.given_vectors(given)
    given.plan = plan_of(given, absent)
    return given


class Plan:
    """The parts of a plan that `prepare` and `backward` use."""


def plan_of(call, absent):
    plan = Plan()
    plan.sizes = call.lead, call.R, call.T, call.B, call.H
    n = call.R * call.H
    plan.cell, plan.clear = vector_size(n * call.B), 1500
    present = [name for name in VECTORS if name not in absent]
    sizes = {name: n if name.endswith("_c") else 4 * n for name in present}
    plan.vectors = sum(map(vector_size, sizes.values()))
    plan.vector_sizes = sizes
    ahead = plan.cell + plan.clear + plan.vectors
    shapes = [(*call.lead, call.T, 4 * call.H)] * 2 + [(*call.lead, call.T, call.H)]
    plan.moments, plan.ahead = statistics_layout(shapes, ahead), ahead
    plan.places, plan.term = plan.moments.at, call.term
    plan.by_unit, plan.finish = False, call.a.h0.dtype
    plan.raises, plan.transposes = True, True
    small = vector_size(n)
    parts = {"dh": 8, "dc": 8, "zeroed": 1500, "sums": 4, "dbias": 12 * n + 2 * small}
    parts |= {"var_h": 4 * call.T * n, "var_c": vector_size(call.T * n)}
    parts |= {"weight": 4 * n * call.H, "end": 0}
    plan.scratch = laid_out({name: 4 * size for name, size in parts.items()}, 0)
    return plan


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["own", "shared", "expanded", "turned"])
@pytest.mark.parametrize("absent", [(), ("bias", "gamma_c")])
def test_all_begins_as_it_should(lead, dtype, states, rows, absent):
    B, H, stride = 5, 6, 8
    moments = not absent
    given = call_of(lead, B, H, dtype, states, (rows == "shared",) * 2, absent)
    a, plan = given.a, given.plan
    if rows == "expanded":
        a.h0 = a.h0[..., :1, :].expand(*lead, B, H)
    if rows == "turned":
        a.c0 = a.c0.mT.contiguous().mT
    hs = torch.full((*lead, 3, B, stride), 7.0, device=DEVICE, dtype=dtype)
    workspace = Workspace(plan, separate=False)
    workspace.memory.fill_(7.0)
    prepare.begin_states(given, hs, workspace, workspace.at() if moments else None)
    h0, c0 = (s.unsqueeze(-2) if rows == "shared" else s for s in (a.h0, a.c0))
    first = hs.select(-3, 0)
    assert torch.equal(first[..., :H], h0.expand(*lead, B, H).to(dtype))
    assert not first[..., H:].any()
    assert (hs.narrow(-3, 1, 2) == 7).all()
    c_n = workspace.part(0, given.R * B * H).view(*lead, B, H)
    assert torch.equal(c_n, c0.expand(*lead, B, H).float())
    assert not workspace.part(plan.cell, plan.clear).any()
    begin = plan.cell + plan.clear
    for name, size in plan.vector_sizes.items():
        part = workspace.part(begin, size)
        assert torch.equal(part, getattr(a, name).flatten().float())
        begin += vector_size(size)
    mean, var, *others = workspace.moments()
    assert all((part == 7).all() for part in others)
    if not moments:
        assert (mean == 7).all()
        return
    want_var, want_mean = torch.var_mean(given.term.double(), -2, correction=0)
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(var.double(), want_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("stride", [6, 8])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padded", [False, True])
def test_last_states_are_those_of_the_last_step(lead, stride, dtype, padded):
    T, B, H = 3, 5, 6
    given = call_of(lead, B, H, dtype, dtype, T=T)
    hs = new(*lead, T + 1, B, stride, dtype=dtype)
    h = new(*lead, B, H) if padded else steps_of(hs, H)
    workspace = Workspace(given.plan, separate=False)
    c = workspace.part(0, given.R * B * H).view(*lead, B, H).copy_(new(*lead, B, H))
    h_n, c_n = forward._last_states(given, h, workspace)
    assert torch.equal(h_n, (h if padded else hs[..., -1, :, :H]).to(dtype))
    assert torch.equal(c_n, c.to(dtype))
    assert h_n.is_contiguous()
    assert c_n.is_contiguous()


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("zero_states", "transposes"), [(False, False), (True, True)])
@pytest.mark.parametrize("states", ["shared", "own", "identical"])
def test_the_backward_pass_begins_in_one_launch(lead, dtype, zero_states, transposes, states):
    """Raises variances like `raised_variances`, transposes W_h and zeroes memory."""
    B, H, T = 5, 38, 4
    given = call_of(lead, B, H, dtype, dtype, (states == "shared",) * 2, T=T)
    a, plan = given.a, given.plan
    plan.transposes = transposes
    if states == "identical":
        a.h0, a.c0 = (s[..., :1, :].expand(*lead, B, H).contiguous() for s in (a.h0, a.c0))
    workspace, scratch = Workspace(plan, separate=False), Scratch(plan)
    moments = workspace.moments()
    for moment in moments:
        moment.copy_(new(*moment.shape).square())
        moment[..., :2, :] = 0  # the rows are identical in the first steps
        moment[..., 3, 0] = 0
    scratch.memory.fill_(7.0)
    weight = new(*lead, 4 * H, H, dtype=dtype)
    prepare.begin_backward(given, weight, workspace.at(), scratch, zero_states, lambda: moments)
    both = [None if states == "shared" else s for s in (a.h0, a.c0)]
    wanted = raised_variances(both, given.term, moments[1], moments[3], moments[5], a.eps)
    for name, want in zip(("var_h", "var_c"), wanted, strict=True):
        assert torch.equal(scratch.part(name, *want.shape), want)
    found = scratch.part("weight", weight.numel()).view(dtype)[: weight.numel()]
    if transposes:
        assert torch.equal(found.view(*lead, H, 4 * H), weight.mT)
    else:
        assert (scratch.part("weight", 8) == 7).all()
    assert not scratch.part("zeroed", 1500).any()
    for name in ("dh", "dc"):
        assert (scratch.part(name, 8) == (0 if zero_states else 7)).all()
    assert (scratch.part("sums", 4) == 7).all()


@pytest.mark.parametrize(("lead", "more"), [((), True), ((2,), False)])
@pytest.mark.parametrize(("B", "by_unit"), [(1, False), (5, True), (200, False)])
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_are_finished_at_once(lead, B, dtype, more, by_unit):
    H = 45
    given = call_of(lead, B, H, dtype, dtype, (True, True), ("bias",))
    given.plan.by_unit = by_unit
    sums = backward._Sums(given, Scratch(given.plan))
    for part in sums.parts():
        part.copy_(new(len(part)))
    dh0, dc = new(*lead, B, H, dtype=dtype), new(*lead, B, H)
    dh = new(*lead, B, H) if more else None
    dweight = new(*lead, 4 * H, H, dtype=dtype)
    ordered, (*found, of_h, of_c) = sums.with_states(dweight, dh0, dh, dc)
    assert torch.equal(ordered, backward.by_gate(dweight, H) if by_unit else dweight)
    wanted = sums.gradients()
    assert found[0] is wanted[0] is None
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))
    for state, value in ((of_h, dh0.double() + (dh if more else 0)), (of_c, dc.double())):
        assert state.shape == (*lead, H)
        assert state.dtype == dtype
        torch.testing.assert_close(state, value.sum(-2).to(dtype))
    given.plan.finish = None  # initial states that differ between rows
    assert sums.with_states(dweight, dh0, dh, dc) is None


def terms_of(sizes):
    """Mean, var, those of a minibatch and the count, for terms with these steps and features."""
    return [
        [
            *(torch.randn(size, device=DEVICE) for _ in range(4)),
            torch.arange(size[0], device=DEVICE),
        ]
        for size in sizes
    ]


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [[(5, 4)], [(1, 400), (3, 400), (3, 100)]])
def test_statistics_are_averaged_at_once(sizes, momentum):
    terms = terms_of(sizes)
    wanted = [[tensor.clone() for tensor in term] for term in terms]
    with rbn.backend("reference"):
        dispatch.average_in(wanted, momentum)
    before = [[tensor._version for tensor in term] for term in terms]
    assert running_average.average_in(terms, momentum)
    for term, versions in zip(terms, before, strict=True):
        after = [tensor._version for tensor in term]
        changed = [a > b for a, b in zip(after, versions, strict=True)]
        assert changed == [True, True, False, False, True]
    for found, want in zip(terms, wanted, strict=True):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(found[-1], want[-1])


def test_statistics_that_the_kernel_does_not_average():
    terms = terms_of([(3, 4)] * 4)
    assert not running_average.average_in(terms, 0.1)
    assert not running_average.average_in([[v.double() for v in terms[0]]], 0.1)
    assert not running_average.average_in([[*(v.t() for v in terms[0][:4]), terms[0][4]]], 0.1)


def test_a_layer_on_a_card_averages_by_the_kernel(monkeypatch):
    """And matches PyTorch's operations."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 8, max_length=4).to(DEVICE)
    twin = copy.deepcopy(layer)
    seen = []
    monkeypatch.setattr(
        importlib.import_module("rbn.ops.gpu"),
        "average_in",
        lambda *given: seen.append(len(given[0])) or running_average.average_in(*given),
    )
    x = torch.randn(4, 6, 3, device=DEVICE)
    for _ in range(3):
        layer(x)
    assert seen == ([3, 3, 3] if DEVICE == "cuda" else [])
    monkeypatch.setattr(running_average, "average_in", lambda *given: False)
    for _ in range(3):
        twin(x)
    for name, value in layer.named_buffers():
        torch.testing.assert_close(value, twin.get_buffer(name))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_launches_all_but_the_first(monkeypatch):
    """On the current stream, and from several threads at once."""
    found, make = [], direct_launch.launcher_at
    monkeypatch.setattr(
        direct_launch, "launcher_at", lambda *a: found.append(make(*a)) or found[-1]
    )
    monkeypatch.setattr(launch_cache, "_LAUNCHERS", {})

    def averaged(terms):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                assert running_average.average_in(terms, 0.25)
            torch.cuda.current_stream().synchronize()

    several = [terms_of([(3, 40), (3, 40), (3, 10)]) for _ in range(4)]
    torch.cuda.synchronize()
    averaged(several[0])
    assert len(found) == 1
    assert found[0] is not None
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(averaged, several[1:]))
    assert len(found) == 1
    for terms in several:
        for mean, _, new, _, count in terms:
            assert torch.equal(count, torch.arange(3, device="cuda") + 50)
            torch.testing.assert_close(mean, new, rtol=1e-4, atol=1e-4)
