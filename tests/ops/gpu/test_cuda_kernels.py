"""The CUDA C++ kernels on a GPU: what they have in common, and the portable ones."""

import dataclasses

import pytest
import torch
from cuda_cases import OPTIONS, UNITS, compare, on_a_card, same_bits
from recurrence_cases import assert_same, calm, differentiate, make_case, poisoned_memory

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels, forward, plan

pytestmark = on_a_card

SHAPES = [(6, 5, 6), (5, 100, 100), (4, 64, 240), (3, 37, 1000), (3, 128, 56), (1, 16, 8)]


# Every option and every shape in every dtype, but not all combinations: each is a compilation.
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 50)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in SHAPES),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("in_memory")
def test_against_the_reference(op, name, shape, dtype, calls):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 100, 100), (5, 64, 1000)])
@pytest.mark.usefixtures("in_memory")
def test_the_same_bits_every_time(shape, dtype, calls):
    same_bits(make_case("bn_lstm", *shape, dtype=dtype).on("cuda"), 200)
    assert len(calls) == 402


def test_arguments_that_begin_anywhere(calls):
    case = make_case("bn_lstm", 4, 17, 52, dtype=torch.bfloat16, **calm("bn_lstm")).on("cuda")
    expected = differentiate(case, "gpu")

    def moved(value):
        memory = value.new_empty(value.numel() + 1)
        return memory[1:].view(value.shape).copy_(value)

    shifted = case.with_tensors(**{name: moved(v) for name, v in case.present().items()})
    found = differentiate(shifted, "gpu")
    assert len(calls) == 4
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_arguments_in_any_order_of_memory(calls):
    """Kernels get addresses: of copies if the data do not have the layout that they read."""
    case = make_case("bn_lstm", 4, 17, 50, dtype=torch.bfloat16, **calm("bn_lstm")).on("cuda")
    rows = {name: case.tensors[name][:1].expand(17, 50) for name in ("h0", "c0")}
    case = case.with_tensors(**{name: value.contiguous() for name, value in rows.items()})
    expected = differentiate(case, "gpu")

    def turned(value):
        return value.transpose(0, 1).contiguous().transpose(0, 1)

    def spread(value):
        return value.new_empty(3 * len(value))[::3].copy_(value)

    changed = {name: turned(case.tensors[name]) for name in ("wx", "weight_hh")} | rows
    names = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c")
    changed |= {name: spread(case.tensors[name]) for name in names}
    cotangents = {name: turned(value) for name, value in case.cotangents.items()}
    found = differentiate(
        dataclasses.replace(case.with_tensors(**changed), cotangents=cotangents), "gpu"
    )
    assert len(calls) == 4
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            # These products read W_h and h0 in place.
            if one is expected[1] and name in ("weight_hh", "h0"):
                error = (value - other[name]).float().norm()
                assert error <= 4 * UNITS[torch.bfloat16] * value.float().norm(), name
            else:
                assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("shape", [(5, 16, 24), (5, 64, 240), (4, 37, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_call_returned_stays(shape, dtype):
    """Later calls get whatever memory is free: nothing that is returned was released too early."""
    case = make_case("bn_lstm", *shape, dtype=dtype, **calm("bn_lstm")).on("cuda")
    with poisoned_memory():
        found = differentiate(case, "gpu")
        kept = [{name: v.clone() for name, v in part.items() if v is not None} for part in found]
        for seed in range(1, 9):
            differentiate(make_case("bn_lstm", *shape, seed, dtype=dtype).on("cuda"), "gpu")
    for part, copies in zip(found, kept, strict=True):
        for name, value in copies.items():
            assert torch.equal(value, part[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [None, 5])
def test_results_of_the_operator_share_no_memory(features, dtype):
    """As PyTorch's compiler takes for granted; called directly, statistics are parts of one."""
    case = make_case("bn_lstm", 4, 16, 24, dtype=dtype).on("cuda")
    tensors = dict.fromkeys(LSTM.tensors) | case.tensors
    tensors["input"] = tensors.pop("wx")
    if features:
        tensors["input"] = tensors["input"][..., :features].contiguous()
        tensors["weight_ih"] = torch.randn(96, features, device="cuda").to(dtype)
    a = LSTMArguments(**tensors, norm="batch", eps=1e-5, save=True, tf32=True)
    found = torch.ops.rbn.gpu_lstm(*a)
    places = [value.untyped_storage().data_ptr() for value in found if value.numel()]
    assert len(set(places)) == len(places)
    direct = forward.forward([a], separate=False)
    expected = (direct.output, *direct.states, *direct.moments)
    assert len(expected) == 9
    for one, other in zip(found, expected, strict=False):
        assert torch.equal(one, other)
    assert len({value.untyped_storage().data_ptr() for value in direct.moments}) == 1


def test_two_steps_in_triton(monkeypatch, calls):
    """A step number of 1 is not a compile-time constant of the kernel."""
    case = make_case("bn_lstm", 2, 9, 16, dtype=torch.float32, **calm("bn_lstm"))
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: None)
    found = differentiate(case.on("cuda"), "gpu")
    assert not calls
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_and_cuda_agree(dtype, monkeypatch, calls):
    case = make_case("bn_lstm", 7, 33, 40, dtype=dtype, lengths="random", **calm("bn_lstm"))
    one = differentiate(case.on("cuda"), "gpu")
    assert calls == ["forward", "backward"]
    monkeypatch.setattr(plan, "_CACHE", {})
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: None)
    other = differentiate(case.on("cuda"), "gpu")
    assert len(calls) == 2
    for a, b in zip(one, other, strict=True):
        assert_same(a, {k: None if v is None else v.cpu() for k, v in b.items()}, 16 * UNITS[dtype])


def test_a_batch_too_large_for_the_kernels(calls):
    case = make_case("bn_lstm", 3, 5000, 4, dtype=torch.float32, **calm("bn_lstm"))
    found = differentiate(case.on("cuda"), "gpu")
    assert not calls
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[torch.float32])


def test_nan_shows():
    case = make_case("bn_lstm", 4, 20, 16, dtype=torch.float32).on("cuda")
    case.tensors["wx"][1, 3, 2] = torch.nan
    with torch.no_grad(), rbn.backend("gpu"):
        output, *_ = rbn.ops.bn_lstm(*case.tensors.values())
    assert output[1:].isnan().any()
    assert not output[0].isnan().any()
