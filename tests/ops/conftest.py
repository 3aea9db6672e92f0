"""Cards that tests without a GPU have in common."""

import types

import pytest
import torch


@pytest.fixture
def hopper(monkeypatch):
    """An H200, as far as the choice of kernels looks at it."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from rbn.ops.gpu import cuda_lstm, wide_lstm

    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    caches = (wide_lstm._choose, cuda_lstm._has_room)
    for module in (wide_lstm, cuda_lstm):
        monkeypatch.setattr(module, "shared_limit", lambda device: 227 * 1024)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
