"""How much the host does around a GPU kernel, counted."""

import pytest
import torch

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

# As counted with torch 2.13, and room for what another version may do differently. More than that
# is time that a small layer waits for the host.
MOST = {
    (rbn.LSTM, 1): {"forward": 18, "forward and backward": 42, "inference": 18},
    (rbn.LSTM, 2): {"forward": 37, "forward and backward": 85, "inference": 37},
    (rbn.BatchNormLSTM, 1): {"forward": 28, "forward and backward": 58, "inference": 18},
    (rbn.BatchNormLSTM, 2): {"forward": 58, "forward and backward": 123, "inference": 46},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what runs on the CPU")
@pytest.mark.parametrize(("layer", "directions"), MOST)
def test_operations_around_a_kernel(bench, layer, directions):
    host = bench("host")
    with host.stand_ins():
        found = {name: host.operations(call) for name, call in host.calls(layer, directions)}
    most = MOST[layer, directions]
    assert found.keys() == most.keys()
    for name, count in found.items():
        assert 10 < count <= most[name], f"{name}: {count}"
