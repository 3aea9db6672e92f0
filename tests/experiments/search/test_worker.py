"""Workers: a trial is an ordinary run, pruned, stopped, failed or finished."""

import json
import time
import weakref

import pytest
import torch

pytest.importorskip("optuna")

from rbn.data.errors import DataNotFound
from rbn.experiments import build, run_folder
from rbn.experiments.search import worker as module
from rbn.experiments.search.heartbeat import Heartbeat
from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.storage import load_study, open_study
from rbn.experiments.search.trials import Trials
from rbn.experiments.search.worker import Job, TooManyFailed, Worker
from rbn.experiments.tasks import Classification
from rbn.experiments.training_session import TrainingSession
from rbn.training import checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def start(tmp_path):
    """A worker for a sweep, and its messages."""

    def start(sweep, where=None, **options):
        said = []
        job = Job(sweep, where or str(tmp_path / "sweep.log"), tmp_path / "runs", CPU, **options)
        return Worker(job, said.append), said

    return start


def states(sweep, where):
    return [row.state for row in sweep_status(load_study(sweep.name, where)).rows]


def history(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


@pytest.mark.slow
def test_trials_are_ordinary_runs(where, make, start, tmp_path):
    sweep = make("plain" + tmp_path.name, space={"optimizer.lr": [0.02, 0.002]})
    worker, said = start(sweep, where)
    assert worker.work()
    now = sweep_status(load_study(sweep.name, where))
    assert (now.finished, now.maximize, now.figure) == (2, True, "accuracy")
    for row, rate in zip(now.rows, (0.02, 0.002), strict=True):
        folder = tmp_path / "runs" / f"trial-{row.number:04d}"
        config, seed = run_folder.read_config(folder)
        assert (config.optimizer["lr"], config.hidden_size, seed) == (rate, 4, 1)
        assert row.parameters == {"optimizer.lr": rate}
        curve = [record["valid_population"] for record in history(folder)]
        assert list(row.curve) == curve
        assert row.best == max(curve)
        assert row.steps == 6
        assert row.seconds > 0
        result = json.loads((folder / "result.json").read_text())
        assert result["tag"] == f"{sweep.name}-{row.number}"
        assert result["command"] == sweep.command(row.parameters, row.number) + " --seed 1"
        assert (folder / "best.safetensors").exists()
    assert said[0] == "trial 0: optimizer.lr=0.02"
    assert f"trial 0: validation accuracy {now.rows[0].best:.4f}" in said[1]
    assert "6 steps" in said[1]
    worker, said = start(sweep, where)
    assert worker.work()  # nothing more to do
    assert said == []


@pytest.mark.slow
def test_a_trials_memory_is_given_back(make, start, monkeypatch):
    alive, seen = weakref.WeakSet(), []
    real = build.make_trainer

    def make_trainer(*arguments, **options):
        seen.append(len(alive))
        alive.add(trainer := real(*arguments, **options))
        return trainer

    monkeypatch.setattr(build, "make_trainer", make_trainer)
    worker, _ = start(make())
    assert worker.work()
    assert seen == [0, 0]


@pytest.mark.slow
def test_pruned_on_the_validation_curve(make, start, tmp_path):
    sweep = make(
        # The second learning rate is too small to learn anything.
        space={"optimizer.lr": [0.05, 1e-9, 0.05001]},
        pruner={"name": "median", "n_startup_trials": 1, "n_warmup_steps": 1},
        set={"hidden_size": 8, "epochs": 4, "evaluate_every": 4, "batch_size": 200},
    )
    worker, said = start(sweep)
    assert worker.work()
    first, second, third = sweep_status(load_study(sweep.name, worker.job.storage)).rows
    assert (first.state, second.state) == ("complete", "pruned")
    assert third.state in ("complete", "pruned")
    assert len(first.curve) == 6
    assert len(second.curve) == 2  # the first evaluation is never pruned
    assert second.curve[1] < first.curve[1]
    assert f"trial 1: pruned at step 8, best accuracy {second.best:.4f}" in said
    folder = tmp_path / "runs" / "trial-0001"
    _, metadata = checkpoint.load(folder / "last.safetensors")
    assert (metadata["progress"]["step"], metadata["progress"]["finished"]) == (8, False)
    assert not (folder / "result.json").exists()
    # Users may still train it to the end.
    fit = TrainingSession([(folder, *run_folder.read_config(folder))], CPU)
    fit.train()
    assert fit.trainers[0].progress.finished
    assert len(history(folder)) == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # from the pruner
def test_pruned_before_it_has_a_figure(make, start, monkeypatch):
    sweep = make(
        space={"optimizer.lr": [0.05, 0.01]},
        pruner={"name": "median", "n_startup_trials": 1, "n_warmup_steps": 1},
        set={"hidden_size": 8, "epochs": 4, "evaluate_every": 4, "batch_size": 200},
    )
    evaluate, looks = Classification.evaluate, []

    def without_number(self):
        looks.append(0)
        found = evaluate(self)
        return found if len(looks) <= 6 else dict.fromkeys(found, float("nan"))

    monkeypatch.setattr(Classification, "evaluate", without_number)
    worker, said = start(sweep)
    assert worker.work()
    first, second = sweep_status(load_study(sweep.name, worker.job.storage)).rows
    assert (first.state, second.state) == ("complete", "pruned")
    assert "trial 1: pruned at step 8, no validation yet" in said


@pytest.mark.slow
def test_out_of_time_and_gone_on_with(make, start, tmp_path, monkeypatch):
    sweep = make(trials=1)
    whole, _ = start(sweep, str(tmp_path / "whole.log"))
    assert whole.work()
    expected = history(tmp_path / "runs" / "trial-0000")
    (tmp_path / "runs").rename(tmp_path / "before")
    worker, said = start(sweep, until=time.monotonic() + 60)
    times = iter([60.0, 1e-9, 0.0])
    monkeypatch.setattr(worker, "_left", lambda: next(times))
    assert not worker.work()
    assert "trial 0: out of time at step 1" in said[-1]
    assert states(sweep, worker.job.storage) == ["waiting"]
    (row,) = sweep_status(load_study(sweep.name, worker.job.storage)).rows
    assert row.remark == "to be resumed"
    again, said = start(sweep)
    assert again.work()
    assert "trial 0: resumes at step 1" in said
    assert history(tmp_path / "runs" / "trial-0000") == expected


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_taken_up_from_its_last_checkpoint(make, start, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_CHECKPOINT_SECONDS", 0.0)
    # Evaluates after steps 2, 4 and 6: killed during the second, when the first is saved.
    sweep = make(
        trials=1,
        heartbeat=0.2,
        set={"hidden_size": 4, "epochs": 1, "batch_size": 200},
        space={"evaluate_every": [2]},
    )
    whole, _ = start(sweep, str(tmp_path / "whole.log"))
    assert whole.work()
    expected = history(tmp_path / "runs" / "trial-0000")
    (tmp_path / "runs").rename(tmp_path / "before")
    report = module._TrialObserver._report

    def killed(self, trainer, metric):
        report(self, trainer, metric)
        if len(trainer.progress.history) == 2:
            raise Killed

    worker, _ = start(sweep)
    with monkeypatch.context() as patch:
        patch.setattr(module._TrialObserver, "_report", killed)
        patch.setattr(Trials, "release", lambda self, number: True)  # dead workers release nothing
        with pytest.raises(Killed):
            worker.work()
    assert states(sweep, worker.job.storage) == ["running"]
    again, said = start(sweep)
    assert again.work()
    assert any("waiting" in line for line in said)
    assert "trial 0: resumes at step 2" in said
    assert history(tmp_path / "runs" / "trial-0000") == expected
    (row,) = sweep_status(load_study(sweep.name, again.job.storage)).rows
    assert list(row.curve) == [record["valid_population"] for record in expected]


@pytest.mark.slow
def test_what_fails_is_told_and_the_others_go_on(make, start):
    sweep = make(space={"batch_size": [5000, 200]}, set={"hidden_size": 4, "epochs": 1})
    worker, said = start(sweep)
    assert worker.work()
    failed, complete = sweep_status(load_study(sweep.name, worker.job.storage)).rows
    assert (failed.state, complete.state) == ("failed", "complete")
    assert failed.remark.startswith("ValueError: ")
    assert f"trial 0: failed: {failed.remark}" in said


def test_many_failures_in_a_row_stop_the_worker(make, start):
    space = {"batch_size": [5000, 5001, 5002, 5003]}
    worker, _ = start(make(space=space, set={"hidden_size": 4, "epochs": 1}))
    with pytest.raises(TooManyFailed, match=r"3 trials .*ValueError"):
        worker.work()
    assert states(worker.job.sweep, worker.job.storage) == ["failed"] * 3


@pytest.mark.parametrize(("seconds", "good"), [(0.0, 5), (60.0, 5), (60.0, 1)])
def test_a_trial_that_diverges(seconds, good, make, start, monkeypatch):
    """It has the best evaluated model, whenever a checkpoint was due."""
    monkeypatch.setattr(build, "_CHECKPOINT_SECONDS", seconds)
    loss, steps = Classification.loss, []

    def bad(self, inputs, labels):
        steps.append(0)
        return loss(self, inputs, labels) * (float("nan") if len(steps) > good else 1)

    monkeypatch.setattr(Classification, "loss", bad)
    worker, _ = start(make(trials=1))
    assert worker.work()
    (row,) = sweep_status(load_study(worker.job.sweep.name, worker.job.storage)).rows
    looks = 1 if good == 5 else 0
    assert row.state == ("complete" if looks else "failed")
    assert row.remark == f"diverged at step {good}"
    assert len(row.curve) == looks


def test_a_trial_without_a_figure_fails(make, start, monkeypatch):
    nothing = {"valid_batch": float("nan"), "valid_population": float("nan")}
    monkeypatch.setattr(Classification, "evaluate", lambda self: nothing)
    worker, _ = start(make(trials=1))
    assert worker.work()
    (row,) = sweep_status(load_study(worker.job.sweep.name, worker.job.storage)).rows
    assert (row.state, row.best) == ("failed", None)
    assert "never a number" in row.remark


def test_interrupted_trials_wait(make, start, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    worker, _ = start(make(trials=1))
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSession, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.work()
    assert states(worker.job.sweep, worker.job.storage) == ["waiting"]
    worker, _ = start(worker.job.sweep)
    assert worker.work()


def test_a_trial_that_another_has_taken(make, start, monkeypatch):
    worker, said = start(make(trials=1))
    with monkeypatch.context() as patch:
        patch.setattr(Heartbeat, "lost", True)
        times = iter([1.0, 0.0])
        patch.setattr(worker, "_left", lambda: next(times))
        assert not worker.work()
    assert "trial 0: another worker" in said[-1]
    assert states(worker.job.sweep, worker.job.storage) == ["running"]  # the other worker's


def test_waits_for_the_trials_of_others(make, start, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_WAIT", 0.1)
    sweep = make(trials=2)
    worker, said = start(sweep)
    other = Trials(sweep, *open_study(sweep, worker.job.storage))
    assert other.take() == 0
    say = worker.say

    def tell(line):
        say(line)
        if line.startswith("waiting"):
            other.complete(0, 0.5)

    worker.say = tell
    assert worker.work()
    assert said[0] == "trial 1: optimizer.lr=0.001"
    assert any("waiting" in line for line in said)


def test_missing_data_cost_no_trial(make, start, tmp_path):
    worker, _ = start(make(config="mnist", set={}, space={"clip": [1.0]}), root=tmp_path)
    with pytest.raises(DataNotFound):
        worker.work()
    assert states(worker.job.sweep, worker.job.storage) == []


def test_a_folder_with_another_run_stops_the_worker(make, start, tmp_path):
    sweep = make(trials=1)
    worker, _ = start(sweep)
    run_folder.create(tmp_path / "runs" / "trial-0000", sweep.config({"optimizer.lr": 0.5}), 1)
    with pytest.raises(FileExistsError, match="trial-0000 holds a run with other settings"):
        worker.work()
    assert states(sweep, worker.job.storage) == ["waiting"]
