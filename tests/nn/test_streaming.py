"""Single steps of cells in eval() match the recurrence, on whichever path they run."""

import copy
import ctypes
import gc
import weakref

import pytest
import torch

import rbn
from rbn.nn import streaming
from rbn.ops import steps
from rbn.ops.cpu import compiled_lstm, inference

ABLATIONS = [
    (),
    ("shared_stats",),
    ("joint_terms",),
    ("pass_normalized_cell",),
    ("raw_output",),
    ("joint_terms", "raw_output", "shared_stats"),
]


OTHERS = (rbn.LayerNormLSTMCell, rbn.BatchNormRNNCell, rbn.BatchNormGRUCell)


def make(cell_class, inputs=5, hidden=7, seen=6, **options):
    """A cell in eval(), with statistics for `seen` steps and all parameters changed."""
    torch.manual_seed(0)
    cell = cell_class(inputs, hidden, **options)
    for name, parameter in cell.named_parameters():
        if not name.startswith("weight"):
            parameter.data.uniform_(-0.3, 1.0)
    if cell_class in (rbn.BatchNormLSTMCell, rbn.BatchNormRNNCell, rbn.BatchNormGRUCell):
        hx = None
        for t in range(seen):
            x = torch.randn(8, inputs, dtype=cell.weight_ih.dtype)
            hx = cell(x, hx, t)
            hx = tuple(s.detach() for s in hx) if isinstance(hx, tuple) else hx.detach()
    return cell.eval()


def states_of(cell, batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, cell.hidden_size)
    states = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in cell.states]
    states = tuple(s.to(cell.weight_ih.dtype) for s in states)
    return states if len(states) > 1 else states[0]


def as_tuple(hx):
    return hx if isinstance(hx, tuple) else (hx,)


def truth(cell, x, hx, step):
    """The plain equations in float64."""
    double = copy.deepcopy(cell).double()
    if hx is not None:
        hx = tuple(s.double() for s in hx) if isinstance(hx, tuple) else hx.double()
    with rbn.backend("reference"), torch.no_grad():
        return as_tuple(double(x.double(), hx, step))


def check(cell, batch, step, with_states=True):
    x = torch.randn(batch, cell.input_size, dtype=cell.weight_ih.dtype)
    hx = states_of(cell, batch) if with_states else None
    wanted = truth(cell, x, hx, step)
    # Terms reach about 30 where a variance is 0 (1/sqrt(eps) is 316), rounded to 6e-8 of that.
    tolerance = 1e-5 if x.dtype == torch.float32 else 1e-12
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            found = as_tuple(cell(x, hx, step))
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == (batch, cell.hidden_size)
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["kernel", "operators"])
def way(request, monkeypatch):
    if request.param == "operators":
        monkeypatch.setattr(inference, "load", lambda: None)
    elif inference.load() is None:
        pytest.skip("no compiled kernel")
    return request.param


def test_a_kernel_built_from_older_sources_is_not_used(monkeypatch):
    cell = make(rbn.BatchNormLSTMCell)
    monkeypatch.setattr(compiled_lstm, "load", object)  # a library without this function
    inference.load.cache_clear()
    try:
        assert inference.load() is None
        check(cell, 1, 2)
    finally:
        inference.load.cache_clear()


@pytest.mark.parametrize("ablations", ABLATIONS, ids="-".join)
@pytest.mark.parametrize("step", [0, 3, 5, 6, 40])  # within, at and beyond the last step
def test_every_ablation_at_every_kind_of_step(ablations, step, way):
    cell = make(rbn.BatchNormLSTMCell, ablations=ablations)
    check(cell, 1, step)
    check(cell, 3, step)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"zoneout": (0.2, 0.3)},
        {"initial_state": "zeros"},
        {"max_length": 4},
        {"max_length": 20},
        {"dtype": torch.float64},
        {"eps": 1e-3, "momentum": None},
    ],
    ids=str,
)
def test_every_option(options, way):
    cell = make(rbn.BatchNormLSTMCell, **options)
    for with_states in (True, False):
        for batch, step in ((1, 2), (2, 5), (1, 9)):
            check(cell, batch, step, with_states)


