"""What is found out once for all calls of the GPU's LSTM that are alike, and where results lie."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import cuda_kernels, families, plan
from rbn.ops.gpu.lstm.kernel_arguments import Call
from rbn.ops.gpu.lstm.signature import MOMENTS, Inputs
from rbn.ops.gpu.lstm.workspace import Room

T, B, H = 3, 5, 6


def inputs(lead=(), size=(T, B, H), dtype=torch.float32, **others):
    steps, rows, hidden = size
    wide = torch.zeros(*lead, 4 * hidden, dtype=dtype)
    state = torch.zeros(*lead, rows, hidden, dtype=dtype)
    given = {
        "wx": torch.zeros(*lead, steps, rows, 4 * hidden, dtype=dtype),
        "weight_hh": torch.zeros(*lead, 4 * hidden, hidden, dtype=dtype),
        **dict.fromkeys(("bias", "gamma_x", "gamma_h"), wide),
        **dict.fromkeys(("gamma_c", "beta_c"), wide[..., :hidden]),
        "h0": state,
        "c0": state,
        "lengths": None,
        "population": [],
        "mask_c": None,
        "mask_h": None,
        "rate_c": 0.0,
        "rate_h": 0.0,
        "norm": "batch",
        "eps": 1e-5,
        "input_stats": "step",
        "padding": "exclude",
        "pass_normalized_cell": False,
        "save": True,
        "tf32": True,
    }
    return Inputs(**(given | others))


LENGTHS, MASK = torch.ones(B, dtype=torch.int64), torch.ones(T, B, H, dtype=torch.bool)
STATISTICS = [torch.ones(1, size * H) for size in (4, 4, 4, 4, 1, 1)]
OTHERS = [
    {"lead": (2,)},
    {"size": (T + 1, B, H)},
    {"size": (T, B + 1, H)},
    {"size": (T, B, H + 2)},
    {"dtype": torch.bfloat16},
    *({name: None} for name in ("bias", "gamma_x", "gamma_c", "beta_c")),
    {"lengths": LENGTHS},
    {"lengths": LENGTHS, "padding": "include"},
    {"population": STATISTICS},
    {"mask_c": MASK},
    {"mask_h": MASK},
    {"rate_c": 0.1},
    {"rate_h": 0.1},
    {"norm": "none"},
    {"input_stats": "sequence"},
    {"pass_normalized_cell": True},
    {"save": False},
]


def test_calls_alike_have_the_same_facts():
    found = [Call(inputs(**given)).facts for given in ({}, *OTHERS)]
    for given, one in zip(({}, *OTHERS), found, strict=True):
        assert Call(inputs(**given)).facts is one
    assert len({id(one) for one in found}) == len(found)
    plain = inputs()
    feature = plan.facts_of(plain, plain.wx[0, 0, :, None])
    assert feature not in found


def test_facts_know_of_another_choice_of_kernels(monkeypatch):
    one = Call(inputs()).facts
    monkeypatch.setattr(families, "choose", lambda a: "another")
    assert Call(inputs()).facts.path == "another" != one.path


def test_facts_hold_no_tensors():
    for given in ({}, *OTHERS):
        values = list(vars(Call(inputs(**given)).facts).values())
        while values:
            value = values.pop()
            assert not isinstance(value, torch.Tensor)
            if isinstance(value, dict):
                value = (*value, *value.values())
            values += value if isinstance(value, (tuple, list)) else []


def test_facts_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(plan, "_FOUND", {})
    monkeypatch.setattr(plan, "_MOST", 2)
    for given in OTHERS[:5]:
        Call(inputs(**given))
    assert len(plan._FOUND) == 1


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("cut", ["counts", "looks", "wide", "no kernel"])
@pytest.mark.parametrize("given", [{}, {"input_stats": "sequence"}, {"gamma_c": None}])
def test_parts_of_a_room_lie_side_by_side(lead, apart, cut, given, monkeypatch):
    """At multiples of 16 bytes, as the kernels ask for."""
    monkeypatch.setattr(plan, "_FOUND", {})
    if cut != "no kernel":
        family = "wide" if cut == "wide" else cuda_kernels.EIGHT
        found = cuda_kernels.Cut(1, 1, 4, 4, registers=False, barrier=cut == "counts")
        if cut == "wide":
            found = cuda_kernels.wide_lstm.WideCut("forward", 8, 1, 1, 4, 1, 64)
        monkeypatch.setattr(cuda_kernels, "covers", lambda a: True)
        monkeypatch.setattr(cuda_kernels, "family", lambda wx, zoned: family)
        monkeypatch.setattr(cuda_kernels, "cut_of", lambda direction, wx, family: found)
    call = Call(inputs(lead, **given))
    room = Room(call, apart)
    zeroed = sum(call.facts.zeroed["forward"].values()) if call.in_cuda else 0
    assert room.clear().numel() * 4 == zeroed
    assert (zeroed > 0) == (cut in ("counts", "wide"))
    parts = {"c_n": room.cell(), "clear": room.clear()} if call.in_cuda else {}
    shapes = {"x": (1 if given.get("input_stats") else T, 4 * H), "h": (T, 4 * H), "c": (T, H)}
    for name, part in zip(MOMENTS, room.moments(), strict=True):
        if name.endswith("c") and "gamma_c" in given:
            assert part is None
            assert name not in room.at
            continue
        assert part.shape == (*lead, *shapes[name[-1]])
        parts[name] = part
    if call.in_cuda:
        assert room.cell().numel() >= call.R * B * H
    assert room.rows == [shapes["x"][0], T, 0 if "gamma_c" in given else T]
    spans = []
    for name, part in parts.items():
        assert part.is_contiguous()
        assert room.at[name] % 16 == 0
        if part.numel():
            assert part.data_ptr() == room.at[name]
            spans.append((part.data_ptr(), part.data_ptr() + part.numel() * 4))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))
    own = {part.untyped_storage().data_ptr() for name, part in parts.items() if name in MOMENTS}
    assert len(own) == (len(parts) - 2 * call.in_cuda if apart else 1)
