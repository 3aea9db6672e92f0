"""Runs a layer of the installed package, and checks that it uses the compiled kernel correctly.

A script, for environments without pytest: `python tests/check_wheel.py`.
"""

import copy

import torch

import rbn
from rbn.ops.cpu import compiled_lstm

assert compiled_lstm.load() is not None, f"no compiled kernel beside {compiled_lstm.__file__}"
torch.manual_seed(0)
layer, x = rbn.BatchNormLSTM(5, 7, 2, bidirectional=True), torch.randn(6, 3, 5)
exact = copy.deepcopy(layer).double()
output, _ = layer(x)
output.square().sum().backward()
with rbn.backend("reference"):
    expected, _ = exact(x.double())
    expected.square().sum().backward()
# float32 against float64: a few steps of normalization over three rows.
torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
for name, parameter in layer.named_parameters():
    gradient = exact.get_parameter(name).grad
    torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-3, atol=1e-4)
print(f"rbn {rbn.__version__} with torch {torch.__version__}: the compiled kernel works")
