"""The plan of the GPU's LSTM, made once for all calls of the same kind, and the workspace."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops import gpu
from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels, plan
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.plan import plan_for
from rbn.ops.gpu.lstm.portable.portable_kernels import PortableTiling
from rbn.ops.gpu.lstm.workspace import Workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, B, H = 3, 5, 6


def arguments(size=(T, B, H), dtype=torch.float32, features=None, **others):
    """The plan of one call. features: of the input; None for an input term."""
    steps, rows, hidden = size
    wide = torch.zeros(4 * hidden, dtype=dtype)
    state = torch.zeros(rows, hidden, dtype=dtype)
    given = {
        "input": torch.zeros(steps, rows, features or 4 * hidden, dtype=dtype),
        "weight_ih": torch.zeros(4 * hidden, features, dtype=dtype) if features else None,
        "weight_hh": torch.zeros(4 * hidden, hidden, dtype=dtype),
        **dict.fromkeys(("bias", "gamma_x", "gamma_h"), wide),
        **dict.fromkeys(("gamma_c", "beta_c"), wide[:hidden]),
        **dict.fromkeys(("h0", "c0"), state),
        **{"norm": "batch", "eps": 1e-5, "save": True, "tf32": True},
    }
    return LSTMArguments(**(given | others))


def plan_of(count=1, separate=False, **given):
    """The plan of several calls side by side."""
    return plan_for([arguments(**given) for _ in range(count)], separate)


LENGTHS, MASK = torch.ones(B, dtype=torch.int64), torch.ones(T, B, H, dtype=torch.bool)
STATISTICS = [torch.ones(1, size * H) for size in (4, 4, 4, 4, 1, 1)]
OTHERS = [
    {"count": 2},
    {"size": (T + 1, B, H)},
    {"size": (T, B + 1, H)},
    {"size": (T, B, H + 2)},
    {"dtype": torch.bfloat16},
    {"features": 2},
    *({name: None} for name in ("bias", "gamma_x", "gamma_c", "beta_c")),
    {"lengths": LENGTHS},
    {"lengths": LENGTHS, "padding": "include"},
    dict(zip(LSTM.moments, STATISTICS, strict=True)),
    {"mask_c": MASK},
    {"mask_h": MASK},
    {"rate_c": 0.1},
    {"rate_h": 0.1},
    {"norm": "none"},
    {"input_stats": "sequence"},
    {"pass_normalized_cell": True},
    {"save": False},
    {"tf32": False},
]


def test_calls_of_one_kind_have_the_same_plan():
    plans = [plan_of(**given) for given in ({}, *OTHERS)]
    for given, one in zip(({}, *OTHERS), plans, strict=True):
        assert plan_of(**given) is one
    assert len({id(one) for one in plans}) == len(plans)


SIZES = {
    "one": {},
    "two": {"count": 2},
    "of inputs": {"features": 3},
    "two of inputs": {"count": 2, "features": 3},
}


def test_a_plan_says_what_the_call_is():
    sizes = {name: plan_of(**given).sizes for name, given in SIZES.items()}
    assert sizes == {
        "one": ((), 1, T, B, H),
        "two": ((2,), 2, T, B, H),
        "of inputs": ((), 1, T, B, H),
        "two of inputs": ((2,), 2, T, B, H),
    }
    for name in ("zoned", "sequence", "include", "joint"):
        assert not getattr(plan_of(), name)
    assert plan_of(mask_c=MASK).zoned
    assert plan_of(rate_h=0.1).zoned
    assert plan_of(input_stats="sequence").sequence
    assert plan_of(lengths=LENGTHS, padding="include").include
    assert plan_of(gamma_x=None).joint
    population = dict(zip(LSTM.moments, STATISTICS, strict=True))
    modes = {"none": plan.NONE, "batch": plan.BATCH, "given": plan.GIVEN}
    for given, expected in (
        ({"norm": "none"}, ("none", "none", "none")),
        ({}, ("batch", "batch", "batch")),
        ({"gamma_x": None}, ("none", "batch", "batch")),
        ({"gamma_c": None}, ("batch", "batch", "none")),
        ({"input_stats": "sequence"}, ("given", "batch", "batch")),
        (population, ("given", "given", "given")),
    ):
        flags = plan_of(**given).flags
        assert [flags[name] for name in ("X", "NORM", "CELL")] == [modes[m] for m in expected]


@pytest.mark.parametrize("family", [cuda_kernels.PORTABLE, None])
def test_a_plan_has_the_kernels_that_were_chosen(family, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: asked.append((term, a)) or family)
    a = arguments(features=2)
    found = plan_for([a, a], False)
    assert found.family == family
    ((term, of),) = asked
    assert term is found.term
    assert (term.shape, term.dtype) == ((2, T, B, 4 * H), torch.float32)
    assert of is a
    plan_for([a, a], False)
    assert len(asked) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_which_inputs_of_one_feature_the_kernels_take_as_they_are(count, monkeypatch):
    cut = cluster_kernels.cluster_tiling(torch.float32, B, H)
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: cuda_kernels.CLUSTER)
    monkeypatch.setattr(cluster_kernels, "choose", lambda term: cut)
    needs_gradient = torch.zeros(T, B, 1, requires_grad=True)

    def taken(features=1, **given):
        return plan_of(count, features=features, **given).one_feature

    assert taken()
    assert taken(norm="none", gamma_x=None, gamma_h=None, gamma_c=None)
    assert taken(input_stats="sequence", lengths=LENGTHS)
    assert taken(input=needs_gradient, save=False)
    assert not taken(input=needs_gradient)
    assert not taken(separate=True)  # its backward pass could not know
    assert not taken(features=2)
    assert not taken(features=None)
    assert not taken(gamma_x=None)
    assert not taken(gamma_c=None)
    with monkeypatch.context() as patch:
        patch.setattr(cluster_kernels, "ONE_FEATURE", ())
        assert not taken()
    monkeypatch.setattr(plan, "_CACHE", {})
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: None)
    assert not taken()


def test_zoned_inputs_of_one_feature_are_multiplied(monkeypatch):
    """Kernels with zoneout do not read inputs of one feature."""
    cut = cluster_kernels.cluster_tiling(torch.float32, B, H)
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: cuda_kernels.CLUSTER)
    monkeypatch.setattr(cluster_kernels, "choose", lambda term: cut)
    assert plan_of(features=1).one_feature
    assert not plan_of(features=1, mask_h=MASK).one_feature
    assert not plan_of(features=1, rate_c=0.5).one_feature


def test_plans_hold_no_tensors():
    for given in ({}, *OTHERS):
        values = list(vars(plan_of(**given)).values())
        while values:
            value = values.pop()
            assert not isinstance(value, torch.Tensor)
            if isinstance(value, dict):
                value = (*value, *value.values())
            values += value if isinstance(value, (tuple, list)) else []


def test_plans_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(plan, "_CACHE", {})
    monkeypatch.setattr(plan, "_MOST", 2)
    for given in OTHERS[:5]:
        plan_of(**given)
    assert len(plan._CACHE) == 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("cut", ["counts", "polls", "grid", "no kernel"])
@pytest.mark.parametrize("given", [{}, {"input_stats": "sequence"}, {"gamma_c": None}])
def test_parts_of_a_workspace_lie_side_by_side(count, separate, cut, given, monkeypatch):
    """At multiples of 16 bytes, as the kernels require."""
    if cut != "no kernel":
        family = cuda_kernels.GRID if cut == "grid" else cuda_kernels.PORTABLE
        found = PortableTiling(1, 1, 4, 4, registers=False, barrier=cut == "counts")
        if cut == "grid":
            found = grid_kernels.GridTiling("forward", 8, 1, 1, 4, 1, 64)
        monkeypatch.setattr(cuda_kernels, "family", lambda term, a: family)
        monkeypatch.setattr(cuda_kernels, "tiling_of", lambda direction, term, family: found)
    planned = plan_of(count, separate, **given)
    assert (planned.family is None) == (cut == "no kernel")
    workspace = Workspace(planned, separate)
    zeroed = sum(planned.zeroed["forward"].values()) if planned.family else 0
    assert planned.clear * 4 == zeroed
    assert (zeroed > 0) == (cut in ("counts", "grid"))
    at = workspace.at() if planned.family else {}
    parts = {}
    if planned.family:
        parts["c_n"] = workspace.part(0, planned.cell)
        clear, begin = workspace.part(planned.cell, planned.clear), planned.cell
        assert not zeroed or at[next(iter(planned.zeroed["forward"]))] == clear.data_ptr()
        begin += planned.clear
        for name in VECTORS:
            size = count * (H if name.endswith("_c") else 4 * H)
            if name in at:
                parts[name] = workspace.part((at[name] - workspace.first) // 4, size)
        assert parts["c_n"].numel() >= count * B * H
        assert ("gamma_c" in parts) == ("gamma_c" not in given)
    lead = (2,) if count == 2 else ()
    shapes = {"x": (1 if given.get("input_stats") else T, 4 * H), "h": (T, 4 * H), "c": (T, H)}
    for name, part in zip(LSTM.moments, workspace.moments(), strict=True):
        if name.endswith("c") and "gamma_c" in given:
            assert part is None
            assert name not in at
            continue
        assert part.shape == (*lead, *shapes[name[-1]])
        parts[name] = part
    for one, other in zip(workspace.input_moments(), workspace.moments()[:2], strict=True):
        assert one is other
    assert planned.moments.rows == [shapes["x"][0], T, 0 if "gamma_c" in given else T]
    spans = []
    for name, part in parts.items():
        assert part.is_contiguous()
        if planned.family:
            assert at[name] % 16 == 0
            assert part.data_ptr() == at[name]
        if part.numel():
            spans.append((part.data_ptr(), part.data_ptr() + part.numel() * 4))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))
    statistics = [part for name, part in parts.items() if name in LSTM.moments]
    if planned.family:
        spans.append((clear.data_ptr(), clear.data_ptr() + zeroed))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))
    own = {part.untyped_storage().data_ptr() for part in statistics}
    assert len(own) == (len(statistics) if separate else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [None, 5])
@pytest.mark.parametrize("hidden", [6, 8])
@pytest.mark.parametrize("given", [{}, {"lengths": LENGTHS}, {"save": False}])
def test_compilers_are_told_the_sizes_of_all_results(dtype, features, hidden, given):
    """Also of saved tensors, in every dtype."""
    assert gpu.operator_for(LSTM, [arguments()]).name == "gpu_lstm"
    a = arguments((2, B, hidden), dtype, features, **given)
    on_device = [v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in a]
    operator = torch.ops.rbn.gpu_lstm.default
    torch.library.opcheck(operator, tuple(on_device), test_utils=("test_faketensor",))
