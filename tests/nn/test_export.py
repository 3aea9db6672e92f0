"""Layers exported with `torch.export`, for any batch size and sequence length."""

import io

import pytest
import torch
from torch.export import Dim, export, load, save

import rbn
from rbn.models import LanguageModel

LAYERS = [rbn.BatchNormLSTM, rbn.LSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
CASES = [
    (rbn.BatchNormLSTM, {}),
    (rbn.BatchNormLSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    (rbn.LSTM, {"initial_state": "zeros"}),
    (rbn.LayerNormLSTM, {"bidirectional": True}),
    (rbn.BatchNormRNN, {}),
    (rbn.BatchNormGRU, {"bidirectional": True}),
]
# Steps, rows; the layers have 6 units.
SIZES = [(5, 2), (25, 3), (20, 20), (1, 1), (2, 1), (1, 3), (4, 6), (6, 24)]
ANY = {0: Dim.AUTO, 1: Dim.AUTO}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
FROM_2_8 = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8),
    reason="before 2.8 torch.export takes sizes and other integers for constants",
)


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """float32 products on a GPU do not use tf32, so that only the order of sums differs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def trained(make, device, **options):
    """A layer with statistics for 20 steps, in eval()."""
    torch.manual_seed(0)
    layer = make(3, 6, **options).to(device)
    for _ in range(2):
        layer(torch.randn(20, 20, 3, device=device))
    return layer.eval()


def random_input(layer, steps, rows):
    size = (rows, steps) if layer.batch_first else (steps, rows)
    return torch.randn(*size, 3, device=next(layer.parameters()).device)


# Raised by `load` of some PyTorch versions, about how it reads the file.
@FROM_2_8
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "options"), CASES)
def test_one_program_for_all_sizes(make, options, device):
    """With fewer steps than there are statistics for, as many, and more; read from a file."""
    layer = trained(make, device, **options)
    program = export(layer, (random_input(layer, 10, 4),), dynamic_shapes=(ANY,))
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    run = load(file).module()
    for steps, rows in SIZES:
        x = random_input(layer, steps, rows)
        torch.testing.assert_close(run(x), layer(x))


@FROM_2_8
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("make", "options"), CASES)
def test_sequences_of_different_length(make, options, device):
    layer = trained(make, device, **options)
    lengths = torch.tensor([3, 9, 5, 1], device=device)
    program = export(
        layer,
        (random_input(layer, 9, 4),),
        {"lengths": lengths},
        dynamic_shapes={"input": ANY, "lengths": {0: Dim.AUTO}},
    )
    for steps in (9, 25):
        lengths = torch.tensor([steps, 1, 2, 2, steps - 1], device=device)
        x = random_input(layer, steps, 5)
        found = program.module()(x, lengths=lengths)
        torch.testing.assert_close(found, layer(x, lengths=lengths))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", LAYERS)
def test_a_fixed_shape(make, strict):
    """`strict`, the default before torch 2.7, traces Python's bytecode."""
    layer = trained(make, "cpu")
    x = torch.randn(25, 4, 3)
    found = export(layer, (x,), strict=strict).module()(x)
    torch.testing.assert_close(found, layer(x))


CELLS = [
    rbn.BatchNormLSTMCell,
    rbn.LSTMCell,
    rbn.LayerNormLSTMCell,
    rbn.BatchNormRNNCell,
    rbn.BatchNormGRUCell,
]


@FROM_2_8
@pytest.mark.parametrize("example", [0, 1, 4, 9])
@pytest.mark.parametrize("make", CELLS)
def test_a_cell_for_every_step(make, example):
    """With statistics for five steps: the first, the last and later ones."""
    torch.manual_seed(0)
    cell = make(3, 6)
    for step in range(5):
        cell(torch.randn(8, 3), step=step)
    cell.eval()
    one = make in (rbn.BatchNormRNNCell, rbn.BatchNormGRUCell)

    def states(rows):
        return torch.randn(rows, 6) if one else (torch.randn(rows, 6), torch.randn(rows, 6))

    rows = {0: Dim.AUTO}
    shapes = (rows, rows if one else (rows, rows), Dim.AUTO)
    run = export(cell, (torch.randn(4, 3), states(4), example), dynamic_shapes=shapes).module()
    for step in range(8):
        for batch in (1, 3):
            x, hx = torch.randn(batch, 3), states(batch)
            torch.testing.assert_close(run(x, hx, step), cell(x, hx, step))


