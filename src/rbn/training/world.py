"""Where this process stands among those that train a run, and Fabric for it."""

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

# How long a process waits for another that is alive but silent. One that dies is noticed at once.
PATIENCE = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The processes of a run, as torchrun and `rbn train --devices` number them.

    Attributes:
        rank: of this process, from 0, over all machines.
        count: of the processes on all machines.
        local_rank: of this process on its machine.
        local_count: of the processes on this machine.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int

    @classmethod
    def of_environment(cls) -> World | None:
        """What the environment says, or None where this process is alone."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = [os.environ.get(name) for name in names]
        if None in found or found[1] == "1":
            return None
        said = ", ".join(f"{name}={value}" for name, value in zip(names, found, strict=True))
        try:
            world = cls(*(int(value) for value in found if value is not None))
        except ValueError:
            raise ValueError(f"the environment must hold numbers, got {said}") from None
        fit = 0 <= world.rank < world.count and 0 <= world.local_rank < world.local_count
        if not fit:
            raise ValueError(f"a process must be one of those that there are, got {said}")
        if world.count % world.local_count:
            raise ValueError(f"every machine must have as many processes, got {said}")
        return world

    def environment(self, port: int) -> dict[str, str]:
        """The variables from which it is read again, for processes on one machine."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def device(self, kind: torch.device) -> torch.device:
        """The device of this process, of that kind."""
        check_devices(kind, self.local_count)
        return kind if kind.type == "cpu" else torch.device(kind.type, self.local_rank)


def check_devices(kind: torch.device, count: int) -> None:
    """Refuse more processes on this machine than it has devices, or one named device for all."""
    if count < 1:
        raise ValueError(f"devices must be at least 1, got {count}")
    if count == 1 or kind.type == "cpu":
        return
    if kind.index is not None:
        raise ValueError(f"device must be cuda or cpu for {count} processes, got {kind}")
    present = torch.cuda.device_count()
    if count > present:
        raise ValueError(f"devices must be at most the {present} GPUs of this machine, got {count}")


def make_fabric(
    device: torch.device, precision: Any = "32-true", world: World | None = None
) -> Fabric:
    """Fabric for one device, or for each of several processes, with a precision as it names it.

    Of several processes each takes up contact with the others here (gloo for CPUs, NCCL for GPUs).
    """
    from lightning.fabric import Fabric

    if device.type == "cpu" and str(precision).startswith("16-"):
        # Fabric would take bfloat16 instead, and whoever reads of the run would not know.
        raise ValueError(f"precision {precision} needs a GPU; bf16-mixed runs on a CPU too")
    for name in ("lightning.fabric", "lightning.pytorch"):
        # They say who registered where, and advise to round float32's products, on every GPU.
        logging.getLogger(name).setLevel(logging.WARNING)
    if world is None:
        devices: Any = 1 if device.type == "cpu" else [device.index or 0]
        return Fabric(accelerator=device.type, devices=devices, precision=precision)
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy

    strategy = DDPStrategy(
        process_group_backend="nccl" if device.type == "cuda" else "gloo",
        timeout=PATIENCE,
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
    """What DDP must know of models with population statistics.

    It must not copy buffers before every step, as it does by default: those that grow with the
    longest sequence may have other shapes on other processes.
    """
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}
