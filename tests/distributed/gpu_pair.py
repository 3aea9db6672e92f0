"""One of two processes that share a GPU: ``python gpu_pair.py RANK FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import rbn

LENGTHS = torch.tensor([6, 3, 5, 2, 6])
ROWS = ([0, 1], [2, 3, 4])
DEVICE = "cuda"


def found(rows: list[int]) -> dict[str, torch.Tensor]:
    """Output, gradients and statistics for some of the rows."""
    torch.manual_seed(2)
    layer = rbn.BatchNormLSTM(3, 8, bidirectional=True, sync_stats=True, dtype=torch.float64)
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    wanted = torch.randn(6, 5, 16, dtype=torch.float64).to(DEVICE)
    layer, mine = layer.to(DEVICE), x[:, rows].to(DEVICE)
    output, _ = layer(mine, lengths=LENGTHS[rows].to(DEVICE))
    (output * wanted[:, rows]).sum().backward()
    grads = {f"grad {name}": p.grad.cpu() for name, p in layer.named_parameters()}
    buffers = {name: value.cpu() for name, value in layer.named_buffers()}
    return {"output": output.detach().cpu()} | grads | buffers


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # NCCL requires a GPU per process; gloo uses the host's memory.
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.save(found(ROWS[rank]), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