@FROM_2_8
@pytest.mark.parametrize("options", [{}, {"max_length": 25}, {"input_stats": "sequence"}])
def test_a_piece_from_every_start(options):
    layer = trained(rbn.BatchNormLSTM, "cpu", **options)
    program = export(
        layer,
        (random_input(layer, 3, 4),),
        {"start": 6},
        dynamic_shapes={"input": ANY, "start": Dim.AUTO},
    )
    run = program.module()
    for start in range(28):
        for steps in (1, 2, 25):
            x = random_input(layer, steps, 2)
            torch.testing.assert_close(run(x, start=start), layer(x, start=start))


@FROM_2_8
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("make", LAYERS)
def test_without_operators_of_our_own(make):
    """For a fixed number of steps, and for backends that only support PyTorch's operators."""
    layer = trained(make, "cpu")
    x = random_input(layer, 5, 4)
    with rbn.backend("reference"):
        program = export(layer, (x,), dynamic_shapes=({1: Dim.AUTO},))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "rbn" in name]
    torch.testing.assert_close(program.module()(x), layer(x))
    x = random_input(layer, 5, 7)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("make", "options"), CASES)
def test_by_the_operators_of_a_gpu(make, options):
    """On the CPU in Triton's interpreter, if there is no other way."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    layer = trained(make, "cuda" if torch.cuda.is_available() else "cpu", **options)
    with rbn.backend("gpu"):
        program = export(layer, (random_input(layer, 10, 4),), dynamic_shapes=(ANY,))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert [name for name in called if name.startswith("rbn.gpu_")]
    for steps, rows in [(1, 1), (3, 2)]:
        x = random_input(layer, steps, rows)
        torch.testing.assert_close(program.module()(x), layer(x))


@FROM_2_8
@pytest.mark.parametrize("device", DEVICES)
def test_a_language_model(device):
    model = LanguageModel(rbn.BatchNormLSTM(5, 6)).to(device)
    model(torch.randint(5, (20, 20), device=device))
    model.eval()
    symbols = torch.randint(5, (10, 4), device=device)
    program = export(model, (symbols,), dynamic_shapes=(ANY,))
    for steps, rows in SIZES:
        symbols = torch.randint(5, (steps, rows), device=device)
        torch.testing.assert_close(program.module()(symbols), model(symbols))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [*LAYERS, *CELLS])
def test_torchscript_is_refused(make):
    """The module itself and a model that contains it; nothing is left behind."""
    module = make(3, 6)
    x = torch.randn(4, 3) if make in CELLS else torch.randn(5, 4, 3)
    for model in (module, torch.nn.Sequential(module)):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.script.*torch\.export"):
            torch.jit.script(model)
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.*torch\.export"):
            torch.jit.trace(model, x)
    module(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_older_onnx_exporter_is_refused():
    pytest.importorskip("onnx", reason="torch.onnx.export needs onnx")
    layer = trained(rbn.BatchNormLSTM, "cpu")
    with pytest.raises(RuntimeError, match=r"torch\.onnx\.export\(\.\.\., dynamo=True\)"):
        torch.onnx.export(layer, (random_input(layer, 5, 4),), io.BytesIO(), dynamo=False)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch 2.7 or newer")
def test_an_untrained_layer_is_refused():
    with pytest.raises(RuntimeError, match="no population statistics"):
        torch.export.export(rbn.BatchNormLSTM(3, 4).eval(), (torch.randn(5, 6, 3),))
