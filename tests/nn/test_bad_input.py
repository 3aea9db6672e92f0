"""Every bad argument raises one clear error, before any work."""

import threading

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_size": 0}, ValueError, "input_size.* 0"),
        ({"hidden_size": -2}, ValueError, "hidden_size.* -2"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size .* int, got: float"),
        ({"num_layers": 0}, ValueError, "num_layers.* 0"),
        ({"bias": 1}, TypeError, "bias .* bool, got: int 1"),
        ({"batch_first": "yes"}, TypeError, "batch_first .* bool, got: str 'yes'"),
        ({"dropout": 1.5}, ValueError, r"dropout .* \[0, 1\], got 1\.5"),
        ({"dropout": "abc"}, ValueError, r"dropout .* \[0, 1\], got 'abc'"),
        ({"dropout": True}, ValueError, r"dropout .* \[0, 1\], got True"),
        ({"weight_dropout": -0.1}, ValueError, "weight_dropout.* 0.* 1, got -0.1"),
        ({"weight_dropout": "abc"}, TypeError, "weight_dropout.*number, got 'abc'"),
        ({"hidden_noise": True}, TypeError, "hidden_noise.*number, got True"),
        ({"initial_state": "ones"}, ValueError, "initial_state.*'learned', 'zeros'"),
        ({"hidden_noise": -0.1}, ValueError, "hidden_noise.*negative, got -0.1"),
    ],
)
def test_options(layer, options, error, message):
    with pytest.raises(error, match=message):
        layer(**{"input_size": 3, "hidden_size": 4, **options})


