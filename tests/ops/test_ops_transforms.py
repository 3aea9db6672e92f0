"""torch.func, forward-mode differentiation, autocast and checkpointing around the ops."""

import pytest
import torch
from recurrence_cases import (
    BACKENDS,
    GRADIENT_TOLERANCE,
    OPS,
    RESULT_TOLERANCE,
    assert_same,
    call,
    differentiate,
    make_case,
)
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint


def case_of(op):
    return make_case(op, 3, 4, 2, lengths=[3, 1, 2, 3], zoneout=(0.2, "mask"))


def loss_of(case, backend=None):
    """The loss whose gradients `differentiate` returns, as a function of the named tensors."""

    def loss(tensors):
        results = call(case.with_tensors(**tensors), backend)
        return sum((results[name] * c).sum() for name, c in case.cotangents.items())

    return loss


# torch.func: the reference runs, unless the fused operator is requested by name -------------------

by_default_and_by_name = pytest.mark.parametrize("backend", [None, "reference"])


@by_default_and_by_name
@pytest.mark.parametrize("op", OPS)
def test_grad_and_vjp(op, backend):
    case = case_of(op)
    _, expected = differentiate(case, "reference")
    loss = loss_of(case, backend)
    assert_same(grad(loss)(case.present()), expected, GRADIENT_TOLERANCE)
    value, pull_back = vjp(loss, case.present())
    assert_same(pull_back(torch.ones_like(value))[0], expected, GRADIENT_TOLERANCE)


@by_default_and_by_name
@pytest.mark.parametrize("op", OPS)
def test_jvp(op, backend):
    case = case_of(op)
    _, gradients = differentiate(case, "reference")
    direction = {name: torch.randn_like(v) for name, v in case.present().items()}
    expected = sum((gradients[name] * d).sum() for name, d in direction.items())
    size = 1 + sum((gradients[name] * d).abs().sum() for name, d in direction.items())
    _, tangent = jvp(loss_of(case, backend), (case.present(),), (direction,))
    assert (tangent - expected).abs() <= GRADIENT_TOLERANCE * size


@by_default_and_by_name
@pytest.mark.parametrize("op", OPS)
def test_vmap_over_sets_of_parameters(op, backend):
    case = case_of(op)
    sets = {name: torch.stack([v, 0.5 * v, v + 0.1]) for name, v in case.present().items()}
    loss = loss_of(case, backend)
    losses, gradients = vmap(loss)(sets), vmap(grad(loss))(sets)
    for k in range(3):
        one = {name: v[k] for name, v in sets.items()}
        assert_same({"loss": losses[k]}, {"loss": loss(one)}, RESULT_TOLERANCE)
        _, expected = differentiate(case.with_tensors(**one), "reference")
        found = {name: v[k] for name, v in gradients.items()}
        assert_same(found, expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("op", OPS)
def test_the_fused_operator_refuses_torch_func_by_name(op):
    case = case_of(op)
    loss, tensors = loss_of(case, "cpu"), case.present()
    pairs = {name: torch.stack([v, v]) for name, v in tensors.items()}
    for run in (
        lambda: grad(loss)(tensors),
        lambda: vjp(loss, tensors),
        lambda: jvp(loss, (tensors,), (tensors,)),
        lambda: vmap(loss)(pairs),
    ):
        with pytest.raises(RuntimeError, match=r'rbn\.backend\("reference"\)'):
            run()


# Forward-mode differentiation -------------------------------------------------------------------


def tangent_of(case, backend):
    """The tangent of the loss for a wx that moves by 1 everywhere."""
    with forward_ad.dual_level():
        wx = forward_ad.make_dual(case.tensors["wx"], torch.ones_like(case.tensors["wx"]))
        return forward_ad.unpack_dual(loss_of(case, backend)({"wx": wx})).tangent


@by_default_and_by_name
@pytest.mark.parametrize("op", OPS)
def test_forward_mode(op, backend):
    case = case_of(op)
    _, gradients = differentiate(case, "reference")
    size = 1 + gradients["wx"].abs().sum()
    error = (tangent_of(case, backend) - gradients["wx"].sum()).abs()
    assert error <= GRADIENT_TOLERANCE * size


@pytest.mark.parametrize("op", OPS)
def test_the_fused_operator_refuses_forward_mode_by_name(op):
    """It has no tangents, and must not pretend to have zero tangents."""
    with pytest.raises(RuntimeError, match=r'rbn\.backend\("reference"\)'):
        tangent_of(case_of(op), "cpu")


# Autocast and checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_autocast_does_not_reach_into_the_forward_pass(op, backend):
    case = case_of(op).to(torch.float32)
    expected = call(case, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(call(case, backend), expected, 0.0)


@pytest.mark.parametrize("op", OPS)
def test_autocast_does_not_reach_into_the_backward_pass(op):
    """Calling ``backward()`` inside the block is common; the arithmetic does not change."""
    case = case_of(op).to(torch.float32)
    _, expected = differentiate(case, "cpu")
    leaves = {name: v.clone().requires_grad_() for name, v in case.present().items()}
    loss = loss_of(case, "cpu")(leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert_same({name: v.grad for name, v in leaves.items()}, expected, 0.0)


@pytest.mark.parametrize("op", OPS)
def test_checkpointing(op):
    case = case_of(op)
    _, expected = differentiate(case, "cpu")
    leaves = {name: v.clone().requires_grad_() for name, v in case.present().items()}
    checkpoint(loss_of(case, "cpu"), leaves, use_reentrant=False).backward()
    assert_same({name: v.grad for name, v in leaves.items()}, expected, 0.0)
