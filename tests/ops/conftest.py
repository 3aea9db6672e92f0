"""What tests of the GPU's kernels have in common, with and without a card."""

import types

import pytest
import torch


@pytest.fixture
def hopper(monkeypatch):
    """An H200, as far as the choice of kernels looks at it."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from rbn.ops.gpu import cuda_lstm, nvrtc, wide_lstm

    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    caches = (wide_lstm._choose, cuda_lstm._has_room)
    monkeypatch.setattr(wide_lstm, "clusters", lambda size, device: 15 * (8 // size))
    for module in (wide_lstm, cuda_lstm):
        monkeypatch.setattr(module, "shared_limit", lambda device: 227 * 1024)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that run."""
    from rbn.ops.gpu import cuda_lstm

    found = []
    for name in ("forward", "backward"):
        run = getattr(cuda_lstm, name)

        def counted(*args, _run=run, _name=name):
            found.append(_name)
            return _run(*args)

        monkeypatch.setattr(cuda_lstm, name, counted)
    return found


@pytest.fixture
def noting(monkeypatch):
    """What notes the runs of a family's kernels, by the name of the function that runs them."""
    from rbn.ops.gpu import cuda_lstm

    def note(name, what=lambda direction, call: direction):
        found, run = [], getattr(cuda_lstm, name)

        def noted(direction, call, *rest):
            run(direction, call, *rest)
            found.append(what(direction, call))

        monkeypatch.setattr(cuda_lstm, name, noted)
        return found

    return note


@pytest.fixture
def drive(monkeypatch):
    """What puts functions of the test in the place of CUDA's driver."""
    from rbn.ops.gpu import driver

    def given(**functions):
        silent = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")
        cuda = types.SimpleNamespace(**dict.fromkeys(silent, lambda *args: 0) | functions)
        monkeypatch.setattr(driver, "_driver", lambda: cuda)
        monkeypatch.setattr(driver, "enter", lambda: None)

    return given


@pytest.fixture
def in_memory(monkeypatch):
    """Small layers, too, run the kernels whose blocks meet in memory, as on cards before Hopper."""
    from rbn.ops.gpu import small_lstm

    monkeypatch.setattr(small_lstm, "choose", lambda wx: None)
