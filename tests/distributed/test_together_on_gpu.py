"""Two processes on one GPU, and DDP over NCCL as far as one process allows."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_pair
import pytest
import torch
from recurrence_cases import GRADIENT_TOLERANCE, RESULT_TOLERANCE, assert_same
from training_cases import Parted

import rbn
from rbn.training import Schedule, Trainer, World, make_fabric

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_two_processes_are_one_with_all_rows(tmp_path):
    script = str(Path(gpu_pair.__file__))
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), str(tmp_path)]) for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    with rbn.backend("reference"):
        expected = gpu_pair.found([0, 1, 2, 3, 4])
    output = torch.cat([first["output"], second["output"]], 1)
    assert_same({"": output}, {"": expected["output"]}, RESULT_TOLERANCE)
    for name, want in expected.items():
        if name.startswith("grad"):
            assert_same({name: first[name] + second[name]}, {name: want}, GRADIENT_TOLERANCE)
        elif name != "output":
            assert torch.equal(first[name], second[name])
            assert_same({name: first[name]}, {name: want}, RESULT_TOLERANCE)


def test_ddp_over_nccl_of_one_process_is_training_without_it(tmp_path, monkeypatch):
    def run(folder, fabric):
        task = Parted()
        task.model.cuda()
        task.text = task.text.cuda()
        optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
        trainer = Trainer(task, optimizer, Schedule(6, evaluate_every=3), folder, fabric=fabric)
        trainer.run()
        return trainer.module.state_dict()

    device = torch.device("cuda", 0)
    alone = run(tmp_path / "alone", make_fabric(device))
    for name, value in World(0, 1, 0, 1).environment(29513).items():
        monkeypatch.setenv(name, value)
    fabric = make_fabric(device, "32-true", World(0, 1, 0, 1))
    try:
        together = run(tmp_path / "together", fabric)
        assert os.environ["WORLD_SIZE"] == "1"
        assert torch.distributed.get_backend() == "nccl"
    finally:
        torch.distributed.destroy_process_group()
    for name, value in alone.items():
        assert torch.equal(value, together[name]), name
