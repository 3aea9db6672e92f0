"""`torch.onnx.export` of layers, cells and models, run by ONNX Runtime."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import rbn
from rbn import ops
from rbn.ops.cpu import scan
from rbn.ops.definition import GRU, LSTM, RNN, LSTMArguments, RNNArguments
from rbn.ops.types import Statistics

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
EXPORTER = pytest.mark.skipif(RELEASE < (2, 8), reason="torch.onnx.export of a scan needs 2.8")
# Older exporters treat a size of 1 in the example as a constant.
ONE = 1 if RELEASE >= (2, 13) else 2
pytestmark = [
    # From the exporter.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
ANY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
SIZES = [(10, 4), (25, 3), (1, 1), (2, 1), (20, 1), (1, 3)]  # steps, rows
# Rounding of float32, which a few steps with gammas of 1 amplify.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module", autouse=True)
def ort():
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason=f"torch.onnx.export needs {name}")
    return pytest.importorskip("onnxruntime", reason="runs what was exported")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def trained(make, size=3, **options):
    """A layer with statistics for 20 steps, in eval()."""
    layer = make(size, 6, **options)
    for _ in range(3):
        layer(torch.randn(20, 20, size))
    return layer.eval()


def exact(module):
    """The module in float64, with the plain equations."""
    module = copy.deepcopy(module).double()

    def run(*args, **kwargs):
        def wide(value):
            if isinstance(value, (tuple, list)):
                return tuple(map(wide, value))
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.double() if floating else value

        with rbn.backend("reference"), torch.no_grad():
            return module(*wide(args), **kwargs)

    return run


def flat(values):
    if isinstance(values, (tuple, list)):
        return [one for value in values for one in flat(value)]
    return [values]


def onnx(model, args, kwargs=None, *, dynamic_shapes):
    return torch.onnx.export(
        model, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False
    )


def session_of(ort, program):
    return ort.InferenceSession(program.model_proto.SerializeToString())


def assert_same(session, expected, *inputs):
    names = [one.name for one in session.get_inputs()]
    values = [torch.as_tensor(value).numpy() for value in flat(inputs)]
    found = session.run(None, dict(zip(names, values, strict=True)))
    for one, other in zip(found, flat(expected), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other.float(), **CLOSE)


CASES = [
    (rbn.BatchNormLSTM, {"ablations": ["joint_terms", "pass_normalized_cell"]}),
    (rbn.LSTM, {"initial_state": "zeros", "cell_bias": True}),
    (rbn.LayerNormLSTM, {"bidirectional": True, "bias": False}),
    (rbn.BatchNormRNN, {"zoneout": 0.1, "nonlinearity": "relu"}),
    (rbn.BatchNormGRU, {"zoneout": 0.1}),
]


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
@pytest.mark.parametrize(("make", "options"), CASES)
def test_a_layer(ort, make, options):
    """Shorter sequences than there are statistics for, longer ones, and single steps."""
    layer = trained(make, **options)
    session = session_of(ort, onnx(layer, (torch.randn(10, 4, 3),), dynamic_shapes=(ANY,)))
    for steps, rows in SIZES:
        x = torch.randn(steps, rows, 3)
        assert_same(session, exact(layer)(x), x)


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
def test_lengths(ort):
    layer = trained(rbn.BatchNormLSTM, bidirectional=True, batch_first=True, max_length=20)
    program = onnx(
        layer,
        (torch.randn(4, 10, 3),),
        {"lengths": torch.tensor([3, 10, 1, 7])},
        dynamic_shapes={"input": ANY, "lengths": {0: Dim.DYNAMIC}},
    )
    session = session_of(ort, program)
    for steps, rows in SIZES:
        x, lengths = torch.randn(rows, steps, 3), torch.randint(1, steps + 1, (rows,))
        expected = exact(layer)(x, lengths=lengths)
        for row, length in enumerate(lengths):
            x[row, length:] = torch.nan
        assert_same(session, expected, x, lengths)


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
def test_start_and_states(ort):
    """Pieces of a sequence; the example is one step of one sequence."""
    layer = trained(rbn.BatchNormLSTM)

    def states(rows):
        return torch.randn(1, rows, 6), torch.randn(1, rows, 6)

    rows = {1: Dim.DYNAMIC}
    program = onnx(
        layer,
        (torch.randn(ONE, ONE, 3), states(ONE)),
        {"start": 3},
        dynamic_shapes={"input": ANY, "hx": (rows, rows), "start": Dim.DYNAMIC},
    )
    session = session_of(ort, program)
    for start, steps, batch in [
        (0, 1, 1),
        (0, 30, 3),
        (1, 2, 3),
        (19, 1, 1),
        (19, 3, 2),
        (40, 2, 1),
    ]:
        x, hx = torch.randn(steps, batch, 3), states(batch)
        assert_same(session, exact(layer)(x, hx, start=start), x, hx, start)


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
@pytest.mark.parametrize("make", [rbn.BatchNormRNNCell, rbn.BatchNormGRUCell])
def test_a_cell_for_every_step(ort, make):
    cell = make(3, 6)
    for step in range(5):
        cell(torch.randn(8, 3), step=step)
    cell.eval()
    rows = {0: Dim.DYNAMIC}
    example = (torch.randn(4, 3), torch.randn(4, 6), 2)
    session = session_of(ort, onnx(cell, example, dynamic_shapes=(rows, rows, Dim.DYNAMIC)))
    for step in range(8):
        for batch in (1, 3):
            x, hx = torch.randn(batch, 3), torch.randn(batch, 6)
            assert_same(session, exact(cell)(x, hx, step), x, hx, step)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.lstm = rbn.BatchNormLSTM(3, 6, num_layers=2, batch_first=True, input_stats="sequence")
        self.linear = nn.Linear(6, 2)

    def forward(self, tokens):
        return self.linear(self.lstm(self.embedding(tokens))[0])


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
def test_a_model(ort, tmp_path):
    """Written to a file that passes ONNX's check, with named dimensions."""
    import onnx as format

    model = Tagger()
    for _ in range(2):
        model(torch.randint(7, (8, 12)))
    model.eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        (torch.randint(7, (ONE, 10)),),
        file,
        dynamic_shapes=({0: "batch", 1: "time"},),
        dynamo=True,
        verbose=False,
    )
    format.checker.check_model(file)
    session = ort.InferenceSession(file)
    assert session.get_inputs()[0].shape == ["batch", "time"]
    for steps, rows in SIZES:
        tokens = torch.randint(7, (rows, steps))
        assert_same(session, exact(model)(tokens), tokens)


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
def test_symbols_and_steps_without_an_estimate(ort):
    """Each such step uses the statistics of the previous one."""
    layer = trained(rbn.BatchNormLSTM, 5)
    for statistics in (layer.stats_x_l0, layer.stats_h_l0, layer.stats_c_l0):
        statistics.count[[0, 1, 7, 8, 19]] = 0
    session = session_of(ort, onnx(layer, (torch.randint(5, (10, 4)),), dynamic_shapes=(ANY,)))
    for steps, rows in SIZES:
        symbols = torch.randint(5, (steps, rows))
        assert_same(session, exact(layer)(symbols), symbols)


