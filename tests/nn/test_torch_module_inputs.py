"""rbn.LSTM instead of nn.LSTM, on the inputs that PyTorch's own tests of nn.LSTM use.

These inputs come with torch. The tests themselves do not; benchmarks/torch_tests.py runs them.
"""

import copy
import importlib.util
import io
import pickle
import re

import pytest
import torch
from torch import nn
from warm_commands import Command

import rbn

# In a separate process: importing torch's test utilities changes torch's global settings.
COLLECT = """
import sys
import torch
from torch.testing._internal import common_modules

(info,) = [info for info in common_modules.module_db if info.module_cls is torch.nn.LSTM]
forward_error = common_modules.ModuleErrorEnum.FORWARD_ERROR
samples, errors = {}, {}
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    options = {"device": "cpu", "dtype": dtype, "training": True}
    samples[dtype] = [
        (dict(one.constructor_input.kwargs), one.forward_input.args)
        for one in info.module_inputs_func(info, requires_grad=False, **options)
    ]
    errors[dtype] = []
    for error in info.module_error_inputs_func(info, requires_grad=False, **options):
        given, call = error.module_error_input.constructor_input, None
        if error.error_on == forward_error:
            call = error.module_error_input.forward_input.args
        errors[dtype].append((given.args, given.kwargs, call, error.error_type, error.error_regex))
torch.save((samples, errors), sys.argv[1])
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory, warm_process):
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("torch's test utilities need expecttest")
    folder = tmp_path_factory.mktemp("torch")
    program, path = folder / "collect.py", folder / "inputs.pt"
    program.write_text(COLLECT)
    process = Command(warm_process, [program, path], folder, folder)
    assert process.wait(300) == 0, process.errors
    return torch.load(path, weights_only=False)


@pytest.fixture
def samples(collected):
    """Layer options and call arguments by dtype, of the inputs without proj_size."""
    found = {
        dtype: [(_without_projection(o), args) for o, args in cases if not o["proj_size"]]
        for dtype, cases in collected[0].items()
    }
    assert all(len(cases) >= 16 for cases in found.values())
    return found


def _without_projection(options):
    return {name: value for name, value in options.items() if name != "proj_size"}


def like_torchs(*args, **options) -> rbn.LSTM:
    return rbn.LSTM(*args, cell_bias=False, initial_state="zeros", **options)


def pair(options: dict) -> tuple[nn.LSTM, rbn.LSTM]:
    peer = nn.LSTM(**options, dtype=torch.float64)
    ours = like_torchs(**options, dtype=torch.float64)
    ours.load_state_dict(peer.state_dict())
    return peer, ours


def flat(result) -> list[torch.Tensor]:
    output, states = result
    return [output, *states]


@pytest.mark.slow  # collecting the inputs
def test_outputs_and_gradients(samples):
    for options, args in samples[torch.float64]:
        peer, ours = pair(options)
        tensors = [args[0], *(args[1] if len(args) > 1 else ())]
        for tensor in tensors:
            tensor.requires_grad_()
        expected, found = flat(peer(*args)), flat(ours(*args))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        weights = [torch.randn_like(tensor) for tensor in expected]
        gradients = []
        for module, results in ((peer, expected), (ours, found)):
            loss = sum((r * w).sum() for r, w in zip(results, weights, strict=True))
            # Both of torch's biases have the gradient of the single one here.
            parameters = [p for name, p in module.named_parameters() if "bias_hh" not in name]
            gradients.append(torch.autograd.grad(loss, [*tensors, *parameters]))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(samples, dtype):
    for options, args in samples[dtype]:
        peer, ours = pair(options)
        with torch.no_grad():
            found = flat(ours.to(dtype)(*args))
            expected = flat(peer.to(dtype).double()(*_doubled(args)))
        assert {tensor.dtype for tensor in found} == {dtype}
        # Both round inputs and weights to dtype; the layer also rounds in between.
        tolerance = 8 * torch.finfo(dtype).eps
        found = [tensor.double() for tensor in found]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _doubled(args):
    return tuple(a.double() if torch.is_tensor(a) else tuple(s.double() for s in a) for a in args)


@pytest.mark.slow  # collecting the inputs
def test_copies_pickles_and_state_dicts(samples):
    for options, args in samples[torch.float64]:
        _, ours = pair(options)
        expected = flat(ours(*args))
        saved = io.BytesIO()
        torch.save(ours, saved)
        saved.seek(0)
        fresh = like_torchs(**options, dtype=torch.float64)
        fresh.load_state_dict(ours.state_dict())
        copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), fresh]
        for module in (*copies, torch.load(saved, weights_only=False)):
            torch.testing.assert_close(flat(module(*args)), expected, rtol=0, atol=0)
            assert repr(module) == repr(ours)


@pytest.mark.slow  # collecting the inputs
def test_moves_to_other_devices(samples):
    options, args = samples[torch.float64][0]
    _, ours = pair(options)
    expected = ours(*args)[0]
    state = ours.state_dict()
    moved = copy.deepcopy(ours).to("meta")
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    assert moved(args[0].to("meta"))[0].shape == expected.shape
    back = moved.to_empty(device="cpu")
    back.load_state_dict(state)
    torch.testing.assert_close(back(*args)[0], expected, rtol=0, atol=0)
    with torch.device("meta"):
        assert rbn.LSTM(3, 4).weight_hh_l0.device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_have_torchs_types_and_words(collected, dtype):
    assert len(collected[1][dtype]) >= 2
    for args, options, call, error, words in collected[1][dtype]:
        with pytest.raises(error, match=words):
            _create_and_call(args, options, call)


def _create_and_call(args, options, call):
    module = like_torchs(*args, **options)
    if call is not None:
        module(*call)


X, STATE = torch.randn(5, 2, 3), torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    "args",
    [
        (torch.randn(3),),
        (torch.randn(1, 5, 2, 3),),
        (torch.randn(5, 2, 4),),
        (torch.randn(5, 4),),
        (X.double(),),
        (X.bfloat16(),),
        (X.long(),),
        (X.to("meta"),),
        (X[:0],),
        (X, (STATE.repeat(2, 1, 1), STATE)),
        (X, (STATE, torch.zeros(1, 3, 4))),
        (X, (STATE, torch.zeros(1, 2, 5))),
        (X, (STATE[0], STATE[0])),
        (X[:, 0], (STATE, STATE)),
        (X, (STATE.double(), STATE.double())),
        (X, (STATE.to("meta"), STATE.to("meta"))),
        (X, 3),
        (nn.utils.rnn.PackedSequence(torch.randn(5, 3), torch.tensor([3, 2, 2])),),
    ],
    ids=lambda args: "-".join(re.sub(r"\W+", "_", str(getattr(a, "shape", "hx"))) for a in args),
)
def test_a_wrong_call_raises_torchs_type(args):
    with pytest.raises(Exception) as expected:  # noqa: PT011
        nn.LSTM(3, 4)(*args)
    with pytest.raises(expected.type) as found:
        like_torchs(3, 4)(*args)
    assert found.type is expected.type


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer_class", "peer"),
    [
        (rbn.LSTM, nn.LSTM(3, 5, 2, bidirectional=True)),
        (rbn.BatchNormLSTM, nn.LSTM(3, 5, 2, bidirectional=True)),
        (rbn.LayerNormLSTM, nn.LSTM(3, 5, 2, bidirectional=True)),
        (rbn.BatchNormRNN, nn.RNN(3, 5, 2, bidirectional=True)),
        (rbn.BatchNormGRU, nn.GRU(3, 5, 2, bidirectional=True)),
    ],
)
def test_attributes_of_torchs_layer(layer_class, peer, bias):
    peer = type(peer)(3, 5, 2, bias=bias, bidirectional=True)
    ours = layer_class(3, 5, 2, bias=bias, bidirectional=True)
    for name in (*nn.RNNBase.__constants__, "training"):
        assert getattr(ours, name) == getattr(peer, name), name
    for found, expected in zip(ours.all_weights, peer.all_weights, strict=True):
        assert [w.shape for w in found] == [w.shape for w in expected]
        assert all(isinstance(w, nn.Parameter) for w in found)
    assert ours.all_weights[3][1] is ours.weight_hh_l1_reverse
    assert len(ours._flat_weights) == len(peer._flat_weights)
    own = {id(p) for p in ours.parameters()}
    for weight in ours._flat_weights:
        assert id(weight) in own or (not weight.requires_grad and not weight.any())


def test_mode_of_a_relu_rnn():
    assert (
        rbn.BatchNormRNN(3, 4, nonlinearity="relu").mode == nn.RNN(3, 4, nonlinearity="relu").mode
    )


def test_all_weights_are_those_of_torchs_operator():
    _, ours = pair({"input_size": 3, "hidden_size": 4, "num_layers": 2})
    x, states = torch.randn(5, 2, 3).double(), (torch.zeros(2, 2, 4).double(),) * 2
    expected = torch.lstm(x, states, ours._flat_weights, True, 2, 0.0, False, False, False)
    torch.testing.assert_close(flat(ours(x)), list(expected), rtol=1e-12, atol=1e-13)


def test_state_dicts_of_torch_load_everywhere():
    peer = nn.LSTM(3, 4, 2)
    both = peer.bias_ih_l1 + peer.bias_hh_l1
    for layer_class in (rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM):
        ours = nn.Sequential(layer_class(3, 4, 2))
        state = nn.Sequential(peer).state_dict()
        result = ours.load_state_dict(state, strict=False)
        assert not result.unexpected_keys
        assert not [name for name in result.missing_keys if "bias" in name or "weight" in name]
        torch.testing.assert_close(ours[0].bias_l1, both, rtol=0, atol=0)
        assert torch.equal(ours[0].weight_hh_l1, peer.weight_hh_l1)
        assert "0.bias_ih_l1" in state  # the caller's dict does not change
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict(state)
    x = torch.randn(5, 2, 3)
    ours = rbn.LSTM(3, 4, 2)
    ours.load_state_dict(peer.state_dict(), strict=False)  # the rest stays zero: the same network
    torch.testing.assert_close(ours(x)[0], peer(x)[0], rtol=1e-5, atol=1e-6)
    cell, peer_cell = rbn.LSTMCell(3, 4, cell_bias=False, initial_state="zeros"), nn.LSTMCell(3, 4)
    cell.load_state_dict(peer_cell.state_dict())
    torch.testing.assert_close(cell(x[0]), peer_cell(x[0]), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="bias_ih_l0"):
        rbn.LSTM(3, 4, 2, bias=False).load_state_dict(peer.state_dict())
