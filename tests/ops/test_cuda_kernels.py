"""The kernels in CUDA C++ and how PyTorch gets along with them, on a card."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from recurrence_cases import (
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

from rbn.ops.gpu import cuda_lstm, driver, launch, nvrtc, small_lstm, wide_lstm
from rbn.ops.gpu.signature import Inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A product of n terms rounded to a unit u is off by about u * sqrt(n) of a term, that is by u of
# the sum here, where weights have the size n ** -0.5; a step adds a few such errors, a gradient one
# for each step it passes. tf32 has the 10 bits of float16.
UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}
SHAPES = [(6, 5, 6), (5, 100, 100), (4, 64, 240), (3, 37, 1000), (3, 128, 56), (1, 16, 8)]
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": "random"},
    "sequencewise": {"input_stats": "sequence", "lengths": "random"},
    "population": {"population": 2},
    "raw output": {"absent": ("gamma_c", "bias")},
}


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that run."""
    found = []
    for name in ("forward", "backward"):
        run = getattr(cuda_lstm, name)

        def counted(*args, _run=run, _name=name):
            found.append(_name)
            return _run(*args)

        monkeypatch.setattr(cuda_lstm, name, counted)
    return found


# Every option and every shape in every type, though not all with all: each is a compilation.
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
    case = make_case(op, *shape, fresh_seed(), dtype=dtype, **calm(op), **OPTIONS[name])
    with poisoned_memory():
        found = differentiate(case.on("cuda"), "gpu")
    assert calls == ["forward", "backward"]
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / want.norm().clamp(min=1)
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels for wide layers have instructions of Hopper only",
)


@pytest.fixture
def in_memory(monkeypatch):
    """Small layers, too, run the kernels whose blocks meet in memory, as on cards before Hopper."""
    monkeypatch.setattr(small_lstm, "choose", lambda wx: None)


@pytest.fixture
def wide(monkeypatch, in_memory):
    """Small layers, too, run the kernels for wide ones."""
    monkeypatch.setattr(cuda_lstm, "_fits", lambda wx: False)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(3, 128, 240), (1, 16, 8), (3, 65, 1000)]),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("wide")
def test_wide_layers_against_the_reference(op, name, shape, dtype, calls):
    test_against_the_reference(op, name, shape, dtype, calls)


@pytest.fixture
def rows_64(monkeypatch, wide):
    """Batches up to 64 rows, of any layer, run the kernels for wide ones with blocks of 64 rows."""
    monkeypatch.setattr(wide_lstm, "PREFERRED", {64: 1})


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
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
    test_against_the_reference(op, name, shape, dtype, calls)


@needs_hopper
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_barriers_at_which_all_wait(batch, monkeypatch, calls):
    """They are for racecheck, and with weights that come again there are most of them."""
    defines = cuda_lstm._defines
    more = (("ALL_WAIT", 1),)
    monkeypatch.setattr(cuda_lstm, "_defines", lambda *args, **kw: defines(*args, **kw) + more)
    test_weights_that_do_not_fit(8, batch, monkeypatch, calls)


