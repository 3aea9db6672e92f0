"""Lengths as the kernels read them, and the number of rows of each step."""

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE

from rbn.ops.gpu.row_counts import row_counts

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (7, 2), (5, 33), (3, 1500)])
def test_lengths_and_counts(steps, batch, dtype):
    lengths = torch.randint(1, steps + 1, (batch,), device=DEVICE).to(dtype)
    lengths[0] = max(1, steps - 1)
    short, inv_n = row_counts(lengths, steps + 1, lengths)
    assert short.dtype == torch.int32
    assert short.tolist() == lengths.tolist()
    rows = (torch.arange(steps + 1, device=DEVICE)[:, None] < lengths).sum(1)
    expected = torch.where(rows > 0, 1.0 / rows, 0.0)  # no row reaches the last step
    assert torch.equal(inv_n, expected)
    assert inv_n[-1] == 0


def test_lengths_that_are_not_contiguous():
    lengths = torch.tensor([3, 9, 1, 9, 2, 9], device=DEVICE)[::2]
    assert row_counts(lengths, 3, lengths)[0].tolist() == [3, 1, 2]
