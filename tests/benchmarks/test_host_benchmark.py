"""How much the host does around a GPU kernel, counted."""

import pytest
import torch

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

# As counted with torch 2.13, and room for what another version may do differently. More than that
# is time that a small layer waits for the host.
MOST = {
    (rbn.LSTM, 1): {"forward": 13, "forward and backward": 35, "inference": 13},
    (rbn.LSTM, 2): {"forward": 33, "forward and backward": 80, "inference": 33},
    (rbn.BatchNormLSTM, 1): {"forward": 20, "forward and backward": 46, "inference": 13},
    (rbn.BatchNormLSTM, 2): {"forward": 49, "forward and backward": 112, "inference": 42},
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