@needs_hopper
@pytest.mark.usefixtures("rows_64")
def test_two_recurrences_in_blocks_of_64_rows():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 500, bidirectional=True).to("cuda", torch.bfloat16)
    x = torch.randn(5, 33, 20, device="cuda", dtype=torch.bfloat16)
    found = layer(x)[0]
    expected = copy.deepcopy(layer).double()(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[torch.bfloat16]


@needs_hopper
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.parametrize("team", [8, 4])
@pytest.mark.usefixtures("rows_64")
def test_weights_that_do_not_fit(team, batch, monkeypatch, calls):
    """Most of them are read again in each step, as in a layer of 2000 units."""
    limit, teams = 62 * 1024, {"forward": (1,), "backward": (team,)}
    monkeypatch.setattr(wide_lstm, "TEAMS", teams)
    monkeypatch.setattr(wide_lstm, "shared_limit", lambda device: limit)
    wide_lstm._choose.cache_clear()
    for direction in teams:
        assert wide_lstm.cut_wide(direction, 488, *teams[direction], limit).second > 0
    try:
        test_against_the_reference("bn_lstm", "lengths", (5, batch, 488), torch.bfloat16, calls)
    finally:
        wide_lstm._choose.cache_clear()


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
def zoned(monkeypatch):
    """Zoned calls run the kernels for wide layers; how often they did."""
    found = []
    run = cuda_lstm._run_wide

    def counted(*args, **kwargs):
        found.append(args[0])
        run(*args, **kwargs)

    monkeypatch.setattr(cuda_lstm, "_run_wide", counted)
    return found


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in ZONEOUT),
        *(("bn_lstm", "masks", shape) for shape in [(4, 64, 1000), (3, 128, 264), (3, 1, 72)]),
        *(("bn_lstm", "masks, lengths", shape) for shape in [(5, 37, 1000), (3, 65, 300)]),
        *(("lstm", name, (5, 40, 24)) for name in ("masks", "rates", "masks, lengths")),
    ],
)
def test_zoneout_against_the_reference(op, name, shape, dtype, calls, zoned, monkeypatch):
    """Small layers, too: no other kernels in CUDA C++ have zoneout."""
    monkeypatch.setitem(OPTIONS, name, ZONEOUT[name])
    test_against_the_reference(op, name, shape, dtype, calls)
    assert zoned == ["forward", "backward"]


@needs_hopper
@pytest.mark.parametrize("name", ["masks", "masks, lengths"])
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_zoneout_and_weights_that_do_not_fit(batch, name, monkeypatch, calls, zoned):
    monkeypatch.setitem(OPTIONS, "lengths", ZONEOUT[name])
    test_weights_that_do_not_fit(8, batch, monkeypatch, calls)
    assert zoned == ["forward", "backward"]


@needs_hopper
@pytest.mark.parametrize(("op", "name"), [("bn_lstm", "rates, population"), ("lstm", "rates")])
def test_zoneout_in_inference(op, name, zoned):
    dtype = torch.bfloat16
    case = make_case(op, 5, 64, 300, dtype=dtype, **calm(op), **ZONEOUT[name])
    with torch.no_grad(), poisoned_memory():
        found = call(case.on("cuda"), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), 16 * UNITS[dtype])
    assert zoned == ["forward"]


@needs_hopper
@pytest.mark.parametrize("shape", [(7, 128, 2000), (9, 64, 1000)])
def test_zoned_layers_give_the_same_bits_every_time(shape, zoned):
    options = ZONEOUT["masks"]
    case = make_case("bn_lstm", *shape, dtype=torch.bfloat16, **options).on("cuda")
    first = differentiate(case, "gpu")
    for _ in range(20):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
    assert len(zoned) == 42