@pytest.mark.parametrize("layer", [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1e-5}, "eps.*negative"),
        ({"gamma": -0.1}, "gamma.*negative"),
        ({"momentum": -0.1}, "momentum.* 0.* 1"),
        ({"momentum": 1.1}, "momentum.* 0.* 1"),
        ({"max_length": 0}, "max_length.* 1"),
        ({"input_stats": "batch"}, "input_stats.*'step', 'sequence', got 'batch'"),
        ({"padding": "ignore"}, "padding.*'exclude', 'include', got 'ignore'"),
        ({"ablations": ["shared"]}, "ablations.*'shared_stats'"),
    ],
)
def test_options_of_the_normalization(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(3, 4, **options)


def test_more_options():
    with pytest.raises(ValueError, match="exclude each other"):
        rbn.BatchNormLSTM(3, 4, ablations=["raw_output", "pass_normalized_cell"])
    with pytest.raises(TypeError, match="collection of names, got 'raw_output'"):
        rbn.BatchNormLSTM(3, 4, ablations="raw_output")
    with pytest.raises(ValueError, match=r"\(cell, hidden\), got 0\.1"):
        rbn.BatchNormLSTM(3, 4, zoneout=0.1)
    with pytest.raises(ValueError, match=r"zoneout.* 0.* 1, got 1\.2"):
        rbn.LSTM(3, 4, zoneout=(0.1, 1.2))
    with pytest.raises(ValueError, match="one rate"):
        rbn.BatchNormRNN(3, 4, zoneout=(0.1, 0.1))
    with pytest.raises(ValueError, match=r"nonlinearity.*'tanh', 'relu'"):
        rbn.BatchNormRNN(3, 4, nonlinearity="gelu")
    with pytest.raises(ValueError, match=r"gamma.*finite, got nan"):
        rbn.LayerNormLSTM(3, 4, gamma=float("nan"))
    with pytest.raises(ValueError, match=r"eps.*finite, got inf"):
        rbn.BatchNormLSTM(3, 4, eps=float("inf"))
    with pytest.raises(ValueError, match=r"eps.*negative, got -inf"):
        rbn.BatchNormLSTM(3, 4, eps=-float("inf"))
    with pytest.raises(ValueError, match=r"ablations.*got \[1\]"):
        rbn.BatchNormLSTM(3, 4, ablations=[[1]])
    with pytest.raises(ValueError, match="joint_terms"):
        rbn.BatchNormLSTM(3, 4, ablations=["joint_terms"], input_stats="sequence")
    with pytest.raises(RuntimeError, match=r"torch\.float32, got torch\.float8"):
        rbn.LSTM(3, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"int64, got torch\.uint16"):
        rbn.LSTM(3, 4)(torch.zeros(6, 4, dtype=torch.uint16))


@pytest.mark.parametrize("layer_class", [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
@pytest.mark.parametrize("input_stats", ["step", "sequence"])
def test_training_with_a_batch_of_one(layer_class, input_stats):
    layer, x = layer_class(3, 4, input_stats=input_stats), torch.randn(5, 6, 3)
    layer(x)
    before = {name: value.clone() for name, value in layer.named_buffers()}
    for call in (
        lambda: layer(x[:, :1]),
        lambda: layer(x[:, 0]),
        lambda: layer(x[:, :1], lengths=[4]),
        lambda: layer(pack_sequence([x[:, 0]])),
    ):
        with pytest.raises(ValueError, match=rf"more than 1 sequence .* {layer_class.__name__}"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())
    assert len(list(layer.recent_calls)) == 1
    layer.eval()(x[:, :1])


@pytest.mark.parametrize(
    "cell_class", [rbn.BatchNormLSTMCell, rbn.BatchNormRNNCell, rbn.BatchNormGRUCell]
)
def test_training_a_cell_with_a_batch_of_one(cell_class):
    for x in (torch.randn(1, 3), torch.randn(3)):
        with pytest.raises(ValueError, match=rf"more than 1 sequence .* {cell_class.__name__}"):
            cell_class(3, 4)(x)


def test_warnings_name_the_callers_line():
    layer = rbn.BatchNormLSTM(3, 4)
    with pytest.warns(UserWarning, match="single sequence") as found, rbn.batch_statistics(layer):
        layer.eval()(torch.randn(5, 1, 3))
    assert [warning.filename for warning in found] == [__file__]
    for layer_class in LAYERS:
        with pytest.warns(UserWarning, match=r"dropout=0\.5 and num_layers=1") as found:
            layer_class(3, 4, dropout=0.5)
        assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize("layer_class", LAYERS)
def test_inputs(layer_class):
    layer = layer_class(3, 4)
    with pytest.raises(TypeError, match=r"Tensor.*PackedSequence, got list"):
        layer([[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match=r"3 dimensions .* got shape \(3,\)"):
        layer(torch.randn(3))
    with pytest.raises(ValueError, match=r"3 dimensions .* got shape \(1, 5, 2, 3\)"):
        layer(torch.randn(1, 5, 2, 3))
    with pytest.raises(RuntimeError, match=r"Expected 3, got 4 .* shape \(5, 2, 4\)"):
        layer(torch.randn(5, 2, 4))
    with pytest.raises(ValueError, match=r"torch\.float64.*torch\.float32"):
        layer(torch.randn(5, 2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"torch\.int64.*torch\.float32"):
        layer(torch.ones(5, 2, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"input .*meta.*cpu"):
        layer(torch.randn(5, 2, 3, device="meta"))
    with pytest.raises(RuntimeError, match=r"sequence length .* got 0"):
        layer(torch.randn(0, 2, 3))
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(4, 2)])
    with pytest.raises(RuntimeError, match="Expected 3, got 2"):
        layer(packed)


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([5, 0], ValueError, "lengths.* 5, got 0 at position 1"),
        ([-1, 2], ValueError, "lengths.* 5, got -1 at position 0"),
        ([5, 6], ValueError, "lengths.* 5, got 6 at position 1"),
        ([5], ValueError, r"lengths.* 2 sequences, got shape \(1,\)"),
        ([[5, 5]], ValueError, r"got shape \(1, 2\)"),
        ([5.0, 2.0], TypeError, "lengths.*integers, got torch.float32"),
        ([True, True], TypeError, "lengths.*integers, got torch.bool"),
    ],
)
def test_lengths(layer_class, lengths, error, message):
    layer = layer_class(3, 4)
    with pytest.raises(error, match=message):
        layer(torch.randn(5, 2, 3), lengths=lengths)
    if layer_class in (rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU):
        assert not layer.stats_h_l0.estimated  # nothing was done


def test_where_lengths_make_no_sense():
    layer = rbn.BatchNormLSTM(3, 4)
    with pytest.raises(ValueError, match="lengths needs a batched"):
        layer(torch.randn(5, 3), lengths=[5])
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(4, 3)])
    with pytest.raises(ValueError, match=r"lengths.*PackedSequence"):
        layer(packed, lengths=[4, 4])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "lengths", [[5, 3], (5, 3), torch.tensor([5, 3]), np.array([5, 3]), torch.tensor([5, 3]).int()]
)
def test_lengths_in_place_of_states(layer, lengths):
    with pytest.raises(TypeError, match="lengths=lengths"):
        layer(3, 4)(torch.randn(5, 2, 3), lengths)


