"""Large buffers ask for large pages; nothing depends on the answer."""

import mmap

import pytest
import torch

from rbn.ops.cpu import memory


@pytest.fixture
def calls(monkeypatch):
    """The ranges that were asked for, all of which are refused."""
    found = []

    def madvise(start, length, advice):
        found.append((start, length, advice))
        return -1

    monkeypatch.setattr(memory, "_madvise", lambda: madvise)
    return found


def test_a_large_buffer_asks_within_its_bounds(calls):
    buffer = memory.empty(3000, 1000, torch.empty(0))
    ((start, length, advice),) = calls
    first, size = buffer.data_ptr(), 3000 * 1000 * 4
    assert buffer.shape == (3000, 1000)
    assert first <= start < first + 2**21
    assert first + size - 2**21 < start + length <= first + size
    assert start % 2**21 == 0
    assert advice == mmap.MADV_HUGEPAGE
    buffer.fill_(1)  # a refusal leaves it as good as any
    assert buffer.sum() == 3000 * 1000


def test_small_buffers_and_other_devices_do_not_ask(calls):
    memory.empty(100, 100, torch.empty(0))
    memory.empty(3000, 1000, torch.empty(0, device="meta"))
    assert calls == []


def test_no_such_call(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert memory.empty(3000, 1000, torch.empty(0, dtype=torch.float64)).dtype == torch.float64


def test_the_systems_call():
    memory._madvise.cache_clear()
    buffer = memory.empty(3000, 1000, torch.empty(0)).fill_(2)
    assert buffer.sum() == 2 * 3000 * 1000
