"""The grid kernels, for wide layers: emulated on the CPU, and on a GPU, there without splits."""

import copy
import dataclasses
import math

import pytest
import torch
from cuda_cases import (
    OPTIONS,
    UNITS,
    at_least_a_hundredth,
    compare,
    compare_emulated,
    needs_hopper,
    on_card,
    same_as_float64,
    same_bits,
)
from recurrence_cases import (
    TOLERANCES,
    assert_same,
    call,
    calm,
    differentiate,
    fresh_seed,
    make_case,
    poisoned_memory,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import emulated
from gpu_cases import differentiate_together, products

from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels

# Emulated on the CPU -----------------------------------------------------------------------------

FLOAT, HALF = torch.float32, torch.bfloat16
KB = 1024
LENGTHS = [5, 1, 3, 2, 5, 4, 1]
PLAIN = {"rows": 64}
TWO_SPLITS = {"rows": 64, "splits": 2}
# How the work is divided, with sizes that do not divide evenly.
TILINGS = {
    "64 rows": (FLOAT, (4, 7, 20), PLAIN),
    "one row": (FLOAT, (2, 1, 20), PLAIN),  # the code of "64 rows"
    "128 rows": (HALF, (3, 20, 36), {"rows": 128}),
    "two splits": (FLOAT, (4, 20, 20), TWO_SPLITS),
    "teams of 8": (HALF, (3, 7, 20), {"rows": 64, "team": 8}),
    "weights that do not fit": (HALF, (3, 7, 136), {"rows": 64, "limits": (30 * KB, 38 * KB)}),
}
EMULATED_OPTIONS = {
    "lstm, lengths": ("lstm", HALF, PLAIN, {"lengths": LENGTHS}),
    "few rows": ("bn_lstm", FLOAT, PLAIN, {"lengths": LENGTHS, "min_rows": 4}),
    "few rows, 128 rows": (
        "bn_lstm",
        HALF,
        {"rows": 128},
        {"lengths": LENGTHS, "min_rows": 4},
    ),
    "few rows, two splits": (
        "bn_lstm",
        FLOAT,
        TWO_SPLITS,
        {"lengths": [*LENGTHS, *[2] * 11], "min_rows": 4},
    ),
    "raw output, no bias": ("bn_lstm", HALF, PLAIN, {"absent": ("gamma_c", "bias")}),
    "sequencewise": ("bn_lstm", HALF, PLAIN, {"input_stats": "sequence", "lengths": LENGTHS}),
    "population": ("bn_lstm", FLOAT, PLAIN, {"population": (2, 7, 5)}),
    "zoneout masks, few rows": (
        "bn_lstm",
        HALF,
        PLAIN,
        {"zoneout": ("mask", "mask"), "lengths": LENGTHS, "min_rows": 4},
    ),
    "zoneout rates": ("bn_lstm", FLOAT, PLAIN, {"zoneout": (0.5, 0.05)}),
}


@pytest.fixture
def emulate(emulate_hopper, monkeypatch, record_runs):
    """Runs all calls in these tilings, on the CPU; returns the directions that ran."""
    runs = record_runs("grid")

    def given(rows, splits=1, team=4, limits=(227 * KB, 227 * KB)):
        """limits: bytes of shared memory, forward and backward."""
        teams = {"forward": (1, limits[0]), "backward": (team, limits[1])}

        def choose(direction, term):
            sizes = *teams[direction], rows, term.dtype != FLOAT, splits
            return grid_kernels.grid_tiling(direction, term.shape[-1] // 4, *sizes)

        emulate_hopper("grid")
        monkeypatch.setattr(grid_kernels, "choose", choose)
        return runs

    return given


@emulated
@pytest.mark.parametrize("name", TILINGS)
def test_emulated_tilings(name, emulate):
    dtype, shape, tiling = TILINGS[name]
    runs = emulate(**tiling)
    compare_emulated(make_case("bn_lstm", *shape, **calm("bn_lstm")), dtype)
    assert runs == ["forward", "backward"]


@emulated
@pytest.mark.parametrize("name", EMULATED_OPTIONS)
def test_emulated_options(name, emulate):
    op, dtype, tiling, options = EMULATED_OPTIONS[name]
    runs = emulate(**tiling)
    batch = len(options.get("lengths", LENGTHS))
    compare_emulated(make_case(op, 5, batch, 20, **calm(op), **options), dtype)
    assert runs == ["forward", "backward"]


@emulated
def test_emulated_recurrences_side_by_side(emulate):
    runs = emulate(**PLAIN)
    options = calm("bn_lstm") | {"min_rows": 4, "dtype": FLOAT}
    cases = [make_case("bn_lstm", 5, 7, 20, seed, **options) for seed in (1, 2)]
    lengths = torch.tensor(LENGTHS)  # of both
    cases = [case.with_options(lengths=lengths) for case in cases]
    for case, found in zip(cases, differentiate_together(cases), strict=True):
        same_as_float64(found, differentiate(case.to(torch.float64), "reference"), FLOAT)
    assert runs == ["forward", "backward"]


# On a GPU ----------------------------------------------------------------------------------------


def on_hopper(test):
    return on_card(needs_hopper(test))


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """Batches of up to 128 rows are not split, even if there is room."""
    monkeypatch.setattr(grid_kernels, "UNSPLIT", 128)


@pytest.fixture
def grid(monkeypatch, in_memory):
    """Small layers also run the grid kernels."""
    monkeypatch.setattr(portable_kernels, "fits", lambda term: False)


@on_hopper
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(3, 128, 240), (1, 16, 8), (3, 65, 1000)]),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("grid")
def test_the_grid_against_the_reference(op, name, shape, dtype, calls):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]


