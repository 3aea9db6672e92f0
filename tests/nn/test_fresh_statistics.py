"""Evaluation re-estimates statistics at the current weights from recent training inputs."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

import rbn
from rbn.nn import recent_calls

KINDS = {
    "lstm": lambda **options: rbn.BatchNormLSTM(3, 5, **options),
    "rnn": lambda **options: rbn.BatchNormRNN(3, 5, **options),
    "gru": lambda **options: rbn.BatchNormGRU(3, 5, **options),
    "stacked": lambda **options: rbn.BatchNormLSTM(3, 5, 2, **options),
    "bidirectional": lambda **options: rbn.BatchNormLSTM(3, 5, bidirectional=True, **options),
    "sequence": lambda **options: rbn.BatchNormLSTM(3, 5, input_stats="sequence", **options),
}


def inputs(count, steps=6, rows=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(steps, rows, 3, generator=generator, dtype=dtype) for _ in range(count)]


def train(layer, batches, forward=None, lr=0.05):
    optimizer = torch.optim.SGD(layer.parameters(), lr)
    for x in batches:
        output = forward(x) if forward else layer(x)[0]
        output.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(layer, batches, **call):
    """The plain average of minibatch statistics at the current weights, without `refresh`."""
    exact = type(layer).__new__(type(layer))
    exact = copy.deepcopy(layer)
    forward = (lambda m, x: m(x, **call)) if call else None
    rbn.update_population_stats(exact, batches, train_mode=False, forward=forward)
    return exact


def statistics(layer):
    return {k: v for k, v in layer.named_buffers() if not k.endswith("count")}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 5])
def test_statistics_are_those_of_recent_inputs_at_the_current_weights(kind, rows):
    layer = KINDS[kind]()
    batches = inputs(4, rows=rows)
    train(layer, batches)
    before = {k: v.clone() for k, v in statistics(layer).items()}
    layer.eval()
    wanted = expected(layer, batches)
    assert_same(statistics(layer), statistics(wanted))
    assert any(not torch.equal(v, before[k]) for k, v in statistics(layer).items())
    x = inputs(1, 9, 1, seed=7)[0]
    torch.testing.assert_close(layer(x)[0], wanted.eval()(x)[0])


def test_without_refresh_statistics_are_running_averages():
    layer = KINDS["lstm"](refresh_stats=False)
    train(layer, inputs(3))
    before = {k: v.clone() for k, v in statistics(layer).items()}
    layer.eval()(inputs(1)[0])
    assert_same(statistics(layer), before)
    assert not layer.recent_calls


def test_training_is_the_same_with_and_without():
    torch.manual_seed(1)
    layer = rbn.BatchNormLSTM(3, 5, 2, dropout=0.3, zoneout=(0.2, 0.1), hidden_noise=0.1)
    plain = copy.deepcopy(layer)
    plain.refresh_stats = False
    for one in (layer, plain):
        torch.manual_seed(2)
        train(one, inputs(3))
        one.eval()
        one.train()
        train(one, inputs(3, seed=5))
        one.drawn = torch.rand(1)
    assert torch.equal(layer.drawn, plain.drawn)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_random_state_is_left_alone_and_noise_is_drawn():
    layer = KINDS["lstm"](hidden_noise=0.5)
    train(layer, inputs(4))
    torch.manual_seed(3)
    layer.eval()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert layer.stats_h_l0.var[0].min() > 1e-4  # W_h h_0 would be constant without noise


def test_lengths_and_packed_sequences_pool_their_rows():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(7, 160, 3, generator=generator),
            torch.randint(1, 8, (160,), generator=generator),
        )
        for _ in range(3)
    ]
    layer, packed = KINDS["lstm"](), None
    packed = copy.deepcopy(layer)
    lr = 1e-3  # the loss is a sum over 160 rows; large steps would magnify rounding errors
    train(layer, batches, lambda b: layer(b[0], lengths=b[1])[0], lr)
    train(
        packed,
        batches,
        lambda b: packed(pack_padded_sequence(b[0], b[1], enforce_sorted=False))[0].data,
        lr,
    )
    layer.eval()
    packed.eval()
    # By hand: at each step the batches count with the number of rows that reach it.
    runs = [copy.deepcopy(layer) for _ in batches]
    for run, (x, lengths) in zip(runs, batches, strict=True):
        rbn.update_population_stats(
            run, [x], forward=lambda m, x, n=lengths: m(x, lengths=n), train_mode=False
        )
    reached = torch.stack([(n[None] > torch.arange(7)[:, None]).sum(1) for _, n in batches])
    reached = torch.where(reached > 1, reached, 0).float()
    for name in ("mean", "var"):
        each = torch.stack([getattr(run.stats_h_l0, name) for run in runs])
        wanted = (each * reached[..., None]).sum(0) / reached.sum(0)[:, None]
        torch.testing.assert_close(getattr(layer.stats_h_l0, name), wanted)
    assert_same(statistics(packed), statistics(layer))


def test_steps_that_few_sequences_reach_use_the_last_well_known_step():
    layer = KINDS["lstm"]()
    lengths = torch.tensor([4] * 28 + [9] * 4)
    train(layer, inputs(1, 9, 32), lambda x: layer(x, lengths=lengths)[0])
    assert (layer.stats_h_l0.count > 0).all()
    layer.eval()
    assert (layer.stats_h_l0.count > 0).tolist() == [True] * 4 + [False] * 5
    x = inputs(1, 9, 1)[0]
    short = rbn.BatchNormLSTM(3, 5, max_length=4)
    state = {
        k: v[:4] if k.split(".")[-1] in ("mean", "var", "count") else v
        for k, v in layer.state_dict().items()
    }
    short.load_state_dict(state)
    torch.testing.assert_close(layer(x)[0], short.eval()(x)[0])


def test_pieces_keep_the_averages_of_steps_that_were_not_seen_lately(monkeypatch):
    monkeypatch.setattr(recent_calls, "ROWS", 4)
    layer = KINDS["lstm"]()
    first, second = inputs(2)
    train(layer, [first])
    train(layer, [second], lambda x: layer(x, start=6)[0])
    early = layer.stats_h_l0.mean[:6].clone()
    with pytest.warns(UserWarning, match="6 steps with running averages"):
        layer.eval()
    assert torch.equal(layer.stats_h_l0.mean[:6], early)
    assert len(layer.stats_h_l0.count) == 12


def test_symbols_and_given_states():
    layer = rbn.BatchNormLSTM(9, 5)
    symbols = [torch.randint(9, (6, 4)) for _ in range(3)]
    hx = (torch.randn(1, 4, 5), torch.randn(1, 4, 5))
    train(layer, symbols, lambda x: layer(x, hx)[0])
    layer.eval()
    wanted = expected(layer, symbols, hx=hx)
    assert_same(statistics(layer), statistics(wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    layer = KINDS["lstm"](dtype=dtype)
    batches = inputs(3, dtype=dtype)
    train(layer, batches)
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, batches)))


def test_autocast_is_as_it_was_in_training():
    layer = KINDS["lstm"]()
    batches = inputs(3)
    with torch.autocast("cpu", torch.bfloat16):
        train(layer, batches)
    layer.eval()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = expected(layer, batches)
    assert_same(statistics(layer), statistics(wanted))


def test_cells_replay_their_steps():
    torch.manual_seed(0)
    cell = rbn.BatchNormLSTMCell(3, 5)
    batches = inputs(3)

    def unroll(x, model=cell):
        hx, outputs = None, []
        for step, row in enumerate(x):
            hx = model(row, hx, step)
            outputs.append(hx[0])
        return torch.stack(outputs)

    train(cell, batches, unroll)
    cell.eval()
    exact = copy.deepcopy(cell)
    rbn.update_population_stats(exact, batches, forward=lambda m, x: unroll(x, m), train_mode=False)
    assert_same(statistics(cell), statistics(exact))


def test_state_dict_in_the_middle_of_training_evaluates_like_the_live_model():
    model = nn.Sequential(KINDS["stacked"]())
    train(model[0], inputs(3))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    assert not any("recent" in name or "call" in name for name in model.state_dict())
    saved.seek(0)
    loaded = nn.Sequential(KINDS["stacked"]())
    loaded.load_state_dict(torch.load(saved))
    x = inputs(1, 9, 3, seed=8)[0]
    assert torch.equal(model.eval()(x)[0], loaded.eval()(x)[0])


def test_whole_models_and_copies_evaluate_like_the_live_model():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    copied = copy.deepcopy(layer)
    assert not loaded.recent_calls
    x = inputs(1, seed=8)[0]
    wanted = layer.eval()(x)[0]
    assert torch.equal(copied.eval()(x)[0], wanted)
    assert torch.equal(loaded.eval()(x)[0], wanted)


def test_a_copy_does_not_change_when_its_source_trains_on():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    best = copy.deepcopy(layer)
    x = inputs(1, seed=8)[0]
    before = best.eval()(x)[0]
    train(layer, inputs(3, seed=4))
    layer.eval()(x)
    assert torch.equal(best(x)[0], before)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_models_follow_growing_statistics_and_are_refreshed(use_buffers):
    layer = KINDS["lstm"]()
    ema = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    recent = []
    for k, steps in enumerate((4, 6, 9)):
        batches = inputs(3, steps, 6, seed=k)
        train(layer, batches)
        ema.update_parameters(layer)
        recent += batches
    layer.eval()(recent[0])
    ema.eval()
    pools = copy.deepcopy(ema.module)
    x = inputs(1, 9, seed=8)[0]
    found = ema(x)[0]
    pools.refresh_stats = False
    # The averaged weights on the source's inputs: only the last three reach the last step.
    rbn.update_population_stats(pools, recent[-3:], train_mode=False)
    torch.testing.assert_close(ema.module.stats_h_l0.var[8], pools.stats_h_l0.var[8])
    assert found.isfinite().all()


def test_update_bn_gives_the_average_over_the_loader():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    batches = inputs(4, seed=3)
    wanted = expected(layer, batches)
    update_bn(batches, layer)
    assert layer.momentum == wanted.momentum
    layer.eval()
    assert_same(statistics(layer), statistics(wanted))


def test_converting_to_sync_batch_norm_leaves_a_layer_as_it_is():
    model = nn.Sequential(nn.BatchNorm1d(3), KINDS["lstm"]())
    names = list(model.state_dict())
    with pytest.warns(UserWarning, match="create it with sync_stats=True"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(model[0], nn.SyncBatchNorm)
    assert list(model.state_dict()) == names
    layer, batches = model[1], inputs(4)
    wanted = expected(layer, batches)
    update_bn(batches, copy.deepcopy(layer))
    update_bn(batches, layer)
    assert_same(statistics(layer.eval()), statistics(wanted))
    synced = nn.Sequential(rbn.BatchNormLSTM(3, 5, sync_stats=True))
    nn.SyncBatchNorm.convert_sync_batchnorm(synced)  # a warning would be an error


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_do_not_count(reentrant):
    layer, plain = KINDS["lstm"](), None
    plain = copy.deepcopy(layer)
    batches = [x.requires_grad_() for x in inputs(3)]
    train(layer, batches, lambda x: checkpoint(lambda y: layer(y)[0], x, use_reentrant=reentrant))
    train(plain, batches)
    assert layer.stats_h_l0.count.tolist() == [3] * 6
    for name, value in plain.named_buffers():
        torch.testing.assert_close(dict(layer.named_buffers())[name], value)
    assert len(list(layer.recent_calls)) == 3


def test_inputs_modified_in_place_are_left_out():
    layer = KINDS["lstm"]()
    batches = inputs(3)
    train(layer, batches)
    batches[0].zero_()
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, batches[1:])))


def test_it_warns_if_all_inputs_were_modified():
    layer = KINDS["lstm"]()
    batches = inputs(2)
    train(layer, batches)
    for x in batches:
        x.zero_()
    before = {k: v.clone() for k, v in statistics(layer).items()}
    with pytest.warns(UserWarning, match="modified in place"):
        layer.eval()
    assert_same(statistics(layer), before)
    layer(inputs(1)[0])  # warns once


def test_it_warns_if_a_buffer_is_reused():
    layer, batches = KINDS["lstm"](), inputs(3)
    buffer = torch.empty_like(batches[0])
    for x in batches:
        train(layer, [buffer.copy_(x)])
    with pytest.warns(UserWarning, match="one training call instead of 3"):
        layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, batches[2:])))
    layer.train()
    train(layer, [buffer.copy_(batches[0])])
    layer.eval()  # warns once


def test_gradients_of_the_input_are_not_held():
    embedding, layer = nn.Embedding(9, 3), KINDS["lstm"]()
    vectors = embedding(torch.randint(9, (6, 4)))
    output = layer(vectors)[0]
    assert all(not call.x.requires_grad for calls in layer.recent_calls for call in calls)
    node = weakref.ref(output.grad_fn)
    output.sum().backward()
    del output, vectors
    gc.collect()
    assert node() is None


def test_inputs_are_bounded_and_released(monkeypatch):
    monkeypatch.setattr(recent_calls, "ROWS", 10)
    layer = KINDS["lstm"]()
    batches = inputs(5)
    train(layer, batches)
    held = [weakref.ref(call.x) for calls in layer.recent_calls for call in calls]
    assert len(held) == 3  # of 4 rows each
    assert all(r().data_ptr() == x.data_ptr() for r, x in zip(held, batches[2:], strict=True))
    layer.requires_grad_(False).eval()(batches[0])  # its weights will not change any more
    assert all(r() is None for r in held)


def test_inputs_that_layers_made_are_fewer():
    layer = KINDS["lstm"]()
    scale = torch.ones((), requires_grad=True)
    for x in inputs(5, rows=100):
        layer(x * scale)
    assert len(list(layer.recent_calls)) == 3


@pytest.mark.parametrize("size", [6, 1])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_sequences_in_pieces_with_states_that_layers_made_are_fewer(kind, size):
    layer = KINDS[kind]()
    for x in inputs(6, rows=30):
        h = torch.randn(1, 30, 5) * torch.ones((), requires_grad=True)
        hx = (h, h) if kind == "lstm" else h
        for start in range(0, 6, size):
            _, hx = layer(x[start : start + size], hx, start=start)
    for x in inputs(6, rows=30):
        layer(x, torch.zeros(1, 30, 5) if kind == "gru" else (torch.zeros(1, 30, 5),) * 2)
    assert len(list(layer.recent_calls)) == 12
    for x in inputs(6, rows=30):
        layer(x * torch.ones((), requires_grad=True))
    assert len(list(layer.recent_calls)) == 9


def decode(kind, drift, trained=True, calls=6):
    """A layer after calls of 30 sequences whose initial states move by `drift` from call to call.

    Returns the layer and what each call was given.
    """
    torch.manual_seed(0)
    layer = KINDS[kind]()
    scale, given = torch.ones((), requires_grad=trained), []
    for k, x in enumerate(inputs(calls, rows=30)):
        h, c = torch.randn(2, 2 if kind in ("stacked", "bidirectional") else 1, 30, 5) + drift * k
        given.append((x, h if kind == "gru" else (h, c)))
        layer(x, h * scale if kind == "gru" else (h * scale, c))
    return layer, given


@pytest.mark.parametrize(
    ("drift", "trained", "used"), [(0, True, 6), (0.5, True, 3), (0.5, False, 6)]
)
@pytest.mark.parametrize("kind", ["lstm", "gru", "stacked", "bidirectional"])
def test_older_initial_states_are_left_out_if_an_encoder_has_changed_them(
    kind, drift, trained, used
):
    """Of 30 sequences each, three calls are needed for 64."""
    layer, given = decode(kind, drift, trained)
    wanted = copy.deepcopy(layer)
    rbn.update_population_stats(wanted, given[-used:], forward=lambda m, call: m(*call))
    layer.eval()
    assert_same(statistics(layer), statistics(wanted))


@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_initial_states_that_are_parameters_are_the_current_ones(kind, expanded):
    """The optimizer modifies them in place."""
    layer, batches = KINDS[kind](), inputs(3)
    states = nn.Parameter(torch.randn(2, 1, 1 if expanded else 4, 5))
    optimizer = torch.optim.SGD([states, *layer.parameters()], 0.1)

    def forward(model, x):
        h, c = states.expand(-1, -1, 4, -1) if expanded else states
        return model(x, h if kind == "gru" else (h, c))[0]

    for x in batches:
        forward(layer, x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = copy.deepcopy(layer)
    rbn.update_population_stats(wanted, batches, forward=forward)
    layer.eval()
    assert_same(statistics(layer), statistics(wanted))
    layer.train()
    for x in batches:
        forward(layer, x)
    batches[-1].zero_()
    assert [calls[0].unchanged for calls in layer.recent_calls][-2:] == [True, False]


def test_short_epochs_keep_earlier_inputs():
    layer = KINDS["lstm"]()
    train(layer, inputs(2))
    layer.eval()(inputs(1)[0])
    layer.train()
    train(layer, inputs(2, seed=1))
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, [*inputs(2), *inputs(2, seed=1)])))


def test_large_inputs_keep_some_rows(monkeypatch):
    monkeypatch.setattr(recent_calls, "BYTES", 20 * 6 * 3 * 4)
    layer = KINDS["lstm"]()
    (x,) = inputs(1, rows=50)
    train(layer, [x])
    ((call,),) = list(layer.recent_calls)
    assert call.x.shape == (6, 20, 3)
    assert call.x.untyped_storage().nbytes() <= recent_calls.BYTES
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, [x[:, :20]])))


def test_weights_changed_after_eval_are_noticed():
    layer = KINDS["lstm"]()
    batches = inputs(2)
    train(layer, batches)
    layer.eval()
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)  # as trainers do that swap in averaged weights
    layer(batches[0])
    assert_same(statistics(layer), statistics(expected(layer, batches)))


def test_exact_statistics_stay():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    rbn.update_population_stats(layer, inputs(5, seed=9))
    exact = {k: v.clone() for k, v in statistics(layer).items()}
    layer.eval()(inputs(1)[0])
    layer.state_dict()
    assert_same(statistics(layer), exact)


def test_statistics_that_are_loaded_stay():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    train(layer, inputs(3, seed=2))
    layer.load_state_dict(state)
    layer.eval()(inputs(1)[0])
    assert_same(dict(layer.named_buffers()), {k: state[k] for k, _ in layer.named_buffers()})


def test_inference_mode_and_gradient_accumulation():
    layer = KINDS["lstm"]()
    batches = inputs(4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.05)
    for x in batches:
        layer(x)[0].sum().backward()
    optimizer.step()
    layer.train()
    for module in layer.modules():
        module.training = False  # not through eval()
    with torch.inference_mode():
        layer(batches[0])
    assert_same(statistics(layer), statistics(expected(layer, batches)))
    assert not layer.stats_h_l0.mean.is_inference()
    layer.train()(batches[0])[0].sum().backward()


def test_functional_call_uses_the_given_parameters():
    layer = KINDS["lstm"]()
    batches = inputs(2)
    parameters = {k: (v * 1.5).detach() for k, v in layer.named_parameters()}
    for x in batches:
        torch.func.functional_call(layer, parameters, (x,))
    for module in layer.modules():
        module.training = False
    found = torch.func.functional_call(layer, parameters, (batches[0],))[0]
    twin = KINDS["lstm"]()
    twin.load_state_dict(parameters | dict(layer.named_buffers()))
    wanted = expected(twin, batches)
    torch.testing.assert_close(found, wanted.eval()(batches[0])[0])


@pytest.mark.slow
@pytest.mark.no_cover
def test_compiled_training():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 5, max_length=6)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
    batches = inputs(4)
    train(layer, batches, compiled)
    train(eager, batches)
    assert len(list(layer.recent_calls)) == 4
    layer.eval()
    eager.eval()
    assert_same(statistics(layer), statistics(eager))


def test_an_untrained_layer_warns_once_and_uses_the_batch():
    layer = KINDS["stacked"]()
    (x,) = inputs(1)
    with pytest.warns(UserWarning, match="not trained"):
        found = layer.eval()(x)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = layer(x)[0]
    with rbn.batch_statistics(layer):
        wanted = layer(x)[0]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(again, wanted)
    assert not any(s.estimated for s in layer._all_statistics())
    with pytest.raises(RuntimeError, match="no population statistics"):
        layer(x[:, :1])


@pytest.mark.parametrize("rows", [4, 1100])
@pytest.mark.parametrize("calls_eval", [True, False])
def test_weights_that_are_swapped_for_an_evaluation_and_back(rows, calls_eval):
    """As averages of weights are evaluated: store, copy in, evaluate, restore."""
    layer = KINDS["lstm"]()
    batches = inputs(2, rows=rows)
    train(layer, batches)
    kept = batches if rows == 4 else batches[1:]
    layer.eval()
    own = [p.detach().clone() for p in layer.parameters()]
    with torch.no_grad():
        layer(batches[0])
        for values in ([1.5 * p for p in own], own):
            torch._foreach_copy_(list(layer.parameters()), values)
            if calls_eval:
                layer.eval()
            layer(batches[0])
            assert_same(statistics(layer), statistics(expected(layer, kept)))


def test_a_frozen_layer_keeps_its_statistics_while_its_weights_move():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    layer.eval()(inputs(1)[0])
    before = {k: v.clone() for k, v in layer.named_buffers()}
    train(layer, inputs(3, seed=1))  # in eval()
    layer.state_dict()
    with torch.no_grad():
        layer.eval()(inputs(1)[0])
    assert_same(dict(layer.named_buffers()), before)
    layer.train()
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, inputs(3))))


def test_statistics_that_are_copied_in_stay():
    """As torch.distributed.checkpoint loads: into the tensors of a state dict."""
    layer, other = KINDS["lstm"](max_length=6), KINDS["lstm"](max_length=6)
    train(layer, inputs(3))
    train(other, inputs(3, seed=1))
    wanted = {k: v.clone() for k, v in other.state_dict().items()}
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            value.copy_(wanted[name])
    layer.eval()(inputs(1)[0])
    assert_same(dict(layer.named_buffers()), {k: wanted[k] for k, _ in layer.named_buffers()})


def test_an_untrained_cell_uses_the_batch():
    cell, x = rbn.BatchNormLSTMCell(3, 5), inputs(1)[0][0]
    with pytest.warns(UserWarning, match="not trained"):
        found = cell.eval()(x)
    with rbn.batch_statistics(cell):
        torch.testing.assert_close(found, cell(x))


def test_folded_layers_and_cells_of_a_layer_have_fresh_statistics():
    layer = KINDS["lstm"]()
    train(layer, inputs(3))
    (cell,) = layer.to_cells()
    folded = rbn.fold(layer)
    (x,) = inputs(1, seed=5)
    wanted = layer.eval()(x)[0]
    torch.testing.assert_close(folded(x)[0], wanted)
    hx = None
    for step, row in enumerate(x):
        hx = cell.eval()(row, hx, step)
    torch.testing.assert_close(hx[0], wanted[-1])


# Zoneout ------------------------------------------------------------------------------------------

ZONED_OUT = {
    "lstm": lambda **options: rbn.BatchNormLSTM(3, 5, zoneout=(0.5, 0.3), **options),
    "rnn": lambda **options: rbn.BatchNormRNN(3, 5, zoneout=0.3, **options),
    "gru": lambda **options: rbn.BatchNormGRU(3, 5, zoneout=0.3, **options),
    "stacked": lambda **options: rbn.BatchNormLSTM(3, 5, 2, zoneout=(0.5, 0.3), **options),
    "bidirectional": lambda **options: rbn.BatchNormLSTM(
        3, 5, bidirectional=True, zoneout=(0.5, 0.3), **options
    ),
}


def zoned_out(kind, **options):
    """A layer whose states change from the first step on, even if all inputs are zero."""
    torch.manual_seed(0)
    layer = ZONED_OUT[kind](**options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("bias", "beta", "h0", "c0")):
                parameter.normal_()
    return layer


def drawn(layer, batches, forward=None):
    """Exact statistics of a copy in training mode, with the masks that `refresh` draws."""
    exact = copy.deepcopy(layer).train()
    exact._generator = torch.Generator().manual_seed(0)
    rbn.update_population_stats(exact, batches, forward=forward)
    exact._generator = None
    return exact


@pytest.mark.parametrize("kind", ZONED_OUT)
def test_estimates_draw_the_masks_of_zoneout(kind):
    layer = zoned_out(kind)
    batches = inputs(3, rows=40)
    for x in batches:
        x[:3] = 0  # without masks, all rows would be equal in these steps
    train(layer, batches)
    layer.eval()
    assert_same(statistics(layer), statistics(drawn(layer, batches)))
    assert layer.stats_h_l0.var[1:3].mean(1).min() > 1e-3
    without = statistics(expected(layer, batches))
    assert without["stats_h_l0.var"][1:3].max() < 1e-6


def test_masks_with_lengths_and_packed_sequences():
    lengths = torch.tensor([6] * 20 + [3] * 20)
    batches = inputs(2, rows=40)
    layer = zoned_out("bidirectional")
    packed = copy.deepcopy(layer)
    train(layer, batches, lambda x: layer(x, lengths=lengths)[0], lr=0.0)
    train(packed, batches, lambda x: packed(pack_padded_sequence(x, lengths))[0].data, lr=0.0)
    layer.eval()
    packed.eval()
    exact = drawn(layer, batches, lambda m, x: m(x, lengths=lengths))
    assert_same(statistics(layer), statistics(exact))
    assert_same(statistics(packed), statistics(exact))


def test_masks_under_autocast():
    layer, batches = zoned_out("lstm"), inputs(2, rows=40)
    with torch.autocast("cpu", torch.bfloat16):
        train(layer, batches)
    layer.eval()
    with torch.autocast("cpu", torch.bfloat16):
        exact = drawn(layer, batches)
    assert_same(statistics(layer), statistics(exact))


def test_masks_in_a_cell():
    torch.manual_seed(0)
    cell, batches = rbn.BatchNormLSTMCell(3, 5, zoneout=(0.5, 0.3)), inputs(3, rows=40)

    def unroll(model, x):
        hx, outputs = None, []
        for step, row in enumerate(x):
            hx = model(row, hx, step)
            outputs.append(hx[0])
        return torch.stack(outputs)

    train(cell, batches, lambda x: unroll(cell, x))
    cell.eval()
    assert_same(statistics(cell), statistics(drawn(cell, batches, unroll)))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_masks_do_not_depend_on_the_random_state_and_leave_it_alone(kind):
    found = []
    for seed in (1, 2):
        layer = zoned_out(kind)
        torch.manual_seed(5)
        train(layer, inputs(3))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        layer.eval()
        assert torch.equal(torch.get_rng_state(), before)
        found.append(layer)
    for name, value in statistics(found[0]).items():
        assert torch.equal(value, statistics(found[1])[name]), name
    x = inputs(1, seed=8)[0]
    assert torch.equal(found[0](x)[0], found[0](x)[0])


def test_the_same_weights_have_the_same_statistics_after_others_were_evaluated():
    layer = zoned_out("lstm")
    train(layer, inputs(3))
    layer.eval()
    before = {k: v.clone() for k, v in statistics(layer).items()}
    own = [p.detach().clone() for p in layer.parameters()]
    with torch.no_grad():
        for values in ([1.5 * p for p in own], own):
            torch._foreach_copy_(list(layer.parameters()), values)
            layer.eval()(inputs(1)[0])
            assert torch.equal(layer.stats_h_l0.mean, before["stats_h_l0.mean"]) == (values is own)
    for name, value in statistics(layer).items():
        assert torch.equal(value, before[name]), name


def test_training_with_masks_goes_on_as_if_nothing_was_evaluated():
    one = zoned_out("stacked", dropout=0.3, weight_dropout=0.2)
    other = copy.deepcopy(one)
    for layer in (one, other):
        torch.manual_seed(2)
        train(layer, inputs(3))
        if layer is one:
            layer.eval()(inputs(1)[0])
            layer.state_dict()
            layer.train()
        train(layer, inputs(3, seed=5))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_with_masks_evaluates_like_the_live_model_and_resumes():
    live = zoned_out("stacked")
    train(live, inputs(3))
    saved, state = live.state_dict(), torch.get_rng_state()
    resumed = zoned_out("stacked")
    resumed.load_state_dict(saved)
    x = inputs(1, 9, 3, seed=8)[0]
    assert torch.equal(resumed.eval()(x)[0], live.eval()(x)[0])
    for layer in (live, resumed):
        layer.train()
        torch.set_rng_state(state)
        layer.recent_calls.clear()  # as in a long run, where newer inputs replace them
        train(layer, inputs(3, seed=5))
        torch.rand(len(saved) if layer is live else 1)  # other code may draw random numbers
    assert torch.equal(resumed.eval()(x)[0], live.eval()(x)[0])


def test_estimates_are_without_dropout():
    layer = rbn.BatchNormLSTM(3, 5, 2, dropout=0.5, weight_dropout=0.5)
    batches = inputs(3)
    train(layer, batches)
    layer.eval()
    assert_same(statistics(layer), statistics(expected(layer, batches)))


@pytest.mark.slow
@pytest.mark.no_cover
def test_masks_after_compiled_training():
    layer = zoned_out("lstm", max_length=6)
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
    batches = inputs(4, rows=40)
    train(layer, batches, compiled)
    layer.eval()
    assert_same(statistics(layer), statistics(drawn(layer, batches)))


@pytest.mark.parametrize("lengths", [None, [6, 4, 1, 6]])
def test_inputs_with_nan_are_left_out(lengths):
    layer = rbn.BatchNormLSTM(3, 5)
    batches = inputs(4)
    bad = batches[1].clone()
    bad[0, 0, 0] = float("nan")
    for x in (batches[0], bad, *batches[2:]):
        layer(x, lengths=lengths)  # whose update the loop skips
    with pytest.warns(UserWarning, match="1 of its 4 recent training calls"):
        layer.eval()
    wanted = rbn.BatchNormLSTM(3, 5)
    wanted.load_state_dict(layer.state_dict())
    wanted.train()
    for k in (0, 2, 3):
        wanted(batches[k], lengths=lengths)
    wanted.eval()
    assert_same(statistics(layer), statistics(wanted))


def test_nan_in_padding_or_in_all_inputs():
    layer = rbn.BatchNormLSTM(3, 5)
    x = inputs(1)[0]
    x[4:, 1] = float("nan")
    layer(x, lengths=[6, 4, 6, 6])
    layer(x, lengths=[6, 4, 6, 6])
    layer.eval()  # no warning: padding is ignored
    assert all(value.isfinite().all() for value in statistics(layer).values())
    layer.train()
    layer.reset_running_stats()
    layer(x)
    layer.eval()
    assert layer.stats_x_l0.mean[4].isnan().all()  # there is nothing else


def test_pieces_that_do_not_cover_a_sequence_warn_once():
    layer = rbn.BatchNormLSTM(3, 5)
    pieces = inputs(7, rows=300)
    for k, x in enumerate(pieces):  # 1,024 sequences are kept: of the last four
        layer(x, start=6 * k)
    with pytest.warns(UserWarning, match="18 steps with running averages"):
        layer.eval()
    layer.train()
    for k, x in enumerate(pieces):
        layer(x, start=6 * k)
    layer.eval()


def test_a_cell_that_saw_longer_sequences_does_not_warn():
    cell = rbn.BatchNormLSTMCell(3, 5)
    for steps, sequences in ((6, 2), (4, 300)):
        for _ in range(sequences):
            hx = None
            for t, x in enumerate(inputs(1, steps)[0]):
                hx = cell(x, hx, t)
    cell.eval()
    assert len(cell.stats_h.count) == 6


def test_pieces_that_cover_a_sequence_do_not_warn():
    layer = rbn.BatchNormLSTM(3, 5)
    for _ in range(2):
        for k, x in enumerate(inputs(3)):
            layer(x, start=6 * k)
    layer.eval()


def in_pieces(layer, x, size, counts=True):
    """Runs a layer over x in pieces of `size` steps. counts: whether to pass their first steps."""
    hx, outputs = None, []
    for step in range(0, len(x), size):
        output, hx = layer(x[step : step + size], hx, start=step if counts else None)
        outputs.append(output)
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("kind", ["lstm", "rnn", "gru", "stacked"])
def test_pieces_of_a_sequence_count_as_one_sequence(kind, size):
    """Their statistics are those of the sequence, also if they hold more than 1,024 rows in all."""
    torch.manual_seed(0)
    layer = KINDS[kind]()
    batches = inputs(3, steps=12, rows=100)
    train(layer, batches, lambda x: in_pieces(layer, x, size), lr=1e-3)
    wanted = expected(layer, batches)
    layer.eval()
    assert_same(statistics(layer), statistics(wanted))
    assert layer.stats_h_l0.count.tolist() == [3] * 12


def test_pieces_with_detached_states():
    torch.manual_seed(0)
    layer, x = KINDS["lstm"](), inputs(1, rows=600)[0]
    first, hx = layer(x[:3])
    hx = tuple(state.detach() for state in hx)
    second, _ = layer(x[3:], hx, start=3)
    (first.sum() + second.sum()).backward()
    wanted = expected(layer, [x])
    layer.eval()
    assert_same(statistics(layer), statistics(wanted))


def test_a_sequence_in_pieces_is_bounded(monkeypatch):
    monkeypatch.setattr(recent_calls, "BYTES", 5 * 6 * 4 * 3 * 4)
    layer, hx = KINDS["lstm"](), None
    for k, x in enumerate(inputs(40)):
        _, hx = layer(x, hx, start=6 * k)
    kept = list(layer.recent_calls)
    assert sum(len(calls) for calls in kept) <= 10
    assert kept[-1][-1].start == 6 * 39


STEPS = {"lstm": rbn.BatchNormLSTM, "rnn": rbn.BatchNormRNN, "gru": rbn.BatchNormGRU}


@pytest.mark.parametrize("kind", STEPS)
def test_steps_of_a_layer_without_start_warn_once_in_training(kind):
    layer, x = STEPS[kind](3, 4), torch.randn(5, 6, 3)
    _, hx = layer(x[:1])
    with pytest.warns(UserWarning, match=r"start .*evaluation .*start=step"):
        _, hx = layer(x[1:2], hx)
    for t in (2, 3, 4):  # further warnings would be errors
        _, hx = layer(x[t : t + 1], hx)


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"input_stats": "sequence"}])
@pytest.mark.parametrize("kind", STEPS)
def test_steps_of_a_layer_without_start_warn_once_in_eval(kind, options):
    layer, x = STEPS[kind](3, 4, **options), torch.randn(6, 6, 3)
    layer(x)
    layer.eval()
    _, hx = layer(x)  # a prefix
    _, hx = layer(x[:, :1] if "batch_first" in options else x[:1], hx)  # or a window of one step
    one = x[:, 1:2] if "batch_first" in options else x[1:2]
    with pytest.warns(UserWarning, match=r"start .*each call .*start=step"):
        _, hx = layer(one, hx)
    for _ in range(3):  # further warnings would be errors
        _, hx = layer(one, hx)
    pickle.loads(pickle.dumps(copy.deepcopy(layer)))(one)


def test_a_sequence_without_a_batch_in_single_steps_warns():
    layer, x = rbn.BatchNormLSTM(3, 4), torch.randn(6, 6, 3)
    layer(x)
    layer.eval()
    _, hx = layer(x[:1, 0])
    with pytest.warns(UserWarning, match="start was not given"):
        layer(x[1:2, 0], hx)


def test_calls_of_a_layer_that_do_not_warn():
    """Warnings are errors in these tests."""
    x = torch.randn(6, 6, 3)
    for options in ({"ablations": ["shared_stats"]}, {"max_length": 1}):
        shared = rbn.BatchNormLSTM(3, 4, **options)
        for mode in (True, False):
            in_pieces(shared.train(mode), x, 1, counts=False)
    layer = rbn.BatchNormLSTM(3, 4)
    in_pieces(layer, x, 3, counts=False)  # windows that continue
    _, given = layer.eval()(x)
    for _ in range(3):
        layer(x[:1], given)  # a first step from given states
    in_pieces(layer, x, 1)
    hx = None
    for t in range(3):  # windows of one step, on purpose
        _, hx = layer(x[t : t + 1], hx, start=0)