@needs_hopper
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_zoned_layer_in_inference(bidirectional, zoned):
    """Both directions at once, too."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 500, zoneout=(0.5, 0.05), bidirectional=bidirectional)
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(5, 33, 20, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # for the population's statistics
        layer.eval()
        found = layer(x)[0]
        expected = copy.deepcopy(layer).double()(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[torch.bfloat16]
    assert zoned == ["forward"] * 2


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wide_layer(dtype, calls):
    test_against_the_reference("bn_lstm", "plain", (3, 128, 2000), dtype, calls)


@needs_hopper
def test_a_wide_layer_gives_the_same_bits_every_time(calls):
    case = make_case("bn_lstm", 7, 128, 2000, dtype=torch.bfloat16).on("cuda")
    first = differentiate(case, "gpu")
    for _ in range(100):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
    assert len(calls) == 202


needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there are clusters of blocks from Hopper on",
)


@pytest.fixture
def small(monkeypatch):
    """The directions in which the kernels for small layers ran."""
    found = []
    run = cuda_lstm._run_small

    def counted(direction, *args, **kwargs):
        if run(direction, *args, **kwargs):
            found.append(direction)
            return True
        return False

    monkeypatch.setattr(cuda_lstm, "_run_small", counted)
    return found


@needs_clusters
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 50)) for name in OPTIONS),
        *(
            ("bn_lstm", "plain", shape)
            for shape in [(5, 100, 100), (3, 128, 128), (6, 5, 6), (1, 16, 8), (3, 1, 2)]
        ),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
def test_small_layers_against_the_reference(op, name, shape, dtype, calls, small):
    test_against_the_reference(op, name, shape, dtype, calls)
    assert small == ["forward", "backward"]


@needs_clusters
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers_give_the_same_bits_every_time(dtype, calls, small):
    test_the_same_bits_every_time((9, 100, 100), dtype, calls)
    assert len(small) == 402


@pytest.fixture
def sixteen(monkeypatch, small):
    """Layers of more than 128 units run in one cluster, too."""
    monkeypatch.setattr(small_lstm, "SIXTEEN", tuple(UNITS))
    return small


@needs_clusters
@pytest.mark.parametrize(
    ("op", "of_h0", "of_gradients", "hidden"),
    [
        *(("bn_lstm", 1, size, 30) for size in (1e-20, 1e20)),
        *(("lstm", size, 1, 30) for size in (1e6, 1e-6)),
        # Of more units some gate is near 0 where h0 is large, by less than a product's error.
        *(
            pytest.param(*sizes, 150, marks=needs_hopper)
            for sizes in [("bn_lstm", 1, 1e-20), ("bn_lstm", 1, 1e20), ("lstm", 1e-6, 1)]
        ),
    ],
)
def test_a_small_layer_with_numbers_of_any_size(op, of_h0, of_gradients, hidden, sixteen):
    """Float16's range does not show: what is multiplied is brought to it."""
    case = make_case(op, 5, 20, hidden, dtype=torch.float32, **calm(op))
    case = case.with_tensors(h0=case.tensors["h0"] * of_h0)
    case.cotangents = {name: v * of_gradients for name, v in case.cotangents.items()}
    found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[torch.float32])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / want.norm().clamp(min=1e-30)
        assert error <= 8 * UNITS[torch.float32], f"gradient of {key}: {error:.2g}"
    assert sixteen == ["forward", "backward"]


@needs_hopper
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 37, 136)) for name in OPTIONS),
        *(
            ("bn_lstm", "plain", shape)
            for shape in [(7, 64, 240), (7, 37, 250), (3, 1, 256), (1, 64, 130)]
        ),
        *(("lstm", name, (5, 40, 250)) for name in ("plain", "lengths")),
    ],
)
def test_blocks_of_16_units_against_the_reference(op, name, shape, dtype, calls, sixteen):
    test_against_the_reference(op, name, shape, dtype, calls)
    assert sixteen == ["forward", "backward"]


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_16_units_give_the_same_bits_every_time(dtype, calls, sixteen):
    test_the_same_bits_every_time((9, 64, 240), dtype, calls)
    assert len(sixteen) == 402


@pytest.fixture
def switched(monkeypatch):
    """Small kernels compiled with other switches, of which none is left behind."""

    def switch(**switches):
        monkeypatch.setattr(small_lstm, "SWITCHES", switches)
        small_lstm.kernel.cache_clear()

    yield switch
    small_lstm.kernel.cache_clear()


@needs_hopper
@pytest.mark.parametrize("hidden", [100, 240])
@pytest.mark.parametrize("name", ["STAGGERED", "ALL_WAIT"])
@pytest.mark.parametrize("dtype", UNITS)
def test_switches_of_small_kernels(hidden, name, dtype, calls, sixteen, switched):
    switched(**{name: 1})
    test_against_the_reference("bn_lstm", "plain", (7, 64, hidden), dtype, calls)
    assert sixteen == ["forward", "backward"]


