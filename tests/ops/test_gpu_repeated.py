"""Launches of a compiled kernel again, with other numbers."""

import pytest

pytest.importorskip("triton")

import torch

from rbn.ops.gpu import repeated
from rbn.ops.gpu.repeated import Repeated


class Compiled:
    """What Triton gives for a launch: it can be launched again, by `compiled[grid](...)`."""

    packed_metadata = ()

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """A Triton function with two tensors, two numbers and two compile-time arguments."""

    arg_names = ("a", "b", "t", "rate", "UNITS", "SAVE")

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, []

    def __getitem__(self, grid):
        def launch(*arguments, **flags):
            self.calls.append((grid, arguments, flags))
            return self.compiled

        return launch


@pytest.mark.parametrize("takes_all", [True, False])
def test_triton_looks_at_the_first_launch_alone(takes_all, monkeypatch):
    monkeypatch.setattr(repeated, "_TAKES_ALL", takes_all)
    kernel = Kernel(Compiled())
    a, b = torch.ones(3), torch.ones(4)
    flags = {"SAVE": True, "UNITS": 8, "num_warps": 4}
    step = Repeated(kernel, (7,), [a, b], flags)
    for t in range(3):
        step(t, 0.5)
    assert kernel.calls == [((7,), (a, b, 0, 0.5), flags)]
    rest = (8, True) if takes_all else ()
    addresses = (a.data_ptr(), b.data_ptr())
    assert kernel.compiled.calls == [((7, 1, 1), (*addresses, t, 0.5, *rest)) for t in (1, 2)]


def test_the_interpreter_compiles_nothing():
    kernel = Kernel(None)
    step = Repeated(kernel, (2, 3), [torch.ones(1)] * 2, {"SAVE": True, "UNITS": 8})
    step(0, 0.5)
    step(1, 0.5)
    assert [call[1][2] for call in kernel.calls] == [0, 1]
