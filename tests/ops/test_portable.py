"""The portable kernels, emulated on the CPU: each way to divide the work, and every option."""

import pytest
import torch
from cuda_cases import UNITS
from recurrence_cases import assert_same, calm, differentiate, make_case, poisoned_memory

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import COMPILER

from rbn.ops.gpu.lstm.portable.portable_kernels import PortableTiling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]


def tiling(tiles, row_warps, column_warps, registers=True, barrier=False, chunk=1):
    return PortableTiling(tiles, row_warps, column_warps, chunk, registers, barrier)


# Of up to 16 rows a warp has all of two pairs of units, of more rows eight of all pairs.
FLOAT, HALF = torch.float32, torch.bfloat16
TILINGS = {
    "few rows": (FLOAT, (5, 7, 10), tiling(1, 1, 4)),
    "few rows, half": (HALF, (4, 16, 42), tiling(1, 1, 3, chunk=2)),
    "few rows, barrier": (HALF, (4, 11, 34), tiling(1, 1, 4, False, True)),
    "one row": (FLOAT, (4, 1, 6), tiling(1, 1, 4)),
    "one step": (HALF, (1, 2, 10), tiling(1, 1, 4)),
    "more rows": (FLOAT, (4, 19, 10), tiling(2, 2, 2)),
    "more rows, barrier": (HALF, (3, 37, 18), tiling(3, 1, 4, False, True)),
}
OPTIONS = {
    "lstm": ("lstm", {}),
    "lstm, lengths": ("lstm", {"lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "no bias": ("bn_lstm", {"absent": ("bias", "beta_c")}),
    "raw output": ("bn_lstm", {"absent": ("gamma_c",)}),
    "lengths": ("bn_lstm", {"lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "no row to the end": ("bn_lstm", {"lengths": [3, 1, 2, 3, 1, 1, 2]}),
    "sequencewise": ("bn_lstm", {"input_stats": "sequence", "lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "population": ("bn_lstm", {"population": (2, 7, 5)}),
    "output alone": ("bn_lstm", {"used": ("output",)}),
    "final state alone": ("bn_lstm", {"used": ("h_n",), "lengths": [2, 5, 3, 1, 2, 4, 5]}),
}


def compare(case, dtype):
    """Results and all gradients beside those of the reference in float64."""
    with poisoned_memory():
        found = differentiate(case.to(dtype), "gpu")
    expected = differentiate(case.to(dtype).to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for key, want in expected[1].items():
        error = (found[1][key].double() - want).norm() / max(1, want.norm())
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


@pytest.mark.parametrize("name", TILINGS)
def test_tilings(name, emulate_portable):
    dtype, shape, both = TILINGS[name]
    launches = emulate_portable(forward=both, backward=both)
    compare(make_case("bn_lstm", *shape, **calm("bn_lstm")), dtype)
    assert launches == ["forward", "backward"]


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 16) for name in OPTIONS), ("lstm, lengths", 32), ("lengths", 32)]
)
def test_options(name, rows, emulate_portable):  # of a tile, or two
    both = tiling(rows // 16, 1, 4)
    launches = emulate_portable(forward=both, backward=both)
    op, options = OPTIONS[name]
    compare(make_case(op, 5, 7, 10, **calm(op), **options), HALF)
    assert launches == ["forward", "backward"]