@pytest.mark.parametrize("hidden", [1, 3, 4, 16, 37, 130])
@pytest.mark.parametrize("inputs", [1, 6, 33])
def test_sizes_that_fill_no_register(hidden, inputs, way):
    check(make(rbn.BatchNormLSTMCell, inputs, hidden, seen=2), 1, 1)
    check(make(rbn.LSTMCell, inputs, hidden), 1, 0)
    for other in OTHERS:
        check(make(other, inputs, hidden, seen=2), 1, 1)


@pytest.mark.parametrize("version", [1, 2])  # 0 is the one in use
def test_narrower_instruction_sets(version):
    if inference.load() is None:
        pytest.skip("no compiled kernel")
    use = compiled_lstm.load().rbn_use_version
    try:
        if not use(ctypes.c_int64(version)):
            pytest.skip("this machine has fewer instruction sets")
        for cell_class in (rbn.BatchNormLSTMCell, *OTHERS):
            check(make(cell_class, 6, 37, seen=2), 1, 1)
    finally:
        use(ctypes.c_int64(0))


@pytest.mark.parametrize("cell_class", [rbn.BatchNormLSTMCell, rbn.LSTMCell, *OTHERS])
def test_nan_shows(cell_class, way):
    cell = make(cell_class)
    x, hx = torch.randn(1, 5), states_of(cell, 1)
    x[0, 2] = float("nan")
    assert all(state.isnan().all() for state in as_tuple(cell(x, hx, 1)))


@pytest.mark.parametrize(
    ("cell_class", "options"),
    [
        (rbn.LSTMCell, {}),
        (rbn.LSTMCell, {"cell_bias": False, "bias": False, "zoneout": (0.1, 0.2)}),
        (rbn.LayerNormLSTMCell, {}),
        (rbn.LayerNormLSTMCell, {"bias": False, "zoneout": (0.1, 0.2)}),
        (rbn.BatchNormRNNCell, {}),
        (rbn.BatchNormRNNCell, {"nonlinearity": "relu", "bias": False, "zoneout": 0.2}),
        (rbn.BatchNormRNNCell, {"ablations": ("shared_stats",)}),
        (rbn.BatchNormGRUCell, {}),
        (rbn.BatchNormGRUCell, {"bias": False, "zoneout": 0.2}),
    ],
    ids=str,
)
def test_the_other_cells(cell_class, options, way):
    for dtype in (torch.float32, torch.float64):
        cell = make(cell_class, dtype=dtype, **options)
        for batch, step in ((1, 2), (3, 5), (1, 9)):
            check(cell, batch, step)
            check(cell, batch, step, with_states=False)


def test_several_threads(monkeypatch):
    monkeypatch.setattr(inference, "_PER_THREAD", 1)
    check(make(rbn.BatchNormLSTMCell, 9, 50), 1, 3)
    check(make(rbn.LSTMCell, 9, 3), 1, 0)  # fewer units than lanes of a register
    for other in OTHERS:
        check(make(other, 9, 50), 1, 3)
        check(make(other, 9, 3), 1, 3)


