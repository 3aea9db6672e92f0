"""Batch normalization of one term outside of a recurrence."""

import pytest
import torch

from rbn.nn.batch_norm_term import BatchNormTerm


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_average_in(rows):
    term, x = BatchNormTerm(3), torch.randn(5, 3)
    term(x)
    before = {name: b.clone() for name, b in term.named_buffers()}
    valid = torch.zeros(rows, dtype=torch.bool) if rows else None
    term(torch.randn(rows, 3), valid)
    assert all(torch.equal(b, before[name]) for name, b in term.named_buffers())
    assert term.eval()(x).isfinite().all()


@pytest.mark.parametrize("padded", [0, 2])
def test_a_single_position_has_no_variance_to_average_in(padded):
    term = BatchNormTerm(3)
    term(torch.randn(5, 3))
    before = {name: b.clone() for name, b in term.named_buffers()}
    if padded:
        term(torch.randn(1 + padded, 3), torch.tensor([True] + [False] * padded))
    else:
        with pytest.raises(ValueError, match=r"more than 1 position .* BatchNormTerm, got 1"):
            term(torch.randn(1, 3))
    assert all(torch.equal(b, before[name]) for name, b in term.named_buffers())
    term(torch.randn(2, 3))
    assert term.stats.count.tolist() == [2]


def test_features_alone_are_no_minibatch():
    with pytest.raises(ValueError, match=r"size 3, got shape \(3,\)"):
        BatchNormTerm(3)(torch.randn(3))
