"""Which model is the best, when it is written, and what a resumed run finds."""

import math
import os
import time

import pytest
import torch
from letters_task import Letters, trainer

from rbn.training import Schedule, Trainer, checkpoint
from rbn.training.atomic_files import write_atomic


class Scripted(Letters):
    """A task with known results."""

    def __init__(self, values, higher_is_better):
        super().__init__()
        self.values, self.higher_is_better = iter(values), higher_is_better

    def evaluate(self):
        return {"valid": next(self.values)}


def looked(folder, values, higher_is_better=False, patience=None):
    schedule = Schedule(len(values), evaluate_every=1, patience=patience)
    return trainer(folder, Scripted(values, higher_is_better), schedule).run()


@pytest.mark.slow
@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 2), (False, 1)])
def test_the_best_is_by_the_tasks_order(higher_is_better, best, tmp_path):
    assert looked(tmp_path, [1.0, 3.0, 2.0], higher_is_better).best_step == best


def test_the_first_of_equals_is_the_best(tmp_path):
    now = looked(tmp_path, [2.0, 2.0, 2.0, 1.0], patience=2)
    assert (now.best_step, now.step, now.stopped_early) == (1, 3, True)


def test_patience_begins_anew_with_a_better_one(tmp_path):
    now = looked(tmp_path, [3.0, 4.0, 2.0, 4.0, 1.0, 5.0, 5.0, 0.0], patience=2)
    assert (now.best, now.step) == (1.0, 7)


def test_figures_that_are_no_numbers_have_no_best(tmp_path):
    run = trainer(tmp_path, Scripted([math.nan] * 2, True), Schedule(2, evaluate_every=1))
    assert run.run().best is None
    with pytest.raises(checkpoint.CheckpointError, match="has no best model: valid "):
        run.load_best()


@pytest.fixture
def slow_clock(monkeypatch):
    """Ten seconds pass at every time measurement."""
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))


def test_minutes_are_minutes_and_go_on(tmp_path, slow_clock):
    now = trainer(tmp_path, schedule=Schedule(6, evaluate_every=3, max_minutes=0.5)).run()
    assert now.step == 3  # 30 s, not half a second
    spent = now.seconds
    assert trainer(tmp_path, schedule=Schedule(6, evaluate_every=3)).run().seconds > spent


def test_checkpoints_by_time(tmp_path, monkeypatch, slow_clock):
    schedule = Schedule(10, evaluate_every=10, checkpoint_every=1, checkpoint_seconds=25)
    run = trainer(tmp_path, schedule=schedule)
    steps, save = [], run.save
    monkeypatch.setattr(run, "save", lambda: (steps.append(run.progress.step), save()))
    run.run()
    assert steps == [0, 3, 6, 9, 10]


def test_the_best_is_written_before_the_last(tmp_path, monkeypatch):
    """After a kill in between, the best model may be newer than the last checkpoint, not older."""
    names, save = [], checkpoint.save

    def noted(path, *content, **options):
        names.append(path.name)
        save(path, *content, **options)

    monkeypatch.setattr(checkpoint, "save", noted)
    looked(tmp_path, [1.0])
    assert names[-2:] == ["best.safetensors", "last.safetensors"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its folder after that."""
    calls, fsync, replace = [], os.fsync, os.replace

    def noted(descriptor):
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def named(source, target):
        calls.append("named")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", named)
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"x": torch.ones(2)}, {})
    assert calls == [path.stat().st_ino, "named", tmp_path.stat().st_ino]


def test_a_text_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_lines_of_steps_that_are_made_again_go(tmp_path):
    schedule = Schedule(20, evaluate_every=5, checkpoint_every=3, checkpoint_seconds=3600)
    run = trainer(tmp_path, schedule=schedule)
    for progress in run.steps():
        if progress.step == 11:
            break
    metrics = tmp_path / "metrics.jsonl"
    assert metrics.read_text().count("\n") == 2
    assert trainer(tmp_path).progress.step == 0
    assert metrics.read_text() == ""


def test_a_damaged_last_is_replaced_at_once(tmp_path):
    """Otherwise the previous one would be saved next."""
    trainer(tmp_path).run()
    (tmp_path / "last.safetensors").write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match="Resuming from"):
        trainer(tmp_path)
    checkpoint.load(tmp_path / "last.safetensors")


def test_a_finished_run_is_not_written_again(tmp_path):
    run = trainer(tmp_path)
    run.run()
    before = run.last.stat()
    trainer(tmp_path).run()
    after = run.last.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_an_evaluation_that_fails_leaves_the_parameters(tmp_path):
    """Also with averages, which replace the parameters for it."""

    class Failing(Letters):
        def evaluate(self):
            raise KeyError("a figure")

    task, seen = Failing(), []
    optimizer = torch.optim.SGD(task.model.parameters(), 1.0)
    run = Trainer(task, optimizer, Schedule(4, evaluate_every=4, average=0.5), tmp_path)
    run.step_callbacks.append(
        lambda _: seen.append(run.module.state_dict()["softmax.weight"].clone())
    )
    with pytest.raises(KeyError, match="a figure"):
        run.run()
    assert torch.equal(run.module.state_dict()["softmax.weight"], seen[-1])


def test_groups_keep_their_rates(tmp_path):
    task, rates = Letters(), []
    first, *others = task.model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01}]
    optimizer = torch.optim.Adam(groups)

    def note(_):
        rates.append([group["lr"] for group in optimizer.param_groups])

    schedule = Schedule(2, evaluate_every=2, decay_from=0.0)
    Trainer(task, optimizer, schedule, tmp_path, on_step=note).run()
    assert rates == [pytest.approx([0.1, 0.01]), pytest.approx([0.05, 0.005])]
