"""Folded layers compute the same as the layer in eval(), with fewer and smaller tensors."""

import copy
import ctypes
import functools
import gc
import io

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rbn
from rbn.ops.cpu import compiled_lstm, inference

OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "initial_state": "zeros"},
    {"zoneout": (0.1, 0.2), "eps": 1e-3},
    {"ablations": ("shared_stats",)},
    {"ablations": ("joint_terms",)},
    {"ablations": ("joint_terms", "shared_stats")},
    {"ablations": ("raw_output",)},
    {"ablations": ("pass_normalized_cell",)},
    {"input_stats": "sequence"},
    {"max_length": 30},
]


def trained(inputs=5, hidden=7, steps=9, **options):
    """A layer in eval(), with statistics for `steps` steps and all parameters changed."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(inputs, hidden, **{"refresh_stats": False, **options})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("weight"):
                parameter.uniform_(-0.3, 0.3 if name.startswith("gamma") else 1.0)
        for _ in range(3):
            x = torch.randn(steps, 6, inputs, dtype=layer.weight_ih_l0.dtype)
            layer(x.transpose(0, 1) if layer.batch_first else x)
    return layer.eval()


def compare(layer, folded, x, double=None, **arguments):
    """The folded layer is as close to the equations in float64 as the layer itself.

    Rounding errors differ, and where a variance is 0 they are scaled by up to 0.3 / sqrt(eps), so
    that the layer's own error is the measure: 8 times it, plus 1e-5 (float64: 1e-11).
    """
    double = copy.deepcopy(layer).double() if double is None else double
    given = dict(arguments)
    if given.get("hx") is not None:
        given["hx"] = tuple(s.double() for s in given["hx"])
    with torch.no_grad():
        with rbn.backend("reference"):
            wanted, states = double(x.double() if x.is_floating_point() else x, **given)
        (output, finals), (own, own_finals) = folded(x, **arguments), layer(x, **arguments)
    least = 1e-11 if output.dtype == torch.float64 else 1e-5
    for one, other, truth in zip(
        (output, *finals), (own, *own_finals), (wanted, *states), strict=True
    ):
        assert one.shape == truth.shape
        error, of_layer = ((t.double() - truth).abs().max() for t in (one, other))
        assert error <= 8 * of_layer + least, (error, of_layer)


def random_input(layer, steps, batch):
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    return torch.randn(*shape, layer.input_size, dtype=layer.weight_ih_l0.dtype)


@pytest.fixture(params=["kernel", "operators"])
def way(request, monkeypatch):
    if request.param == "operators":
        monkeypatch.setattr(inference, "load", lambda: None)
    elif inference.load() is None:
        pytest.skip("no compiled kernel")
    return request.param


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_option_is_folded(options, dtype, way):
    layer = trained(dtype=dtype, **options)
    folded = rbn.fold(layer)
    same = functools.partial(compare, layer, folded, double=copy.deepcopy(layer).double())
    for batch, steps in ((1, 1), (1, 14), (2, 9), (5, 4)):  # fewer steps, as many and more
        x = random_input(layer, steps, batch)
        same(x)
        lengths = torch.randint(1, steps + 1, (batch,))
        same(x, lengths=lengths)
        shape = (layer.num_layers * layer.directions, batch, 7)
        same(x, hx=(torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)))
        if not layer.bidirectional:
            for start in (2, 8, 9, 50):
                same(x, start=start)


@pytest.mark.parametrize("hidden", [1, 3, 16, 37])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_sizes_that_fill_no_register(hidden, batch, way):
    layer = trained(1, hidden, steps=3)
    compare(layer, rbn.fold(layer), random_input(layer, 5, batch))


def test_several_threads(monkeypatch):
    monkeypatch.setattr(inference, "_PER_THREAD", 1)
    layer = trained(3, 50)
    compare(layer, rbn.fold(layer), random_input(layer, 5, 1))
    compare(layer, rbn.fold(layer), random_input(layer, 5, 64))


def test_symbols_packed_sequences_and_one_without_a_batch(way):
    layer = trained()
    folded = rbn.fold(layer)
    compare(layer, folded, torch.randint(5, (11, 3)))
    compare(layer, folded, torch.randint(5, (11, 1)), start=3)
    compare(layer, folded, torch.randn(6, 5))
    packed = pack_padded_sequence(torch.randn(6, 3, 5), [2, 6, 4], enforce_sorted=False)
    (one, states), (other, wanted) = folded(packed), layer(packed)
    for a, b in zip(
        (pad_packed_sequence(one)[0], *states),
        (pad_packed_sequence(other)[0], *wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero", ["gamma_x_l0", "gamma_h_l0", "gamma_c_l0", "all"])
def test_gammas_of_zero_and_below(zero, way):
    layer = trained()
    names = ("gamma_x_l0", "gamma_h_l0", "gamma_c_l0") if zero == "all" else (zero,)
    with torch.no_grad():
        for name in names:
            layer.get_parameter(name)[::2] = 0
            layer.get_parameter(name)[1] = -0.5
            layer.get_parameter(name)[3] = 1e-20
    compare(layer, rbn.fold(layer), torch.randn(11, 2, 5))


def test_steps_without_an_estimate():
    layer = trained()
    for statistics in (layer.stats_x_l0, layer.stats_h_l0, layer.stats_c_l0):
        statistics.count[3:5] = 0
        statistics.count[8:] = 0
    folded = rbn.fold(layer)
    assert len(folded.shift_l0) == 8
    compare(layer, folded, torch.randn(11, 1, 5))


def size(module):
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_state_is_smaller(options):
    layer = trained(**options)
    folded = rbn.fold(layer)
    assert size(folded) < size(layer)
    assert not list(folded.parameters())
    if "shared_stats" in options.get(
        "ablations", ()
    ):  # the weights, a shift, the cell's shift and h0, c0
        assert folded.scale_x_l0 is None
        assert folded.scale_h_l0 is None
        assert size(folded) == 4 * (28 * 5 + 28 * 7 + 28 + 4 * 7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_state_dict_has_everything(options):
    layer = trained(**options)
    folded = rbn.fold(layer)
    kept = ("num_layers", "bidirectional", "batch_first", "initial_state", "zoneout", "ablations")
    empty = rbn.FoldedLSTM(5, 7, **{name: getattr(folded, name) for name in kept})
    empty.load_state_dict(folded.state_dict())
    x = random_input(layer, 12, 2)
    assert torch.equal(empty(x)[0], folded(x)[0])
    assert {k: v.shape for k, v in empty.state_dict().items()} == {
        k: v.shape for k, v in folded.state_dict().items()
    }
    other = rbn.fold(trained(steps=4, **options))  # another number of steps
    other.load_state_dict(folded.state_dict())
    assert torch.equal(other(x)[0], folded(x)[0])


def test_a_state_of_other_sizes_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for shift_l0"):
        rbn.FoldedLSTM(5, 6).load_state_dict(rbn.fold(trained()).state_dict())


def test_copies_files_and_casts():
    layer = trained()
    folded = rbn.fold(layer)
    x = torch.randn(11, 2, 5)
    wanted = folded(x)[0]
    file = io.BytesIO()
    torch.save(folded, file)
    file.seek(0)
    for other in (copy.deepcopy(folded), torch.load(file, weights_only=False), folded.train()):
        assert torch.equal(other(x)[0], wanted)  # in training mode, too


def test_single_steps_without_start_warn_once():
    folded, x = rbn.fold(trained()), torch.randn(4, 2, 5)
    hx = None
    for t in range(4):
        _, hx = folded(x[t : t + 1], hx, start=t)
    _, hx = folded(x[:1])
    with pytest.warns(UserWarning, match=r"FoldedLSTM.*start=step"):
        _, hx = folded(x[1:2], hx)
    folded(x[2:3], hx)


@pytest.mark.parametrize("options", [{"max_length": 1}, {"ablations": ("shared_stats",)}], ids=str)
def test_single_steps_with_the_same_statistics_do_not_warn(options):
    folded, x = rbn.fold(trained(**options)), torch.randn(4, 2, 5)
    hx = None
    for t in range(4):
        _, hx = folded(x[t : t + 1], hx)


def test_half_precision():
    layer, x = trained(), torch.randn(11, 2, 5).bfloat16()
    # The recurrence is in float32, from input terms rounded to 8 bits and scales of about 1.
    close = {"rtol": 2**-6, "atol": 2**-6}
    half = copy.deepcopy(layer).bfloat16()
    found = rbn.fold(half)(x)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, half(x)[0], **close)
    cast = rbn.fold(layer).bfloat16()
    assert cast.weight_hh_l0.dtype == torch.bfloat16
    assert cast.scale_h_l0.dtype == torch.float32
    with torch.no_grad():  # what is rounded there, except gammas and biases
        for name, parameter in layer.named_parameters():
            if name.startswith(("weight", "h0", "c0")):
                parameter.copy_(parameter.bfloat16())
    torch.testing.assert_close(cast(x)[0].float(), layer(x.float())[0], **close)


def test_autocast_is_as_in_the_layer():
    layer = trained()
    x = torch.randn(4, 2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = rbn.fold(layer)(x)[0], layer(x)[0]
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


def test_gradients_of_the_input():
    layer = trained(dtype=torch.float64)
    folded = rbn.fold(layer)
    x, twin = (torch.ones(4, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layer(x)[0].square().sum().backward()
    folded(twin)[0].square().sum().backward()
    torch.testing.assert_close(twin.grad, x.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_exported_for_any_size(options):
    layer = trained(**options)
    folded = rbn.fold(layer)
    sizes = {0: Dim.AUTO, 1: Dim.AUTO}
    program = export(folded, (random_input(layer, 9, 3),), dynamic_shapes=(sizes,), strict=False)
    for steps, batch in ((9, 3), (4, 2), (20, 5)):
        x = random_input(layer, steps, batch)
        found, wanted = program.module()(x)[0], folded(x)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.again = layer, layer  # one layer under two names
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0] + self.again(x)[0])


def test_a_model_with_layers_in_it():
    model = Model(trained()).train()
    served = rbn.fold(model)
    assert isinstance(served, Model)
    assert isinstance(served.layer, rbn.FoldedLSTM)
    assert served.again is served.layer
    assert not served.training
    assert model.training
    assert isinstance(model.layer, rbn.BatchNormLSTM)
    x = torch.randn(11, 3, 5)
    torch.testing.assert_close(served(x), model.eval()(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.head.weight.zero_()
        model.layer.gamma_h_l0.zero_()
    assert served.head.weight.abs().sum() > 0


def test_stale_statistics_are_refreshed_first():
    layer = trained(refresh_stats=True)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(-1)
    x = torch.randn(11, 3, 5)
    found = rbn.fold(layer)(x)[0]  # before the layer evaluates
    torch.testing.assert_close(found, layer(x)[0], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_folded():
    with pytest.raises(RuntimeError, match=r"BatchNormLSTM.*no population statistics"):
        rbn.fold(rbn.BatchNormLSTM(5, 7))
    with pytest.raises(RuntimeError, match="no population statistics"):
        rbn.fold(Model(rbn.BatchNormLSTM(5, 7)))
    with pytest.raises(ValueError, match=r"BatchNormLSTM.*got Linear"):
        rbn.fold(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got int"):
        rbn.fold(3)
    with pytest.raises(ValueError, match="ablations must"):
        rbn.FoldedLSTM(5, 7, ablations=("shared_stats",))


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"zoneout": (0.1, 0.2)}, {"ablations": ("joint_terms",)}])
@pytest.mark.parametrize(("batch", "hidden"), [(32, 3), (59, 17), (33, 40)])
def test_large_batches_with_every_instruction_set(batch, hidden, options, version):
    """With enough rows that each step computes its own input term."""
    if inference.load() is None:
        pytest.skip("no compiled kernel")
    library = compiled_lstm.load()
    layer = trained(5, hidden, steps=3, **options)
    try:
        if not library.rbn_use_version(ctypes.c_int64(version)):
            pytest.skip("this machine has fewer instruction sets")
        compare(layer, rbn.fold(layer), random_input(layer, 4, batch))
    finally:
        library.rbn_use_version(ctypes.c_int64(0))


@pytest.mark.skipif(inference.load() is None, reason="needs the compiled kernel")
@pytest.mark.parametrize("batch", [1, 40])
def test_weights_are_packed_again_only_when_they_change(monkeypatch, batch):
    calls, packed = [], compiled_lstm.packed
    monkeypatch.setattr(compiled_lstm, "packed", lambda *a: calls.append(1) or packed(*a))
    folded, x = rbn.fold(trained()), torch.randn(20, batch, 5)
    other = rbn.fold(trained(hidden=7)).state_dict()

    def set_data():
        folded.weight_hh_l0.data = folded.weight_hh_l0 * 3

    def changes():
        yield lambda: folded.weight_hh_l0.mul_(0.5)
        yield lambda: folded.weight_ih_l0.neg_()
        yield lambda: folded.load_state_dict(other)
        yield lambda: setattr(folded, "weight_ih_l0", folded.weight_ih_l0 * 2)
        yield lambda: setattr(folded, "weight_hh_l0", folded.weight_hh_l0.neg())
        yield set_data
        yield lambda: folded.double().float()

    with torch.no_grad():
        folded(x)
        for change in changes():
            change()
            calls.clear()
            for _ in range(3):
                output, _ = folded(x)
            assert len(calls) <= 1
            assert torch.equal(output, copy.deepcopy(folded)(x)[0])


@pytest.mark.skipif(inference.load() is None, reason="needs the compiled kernel")
def test_packed_weights_are_freed_with_the_layer():
    gc.collect()
    before = len(inference._latest)
    folded = rbn.fold(trained())
    with torch.no_grad():
        folded(torch.randn(20, 1, 5))
    assert len(inference._latest) == before + 1
    del folded
    gc.collect()
    assert len(inference._latest) == before


@pytest.mark.skipif(inference.load() is None, reason="needs the compiled kernel")
def test_weights_made_in_inference_mode_are_packed_every_time():
    x = torch.randn(20, 1, 5)
    with torch.inference_mode():
        folded = rbn.fold(trained())
        for _ in range(2):
            folded.weight_hh_l0.mul_(0.5)
            output, _ = folded(x)
        assert torch.equal(output, copy.deepcopy(folded)(x)[0])
