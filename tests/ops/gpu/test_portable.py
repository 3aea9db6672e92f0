"""The portable kernels: each tiling and every option, emulated on the CPU.

On a GPU: layers with few rows.
"""

import pytest
import torch
from cuda_cases import OPTIONS as CARD_OPTIONS
from cuda_cases import UNITS, compare, compare_emulated, on_card, same_bits
from recurrence_cases import calm, make_case

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import COMPILER

from rbn.ops.gpu.lstm import plan
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable.portable_kernels import PortableTiling, choose

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def tiling(tiles, row_warps, column_warps, registers=True, barrier=False, chunk=1):
    return PortableTiling(tiles, row_warps, column_warps, chunk, registers, barrier)


# With up to 16 rows, a warp has all of two pairs of units; with more, eight of all pairs.
FLOAT, HALF = torch.float32, torch.bfloat16
TILINGS = {
    "few rows": (FLOAT, (5, 7, 10), tiling(1, 1, 4)),
    "few rows, half": (HALF, (4, 16, 42), tiling(1, 1, 3, chunk=2)),
    "few rows, barrier": (HALF, (4, 11, 34), tiling(1, 1, 4, False, True)),
    "one row": (FLOAT, (4, 1, 10), tiling(1, 1, 4)),  # the code path of "few rows"
    "one step": (HALF, (1, 2, 10), tiling(1, 1, 4)),
    "more rows": (FLOAT, (4, 19, 10), tiling(2, 2, 2)),
    "more rows, barrier": (HALF, (3, 37, 18), tiling(3, 1, 4, False, True)),
}
OPTIONS = {
    "lstm, lengths": ("lstm", {"lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "no bias": ("bn_lstm", {"absent": ("bias", "beta_c")}),
    "raw output, lengths": (
        "bn_lstm",
        {"absent": ("gamma_c",), "lengths": [5, 1, 3, 2, 5, 4, 1]},
    ),
    "lengths": ("bn_lstm", {"lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "few rows": ("bn_lstm", {"lengths": [5, 1, 3, 2, 5, 4, 1], "min_rows": 4}),
    "no row to the end": ("bn_lstm", {"lengths": [3, 1, 2, 3, 1, 1, 2]}),
    "sequencewise": ("bn_lstm", {"input_stats": "sequence", "lengths": [5, 1, 3, 2, 5, 4, 1]}),
    "population": ("bn_lstm", {"population": (2, 7, 5)}),
    "output alone": ("bn_lstm", {"used": ("output",)}),
    "final state alone": ("bn_lstm", {"used": ("h_n",), "lengths": [2, 5, 3, 1, 2, 4, 5]}),
}


@pytest.fixture
def portable(monkeypatch):
    """No call runs the wide kernels."""
    monkeypatch.setattr(plan, "_CACHE", {})
    monkeypatch.setattr(grid_kernels, "preferred", lambda term: False)


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("name", TILINGS)
def test_tilings(name, emulate_portable):
    dtype, shape, both = TILINGS[name]
    launches = emulate_portable(forward=both, backward=both)
    compare_emulated(make_case("bn_lstm", *shape, **calm("bn_lstm")), dtype)
    assert launches == ["forward", "backward"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "rows"), [*((name, 16) for name in OPTIONS), ("lengths", 32)])
def test_options(name, rows, emulate_portable):  # of a tile, or two
    both = tiling(rows // 16, 1, 4)
    launches = emulate_portable(forward=both, backward=both)
    op, options = OPTIONS[name]
    compare_emulated(make_case(op, 5, 7, 10, **calm(op), **options), HALF)
    assert launches == ["forward", "backward"]


# Tilings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("hidden", [258, 512, 768, 1000, 1056])
def test_few_rows_are_polled_forward(dtype, hidden):
    """A warp prefetches all of its columns, or a few at a time if there are too many."""
    forward, backward = (choose(d, dtype, 16, hidden) for d in ("forward", "backward"))
    assert not forward.barrier
    assert backward.barrier
    width = 32 if dtype != FLOAT else 16
    for found, columns in ((forward, hidden), (backward, 4 * hidden)):
        assert found.column_warps * -(-columns // (found.column_warps * width)) * width >= columns
    assert choose("forward", dtype, 17, hidden).barrier


# On a GPU ----------------------------------------------------------------------------------------


@on_card
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (5, 13, 268)) for name in CARD_OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(6, 16, 512), (5, 9, 768), (3, 2, 512)]),
        *(("bn_lstm", "plain", shape) for shape in [(4, 3, 1056), (3, 1, 10)]),
        *(("lstm", name, (5, 16, 512)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("in_memory", "portable")
def test_few_rows(op, name, shape, dtype, calls):
    compare(op, shape, dtype, CARD_OPTIONS[name])
    assert calls == ["forward", "backward"]


@on_card
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.usefixtures("in_memory", "portable")
def test_few_rows_give_the_same_bits_every_time(dtype, calls):
    same_bits(make_case("bn_lstm", 40, 16, 512, dtype=dtype).on("cuda"), 100)
    assert len(calls) == 202
