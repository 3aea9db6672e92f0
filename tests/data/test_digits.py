"""The digits as sequences."""

import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from rbn.data import Splits, digits
from rbn.data.digits import pixel_order


def rows(*inputs: Tensor) -> list[tuple[float, ...]]:
    """Every image as a tuple of its pixels, sorted."""
    images = torch.cat([x[:, :, 0].T for x in inputs])
    return sorted(tuple(image.tolist()) for image in images)


@pytest.fixture(scope="module")
def plain() -> Splits:
    return digits()


def test_shapes_types_and_range(plain: Splits) -> None:
    for split, size in ((plain.train, 1200), (plain.valid, 297), (plain.test, 300)):
        assert len(split) == size
        assert split.inputs.shape == (64, size, 1)
        assert split.inputs.dtype == torch.float32
        assert split.labels.shape == (size,)
        assert split.labels.dtype == torch.int64
        assert split.inputs.min() == 0
        assert split.inputs.max() == 1
        assert set(split.labels.tolist()) == set(range(10))


def test_splits_are_disjoint_and_lose_nothing(plain: Splits) -> None:
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    # As multisets: each image of the data set is in exactly one split.
    split = rows(plain.train.inputs, plain.valid.inputs, plain.test.inputs)
    assert split == sorted(tuple(image.tolist()) for image in images)


def test_labels_stay_with_their_images(plain: Splits) -> None:
    source = load_digits()
    label_of = {
        tuple(image): label
        for image, label in zip((source.data / 16).tolist(), source.target.tolist(), strict=True)
    }
    for split in (plain.train, plain.valid, plain.test):
        images = split.inputs[:, :, 0].T.tolist()
        assert [label_of[tuple(image)] for image in images] == split.labels.tolist()


def test_same_seed_same_splits_other_seed_others(plain: Splits) -> None:
    again, other = digits(), digits(seed=1)
    assert torch.equal(plain.train.inputs, again.train.inputs)
    assert torch.equal(plain.test.labels, again.test.labels)
    assert not torch.equal(plain.train.inputs, other.train.inputs)


def test_permuted_pixels_are_the_same_in_a_fixed_other_order(plain: Splits) -> None:
    order = pixel_order()
    assert sorted(order.tolist()) == list(range(64))
    assert order.tolist() != list(range(64))
    assert torch.equal(order, pixel_order())
    permuted = digits(permuted=True)
    for name in ("train", "valid", "test"):
        before, after = getattr(plain, name), getattr(permuted, name)
        assert torch.equal(after.inputs, before.inputs[order])
        assert torch.equal(after.labels, before.labels)


def test_pixels_are_permuted_by_the_seed() -> None:
    plain, permuted = digits(seed=3), digits(permuted=True, seed=3)
    assert torch.equal(permuted.train.inputs, plain.train.inputs[pixel_order(3)])
    assert not torch.equal(pixel_order(3), pixel_order(0))


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    digits(permuted=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_first_takes_the_beginning(plain: Splits) -> None:
    few = plain.train.first(7)
    assert len(few) == 7
    assert torch.equal(few.inputs, plain.train.inputs[:, :7])
    assert len(plain.test.first(1000)) == 300


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"recurrent-batchnorm\[demo\]"):
        digits()
