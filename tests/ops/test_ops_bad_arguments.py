"""Arguments of the wrong shape are rejected, and never read beyond their end.

The compiled step works on raw addresses, so a mistake here can crash the process: the calls are
made in another one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The invalid part: the argument (or statistic), and its shape instead of the correct one.
T, B, H = 4, 3, 2
ARGUMENTS = {
    "weight_hh": [(4 * H - 1, H), (4 * H, H + 1)],
    "bias": [(1,), (4 * H - 1,)],
    "gamma_x": [(1,), (4 * H - 1,)],
    "gamma_h": [(1,), (4 * H - 1,)],
    "gamma_c": [(1,), (H + 1,)],
    "beta_c": [(1,), (H + 1,)],
    "h0": [(B - 1, H), (B, 1), (1,), (H + 1,)],
    "c0": [(1, H), (B - 1, H), (B, 1), (1,), (H + 1,)],
}
STATISTICS = {
    "mean_x": [(2, 4 * H - 1), (0, 4 * H)],
    "var_h": [(1, 4 * H), (2, 1)],
    "mean_c": [(2, H - 1), (H,)],
}
CALLS = [
    *(("bn_lstm", name, shape) for name, shapes in ARGUMENTS.items() for shape in shapes),
    *(("bn_lstm", name, shape) for name, shapes in STATISTICS.items() for shape in shapes),
    *(("bn_lstm", name, None) for name in STATISTICS),
    *(("lstm", name, shape) for name in ("bias", "beta_c", "c0") for shape in ARGUMENTS[name]),
]

MAKE_CALLS = """
import json, sys, warnings
import torch
from recurrence_cases import call, make_case
warnings.simplefilter("ignore")
for op, name, shape in json.loads(sys.argv[1]):
    options = {} if op == "lstm" else {"population": 2}
    case = make_case(op, 4, 3, 2, dtype=torch.float32, **options)
    value = None if shape is None else torch.ones(shape)
    if name in case.tensors:
        case = case.with_tensors(**{name: value})
    else:
        population = case.options["population"]._replace(**{name: value})
        case = case.with_options(population=population)
    try:
        call(case, "cpu")
        found = "no error"
    except Exception as error:
        found = "refused"
    print(json.dumps([[op, name, shape], found]), flush=True)
"""


DIFFERENTIATE_STATISTICS = """
import torch
from recurrence_cases import call, make_case
from rbn.ops import Statistics
case = make_case("bn_lstm", 4, 3, 2, dtype=torch.float32, population=2)
leaves = Statistics(*(p.requires_grad_() for p in case.options["population"]))
try:
    call(case.with_options(population=leaves), "cpu")["output"].sum().backward()
except Exception as error:
    print(error)
"""


def run(program, *args):
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes():
    """The outcome of each call. One that crashed the process is missing, and so are later ones."""
    process = run(MAKE_CALLS, json.dumps(CALLS))
    found = {}
    for line in process.stdout.splitlines():
        (op, name, shape), outcome = json.loads(line)
        found[op, name, shape if shape is None else tuple(shape)] = outcome
    return found, process.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name", "shape"), CALLS)
def test_a_wrong_shape_is_refused(op, name, shape, outcomes):
    found, returncode = outcomes
    ended = f"the process ended (status {returncode}) at this call or before"
    assert found.get((op, name, shape), ended) == "refused"


@pytest.mark.slow
def test_statistics_that_want_a_gradient_do_no_harm():
    """The fused operator has no statistics for them."""
    process = run(DIFFERENTIATE_STATISTICS)
    assert process.returncode == 0, process.stderr
