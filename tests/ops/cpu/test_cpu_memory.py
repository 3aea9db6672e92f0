"""Large buffers are reused and request huge pages; results do not depend on it."""

import gc
import mmap
import sys

import pytest
import torch

from rbn.ops.cpu import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the pool")
LIKE = torch.empty(0)


@pytest.fixture
def pool(monkeypatch):
    gc.collect()
    monkeypatch.setattr(memory, "_pool", memory.Pool())
    return memory._pool


def test_a_freed_buffer_is_used_again(pool):
    first, second = memory.empty(3000, 1000, LIKE), memory.empty(3000, 1000, LIKE)
    assert first.shape == (3000, 1000)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.data_ptr() % 64 == 0
    first.fill_(1)
    view, used = first[5:], pool.used
    assert used == pool.peak >= 2 * 3000 * 1000 * 4
    del first
    assert pool.used == used  # used by the view
    third = memory.empty(3000, 1000, LIKE).fill_(2)
    assert view.sum() == 2995 * 1000
    del third, view
    assert pool.used == used // 2
    assert len(pool.free) == 2
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = 3000 * 4 // dtype.itemsize
        again = memory.empty(rows, 1000, LIKE.to(dtype))
        assert again.dtype == dtype
        assert again.shape == (rows, 1000)
        assert len(pool.free) == 1
        del again


def test_no_more_is_kept_than_was_in_use_at_once(pool):
    for rows in range(2000, 20_000, 1500):  # too different for the previous one to fit
        memory.empty(rows, 1000, LIKE)
        assert pool.used == 0
        assert sum(map(len, pool.free)) <= pool.peak
    assert len(pool.free) == 1


def test_small_buffers_and_other_devices_have_no_part(pool):
    memory.empty(100, 100, LIKE)
    memory.empty(3000, 1000, torch.empty(0, device="meta"))
    assert pool.peak == 0


def test_a_system_that_refuses(pool, monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, *args):
            raise OSError

    monkeypatch.setattr(mmap, "mmap", Refuses)
    assert memory.empty(3000, 1000, LIKE).fill_(1).sum() == 3000 * 1000
    assert len(pool.free) == 1

    def none(*args, **options):
        raise OSError

    monkeypatch.setattr(mmap, "mmap", none)
    assert memory.empty(9000, 1000, LIKE).fill_(1).sum() == 9000 * 1000
    assert len(pool.free) == 1
