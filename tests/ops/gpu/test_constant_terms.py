"""The kernel that decides in which steps the backward pass may treat a term as constant."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm.constant_terms import raised_variances
from rbn.ops.identical_rows import identical_steps, raise_variances
from rbn.ops.types import CONSTANT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 0.1


def variances(lead, steps, features, zeros, generator):
    """Variances: the first `zeros` steps and some later values count as constant."""
    found = torch.rand(*lead, steps, features, generator=generator)
    small = torch.rand(found.shape, generator=generator) < 0.3
    found = torch.where(small, found * CONSTANT * EPS, found)
    found[..., :zeros, :] = CONSTANT * EPS * torch.rand(features, generator=generator)
    return found


def states_of(kind, lead, B, H, generator):
    """``[..., B, H]``, or None for a state of shape ``[..., H]`` that all rows share."""
    if kind == "shared":
        return None
    row = torch.randn(*lead, 1, H, generator=generator)
    if kind == "one row":
        return row.expand(*lead, B, H)
    state = row.expand(*lead, B, H).clone()
    if kind == "differ":
        state[..., -1, -1] += 1
    if kind == "nan":
        state[..., 0, 0] = torch.nan
    return state


KINDS = ("shared", "one row", "identical", "differ", "nan")


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([(), (1,), (2,)]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([1, 3, 300]),
    *(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, False, True])),
)
def test_as_the_operations_of_torch(data, lead, T, B, H, cell, sequence, masked, include):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    drawn_states = [
        states_of(data.draw(st.sampled_from(KINDS)), lead, B, H, generator) for _ in range(2)
    ]
    states = tuple(None if state is None else state.to(DEVICE) for state in drawn_states)
    zeros = [data.draw(st.integers(0, T)) for _ in range(3)]
    var_x, var_h, var_c = (
        variances(lead, T, features, n, generator).to(DEVICE)
        for features, n in zip((4 * H, 4 * H, H), zeros, strict=True)
    )
    var_c = var_c if cell else None
    var_x = var_x[..., :1, :].contiguous() if sequence else var_x
    wx = torch.zeros(*lead, T, B, 4 * H, device=DEVICE)
    drawn = [data.draw(st.integers(1, T)) for _ in range(B)]
    lengths = None if include is None else torch.tensor(drawn, device=DEVICE)
    rest = (wx, var_x, var_h, var_c, EPS, masked, lengths, bool(include))
    before, after = identical_steps(tuple(s for s in states if s is not None), *rest)
    if include:
        assert not before[..., min(drawn) + 1 :].any()
        assert not after[..., min(drawn) :].any()
    if masked:
        assert not before[..., 1:].any()
        assert not after[..., 1:].any()
    found_h, found_c = raised_variances(states, *rest)
    assert torch.equal(found_h, raise_variances(var_h, before, EPS))
    if cell:
        assert torch.equal(found_c, raise_variances(var_c, after, EPS))
    else:
        assert found_c is None


@pytest.mark.parametrize("absent", ["x", "steps of x"])
def test_what_the_kernel_does_not_know(absent):
    """Terms normalized as one, and sequencewise statistics."""
    generator = torch.Generator().manual_seed(0)
    T, B, H = 4, 3, 2
    wx = torch.zeros(T, B, 4 * H)
    wx[2, 1] = 1
    states = (torch.zeros(B, H), torch.zeros(B, H))
    var_h = variances((), T, 4 * H, 3, generator)
    var_x = None if absent == "x" else torch.ones(1, 4 * H)
    found, none = raised_variances(states, wx, var_x, var_h, None, EPS)
    before, _ = identical_steps(states, wx, var_x, var_h, None, EPS)
    assert none is None
    assert torch.equal(found, raise_variances(var_h, before, EPS))
    assert before.tolist() == [True, True, True, False]


def test_nan_stays():
    var_h, var_c = torch.full((2, 8), torch.nan), torch.full((2, 2), torch.nan)
    states = (torch.zeros(3, 2), torch.zeros(3, 2))
    wx = torch.zeros(2, 3, 8)
    found = raised_variances(
        tuple(s.to(DEVICE) for s in states),
        *(v.to(DEVICE) for v in (wx, var_h, var_h, var_c)),
        EPS,
    )
    assert all(v.isnan().all() for v in found)
