"""The rank of this process in its group, and Lightning Fabric for it."""

from __future__ import annotations

import datetime
import inspect
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# How long a process waits for one that is alive but does not respond. Deaths are noticed at once.
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of its group, as torchrun counts them.

    Attributes:
        rank: number of this process, from 0, over all machines.
        count: number of processes on all machines.
        local_rank: number of this process on its machine, from 0.
        local_count: number of processes on this machine.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def from_environment(cls) -> World | None:
        """Read it from the environment variables of torchrun; None for a single process."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name) for name in names]
        if None in values or values[1] == "1":
            return None
        settings = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        try:
            world = cls(*(int(value) for value in values if value is not None))
        except ValueError:
            raise ValueError(f"torchrun's variables must be numbers, got {settings}") from None
        if not (0 <= world.rank < world.count and 0 <= world.local_rank < world.local_count):
            raise ValueError(f"a rank must be at least 0 and below the size, got {settings}")
        if world.count % world.local_count:
            raise ValueError(f"all machines must have the same number of processes, got {settings}")
        return world

    def environment(self, port: int) -> dict[str, str]:
        """The variables that `from_environment` reads, for processes on one machine."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def device(self, kind: torch.device) -> torch.device:
        """The device of this process: cpu, or the GPU with its local rank."""
        check_devices(kind, self.local_count)
        return kind if kind.type == "cpu" else torch.device(kind.type, self.local_rank)


def check_devices(kind: torch.device, count: int) -> None:
    """Reject more processes than this machine has devices, or one specific GPU for all of them."""
    if count < 1:
        raise ValueError(f"devices must be at least 1, got {count}")
    if count == 1 or kind.type == "cpu":
        return
    if kind.index is not None:
        raise ValueError(f"device must be cuda or cpu with {count} processes, got {kind}")
    present = torch.cuda.device_count()
    if count > present:
        raise ValueError(f"devices must be at most the {present} GPUs of this machine, got {count}")


def make_fabric(
    device: torch.device, precision: Any = "32-true", world: World | None = None
) -> Fabric:
    """Lightning Fabric for one device, or for this process of several.

    Initializes the process group of several processes: gloo for CPUs, NCCL for GPUs.

    Args:
        device: the device of this process.
        precision: a precision of Fabric, such as ``"bf16-mixed"``.
        world: rank and size; None for a single process.
    """
    from lightning.fabric import Fabric

    if device.type == "cpu" and str(precision).startswith("16-"):
        # Fabric would silently use bfloat16 instead.
        raise ValueError(f"precision {precision} needs a GPU; bf16-mixed also works on a CPU")
    for name in ("lightning.fabric", "lightning.pytorch"):
        # Silences messages about the process group and advice to use TF32.
        logging.getLogger(name).setLevel(logging.WARNING)
    if world is None:
        devices: Any = 1 if device.type == "cpu" else [device.index or 0]
        return Fabric(accelerator=device.type, devices=devices, precision=precision)
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy

    strategy = DDPStrategy(
        process_group_backend="nccl" if device.type == "cuda" else "gloo",
        timeout=TIMEOUT,
        **ddp_options(),
    )
    fabric = Fabric(
        accelerator=device.type,
        devices=world.local_count,
        num_nodes=world.count // world.local_count,
        strategy=strategy,
        precision=precision,
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    return fabric


def ddp_options() -> dict[str, Any]:
    """Options of DDP for models with population statistics.

    By default DDP copies buffers before every step. Statistics grow with the longest sequence, so
    their shapes may differ between processes, and the copy must be off.
    """
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}