@needs_clusters
@pytest.mark.parametrize(("B", "H"), [(100, 100), pytest.param(64, 240, marks=needs_hopper)])
def test_more_small_layers_than_fit_at_once(B, H, sixteen):
    R, T = 20, 30
    torch.manual_seed(0)
    wx, weight = torch.randn(R, T, B, 4 * H), torch.randn(R, 4 * H, H) * H**-0.5
    state = torch.randn(2, R, B, H)

    def run(pick):
        tensors = (v[pick].cuda() for v in (wx, weight, state[0], state[1]))
        x, w, h0, c0 = tensors
        nothing = [None] * 5
        options = (0.0, 0.0, "none", 0.0, "step", "exclude", False, True)
        a = Inputs(x, w, *nothing, h0, c0, None, [], None, None, *options)
        results = launch.forward(a)
        return results, launch.backward(a, results, torch.ones_like(results.output), None, None)

    together, gradients = run(slice(None))
    for r in range(0, R, 7):
        alone, gradient = run(slice(r, r + 1))
        assert torch.equal(together.output[r], alone.output[0])
        assert torch.equal(gradients.wx[r], gradient.wx[0])
    assert len(sixteen) == 8


def test_arguments_that_begin_anywhere(calls):
    case = make_case("bn_lstm", 4, 17, 52, dtype=torch.bfloat16, **calm("bn_lstm")).on("cuda")
    expected = differentiate(case, "gpu")

    def moved(value):
        room = value.new_empty(value.numel() + 1)
        return room[1:].view(value.shape).copy_(value)

    shifted = case.with_tensors(**{name: moved(v) for name, v in case.present().items()})
    found = differentiate(shifted, "gpu")
    assert len(calls) == 4
    for one, other in zip(expected, found, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_arguments_in_any_order_of_memory(calls):
    """Kernels are given addresses: of copies, where the numbers do not lie as they read them."""
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
            # The products that make these read W_h and h0 as they lie.
            if one is expected[1] and name in ("weight_hh", "h0"):
                error = (value - other[name]).float().norm()
                assert error <= 4 * UNITS[torch.bfloat16] * value.float().norm(), name
            else:
                assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("shape", [(5, 16, 24), (5, 64, 240), (4, 37, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_call_returned_stays(shape, dtype):
    """Whatever memory later calls are given: nothing that is returned was handed back too soon."""
    case = make_case("bn_lstm", *shape, dtype=dtype, **calm("bn_lstm")).on("cuda")
    with poisoned_memory():
        found = differentiate(case, "gpu")
        kept = [{name: v.clone() for name, v in part.items() if v is not None} for part in found]
        for seed in range(1, 9):
            differentiate(make_case("bn_lstm", *shape, seed, dtype=dtype).on("cuda"), "gpu")
    for part, copies in zip(found, kept, strict=True):
        for name, value in copies.items():
            assert torch.equal(value, part[name]), name


def test_results_of_the_operator_share_no_memory():
    """As PyTorch's compiler takes for granted; called directly, statistics are parts of one."""
    case = make_case("bn_lstm", 4, 16, 24, dtype=torch.float32).on("cuda")
    args = (*case.tensors.values(), None, [], None, None, 0.0, 0.0)
    args += ("batch", 1e-5, "step", "exclude", False, True)
    found = torch.ops.rbn.gpu_lstm(*args)
    places = [value.untyped_storage().data_ptr() for value in found if value.numel()]
    assert len(set(places)) == len(places)
    for one, other in zip(found[:9], launch.forward(Inputs(*args))[:9], strict=True):
        assert torch.equal(one, other)


def test_two_steps_in_triton(monkeypatch, calls):
    """A step that is number 1 is no constant of the kernel."""
    case = make_case("bn_lstm", 2, 9, 16, dtype=torch.float32, **calm("bn_lstm"))
    monkeypatch.setattr(cuda_lstm, "covers", lambda a: False)
    found = differentiate(case.on("cuda"), "gpu")
    assert not calls
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 100, 100), (5, 64, 1000)])
@pytest.mark.usefixtures("in_memory")
def test_the_same_bits_every_time(shape, dtype, calls):
    case = make_case("bn_lstm", *shape, dtype=dtype).on("cuda")
    first = differentiate(case, "gpu")
    for _ in range(200):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
    assert len(calls) == 402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_and_cuda_agree(dtype, monkeypatch):
    case = make_case("bn_lstm", 7, 33, 40, dtype=dtype, lengths="random", **calm("bn_lstm"))
    one = differentiate(case.on("cuda"), "gpu")
    monkeypatch.setattr(cuda_lstm, "covers", lambda a: False)
    other = differentiate(case.on("cuda"), "gpu")
    for a, b in zip(one, other, strict=True):
        assert_same(a, {k: None if v is None else v.cpu() for k, v in b.items()}, 16 * UNITS[dtype])


def test_a_batch_too_large_for_the_kernels(calls):
    case = make_case("bn_lstm", 3, 5000, 4, dtype=torch.float32, **calm("bn_lstm"))
    assert launch.plan_for(case.tensors["wx"][None].cuda()) is None
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


def test_a_thread_that_has_used_no_cuda_loads_code():
    """It is in no context, and torch puts it into one only with the first work it gives."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    code = nvrtc.compile_source('extern "C" __global__ void nothing() {}', "nothing", {}, arch)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(driver.Kernel, code, "nothing", 32, 0).result().at_once > 0


def train_step(layer, x):
    layer.zero_grad(set_to_none=False)
    layer(x)[0].square().mean().backward()


def test_a_graph_of_a_training_step(capture):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64, max_length=12).cuda()
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 8, device="cuda")
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph, _ = capture(lambda: train_step(layer, x))
    fresh = torch.randn_like(x)
    x.copy_(fresh)
    graph.replay()
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    train_step(twin, fresh)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
def test_compiled_as_one_graph():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64, max_length=12).cuda()
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 8, device="cuda")
    compiled = torch.compile(lambda v: layer(v)[0].square().mean(), fullgraph=True)
    compiled(x).backward()
    twin(x)[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype, calls):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(8, 64).cuda()
    x = torch.randn(12, 32, 8, device="cuda")
    with torch.autocast("cuda", dtype):
        output, _ = layer(x)
    assert output.dtype == dtype
    output.float().square().mean().backward()
    assert calls == ["forward", "backward"]
    twin = copy.deepcopy(layer).cpu().double()
    twin.zero_grad()
    twin(x.cpu().double())[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        want = twin.get_parameter(name).grad
        error = (parameter.grad.double().cpu() - want).norm()
        assert error <= 16 * UNITS[dtype] * want.norm().clamp(min=1e-2), name


def test_two_streams_at_once():
    torch.manual_seed(0)
    cases = [
        make_case("bn_lstm", 50, 64, 100, seed, dtype=torch.float32).on("cuda") for seed in (0, 1)
    ]
    alone = [differentiate(case, "gpu") for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    together = []
    for case, stream in zip(cases, streams, strict=True):
        with torch.cuda.stream(stream):
            together.append(differentiate(case, "gpu"))
    torch.cuda.synchronize()
    for one, other in zip(alone, together, strict=True):
        for name, value in one[1].items():
            assert torch.equal(value, other[1][name]), name


def test_long_sequences_in_inference():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(2, 16).cuda()
    layer(torch.randn(10, 8, 2, device="cuda"))
    layer.eval()
    x = torch.randn(100_000, 2, 2, device="cuda")
    with torch.no_grad():
        output, _ = layer(x)
        head, _ = layer(x[:50])
    assert torch.equal(output[:50], head)
    assert output.isfinite().all()