@pytest.mark.slow
@pytest.mark.no_cover
@EXPORTER
@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize("options", [{}, {"zoneout": (0.1, 0.1)}])
def test_not_while_training(options):
    make = rbn.LSTM if options else rbn.BatchNormLSTM
    layer = trained(make, **options).train()
    with pytest.raises(Exception, match=r"call model.eval\(\) first"):
        onnx(layer, (torch.randn(10, 4, 3),), dynamic_shapes=(ANY,))


# The scan itself, which runs without an exporter --------------------------------------------------

T, B, H = 7, 3, 4


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def population(rows, gates, cell):
    found = []
    for features in (gates * H, gates * H, *([H] if cell else [])):
        found += [double(rows, features), double(rows, features).square()]
    return found


def by_reference(function, *arguments, **options):
    with ops.backend("reference"):
        return function(*arguments, **options)


@EXPORTER
@pytest.mark.parametrize("lengths", [None, [7, 1, 4]])
@pytest.mark.parametrize("norm", ["none", "batch", "layer", "joint", "raw"])
def test_scan_of_an_lstm(norm, lengths):
    wx, weight, bias = double(T, B, 4 * H), double(4 * H, H), double(4 * H)
    gammas = [None if norm == "joint" else double(4 * H), double(4 * H), double(H)]
    beta, h0, c0 = double(H), double(B, H), double(B, H)
    lengths = None if lengths is None else torch.tensor(lengths)
    options = {"lengths": lengths, "zoneout_c": 0.2, "zoneout_h": 0.3}
    given, statistics = [], None
    if norm == "none":
        expected = by_reference(ops.lstm, wx, weight, bias, beta, h0, c0, **options)
        gammas = [None] * 3
    elif norm == "layer":
        expected = by_reference(
            ops.ln_lstm, wx, weight, bias, *gammas, beta, h0, c0, eps=0.1, **options
        )
    else:
        given = population(5, 4, True)
        if norm == "raw":
            gammas[2] = None
        statistics = Statistics(*given)
        options |= {"population": statistics, "pass_normalized_cell": norm == "joint", "eps": 0.1}
        expected = by_reference(ops.bn_lstm, wx, weight, bias, *gammas, beta, h0, c0, **options)
    arguments = LSTMArguments(
        *(wx, None, weight, bias, *gammas, beta, h0, c0, lengths),
        rate_c=0.2,
        rate_h=0.3,
        norm="batch" if given else norm,
        eps=0.1,
        pass_normalized_cell=norm == "joint",
    )
    found = scan.lstm(*LSTM.with_population(arguments, statistics))
    torch.testing.assert_close(found[:3], expected[:3])


