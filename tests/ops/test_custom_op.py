"""The operators as PyTorch sees them: schema, fake implementations, autograd registration."""

import importlib
import itertools

import pytest
import torch
from recurrence_cases import (
    OPS,
    RESULTS,
    from_input,
    has_compiled_step,
    make_case,
    operator_call,
    poisoned_memory,
    results_to_keep,
    saved_results,
)

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
    "bn_gru": {
        "batch": {"dtype": torch.float32},
        "population": {"population": 2, "lengths": LENGTHS},
        "padding counts": {"lengths": LENGTHS, "padding": "include", "zoneout": (0.0, "mask")},
        "no shifts": {"absent": ("bias", "beta_n"), "dtype": torch.bfloat16},
    },
}
# What opcheck does without tracing, which takes most of its time; once per operator is enough.
UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")
every_call = pytest.mark.parametrize(
    ("op", "options"),
    [pytest.param(op, SETS[op][name], id=f"{op}: {name}") for op in OPS for name in SETS[op]],
)


@pytest.mark.slow
@pytest.mark.no_cover
@every_call
def test_forward(op, options):
    case = make_case(op, 4, 4, 3, **options)
    training = "population" not in options
    leaves = {k: v.clone().requires_grad_(training) for k, v in case.present().items()}
    name, args = operator_call(case.with_tensors(**leaves), "cpu")
    assert args.save is training
    checks = torch.library.opcheck(getattr(torch.ops.rbn, name).default, tuple(args))
    assert len(checks) >= 4
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.no_cover
@every_call
def test_backward(op, options):
    case = make_case(op, 4, 4, 3, **options)
    name, args = operator_call(case, "cpu")
    args = args._replace(save=True)
    results = results_to_keep(op, getattr(torch.ops.rbn, name).default(*args))
    cotangents = [case.cotangents[k] for k in RESULTS[op]]
    if "lengths" in options:
        cotangents[0] = None  # a loss that only uses the final states
    checks = torch.library.opcheck(
        getattr(torch.ops.rbn, f"{name}_backward").default,
        (*cotangents, results, True, *args),
        **({} if options == next(iter(SETS[op].values())) else {"test_utils": UNTRACED}),
    )
    assert len(checks) >= 3
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, torch.float64) for op in OPS),
        *((op, torch.float32) for op in OPS if has_compiled_step(op)),
    ],
)
def test_from_an_input_and_states_for_all_rows(op, dtype):
    case = make_case(op, 4, 4, 3, dtype=dtype, lengths=LENGTHS)
    leaves = {k: v.clone().requires_grad_() for k, v in case.present().items()}
    name, args = operator_call(case.with_tensors(**leaves), "cpu")
    args = from_input(args)
    checks = torch.library.opcheck(getattr(torch.ops.rbn, name).default, tuple(args))
    assert set(checks.values()) == {"SUCCESS"}
    args = args._replace(**{n: v.detach() for n, v in args._asdict().items() if torch.is_tensor(v)})
    results = results_to_keep(op, getattr(torch.ops.rbn, name).default(*args))
    cotangents = [case.cotangents[k] for k in RESULTS[op]]
    for needs_input in (True, False):
        checks = torch.library.opcheck(
            getattr(torch.ops.rbn, f"{name}_backward").default,
            (*cotangents, results, needs_input, *args),
            test_utils=UNTRACED,
        )
        assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (3, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("op", OPS)
def test_fake_shapes_of_small_calls(op, shape):
    """Shapes, dtypes and strides, which opcheck compares at one size only."""
    T, B, _ = shape
    for lengths, training in itertools.product((None, [1] * B, [T] * B), (True, False)):
        case = make_case(op, *shape, lengths=lengths)
        leaves = {k: v.clone().requires_grad_(training) for k, v in case.present().items()}
        name, args = operator_call(case.with_tensors(**leaves), "cpu")
        args = tuple(args)
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
def test_no_result_has_undefined_elements(op, options):
    """Including those that are only saved: operators are compared and replayed as a whole."""
    name, args = operator_call(make_case(op, 4, 4, 3, **options), "cpu")
    operator, args = getattr(torch.ops.rbn, name).default, args._replace(save=True)
    with poisoned_memory():
        results = operator(*args)
    assert len(results) >= 9
    for value, again in zip(results, operator(*args), strict=True):
        assert torch.equal(value, again)


@pytest.mark.parametrize("op", OPS)
def test_without_a_gradient_nothing_is_saved(op):
    name, args = operator_call(make_case(op, 4, 4, 3), "cpu")
    operator = getattr(torch.ops.rbn, name).default
    sizes = [value.numel() for value in saved_results(op, operator(*args))]
    kept = [value.numel() for value in saved_results(op, operator(*args._replace(save=True)))]
    assert len(sizes) == len(kept) >= 9
    assert sum(sizes) <= 4 * (2 * 12 + 3)  # no more than statistics
    assert sum(kept) >= sum(sizes) + 4 * 4 * 3


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("cpu", ("cpu_lstm", "cpu_rnn", "cpu_gru")),
        ("gpu", ("gpu_lstm", "gpu_ln_lstm", "gpu_rnn", "gpu_gru")),
    ],
)
def test_no_argument_has_a_default(backend, names):
    """PyTorch would drop a compiled call's arguments equal to a default, and miscount gradients."""
    if backend == "gpu":
        pytest.importorskip("triton", reason="the GPU's kernels need triton")
    importlib.import_module(f"rbn.ops.{backend}")
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"rbn::{backend}_")]
    both = (f"rbn::{name}{which}" for name in names for which in ("", "_backward"))
    assert sorted(s.name for s in schemas) == sorted(both)
    for schema in schemas:
        assert not [a.name for a in schema.arguments if a.has_default_value()], schema.name