@on_hopper
@pytest.mark.parametrize("dtype", UNITS)
def test_a_wide_layer(dtype, calls):
    compare("bn_lstm", (3, 128, 2000), dtype, {})
    assert calls == ["forward", "backward"]


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 128, 2000), (7, 64, 1000)])
def test_a_wide_layer_gives_the_same_bits_every_time(shape, dtype, calls):
    same_bits(make_case("bn_lstm", *shape, dtype=dtype).on("cuda"), 100)
    assert len(calls) == 202


@pytest.fixture
def rows_64(monkeypatch, grid):
    """Batches up to 64 rows, of any layer, run the grid kernels with blocks of 64 rows."""
    monkeypatch.setattr(grid_kernels, "PREFERRED", {64: 1})


@on_hopper
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(7, 64, 1000), (3, 64, 512), (1, 16, 8)]),
        *(("bn_lstm", "lengths", shape) for shape in [(5, 37, 1000), (4, 1, 2000)]),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("rows_64")
def test_blocks_of_64_rows_against_the_reference(op, name, shape, dtype, calls):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]


@pytest.fixture
def with_switch(monkeypatch):
    """Compiles the kernels with a test macro from now on."""

    def switch(name, value):
        defines, more = cuda_kernels.defines, ((name, value),)
        monkeypatch.setattr(cuda_kernels, "defines", lambda *args: defines(*args) + more)

    return switch


@on_hopper
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("block", [0, 3, 4, 7])
@pytest.mark.parametrize(
    ("batch", "dtype"), [(17, torch.bfloat16), (100, torch.bfloat16), (17, torch.float32)]
)
@pytest.mark.usefixtures("rows_64")
def test_any_block_may_be_late(batch, dtype, block, place, with_switch, calls):
    """As when others use the GPU. Four blocks have some of the 52 units, the team's others none."""
    with_switch("LATE", 4 * block + place)
    compare("bn_lstm", (9, batch, 52), dtype, {})
    assert calls == ["forward", "backward"]