def test_states():
    layer, x = rbn.BatchNormLSTM(3, 4, 2), torch.randn(5, 2, 3)
    good = torch.zeros(2, 2, 4)
    with pytest.raises(TypeError, match=r"hx.*pair.*\(h_0, c_0\), got Tensor"):
        layer(x, good)
    with pytest.raises(RuntimeError, match=r"hidden\[0\] size \(2, 2, 4\), got \[1, 2, 4\]"):
        layer(x, (good[:1], good))
    with pytest.raises(RuntimeError, match=r"hidden\[1\] size \(2, 2, 4\), got \[2, 3, 4\]"):
        layer(x, (good, torch.zeros(2, 3, 4)))
    with pytest.raises(RuntimeError, match=r"hidden\[0\] size \(2, 4\), got \[2, 2, 4\]"):
        layer(x[:, 0], (good, good))
    with pytest.raises(RuntimeError, match=r"hidden\[1\] .* torch.float32, got torch.float64"):
        layer(x, (good, good.double()))
    with pytest.raises(TypeError, match=r"hidden\[0\].*Tensor, got NoneType"):
        layer(x, (None, good))
    with pytest.raises(TypeError, match=r"hidden.*Tensor, got tuple"):
        rbn.BatchNormRNN(3, 4)(x, (good[:1],))
    assert not layer.stats_h_l0.estimated


def test_start():
    x = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=r"start.* 0.*got -1"):
        rbn.LSTM(3, 4)(x, start=-1)
    with pytest.raises(ValueError, match="start must be 0"):
        rbn.LSTM(3, 4, bidirectional=True)(x, start=2)


@pytest.mark.parametrize("start", [1.0, "1"])
def test_a_start_that_is_no_whole_number(start):
    with pytest.raises(TypeError, match=r"start.*integer, got "):
        rbn.LSTM(3, 4)(torch.randn(5, 2, 3), start=start)
    with pytest.raises(TypeError, match=r"step.*integer, got "):
        rbn.LSTMCell(3, 4)(torch.randn(2, 3), None, start)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_start_of_another_kind(kind):
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 8, 3))
    layer.eval()
    x = torch.randn(3, 2, 3)
    assert torch.equal(layer(x, start=kind(2))[0], layer(x, start=2)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"zoneout": None}, ValueError, r"\(cell, hidden\), got None"),
        ({"zoneout": np.float32(0.1)}, ValueError, r"\(cell, hidden\)"),
        ({"zoneout": "ab"}, ValueError, "a pair of rates"),
        ({"ablations": None}, TypeError, "ablations.*names, got None"),
    ],
)
def test_options_of_no_use(options, error, message):
    with pytest.raises(error, match=message):
        rbn.BatchNormLSTM(3, 4, **options)


@pytest.mark.parametrize("lengths", [["a", "b"], [None, None], [[1], [2, 3]]])
def test_lengths_that_are_no_numbers(lengths):
    with pytest.raises(TypeError, match=r"lengths.*integers, got "):
        rbn.LSTM(3, 4)(torch.randn(5, 2, 3), lengths=lengths)


def test_no_lengths_of_no_sequences():
    output, _ = rbn.LSTM(3, 4)(torch.randn(5, 0, 3), lengths=[])
    assert output.shape == (5, 0, 4)


def test_a_subclass_with_an_option_of_its_own_can_be_shown():
    class Mine(rbn.BatchNormLSTM):
        def __init__(self, input_size, hidden_size, extra=3):
            super().__init__(input_size, hidden_size, max_length=extra)

    assert repr(Mine(3, 4)) == "Mine(3, 4)"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_inputs_that_are_not_dense(kind):
    x = torch.randn(5, 4, 3)
    given = torch.nested.nested_tensor([x, x]) if kind == "nested" else x.to_sparse()
    with pytest.raises(ValueError, match=rf"dense Tensor, got a {kind}.* lengths"):
        rbn.LSTM(3, 4)(given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_lengths_are_lengths(dtype):
    layer, x = rbn.LSTM(3, 4), torch.randn(5, 2, 3)
    found, _ = layer(x, lengths=torch.tensor([5, 2]).to(dtype))
    assert torch.equal(found, layer(x, lengths=[5, 2])[0])


@pytest.mark.parametrize("make", [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTMCell])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, "float32"])
def test_parameters_are_real_numbers(make, dtype):
    error = TypeError if isinstance(dtype, str) else RuntimeError
    with pytest.raises(error, match=rf"dtype.*floating-point.*{dtype}"):
        make(3, 4, dtype=dtype)