def test_a_batch_in_any_layout(way):
    cell = make(rbn.BatchNormLSTMCell)
    x, (h, c) = torch.randn(1, 5), states_of(cell, 1)
    wanted = cell(x, (h, c), 2)
    strided = [torch.stack([t, t], dim=2)[:, :, 0] for t in (x, h, c)]
    assert not any(t.is_contiguous() for t in strided)
    found = cell(strided[0], (strided[1], strided[2]), 2)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    cell.weight_hh.data = cell.weight_hh.data.t().contiguous().t()
    for one, other in zip(cell(x, (h, c), 2), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cell_class", [rbn.BatchNormLSTMCell, rbn.LSTMCell])
@pytest.mark.parametrize("ablations", ABLATIONS, ids="-".join)
def test_gradients_of_the_plain_equations(cell_class, ablations, way):
    if cell_class is rbn.LSTMCell and ablations:
        pytest.skip("has no ablations")
    options = {"ablations": ablations} if cell_class is rbn.BatchNormLSTMCell else {}
    cell = make(cell_class, zoneout=(0.1, 0.2), **options)
    double = copy.deepcopy(cell).double()
    x = torch.randn(1, 5, requires_grad=True)
    state = states_of(cell, 1)[0].requires_grad_()  # used twice: as h and as c
    total = 0.0
    for t, hx in enumerate([None, (state, state)]):
        h, c = cell(x, hx, t + 4)
        h, c = cell(x, (h, c), t + 5)
        total = total + (h * h).sum() + (c * h).sum()
    total.backward()
    x64, state64 = (t.detach().double().requires_grad_() for t in (x, state))
    total = 0.0
    with rbn.backend("reference"):
        for t, hx in enumerate([None, (state64, state64)]):
            h, c = double(x64, hx, t + 4)
            h, c = double(x64, (h, c), t + 5)
            total = total + (h * h).sum() + (c * h).sum()
    total.backward()
    pairs = [(x, x64), (state, state64), *zip(cell.parameters(), double.parameters(), strict=True)]
    for one, other in pairs:
        # Gradients of up to 100 here, and a few steps with scales of up to 30.
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "cell_class", [rbn.BatchNormLSTMCell, rbn.BatchNormRNNCell, rbn.BatchNormGRUCell]
)
def test_second_derivatives(cell_class):
    cell = make(cell_class, dtype=torch.float64)
    x = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    hx = states_of(cell, 1)

    def run(x):
        return as_tuple(cell(x, hx, 3))[0]

    assert torch.autograd.gradgradcheck(run, (x,))


def test_statistics_may_change_before_the_backward_pass():
    cell = make(rbn.BatchNormLSTMCell)
    x, hx = torch.randn(1, 5), states_of(cell, 1)
    cell(x, hx, 3)[0].sum().backward()
    wanted = cell.weight_hh.grad.clone()
    cell.zero_grad()
    total = cell(x, hx, 3)[0].sum()
    cell.stats_h.var.mul_(3)
    total.backward()
    assert torch.equal(cell.weight_hh.grad, wanted)


def changes(cell):
    """Ways to change what a step depends on, between two steps."""
    other = make(rbn.BatchNormLSTMCell, seen=9, ablations=cell.ablations)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    yield lambda: cell.stats_h.mean.add_(0.5)
    yield lambda: cell.stats_c.var.mul_(2)
    yield lambda: setattr(cell.stats_x, "mean", cell.stats_x.mean + 0.5)
    yield lambda: cell.gamma_h.data.mul_(1.5)  # not noticed by version counters
    yield lambda: cell.bias.data.add_(0.5)
    yield lambda: setattr(cell, "beta_c", torch.nn.Parameter(cell.beta_c + 0.3))
    yield lambda: cell.load_state_dict(other.state_dict())
    yield lambda: cell.stats_h.count[3:5].zero_()  # steps without an estimate
    yield lambda: cell.stats_x.count[:2].zero_()

    def train():
        cell.train()(torch.randn(8, 5), None, 3)
        cell.eval()

    yield train


@pytest.mark.slow
@pytest.mark.parametrize("ablations", [(), ("shared_stats",)], ids="-".join)
def test_nothing_stale_is_used(ablations, way):
    cell = make(rbn.BatchNormLSTMCell, ablations=ablations)
    for change in changes(cell):
        for step in (0, 3, 4, 30):
            check(cell, 1, step)
        change()
        for step in (0, 3, 4, 30):
            check(cell, 1, step)
    del change
    gc.collect()