@on_hopper
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_barriers_at_which_all_wait(batch, with_switch, few_weights):
    """These are for racecheck, and there are most of them if weights are read again."""
    with_switch("ALL_WAIT", 1)
    few_weights(8)
    compare("bn_lstm", (5, batch, 488), torch.bfloat16, OPTIONS["lengths"])


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("rows_64")
def test_two_recurrences_in_blocks_of_64_rows(dtype):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 500, bidirectional=True, eps=0.1).to("cuda", dtype)
    x = torch.randn(5, 33, 20, device="cuda", dtype=dtype)
    twin = copy.deepcopy(layer).double()
    found, expected = layer(x)[0], twin(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[dtype]
    (100 * found.square()).sum().backward()
    (100 * expected.square()).sum().backward()
    for name, parameter in twin.named_parameters():
        error = (layer.get_parameter(name).grad - parameter.grad).norm()
        assert error <= 16 * UNITS[dtype] * parameter.grad.norm().clamp(min=1), name


@pytest.fixture
def few_weights(monkeypatch):
    """Reads most weights of 488 units again in each step, as in a layer of 2000 units."""
    limit = 62 * 1024

    def limited(team):
        teams = {"forward": (1,), "backward": (team,)}
        monkeypatch.setattr(grid_kernels, "TEAMS", teams)
        monkeypatch.setattr(grid_kernels, "shared_limit", lambda device: limit)
        grid_kernels._choose.cache_clear()
        for direction in teams:
            assert grid_kernels.grid_tiling(direction, 488, *teams[direction], limit).second > 0

    yield limited
    grid_kernels._choose.cache_clear()


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.parametrize("team", [8, 4])
@pytest.mark.usefixtures("rows_64")
def test_weights_that_do_not_fit(team, batch, dtype, calls, few_weights):
    few_weights(team)
    compare("bn_lstm", (5, batch, 488), dtype, OPTIONS["lengths"])
    assert calls == ["forward", "backward"]


ZONEOUT = {
    "masks": {"zoneout": ("mask", "mask")},
    "a mask of the cell": {"zoneout": ("mask", 0.0)},
    "a mask of h": {"zoneout": (0.0, "mask")},
    "rates": {"zoneout": (0.5, 0.05)},
    "both kinds": {"zoneout": (0.3, "mask")},
    "masks, lengths": {"zoneout": ("mask", "mask"), "lengths": "random"},
    "rates, lengths": {"zoneout": (0.5, 0.05), "lengths": "random"},
    "rates, population": {"zoneout": (0.5, 0.05), "population": 2},
    "masks, raw output": {"zoneout": ("mask", "mask"), "absent": ("gamma_c", "bias")},
}


@pytest.fixture
def zoned(record_runs):
    """Calls with zoneout run the grid kernels; records the directions."""
    return record_runs("grid")


@on_hopper
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in ZONEOUT),
        *(("bn_lstm", "masks", shape) for shape in [(4, 64, 1000), (3, 128, 264), (3, 1, 72)]),
        *(("bn_lstm", "masks, lengths", shape) for shape in [(5, 37, 1000), (3, 65, 300)]),
        *(("lstm", name, (5, 40, 24)) for name in ("masks", "rates", "masks, lengths")),
    ],
)
def test_zoneout_against_the_reference(op, name, shape, dtype, zoned):
    """Small layers also: no other CUDA C++ kernels support zoneout."""
    compare(op, shape, dtype, ZONEOUT[name])
    assert zoned == ["forward", "backward"]


@on_hopper
@pytest.mark.parametrize("name", ["masks", "masks, lengths"])
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_zoneout_and_weights_that_do_not_fit(batch, name, few_weights, zoned):
    few_weights(8)
    compare("bn_lstm", (5, batch, 488), torch.bfloat16, ZONEOUT[name])
    assert zoned == ["forward", "backward"]


@on_hopper
@pytest.mark.parametrize(("op", "name"), [("bn_lstm", "rates, population"), ("lstm", "rates")])
def test_zoneout_in_inference(op, name, zoned):
    dtype = torch.bfloat16
    case = make_case(op, 5, 64, 300, dtype=dtype, **calm(op), **ZONEOUT[name])
    with torch.no_grad(), poisoned_memory():
        found = call(case.on("cuda"), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), 16 * UNITS[dtype])
    assert zoned == ["forward"]


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 128, 2000), (9, 64, 1000)])
def test_zoned_layers_give_the_same_bits_every_time(shape, dtype, zoned):
    case = make_case("bn_lstm", *shape, dtype=dtype, **ZONEOUT["masks"])
    same_bits(case.on("cuda"), 20)
    assert len(zoned) == 42


@on_hopper
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_zoned_layer_in_inference(bidirectional, zoned):
    """Also both directions at once."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(
        20, 500, zoneout=(0.5, 0.05), bidirectional=bidirectional, refresh_stats=False
    )
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(5, 33, 20, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # for the population's statistics
        layer.eval()
        found = layer(x)[0]
        expected = copy.deepcopy(layer).double()(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[torch.bfloat16]
    assert zoned == ["forward"] * 2


# float32: products of float16, with powers of two -------------------------------------------------


def scaled(by, only=None, rows=slice(None)):
    """Scales a call's cotangents, and keeps those of one step only."""

    def change(case):
        found = {name: value.clone() for name, value in case.cotangents.items()}
        for value in found.values():
            value[..., rows, :] *= by
        if only is not None:
            found = {"output": torch.zeros_like(found["output"])}
            found["output"][only] = case.cotangents["output"][only]
        return dataclasses.replace(case, cotangents=found)

    return change


