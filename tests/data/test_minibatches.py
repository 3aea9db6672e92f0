"""Batches of labelled sequences."""

import pytest
import torch

from rbn.data import Minibatches, Split


def split(count: int) -> Split:
    """Sequence i is i, i + 1000, i + 2000, and its label i."""
    labels = torch.arange(count)
    inputs = labels + 1000 * torch.arange(3)[:, None]
    return Split(inputs[:, :, None].float(), labels)


@pytest.mark.parametrize(("count", "size"), [(12, 4), (13, 4), (7, 7), (5, 1), (100, 33)])
def test_batches(count: int, size: int) -> None:
    batches = Minibatches(split(count), size, seed=2)
    assert batches.batches_per_epoch == count // size
    for epoch in range(3):
        seen: list[int] = []
        for k in range(batches.batches_per_epoch):
            inputs, labels = batches.batch(epoch, k)
            assert inputs.shape == (3, size, 1)
            assert inputs.dtype == torch.float32
            expected = labels + 1000 * torch.arange(3)[:, None]
            assert torch.equal(inputs[:, :, 0], expected.float())
            seen += labels.tolist()
        assert len(seen) == len(set(seen)) == count // size * size


def test_any_batch_again_without_those_before_it() -> None:
    one, other = (Minibatches(split(50), 4, seed=7) for _ in range(2))
    ran = {(epoch, k): one.batch(epoch, k)[1] for epoch in range(3) for k in range(12)}
    for epoch, k in ((2, 5), (0, 0), (1, 11), (1, 11)):
        assert torch.equal(other.batch(epoch, k)[1], ran[epoch, k])


def test_epochs_and_seeds_differ() -> None:
    batches, other = Minibatches(split(50), 4), Minibatches(split(50), 4, seed=1)
    assert not torch.equal(batches.order(0), batches.order(1))
    assert not torch.equal(batches.order(0), other.order(0))


def test_in_order_for_evaluation() -> None:
    batches = Minibatches(split(10), 4, shuffle=False)
    assert batches.batches_per_epoch == 3
    rows = [batches.batch(5, k)[1].tolist() for k in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"batch_size.* 1, got 0"):
        Minibatches(split(10), 0)
    with pytest.raises(ValueError, match="batch of 11: 10"):
        Minibatches(split(10), 11)
    with pytest.raises(IndexError, match=r"batch.* 0.* 1, got 2"):
        Minibatches(split(10), 4).batch(0, 2)
