"""What tests of the GPU's kernels have in common, with and without a card."""

import types

import pytest
import torch


@pytest.fixture
def hopper(monkeypatch):
    """An H200, as far as the choice of kernels looks at it."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from rbn.ops.gpu.lstm import cuda_kernels
    from rbn.ops.gpu.lstm.grid import grid_kernels
    from rbn.ops.gpu.runtime import nvrtc

    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    caches = (grid_kernels._choose, cuda_kernels._has_room)
    monkeypatch.setattr(grid_kernels, "clusters", lambda size, device: 15 * (8 // size))
    for module in (grid_kernels, cuda_kernels):
        monkeypatch.setattr(module, "shared_limit", lambda device: 227 * 1024)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that run."""
    from rbn.ops.gpu.lstm import cuda_kernels

    found = []
    for name in ("forward", "backward"):
        run = getattr(cuda_kernels, name)

        def counted(*args, _run=run, _name=name):
            found.append(_name)
            return _run(*args)

        monkeypatch.setattr(cuda_kernels, name, counted)
    return found


@pytest.fixture
def noting(monkeypatch):
    """What notes the runs of a family's kernels, by the name of the function that runs them."""
    from rbn.ops.gpu.lstm import cuda_kernels

    def note(name, what=lambda direction, call: direction):
        found, run = [], getattr(cuda_kernels, name)

        def noted(direction, call, *rest):
            run(direction, call, *rest)
            found.append(what(direction, call))

        monkeypatch.setattr(cuda_kernels, name, noted)
        return found

    return note


@pytest.fixture
def drive(monkeypatch):
    """What puts functions of the test in the place of CUDA's driver."""
    from rbn.ops.gpu.runtime import driver

    def given(**functions):
        silent = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")
        cuda = types.SimpleNamespace(**dict.fromkeys(silent, lambda *args: 0) | functions)
        monkeypatch.setattr(driver, "_driver", lambda: cuda)
        monkeypatch.setattr(driver, "enter", lambda: None)

    return given


@pytest.fixture
def in_memory(monkeypatch):
    """Small layers, too, run the kernels whose blocks meet in memory, as on cards before Hopper."""
    from rbn.ops.gpu.lstm.cluster import cluster_kernels

    monkeypatch.setattr(cluster_kernels, "choose", lambda wx: None)
