"""Cases for the tests of the GPU's LSTM: every option, and a comparison with the reference."""

import contextlib
from unittest import mock

import faster_interpreter
import torch
from recurrence_cases import (
    RESULTS,
    TOLERANCES,
    arguments,
    assert_same,
    differentiate,
    poisoned_memory,
)

import rbn
from rbn.ops.definition import LSTM
from rbn.ops.dispatch import run
from rbn.ops.gpu.lstm import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": [5, 1, 3]},
    "few rows": {"lengths": [5, 1, 3], "min_rows": 2},
    "padding counted": {"lengths": [2, 5, 1], "padding": "include"},
    "sequencewise": {"input_stats": "sequence", "lengths": [5, 4, 1]},
    "sequencewise, padding counted": {
        "input_stats": "sequence",
        "lengths": [5, 4, 1],
        "padding": "include",
    },
    "population": {"population": (2, 7, 5)},
    "zoneout masks": {"zoneout": ("mask", "mask")},
    "zoneout rates": {"zoneout": (0.2, 0.3)},
    "zoneout and lengths": {"zoneout": ("mask", 0.3), "lengths": [2, 5, 3]},
    "joint": {"absent": ("gamma_x", "bias")},
    "raw output": {"absent": ("gamma_c", "beta_c")},
    "passed on": {"pass_normalized_cell": True},
}
PLAIN = ("plain", "lengths", "zoneout masks", "zoneout rates", "zoneout and lengths")
EVERY_OPTION = [("bn_lstm", name) for name in OPTIONS] + [("lstm", name) for name in PLAIN]


@contextlib.contextmanager
def products(tf32):
    """Allow tf32 for float32 products, or not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    yield
    torch.backends.cudnn.allow_tf32 = before


def differentiate_together(made):
    """`differentiate` for several cases side by side, whatever their sizes."""
    made = [
        case.with_tensors(**{n: v.detach().requires_grad_() for n, v in case.present().items()})
        for case in made
    ]
    with (
        rbn.backend("gpu"),
        mock.patch.object(plan, "_fits_side_by_side", return_value=True),
        mock.patch.object(plan, "_CACHE", {}),
    ):
        values = run(LSTM, [arguments(case) for case in made])
    names = RESULTS["lstm"]
    outputs = [value for each in values for value in each[: len(names)]]
    cotangents = [case.cotangents[name] for case in made for name in names]
    leaves = [leaf for case in made for leaf in case.present().values()]
    grads = iter(torch.autograd.grad(outputs, leaves, cotangents))
    found = []
    for case, each in zip(made, values, strict=True):
        results = dict(zip(names, each, strict=False)) | each[-1]._asdict()
        results = {name: None if v is None else v.detach() for name, v in results.items()}
        found.append((results, {name: next(grads) for name in case.present()}))
    return found


def compare(case, dtype=torch.float32, tolerances=TOLERANCES[torch.float32]):
    """Results and gradients in a dtype against those of the reference in float64."""
    case = case.to(dtype)
    with poisoned_memory():
        found = differentiate(case.on(DEVICE), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    results, gradients = tolerances
    assert_same(found[0], expected[0], results)
    assert_same(found[1], expected[1], gradients)


if DEVICE == "cpu":
    faster_interpreter.prepare_once()
    faster_interpreter.make_types_once()
    faster_interpreter.leave_like_shapes()
    faster_interpreter.calculate_at_once()
