"""The operators as PyTorch sees them: schema, fake implementations, autograd registration."""

import importlib
import itertools

import pytest
import torch
from recurrence_cases import OPS, RESULTS, call, make_case, poisoned_memory

from rbn.ops import cpu

LENGTHS = [4, 2, 1, 4]
SETS = {
    "bn_lstm": {
        "batch": {},
        "population": {"population": 2},
        "lengths": {"lengths": LENGTHS, "zoneout": ("mask", 0.3)},
        "padding counts": {
            "lengths": LENGTHS,
            "padding": "include",
            "input_stats": "sequence",
        },
        "nothing optional": {"absent": ("bias", "gamma_x", "gamma_c", "beta_c")},
        "bfloat16": {"dtype": torch.bfloat16, "pass_normalized_cell": True},
    },
    "lstm": {"plain": {}, "lengths": {"lengths": LENGTHS, "dtype": torch.float32}},
    "ln_lstm": {"lengths": {"lengths": LENGTHS, "zoneout": (0.2, "mask")}},
    "bn_rnn": {
        "batch": {"dtype": torch.float32},
        "population": {"population": 2, "lengths": LENGTHS},
        "padding counts": {"lengths": LENGTHS, "padding": "include", "nonlinearity": "relu"},
    },
}
every_call = pytest.mark.parametrize(
    ("op", "options"),
    [pytest.param(op, SETS[op][name], id=f"{op}: {name}") for op in OPS for name in SETS[op]],
)


@pytest.fixture
def operator_call(monkeypatch):
    """A function that gives the operator that a call ends in, and its arguments there."""

    def find(case):
        name = "rnn" if case.op == "bn_rnn" else "lstm"
        run, found = getattr(cpu, f"{name}_op"), []
        with monkeypatch.context() as patch:
            patch.setattr(cpu, f"{name}_op", lambda *args: found.append(args) or run(*args))
            call(case, "cpu")
        (args,) = found
        return name, args

    return find


@pytest.mark.slow
@pytest.mark.no_cover
@every_call
def test_forward(op, options, operator_call):
    case = make_case(op, 4, 4, 3, **options)
    training = "population" not in options
    leaves = {k: v.clone().requires_grad_(training) for k, v in case.present().items()}
    name, args = operator_call(case.with_tensors(**leaves))
    assert args[-1] is training  # save
    checks = torch.library.opcheck(getattr(torch.ops.rbn, name).default, args)
    assert len(checks) >= 4
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.no_cover
@every_call
def test_backward(op, options, operator_call):
    case = make_case(op, 4, 4, 3, **options)
    name, args = operator_call(case)
    args = (*args[:-1], True)  # save
    results = getattr(torch.ops.rbn, name).default(*args)
    cotangents = [case.cotangents[k] for k in RESULTS[op]]
    if "lengths" in options:
        cotangents[0] = None  # a loss of the final states alone
    checks = torch.library.opcheck(
        getattr(torch.ops.rbn, f"{name}_backward").default, (*cotangents, list(results), *args)
    )
    assert len(checks) >= 4
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (3, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("op", OPS)
def test_fake_shapes_of_small_calls(op, shape, operator_call):
    """Shapes, types and strides, which opcheck compares at one size only."""
    T, B, _ = shape
    for lengths, training in itertools.product((None, [1] * B, [T] * B), (True, False)):
        case = make_case(op, *shape, lengths=lengths)
        leaves = {k: v.clone().requires_grad_(training) for k, v in case.present().items()}
        name, args = operator_call(case.with_tensors(**leaves))
        torch.library.opcheck(
            getattr(torch.ops.rbn, name).default,
            args,
            test_utils=("test_schema", "test_faketensor"),
        )
        operator = getattr(torch.ops.rbn, name).default
        real = operator(*args)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = operator(
                *torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
            )
        for got, want in zip(fake, real, strict=True):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@every_call
def test_no_result_has_undefined_elements(op, options, operator_call):
    """Those that are only saved, too: operators are compared and replayed as a whole."""
    name, args = operator_call(make_case(op, 4, 4, 3, **options))
    operator, args = getattr(torch.ops.rbn, name).default, (*args[:-1], True)
    with poisoned_memory():
        results = operator(*args)
    assert len(results) >= 9
    for value, again in zip(results, operator(*args), strict=True):
        assert torch.equal(value, again)


def test_without_a_gradient_nothing_is_saved(operator_call):
    case = make_case("bn_lstm", 4, 4, 3)
    name, args = operator_call(case)
    results = getattr(torch.ops.rbn, name).default(*args)
    saved = results[3 + 6 :]  # behind the three results and the six statistics
    assert len(saved) == 6
    assert all(value.numel() == 0 for value in saved)


@pytest.mark.parametrize("library", ["cpu.library", "gpu.library", "gpu.steps_library"])
def test_no_argument_has_a_default(library):
    """PyTorch would leave out of a compiled call what equals it, and then miscount gradients."""
    if library.startswith("gpu"):
        pytest.importorskip("triton", reason="the GPU's kernels need triton")
    importlib.import_module(f"rbn.ops.{library}")
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("rbn::")]
    assert schemas
    for schema in schemas:
        assert not [a.name for a in schema.arguments if a.has_default_value()], schema.name