def test_statistics_are_refreshed_when_the_weights_move(way):
    cell = make(rbn.BatchNormLSTMCell)
    x, hx = torch.randn(1, 5), states_of(cell, 1)
    before = cell.stats_h.mean.clone()
    with torch.no_grad():
        cell(x, hx, 3)
        cell.weight_hh.mul_(-1)
        found = cell(x, hx, 3)
    assert not torch.equal(cell.stats_h.mean, before)
    for one, other in zip(found, truth(cell, x, hx, 3), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_parametrized_cell(way):
    cell = make(rbn.BatchNormLSTMCell)
    check(cell, 1, 3)
    torch.nn.utils.parametrizations.weight_norm(cell, "weight_hh")
    check(cell, 1, 3)
    with torch.no_grad():
        cell.parametrizations.weight_hh.original0.mul_(2)
    found = cell(x := torch.randn(1, 5), hx := states_of(cell, 1), 3)
    for one, other in zip(found, truth(cell, x, hx, 3), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_minibatch_statistics_where_they_are_asked_for():
    cell = make(rbn.BatchNormLSTMCell)
    x, hx = torch.randn(4, 5), states_of(cell, 4)
    population = cell(x, hx, 2)[0]
    with rbn.batch_statistics(cell):
        found = cell(x, hx, 2)[0]
    assert not torch.allclose(found, population, atol=1e-3)
    assert torch.equal(cell(x, hx, 2)[0], population)


def test_copies_and_files(tmp_path):
    cell = make(rbn.BatchNormLSTMCell)
    x, hx = torch.randn(1, 5), states_of(cell, 1)
    wanted = cell(x, hx, 2)[0]
    torch.save(cell, tmp_path / "cell.pt")
    for other in (copy.deepcopy(cell), torch.load(tmp_path / "cell.pt", weights_only=False)):
        assert torch.equal(other(x, hx, 2)[0], wanted)
        with torch.no_grad():
            other.stats_h.mean.add_(1)
        assert not torch.allclose(other(x, hx, 2)[0], wanted, atol=1e-3)
    assert torch.equal(cell(x, hx, 2)[0], wanted)


def test_a_cell_that_is_gone_is_not_kept():
    cell = make(rbn.BatchNormLSTMCell)
    cell(torch.randn(1, 5), None, 2)
    assert cell in streaming._cache
    gone = weakref.ref(cell)
    del cell
    gc.collect()
    assert gone() is None


def test_statistics_that_have_no_version():
    with torch.inference_mode():
        cell = rbn.BatchNormLSTMCell(5, 7)
        for t in range(3):
            cell(torch.randn(6, 5), None, t)
        cell.eval()
        x = torch.randn(1, 5)
        before = cell(x, None, 1)[0]
        cell.stats_x.mean.add_(1)
        assert not torch.allclose(cell(x, None, 1)[0], before, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_the_longer_way(dtype):
    cell = make(rbn.BatchNormLSTMCell).to(dtype)
    x = torch.randn(1, 5, dtype=dtype)
    assert not steps.supported(x)
    assert cell(x, None, 2)[0].dtype == dtype


def test_autocast_is_as_before():
    cell = make(rbn.BatchNormLSTMCell)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cell(torch.randn(1, 5), None, 2)[0].dtype == torch.bfloat16


def test_transforms_and_compiled_cells_go_the_longer_way():
    cell = make(rbn.BatchNormLSTMCell, dtype=torch.float64)
    x, (h, c) = torch.randn(3, 1, 5, dtype=torch.float64), states_of(cell, 1)
    found = torch.func.vmap(lambda one: cell(one, (h, c), 2)[0])(x)
    wanted = torch.stack([cell(one, (h, c), 2)[0] for one in x])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [2, 7])
def test_a_row_without_a_batch(step, way):
    cell = make(rbn.BatchNormLSTMCell)
    x, (h, c) = torch.randn(5), states_of(cell, 1)
    found, wanted = cell(x, (h[0], c[0]), step), cell(x[None], (h, c), step)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other[0])
    assert torch.equal(cell(x, None, step)[0], cell(x[None], None, step)[0][0])


def test_one_thread_does_not_disturb_another():
    from concurrent.futures import ThreadPoolExecutor

    cell = make(rbn.BatchNormLSTMCell, 16, 64)
    inputs = [(torch.randn(1, 16), k % 8) for k in range(64)]
    with torch.no_grad():
        wanted = [cell(x, None, k)[0] for x, k in inputs]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda args: cell(args[0], None, args[1])[0], inputs * 5))
    for one, other in zip(found, wanted * 5, strict=True):
        assert torch.equal(one, other)
