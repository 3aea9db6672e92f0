"""The host's cache of population statistics, and when it becomes invalid."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx

import rbn

NONE = "was not trained"  # a warning; the batch's statistics are used


def averaging(**options):
    """A layer with running averages only."""
    return rbn.BatchNormLSTM(3, 4, **options, refresh_stats=False)


def trained(steps=6, **options):
    torch.manual_seed(0)
    layer = averaging(max_length=steps, **options)
    layer(torch.randn(steps, 5, 3))
    return layer


def with_buffers(layer, buffers, x):
    return functional_call(layer, dict(layer.named_parameters()) | buffers, (x,))


def assert_first_estimates(layer, x, found=None):
    """The statistics of a layer that has seen nothing else; not averaged with zeros."""
    twin = averaging(max_length=layer.stats_h_l0.max_length)
    parameters = {k: v for k, v in layer.state_dict().items() if "stats" not in k}
    twin.load_state_dict(parameters, strict=False)
    twin(x)
    found = dict(layer.named_buffers()) if found is None else found
    for name, want in twin.named_buffers():
        torch.testing.assert_close(found[name], want)


def test_a_call_with_other_buffers_leaves_a_layer_as_it_was():
    x = torch.randn(6, 5, 3)
    theirs = dict(trained().named_buffers())
    fresh = averaging(max_length=6).eval()
    with_buffers(fresh, theirs, x)
    with pytest.warns(UserWarning, match=NONE):
        fresh(x)
    fresh.train()
    with_buffers(fresh, theirs, x)
    fresh(x)
    assert_first_estimates(fresh, x)


def test_a_call_with_empty_buffers_estimates_anew():
    x = torch.randn(6, 5, 3)
    layer = trained()
    before = {name: b.clone() for name, b in layer.named_buffers()}
    empty = {name: torch.zeros_like(b) for name, b in before.items()}
    with_buffers(layer, empty, x)
    assert_first_estimates(layer, x, empty)
    with_buffers(layer, empty, x)  # now there are some
    assert empty["stats_h_l0.count"].tolist() == [2] * 6
    assert all(torch.equal(b, before[name]) for name, b in layer.named_buffers())
    layer.eval()
    with pytest.warns(UserWarning, match=NONE):
        with_buffers(layer, {name: torch.zeros_like(b) for name, b in empty.items()}, x)


@pytest.mark.parametrize("steps", [6, 4])
def test_buffers_that_someone_empties(steps):
    """E.g. DDP, with those of a process that has not seen as long sequences."""
    x = torch.randn(steps, 5, 3)
    layer = trained()
    for buffer in layer.buffers():
        buffer.zero_()
    layer(x)
    assert_first_estimates(layer, x)
    assert layer.stats_h_l0.count.tolist() == [1] * steps + [0] * (6 - steps)


def test_buffers_that_someone_empties_before_an_evaluation():
    layer = trained().eval()
    empty = averaging(max_length=6)
    for ours, theirs in zip(layer.buffers(), empty.buffers(), strict=True):
        ours.copy_(theirs)
    with pytest.warns(UserWarning, match=NONE):
        layer(torch.randn(6, 5, 3))


def test_the_last_rows_emptied_before_an_evaluation():
    layer, x = trained(), torch.randn(6, 5, 3)
    expected = trained(4)
    expected.load_state_dict(
        {k: v[:4] if "stats" in k else v for k, v in layer.state_dict().items()}
    )
    for buffer in layer.buffers():
        buffer[4:] = 0
    torch.testing.assert_close(layer.eval()(x), expected.eval()(x))


def test_nothing_is_known_of_empty_memory():
    layer = trained()
    assert layer.stats_h_l0.known_steps == 6
    layer.to_empty(device="cpu")
    assert layer.stats_h_l0.known_steps == 0
    assert not layer.stats_h_l0.estimated


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_know_as_much(copied):
    statistics = trained().stats_h_l0
    assert copied(statistics).known_steps == 6
    statistics.count.zero_()
    assert copied(statistics).known_steps == 0


def test_an_ensemble():
    """As in PyTorch's tutorial."""
    x = torch.randn(6, 5, 3)
    several = [averaging(max_length=6) for _ in range(3)]
    for each in several:
        each(torch.randn(6, 5, 3))
        each.eval()
    base = copy.deepcopy(several[0]).to("meta")

    def run(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))[0]

    found = torch.func.vmap(run, (0, 0, None))(*stack_module_state(several), x)
    torch.testing.assert_close(found, torch.stack([each(x)[0] for each in several]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_with_buffers_as_arguments(mode):
    layer, x = trained().eval(), torch.randn(6, 5, 3)
    given = dict(layer.named_parameters()) | dict(layer.named_buffers())
    with rbn.backend("reference"):
        made = make_fx(lambda v, x: functional_call(layer, v, (x,))[0], tracing_mode=mode)
        graph = made(given, x)
    torch.testing.assert_close(graph(given, x), layer(x)[0])


def test_fake_buffers():
    layer = trained().eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, rbn.backend("reference"):
        buffers = {name: mode.from_tensor(b) for name, b in layer.named_buffers()}
        assert with_buffers(layer, buffers, torch.empty(6, 5, 3))[0].shape == (6, 5, 4)


def compiled_with_buffers(layer, buffers, x):
    call = torch.compile(lambda b, x: with_buffers(layer, b, x)[0], backend="aot_eager")
    return call(buffers, x)


@pytest.mark.slow
def test_a_compiled_call_with_other_buffers():
    x = torch.randn(6, 5, 3)
    fresh = averaging(max_length=6)
    compiled_with_buffers(fresh, dict(trained().named_buffers()), x)
    with pytest.warns(UserWarning, match=NONE):
        fresh.eval()(x)


@pytest.mark.slow
def test_a_compiled_call_with_empty_buffers():
    layer, x = trained(), torch.randn(6, 5, 3)
    empty = {name: torch.zeros_like(b) for name, b in layer.named_buffers()}
    compiled_with_buffers(layer, empty, x)
    assert_first_estimates(layer, x, empty)


def test_a_compiled_evaluation_sees_buffers_that_someone_wrote_into():
    """In place, like torch.distributed.checkpoint; compiled before or after that."""
    fewer, x = averaging(max_length=6), torch.randn(6, 5, 3)
    fewer(x[:2])
    expected = fewer.eval()(x)[0]
    for compiled_before in (True, False):
        layer = trained().eval()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        if compiled_before:
            compiled(x)
        with torch.no_grad():
            for name, value in layer.state_dict().items():
                value.copy_(fewer.state_dict()[name])
        torch.testing.assert_close(compiled(x)[0], expected)


def test_a_training_call_that_torch_func_refuses_leaves_no_estimates():
    layer, x = averaging(max_length=6), torch.randn(6, 5, 3)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    for lengths in (None, torch.tensor([6, 5, 4, 2, 1])):
        with pytest.raises(RuntimeError, match=r"in-place|torch\.func"):
            torch.func.grad(
                lambda p, lengths=lengths: functional_call(layer, p, (x,), {"lengths": lengths})[
                    0
                ].sum()
            )(parameters)
        assert not layer.stats_h_l0.find_estimates()
    layer(x)
    assert_first_estimates(layer, x)


def test_each_term_has_its_momentum():
    layer, x = trained(), torch.randn(6, 5, 3)
    layer.stats_h_l0.momentum, layer.stats_c_l0.momentum = 1.0, None
    before = layer.stats_c_l0.mean.clone()
    layer(x)
    fresh = averaging()
    fresh.load_state_dict({k: v for k, v in layer.state_dict().items() if "stats" not in k}, False)
    fresh(x)
    torch.testing.assert_close(layer.stats_h_l0.mean, fresh.stats_h_l0.mean)
    torch.testing.assert_close(layer.stats_c_l0.mean, (before + fresh.stats_c_l0.mean) / 2)


def test_an_average_over_steps_is_exact():
    layer = trained(3, ablations=["shared_stats"]).double()
    layer(torch.randn(3, 5, 3, dtype=torch.float64))
    statistics = layer.stats_h_l0
    mean, var = statistics.read(0, 3)
    torch.testing.assert_close(mean[0], statistics.mean.mean(0), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(var[0], statistics.var.mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.filterwarnings("ignore:BatchNormLSTM")  # a single sequence
@pytest.mark.parametrize("rows", [0, 1])
def test_batches_without_statistics_change_nothing(rows):
    layer = trained()
    before = {name: b.clone() for name, b in layer.named_buffers()}
    with pytest.raises(ValueError, match="no batch has two sequences"):
        rbn.update_population_stats(layer, [torch.randn(6, rows, 3)])
    assert all(torch.equal(b, before[name]) for name, b in layer.named_buffers())
    layer.eval()(torch.randn(6, 5, 3))


def test_one_tensor_is_no_batches():
    with pytest.raises(TypeError, match=r"iterable.*got a Tensor"):
        rbn.update_population_stats(trained(), torch.randn(6, 5, 3))


def test_estimated_anew_in_the_same_buffers():
    """Other processes or a graph may hold references to them."""
    layer, x = trained(), torch.randn(6, 5, 3)
    buffers = dict(layer.named_buffers())
    rbn.update_population_stats(layer, [x])
    assert all(b is buffers[name] for name, b in layer.named_buffers())
    assert_first_estimates(layer, x)
    assert layer.stats_h_l0.known_steps == 6