@pytest.mark.parametrize("sizes", [[2, 2], [3, 2, 2], [2, 3], [3, 2, 0], [6, -1], []])
def test_a_packed_sequence_that_does_not_agree_with_itself(sizes):
    packed = PackedSequence(torch.randn(5, 3), torch.tensor(sizes, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="of a PackedSequence must"):
        rbn.BatchNormLSTM(3, 4)(packed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0}, "eps.*positive, got 0"),
        ({"weight_dropout": 1}, "weight_dropout.* 1, got 1"),
        ({"max_length": 10**12}, "max_length.* 100,000,000, got 1,000,000,000,000"),
    ],
)
def test_options_that_leave_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        rbn.BatchNormLSTM(3, 4, **options)


@pytest.mark.parametrize("name", ["stats_h_l0.var", "stats_h_l0.count"])
def test_negative_statistics_are_not_loaded(name):
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 6, 3))
    state = layer.state_dict()
    before = state[name].clone()
    with pytest.raises(RuntimeError, match=rf"{name}.*negative, got -2"):
        layer.load_state_dict({**state, name: torch.full_like(before, -2)})
    assert torch.equal(layer.state_dict()[name], before)


@pytest.mark.parametrize("name", ["stats_h_l0.var", "stats_h_l0.mean"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_statistics_that_are_not_finite_are_named(name, value):
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 6, 3))
    state = layer.state_dict()
    state[name] = state[name].clone()
    state[name][2, 3] = value
    with pytest.warns(UserWarning, match=rf"{name} .*not finite"):
        layer.load_state_dict(state)


def test_batches_with_nan_change_no_statistics():
    layer = rbn.BatchNormLSTM(3, 4)
    good = torch.randn(5, 6, 3)
    rbn.update_population_stats(layer, [good])
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    bad = good.clone()
    bad[2, 1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"statistics.*not finite"):
        rbn.update_population_stats(layer, [good, bad])
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_batch_statistics_are_of_their_thread():
    layer = rbn.BatchNormLSTM(3, 4)
    inputs = torch.randn(5, 6, 3)
    rbn.update_population_stats(layer, [inputs, inputs + 1])
    layer.eval()
    inside, done, found = threading.Event(), threading.Event(), []

    def other():
        with rbn.batch_statistics(layer):
            inside.set()
            done.wait(60)
            found.append(layer(inputs)[0])

    expected = layer(inputs)[0]
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    mine = layer(inputs)[0]
    done.set()
    thread.join()
    assert torch.equal(mine, expected)
    assert not torch.equal(found[0], expected)
    assert torch.equal(layer(inputs)[0], expected)


def test_a_replaced_weight_of_another_shape_is_named():
    layer = rbn.BatchNormLSTM(3, 8)
    layer.weight_hh_l0 = torch.nn.Parameter(torch.randn(32, 7))
    with pytest.raises(ValueError, match=r"weight_hh.*shape.*\[32, 8\], got \[32, 7\]"):
        layer(torch.randn(4, 2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rbn.batch_statistics("x").__enter__(), "model.*torch.nn.Module, got str"),
        (lambda: rbn.average_population_stats(None), "model.*torch.nn.Module, got None"),
        (lambda: rbn.update_population_stats("x", []), "model.*torch.nn.Module, got str"),
        (
            lambda: rbn.update_population_stats(rbn.BatchNormLSTM(3, 2), None),
            "batches.*iterable.*list, got None",
        ),
        (
            lambda: rbn.match_statistics(rbn.BatchNormLSTM(3, 2), 5),
            "checkpoint.*file, got int",
        ),
    ],
)
def test_functions_name_an_argument_of_the_wrong_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()