def times(name, by):
    return lambda case: case.with_tensors(**{name: case.tensors[name] * by})


EXTREMES = {
    "tiny gradients": scaled(1e-20),
    "huge gradients": scaled(1e20),
    "one row's gradients": scaled(1e4, rows=3),
    "the last step's": scaled(1, only=5),
    "a middle step's": scaled(1, only=2),
    "no weights": times("weight_hh", 0),
    "small weights": times("weight_hh", 1e-9),
    "a large first state": times("h0", 100),
}


@on_hopper
@pytest.mark.parametrize("shape", [(6, 17, 52), (6, 65, 268), (6, 1, 100), (6, 2, 4), (6, 128, 60)])
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.usefixtures("rows_64")
def test_numbers_of_any_size_in_float32(name, shape, calls):
    if name == "one row's gradients" and shape[1] < 4:
        return
    compare("bn_lstm", shape, torch.float32, {}, EXTREMES[name], at_least_a_hundredth)
    assert calls == ["forward", "backward"]


@on_hopper
@pytest.mark.usefixtures("rows_64")
def test_rows_without_gradients_get_none(calls):
    """Although they are scaled with others, and sums of zeros do not identify their step."""
    case = make_case("lstm", 5, 17, 52, fresh_seed(), dtype=torch.float32)
    case = scaled(0, rows=slice(5, 9))(case)
    found = differentiate(case.on("cuda"), "gpu")
    assert calls == ["forward", "backward"]
    assert not found[1]["wx"][:, 5:9].any()
    assert not found[1]["h0"][5:9].any()
    assert found[1]["wx"][:, 4].any()


@on_hopper
@pytest.mark.parametrize("zoneout", [(0.0, "mask"), (0.0, 0.3)])
@pytest.mark.usefixtures("rows_64")
def test_a_large_first_state_that_units_keep(zoneout, zoned):
    """It is passed on with what every step passes on."""
    case = make_case("bn_lstm", 5, 17, 52, fresh_seed(), dtype=torch.float32, zoneout=zoneout)
    case = times("h0", 1000)(case)
    with torch.no_grad():
        found = call(case.on("cuda"), "gpu")
    assert zoned == ["forward"]
    assert_same(found, call(case.to(torch.float64), "reference"), 16 * UNITS[torch.float32])


@on_hopper
@pytest.mark.usefixtures("rows_64")
def test_kept_states_are_not_rounded(zoned):
    case = make_case("bn_lstm", 5, 17, 52, fresh_seed(), dtype=torch.float32, zoneout=(0.0, "mask"))
    with torch.no_grad():
        found = call(case.on("cuda"), "gpu")["output"].cpu()
    assert zoned == ["forward"]
    kept = case.options["zoneout_h"]
    before = torch.cat((case.tensors["h0"][None], found[:-1]))
    assert torch.equal(found[kept], before[kept])
    assert not torch.equal(found, found.half().float())


@on_hopper
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("wx", (2, 3, 5), math.nan),
        ("h0", (3, 5), math.nan),
        ("h0", (3, 5), math.inf),
        ("weight_hh", (3, 5), math.nan),
        ("weight_hh", (3, 5), math.inf),
    ],
)
@pytest.mark.parametrize("op", ["lstm", "bn_lstm"])
@pytest.mark.usefixtures("rows_64")
def test_what_is_not_finite_shows_in_float32(op, name, at, value, calls):
    case = make_case(op, 4, 40, 52, fresh_seed(), dtype=torch.float32, **calm(op))
    given = case.tensors[name].clone()
    given[at] = value
    case = case.with_tensors(**{name: given})
    found = differentiate(case.on("cuda"), "gpu")
    assert calls == ["forward", "backward"]
    expected = differentiate(case.to(torch.float64), "reference")
    for key in ("output", "h_n", "c_n"):
        assert torch.equal(found[0][key].cpu().isfinite(), expected[0][key].isfinite()), key
    assert not found[1]["weight_hh"].isfinite().all()


@on_hopper
@pytest.mark.usefixtures("rows_64")
def test_full_float32_does_not_run_here(zoned):
    """If tf32 is not allowed."""
    case = make_case("bn_lstm", 4, 17, 52, fresh_seed(), dtype=torch.float32, **calm("bn_lstm"))
    with products(tf32=False):
        found = differentiate(case.on("cuda"), "gpu")
    assert not zoned
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], TOLERANCES[torch.float32][0])
