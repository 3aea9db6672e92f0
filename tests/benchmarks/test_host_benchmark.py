"""Host overhead around a GPU kernel: how much, and with which addresses."""

import importlib

import pytest
import torch

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

# Counts with torch 2.13, plus some slack for other versions. Anything beyond that is time that a
# small layer waits for the host.
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


USERS = ("lstm.backward", "lstm.forward", "lstm.prepare", "running_average", "runtime.launch_cache")


@pytest.fixture
def launches(monkeypatch):
    """Every launch whose arguments are cached, as (the first launch's arguments, addresses)."""
    modules = [importlib.import_module(f"rbn.ops.gpu.{name}") for name in USERS]
    original, made = modules[-1].launch_by_key, []

    def launch_by_key(kernel, key, addresses, arguments, like):
        made.append((id(kernel), key, arguments(), addresses))
        original(kernel, key, addresses, arguments, like)

    for module in modules:
        if hasattr(module, "launch_by_key"):
            monkeypatch.setattr(module, "launch_by_key", launch_by_key)
    return made


def is_read(position, tensor, flags):
    """Whether the kernel reads this tensor: not if it is empty, or if it has unraised variances."""
    return tensor.numel() > 0 and not (flags.get("RAISE") is False and position in (2, 3, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for the CPU")
@pytest.mark.parametrize("kernels", ["portable", "cluster"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"bias": False}, {"initial_state": "zeros"}, {"num_layers": 2}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("layer", [rbn.LSTM, rbn.BatchNormLSTM])
def test_a_repeated_launch_gets_what_the_first_got(
    layer, options, features, dtype, kernels, bench, launches
):
    """Later launches pass addresses, the first passes tensors: both must be the same memory."""
    host = bench("host")
    with host.stand_ins(kernels):
        for lengths in (None, torch.tensor([3, 1, 2])):
            network = layer(features, 8, **options).to(dtype)
            for _ in range(2):
                output, _ = network(torch.randn(3, 3, features, dtype=dtype), lengths=lengths)
                output.float().sum().backward()
    assert len(launches) > 8
    known = {}
    for kernel, key, (grid, tensors, numbers, flags), addresses in launches:
        assert len(tensors) == len(addresses)
        for position, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
            if is_read(position, tensor, flags):
                assert tensor.data_ptr() == address, position
        found = grid, numbers, flags, [tensor.dtype for tensor in tensors]
        assert known.setdefault((kernel, key), found) == found