@EXPORTER
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_scan_of_a_simple_rnn(nonlinearity):
    wx, weight, gammas, h0 = double(T, B, H), double(H, H), [double(H), double(H)], double(B, H)
    given, lengths = population(9, 1, False), torch.tensor([2, 7, 5])
    expected = by_reference(
        ops.bn_rnn,
        wx,
        weight,
        None,
        *gammas,
        h0,
        nonlinearity=nonlinearity,
        lengths=lengths,
        population=Statistics(*given),
        zoneout_h=0.1,
    )
    arguments = RNNArguments(
        *(wx, None, weight, None, *gammas, h0, None, lengths),
        **dict(zip(RNN.moments, given, strict=True)),
        rate_h=0.1,
        eps=1e-5,
        nonlinearity=nonlinearity,
    )
    found = scan.rnn(*arguments)
    torch.testing.assert_close(found[:2], expected[:2])


@EXPORTER
@pytest.mark.parametrize("shifted", [True, False])
def test_scan_of_a_gru(shifted):
    wx, weight, h0 = double(T, B, 3 * H), double(3 * H, H), double(B, H)
    gammas, bias = [double(3 * H), double(3 * H)], double(3 * H) if shifted else None
    beta = double(H) if shifted else None
    given, lengths = population(9, 3, False), torch.tensor([2, 7, 5])
    options = {"lengths": lengths, "population": Statistics(*given), "zoneout_h": 0.1}
    expected = by_reference(ops.bn_gru, wx, weight, bias, *gammas, h0, beta, **options)
    arguments = RNNArguments(
        *(wx, None, weight, bias, *gammas, h0, beta, lengths),
        **dict(zip(GRU.moments, given, strict=True)),
        rate_h=0.1,
        eps=1e-5,
        nonlinearity="gates",
    )
    torch.testing.assert_close(scan.rnn(*arguments)[:2], expected[:2])
