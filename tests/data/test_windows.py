"""Windows of a stream, checked to the character."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbn.data import Windows
from rbn.data.epochs import epoch_generator

SIZES = [
    (7, 2, 1),
    (100, 7, 3),
    (101, 10, 4),
    (119, 10, 10),
    (64, 5, 11),
    (1000, 13, 76),
    (3, 2, 1),
]


def stream(length: int) -> torch.Tensor:
    """Every character encodes its position."""
    return torch.arange(length)


@pytest.mark.parametrize(("n", "length", "batch"), SIZES)
def test_batches_to_the_character(n: int, length: int, batch: int) -> None:
    windows = Windows(stream(n), length, batch, seed=3)
    assert windows.windows_per_epoch == (n - length + 1) // length
    assert windows.batches_per_epoch == windows.windows_per_epoch // batch
    for epoch in range(4):
        starts = windows.starts(epoch).tolist()
        offset = min(starts)
        assert sorted(starts) == list(range(offset, offset + len(starts) * length, length))
        assert max(starts) + length <= n
        for k in range(windows.batches_per_epoch):
            inputs, targets = windows.batch(epoch, k)
            assert inputs.shape == targets.shape == (length - 1, batch)
            assert inputs.dtype == targets.dtype == torch.int64
            for row in range(batch):
                start = starts[k * batch + row]
                assert inputs[:, row].tolist() == list(range(start, start + length - 1))
                assert targets[:, row].tolist() == list(range(start + 1, start + length))


@pytest.mark.parametrize("together", [1, 3, 5, 100])
def test_batches_are_the_same_however_many_are_gathered_at_once(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order: one epoch in order, backwards, or two epochs alternating."""
    one = Windows(stream(400), 7, 4, seed=2)
    assert one.batches_per_epoch == 14
    monkeypatch.setattr("rbn.data.windows._AT_ONCE", together * 7 * 4)
    other = Windows(stream(400), 7, 4, seed=2)
    asked = [(0, k) for k in range(14)] + [(1, k) for k in reversed(range(14))]
    for epoch, k in [*asked, (0, 3), (1, 3), (0, 4), (0, 13), (1, 13)]:
        starts = one.starts(epoch)[4 * k : 4 * k + 4]
        for windows in (one, other):
            inputs, targets = windows.batch(epoch, k)
            assert torch.equal(inputs, starts + torch.arange(6)[:, None])
            assert torch.equal(targets, inputs + 1)
            assert inputs.is_contiguous()


@pytest.mark.parametrize(("n", "length", "batch"), SIZES)
def test_every_character_at_most_once_an_epoch(n: int, length: int, batch: int) -> None:
    windows = Windows(stream(n), length, batch)
    seen = []
    for k in range(windows.batches_per_epoch):
        inputs, targets = windows.batch(0, k)
        seen += torch.cat([inputs[:1], targets]).flatten().tolist()
    assert len(seen) == len(set(seen)) == windows.batches_per_epoch * batch * length


def test_every_character_has_its_turn() -> None:
    for n in range(39, 50):
        windows = Windows(stream(n), 10, 1)
        seen = set()
        for epoch in range(100):
            starts = windows.starts(epoch)
            seen |= set((starts + torch.arange(10)[:, None]).flatten().tolist())
        assert seen == set(range(n))


def test_any_batch_again_without_those_before_it() -> None:
    one, other = (Windows(stream(1000), 10, 4, seed=7) for _ in range(2))
    ran = {
        (epoch, k): one.batch(epoch, k) for epoch in range(3) for k in range(one.batches_per_epoch)
    }
    for epoch, k in ((2, 5), (0, 0), (1, 23), (1, 23)):
        for a, b in zip(other.batch(epoch, k), ran[epoch, k], strict=True):
            assert torch.equal(a, b)


def test_epochs_and_seeds_differ() -> None:
    windows, other = Windows(stream(1000), 10, 4, seed=0), Windows(stream(1000), 10, 4, seed=1)
    cuts = [windows.starts(epoch) for epoch in range(30)]
    assert len({tuple(cut.tolist()) for cut in cuts}) == 30
    assert len({int(cut.min()) for cut in cuts}) > 5  # the offset changes, not only the order
    assert not torch.equal(windows.starts(0), other.starts(0))


def test_cut_is_the_same_on_every_machine() -> None:
    # A change here changes every training run.
    assert Windows(stream(60), 10, 1, seed=1).starts(2).tolist() == [29, 39, 9, 19, 49]


def test_from_all_over_the_text_for_evaluation() -> None:
    windows = Windows(stream(57), 10, 3, shuffle=False)
    assert windows.batches_per_epoch == 2
    first, second = windows.batch(0, 0)[0], windows.batch(0, 1)[0]
    assert first[0].tolist() == [0, 20, 40]
    assert second[0].tolist() == [10, 30]
    assert torch.equal(windows.batch(9, 1)[0], second)
    whole = Windows(stream(57), 57, 1, shuffle=False)
    assert whole.batch(0, 0)[1].flatten().tolist() == list(range(1, 57))


@given(n=st.integers(20, 3000), batch_size=st.integers(1, 40))
def test_every_window_once_in_batches_of_one_size(n: int, batch_size: int) -> None:
    windows = Windows(stream(n), 10, batch_size, shuffle=False)
    found = [windows.batch(0, k)[0][0] for k in range(windows.batches_per_epoch)]
    assert sorted(torch.cat(found).tolist()) == list(range(0, n - 9, 10))
    sizes = [len(batch) for batch in found]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_bytes_become_int64_on_the_streams_device() -> None:
    characters = torch.arange(256, dtype=torch.uint8).repeat(3)
    inputs, targets = Windows(characters, 100, 2).batch(0, 0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.device == characters.device
    assert torch.equal((inputs + 1) % 256, targets)
    meta = Windows(characters.to("meta"), 100, 2).batch(0, 0)[0]
    assert meta.device.type == "meta"


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    Windows(stream(100), 10, 2).batch(3, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("n", "length", "batch", "message"),
    [
        (100, 1, 4, "length.* 2, got 1"),
        (100, 10, 0, "batch_size.* 1, got 0"),
        (100, 10, 10, "windows of 10 .*batch of 10: 9"),
        (18, 10, 1, "windows of 10 .*batch of 1: 0"),
        (0, 10, 1, "windows of 10 .*batch of 1: 0"),
    ],
)
def test_bad_arguments(n: int, length: int, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Windows(stream(n), length, batch)


def test_bad_stream_and_places() -> None:
    with pytest.raises(ValueError, match=r"stream.*dimension, got shape \(2, 50\)"):
        Windows(stream(100).view(2, 50), 10, 2)
    with pytest.raises(TypeError, match=r"stream.*integers, got torch\.float32"):
        Windows(stream(100).float(), 10, 2)
    windows = Windows(stream(100), 10, 2)
    with pytest.raises(IndexError, match=r"batch.* 0.* 3, got 4"):
        windows.batch(0, 4)
    with pytest.raises(IndexError, match=r"batch.* 0.* 3, got -1"):
        windows.batch(0, -1)
    with pytest.raises(IndexError, match=r"epoch.* 0, got -1"):
        windows.batch(-1, 0)


def test_generator_depends_on_both_numbers() -> None:
    drawn = {
        int(torch.randint(2**62, (), generator=epoch_generator(seed, epoch)))
        for seed in range(-2, 30)
        for epoch in range(30)
    }
    assert len(drawn) == 32 * 30
