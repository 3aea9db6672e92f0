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
