"""Two processes that run all cases together, because starting them takes longer than any case.

python pair.py RANK FOLDER
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from warm_commands import Command, WarmProcess

from rbn.training.launcher import exit_at_once

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "ops"))  # recurrence_cases


def run_pair(warm: WarmProcess, folder: Path, timeout: float = 300) -> None:
    """Let two processes of a gloo group save the result of each case."""
    outputs = [folder / f"output{rank}" for rank in range(2)]
    for output in outputs:
        output.mkdir()
    processes = [
        Command(warm, [HERE / "pair.py", rank, folder], folder, output)
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, code in zip(processes, codes, strict=True):
        assert code == 0, process.errors


def all_cases(folder: Path) -> dict[str, Any]:
    """What to call with the rank, by kind and name."""
    import layer_cases
    import op_cases
    import population_cases
    import training_cases
    from recurrence_cases import differentiate

    cases: dict[str, Any] = {
        f"op {name}": lambda rank, c=case: differentiate(op_cases.part_of(c, rank))
        for name, case in op_cases.CASES.items()
    }
    for name, run in layer_cases.MODELS.items():
        cases[f"layer {name}"] = lambda rank, run=run: run([rank])
    cases |= {f"population {name}": run for name, run in population_cases.CASES.items()}
    runs = training_cases.cases(folder)
    return cases | {f"training {name}": run for name, run in runs.items()}


def main(rank: int, folder: Path) -> None:
    """One of the two processes: saves the result of each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    cases = all_cases(folder)
    if rank == 0:
        import training_cases

        training_cases.prepare(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = case(rank)
        except Exception as error:
            raise RuntimeError(f"rank {rank}, case {name}") from error
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    exit_at_once(0)  # gloo's threads may not be ready to exit


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
