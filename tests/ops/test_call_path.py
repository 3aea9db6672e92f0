"""A layer's call reaches the kernel through at most 9 stack frames and 10 files."""

import inspect
from pathlib import Path

import pytest
import torch

import rbn
from rbn.nn.layers import Layers
from rbn.ops.cpu import compiled_lstm

PACKAGE = str(Path(rbn.__file__).parent)
FRAMES, FILES = 9, 10
KERNELS = ("parts.py", "input_moments.py", "row_sums.py")  # files of Triton kernels


class Reached(Exception):
    """Raised in place of a kernel; its frames are those of the package, innermost first."""

    def __init__(self):
        self.frames = []
        for info in inspect.stack()[1:]:
            if info.filename.startswith(PACKAGE):
                self.frames.append((info.filename, info.function))
            if info.frame.f_code is Layers.forward.__code__:
                return


def reach(*args, **kwargs):
    raise Reached


def check(layer, x):
    with pytest.raises(Reached) as raised:
        layer(x)
    frames = raised.value.frames
    assert frames[-1][1] == "forward"
    assert len(frames) <= FRAMES, frames
    assert len({filename for filename, _ in frames}) <= FILES, frames


def test_on_a_cpu(monkeypatch):
    if compiled_lstm.load() is None:
        pytest.skip("the CPU kernel is not built")

    class Library:
        rbn_lstm_forward_steps = staticmethod(reach)
        rbn_panel_lanes = staticmethod(lambda: 0)  # products by PyTorch

    monkeypatch.setattr(compiled_lstm, "load", Library)
    check(rbn.BatchNormLSTM(3, 8), torch.randn(4, 5, 3))


def test_step_by_step(monkeypatch):
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from rbn.ops.gpu.lstm.steps import step_launches

    monkeypatch.setattr(step_launches, "RepeatedLaunch", reach)
    with rbn.backend("gpu"):
        if torch.cuda.is_available():
            check(rbn.BatchNormLSTM(3, 8).cuda(), torch.randn(4, 3000, 3, device="cuda"))
        else:
            check(rbn.BatchNormLSTM(3, 8), torch.randn(4, 5, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden", [64, 600])
def test_in_cuda(monkeypatch, hidden):
    from rbn.ops.gpu.runtime import driver

    layer, x = rbn.BatchNormLSTM(3, hidden).cuda(), torch.randn(4, 48, 3, device="cuda")
    layer(x)  # compiles
    monkeypatch.setattr(driver.Kernel, "launch", reach)
    check(layer, x)


def test_functions_have_few_parameters():
    """No function of the operators has more than 12 arguments, except kernels and public ones."""
    import ast

    too_many = []
    for path in (Path(PACKAGE) / "ops").rglob("*.py"):
        if "kernel" in path.name or path.name in ("functional.py", "triton_functions.py"):
            continue
        if "reference" in path.parts or path.name in (
            "parts.py",
            "input_moments.py",
            "row_sums.py",
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                if count > 12:
                    too_many.append((str(path), node.name, count))
    assert not too_many
