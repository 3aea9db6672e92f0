"""Training runs: when they evaluate and stop, and that they resume with identical results."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from letters_task import Letters, assert_same_run, final, trainer
from warm_commands import Command

from rbn import training
from rbn.training import (
    CheckpointError,
    Diverged,
    Schedule,
    Trainer,
    checkpoint,
    train_interleaved,
)


class Killed(Exception):
    pass


def killed_after(step):
    def kill(progress):
        if progress.step == step:
            raise Killed

    return kill


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from the first step to the last."""
    folder = tmp_path_factory.mktemp("whole")
    progress = trainer(folder).run()
    assert progress.finished
    assert progress.step == 20
    return folder


def test_what_a_run_leaves_behind(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert lines[-1].keys() == {"step", "seconds", "train", "valid", "half"}
    assert lines[-1]["train"] < lines[0]["train"]
    best = min(lines, key=lambda line: line["valid"])
    _, metadata = checkpoint.load(whole / "best.safetensors")
    assert metadata == {"step": best["step"], "valid": best["valid"]}


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 17, 19])
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(stop, whole, tmp_path):
    with pytest.raises(Killed):
        trainer(tmp_path, on_step=killed_after(stop)).run()
    torch.manual_seed(12345)  # another process has another random state
    again = trainer(tmp_path, Letters(seed=99))
    assert 0 <= again.progress.step <= stop
    again.run()
    assert_same_run(tmp_path, whole)


KILL_IN_A_CHECKPOINT = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from pathlib import Path
from letters_task import trainer
from rbn.training import checkpoint
replace, count = os.replace, 0
def die(*args):
    global count
    count += 1
    if count == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(*args)
os.replace = die
trainer(Path(sys.argv[1])).run()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_in_the_middle_of_a_checkpoint(whole, tmp_path, warm_process):
    program, folder = tmp_path / "train.py", tmp_path / "run"
    program.write_text(KILL_IN_A_CHECKPOINT)
    folder.mkdir()
    words = [program, folder, Path(__file__).parent]
    process = Command(warm_process, words, tmp_path, tmp_path)
    assert process.wait(120) == -signal.SIGKILL, process.errors
    assert list(folder.glob("*.part"))
    trainer(folder, Letters(seed=99)).run()
    assert_same_run(folder, whole)


def test_control_c_finishes_the_step_and_saves(whole, tmp_path):
    class Interrupted(Letters):
        def batch(self, step):
            if step == 6:
                os.kill(os.getpid(), signal.SIGINT)  # in the middle of the seventh step
            return super().batch(step)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(training.Interrupted):
        trainer(tmp_path, Interrupted()).run()
    assert signal.getsignal(signal.SIGINT) is handler
    again = trainer(tmp_path)
    assert again.progress.step == 7
    again.run()
    assert_same_run(tmp_path, whole)


def test_a_second_control_c_does_not_wait(tmp_path):
    class Interrupted(Letters):
        def batch(self, step):
            for _ in range(2 if step == 6 else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch(step)

    run = trainer(tmp_path, Interrupted())
    with pytest.raises(KeyboardInterrupt) as caught:
        run.run()
    assert not isinstance(caught.value, training.Interrupted)  # which says that everything is saved
    assert run.progress.step == 6
    assert trainer(tmp_path).progress.step == 6  # the checkpoint of step 6, not one of the seventh


def test_a_finished_run_stays_finished(whole, tmp_path):
    again = trainer(whole)
    assert again.progress.finished
    assert again.run().step == 20


def test_out_of_time(tmp_path):
    schedule = Schedule(20, evaluate_every=5, max_minutes=1e-9)
    progress = trainer(tmp_path, schedule=schedule).run()
    assert (progress.step, progress.finished) == (1, False)
    assert trainer(tmp_path).run().finished


@pytest.mark.slow
def test_stopped_by_whoever_watches(tmp_path):
    whole = trainer(tmp_path / "whole").run()
    stopped = trainer(tmp_path / "stopped")
    stopped.record_callbacks.append(lambda record: stopped.stop())
    progress = stopped.run()
    first = whole.history[0]["step"]
    assert (progress.step, progress.finished) == (first, False)
    again = trainer(tmp_path / "stopped")
    assert again.progress.step == first  # it was saved
    assert again.run().best == whole.best


def test_patience(tmp_path):
    class Worse(Letters):
        looks = 0

        def evaluate(self):
            self.looks += 1
            return {"valid": float(self.looks)}

    progress = trainer(tmp_path, Worse(), Schedule(100, evaluate_every=2, patience=3)).run()
    assert progress.stopped_early
    assert (progress.step, progress.best, progress.best_step) == (8, 1.0, 2)


def test_the_best_model_comes_back(tmp_path):
    task = Letters()
    run = trainer(tmp_path, task)
    run.run()
    tensors, _ = checkpoint.load(run.best)
    for parameter in task.model.parameters():
        torch.nn.init.zeros_(parameter)
    assert run.load_best()["step"] == run.progress.best_step
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, tensors[f"model.{name}"])


def test_a_loss_that_is_not_finite_stops_with_a_model_to_look_at(tmp_path):
    class Bad(Letters):
        def batch(self, step):
            self.bad = step == 3
            return super().batch(step)

        def loss(self, *batch):
            return super().loss(*batch) * (torch.nan if self.bad else 1)

    with pytest.raises(Diverged, match=r"diverged at step 3: .*safetensors"):
        trainer(tmp_path, Bad()).run()
    tensors, metadata = checkpoint.load(tmp_path / "diverged.safetensors")
    assert metadata["progress"]["step"] == 3
    assert all(v.isfinite().all() for k, v in tensors.items() if k.startswith("model."))


def test_the_best_model_before_a_loss_that_is_not_finite_is_kept(tmp_path):
    """Although no checkpoint was due since."""

    class Bad(Letters):
        def loss(self, *batch):
            return super().loss(*batch) * (torch.nan if self.bad else 1)

        def batch(self, step):
            self.bad = step == 7
            return super().batch(step)

    schedule = Schedule(20, evaluate_every=5, checkpoint_every=3, checkpoint_seconds=3600)
    run = trainer(tmp_path, Bad(), schedule)
    with pytest.raises(Diverged):
        run.run()
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert checkpoint.load(run.best)[1] == {"step": 5, "valid": line["valid"]}
    assert checkpoint.load(run.last)[1]["progress"]["step"] == 0


def test_losses_fetched_later_are_the_same(whole, tmp_path):
    class Bad(Letters):
        def batch(self, step):
            self.bad = step == 7
            return super().batch(step)

        def loss(self, *batch):
            return super().loss(*batch) * (torch.nan if self.bad else 1)

    trainer(tmp_path / "late", look_back=7).run()
    assert_same_run(tmp_path / "late", whole)
    message = r"diverged at step 7: .*bad.diverged\.safetensors"
    with pytest.raises(Diverged, match=message):
        trainer(tmp_path / "bad", Bad(), look_back=100).run()
    _, metadata = checkpoint.load(tmp_path / "bad" / "last.safetensors")
    assert metadata["progress"]["step"] == 6  # the previous checkpoint


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    run.run()
    before = run.last.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"could not write .*No space left"):
        run.save()
    assert run.last.read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("position", [0.02, 0.5, 0.9])
def test_a_damaged_checkpoint_is_named(position, whole, tmp_path):
    content = bytearray((whole / "last.safetensors").read_bytes())
    content[int(len(content) * position)] ^= 0xFF
    (tmp_path / "last.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.safetensors is (not a checkpoint|damaged)"):
        trainer(tmp_path)


def test_a_damaged_checkpoint_has_one_before(whole, tmp_path):
    with pytest.raises(Killed):
        trainer(tmp_path, on_step=killed_after(14)).run()
    (tmp_path / "last.safetensors").write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match=r"last\.safetensors is not a checkpoint.*step 10"):
        again = trainer(tmp_path, Letters(seed=99))
    again.run()
    assert_same_run(tmp_path, whole)
    _, metadata = checkpoint.load(again.previous)
    assert metadata["progress"]["step"] == 18
    (tmp_path / "last.safetensors").write_bytes(b"no checkpoint")
    again.previous.write_bytes(b"nor this")
    both = (
        r"last\.safetensors is not a checkpoint.*; and .*previous\.safetensors is not a checkpoint"
    )
    with pytest.raises(CheckpointError, match=both):
        trainer(tmp_path)


def test_a_full_disk_at_an_evaluation(whole, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()  # has the effect of a full disk
    message = r"could not write .*metrics\.jsonl: "
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path).run()
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / "metrics.jsonl").rmdir()
    again = trainer(tmp_path, Letters(seed=99))
    assert again.progress.step == 3
    again.run()
    assert_same_run(tmp_path, whole)


def test_a_truncated_checkpoint_is_named(whole, tmp_path):
    content = (whole / "last.safetensors").read_bytes()
    (tmp_path / "last.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"last\.safetensors.*damaged"):
        trainer(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps.* 1, got 0"),
        ({"patience": 0}, "patience.* 1, got 0"),
        ({"evaluate_every": 0}, "evaluate_every.* 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every.* 1, got 0"),
        ({"clip": 0.0}, "clip.*positive, got 0"),
        ({"max_minutes": -1.0}, "max_minutes.*positive, got -1"),
        ({"decay_from": 1.5}, "decay_from.* 0.* 1, got 1.5"),
        ({"average": 1.0}, "average.* 0.* 1, got 1.0"),
    ],
)
def test_bad_schedules(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"steps": 1, "evaluate_every": 1} | options)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
def test_every_optimiser_goes_on(make, tmp_path):
    def run(folder, stop=None):
        task = Letters()
        options = {} if make is torch.optim.AdamW else {"momentum": 0.9}
        optimizer = make(task.model.parameters(), 0.01, **options)
        schedule = Schedule(6, evaluate_every=3, checkpoint_every=2)

        def kill(progress):
            if progress.step == stop:
                raise Killed

        Trainer(task, optimizer, schedule, folder, on_step=kill).run()

    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", 5)
    run(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert os.listdir(tmp_path / "whole") == os.listdir(tmp_path / "cut")


def test_how_an_optimiser_computes_is_no_part_of_a_checkpoint(tmp_path):
    """A run from a GPU, whose optimiser is fused and capturable, continues without one."""
    task = Letters()
    model = task.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    there = torch.optim.Adam(model.parameters(), 0.01)
    there.step()
    there.param_groups[0].update(capturable=True, fused=True)
    tensors, metadata = checkpoint.state_of(model, there)
    here = torch.optim.Adam(model.parameters(), 0.02)
    checkpoint.restore(model, here, tensors, metadata)
    group = here.param_groups[0]
    assert (group["capturable"], group["fused"], group["lr"]) == (False, None, 0.01)
    here.step()


@pytest.mark.slow
def test_runs_in_turns_give_the_numbers_of_each_alone(whole, tmp_path):
    for seed in (1, 2):
        trainer(tmp_path / f"alone{seed}", Letters(seed)).run()
    together = [trainer(tmp_path / f"together{seed}", Letters(seed)) for seed in (1, 2)]
    state = torch.get_rng_state()
    train_interleaved(together)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, run in enumerate(together, start=1):
        assert run.progress.finished
        assert_same_run(tmp_path / f"together{seed}", tmp_path / f"alone{seed}")


def test_a_rate_that_decays(tmp_path):
    rates = []
    task = Letters()
    optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
    schedule = Schedule(8, evaluate_every=4, decay_from=0.5)
    run = Trainer(
        task,
        optimizer,
        schedule,
        tmp_path,
        on_step=lambda _: rates.append(optimizer.param_groups[0]["lr"]),
    )
    run.run()
    assert rates == pytest.approx([0.01] * 5 + [0.0075, 0.005, 0.0025])


def test_the_average_is_evaluated_and_kept(tmp_path):
    """The mean of the first steps, then a decaying average; training itself does not use it."""
    decay, seen, looked = 0.75, [], []

    class Watched(Letters):
        def evaluate(self):
            looked.append(self.model.state_dict()["softmax.weight"].clone())
            return super().evaluate()

    def note(_):
        seen.append(task.model.state_dict()["softmax.weight"].clone())

    task = Watched()
    schedule = Schedule(8, evaluate_every=4, average=decay)
    run = Trainer(task, torch.optim.Adam(task.model.parameters(), 0.01), schedule, tmp_path)
    run.step_callbacks.append(note)
    run.run()
    expected = torch.zeros_like(seen[0])
    for n, value in enumerate(seen):
        expected += max(1 - decay, 1 / (n + 1)) * (value - expected)
        if n == 3:
            torch.testing.assert_close(expected, torch.stack(seen[:4]).mean(0))
            torch.testing.assert_close(looked[0], expected)
    torch.testing.assert_close(looked[1], expected)
    assert torch.equal(run.module.state_dict()["softmax.weight"], seen[-1])
    assert run.progress.best_step == 8
    run.load_best()
    assert torch.equal(run.module.state_dict()["softmax.weight"], looked[1])

    plain = Letters()
    schedule = Schedule(8, evaluate_every=4)
    Trainer(
        plain, torch.optim.Adam(plain.model.parameters(), 0.01), schedule, tmp_path / "plain"
    ).run()
    assert torch.equal(plain.model.state_dict()["softmax.weight"], seen[-1])


def test_the_average_goes_on_after_a_kill(tmp_path):
    def run(folder, stop=None):
        task = Letters()

        def kill(progress):
            if progress.step == stop:
                raise Killed

        optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
        schedule = Schedule(8, evaluate_every=4, checkpoint_every=3, average=0.6)
        Trainer(task, optimizer, schedule, folder, on_step=kill).run()

    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", 5)
    run(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert any(name.startswith("average.") for name in final(tmp_path / "whole")[0])


def test_checkpoints_are_not_too_frequent(tmp_path, monkeypatch):
    steps = []
    task = Letters()
    schedule = Schedule(20, evaluate_every=5, checkpoint_every=3, checkpoint_seconds=1e9)
    run = trainer(tmp_path, task, schedule)
    save = run.save
    monkeypatch.setattr(run, "save", lambda: (steps.append(run.progress.step), save()))
    run.run()
    assert steps == [0, 20]
    assert run.load_best()["step"] == run.progress.best_step


def test_a_graph_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match=r"graph.*CUDA"):
        trainer(tmp_path, graph=True)


def test_one_that_diverges_does_not_stop_the_others(whole, tmp_path):
    class Bad(Letters):
        def loss(self, *batch):
            return super().loss(*batch) * torch.nan

    good = trainer(tmp_path / "good")
    with pytest.raises(Diverged, match="loss of minibatch 0"):
        train_interleaved([trainer(tmp_path / "bad", Bad()), good])
    assert good.progress.finished
    assert_same_run(tmp_path / "good", whole)


def test_a_look_that_gives_no_number_is_never_the_best(tmp_path):
    run = trainer(tmp_path)
    looks = iter([float("nan"), 3.0, 2.0, float("nan")])
    evaluate = run.task.evaluate
    run.task.evaluate = lambda *args: {**evaluate(*args), "valid": next(looks)}
    progress = run.run()
    assert (progress.best, progress.best_step) == (2.0, 15)


def test_the_checkpoint_before_is_gone_on_from_where_the_last_is_gone(whole, tmp_path):
    trainer(tmp_path).run()
    (tmp_path / "last.safetensors").unlink()
    with pytest.warns(UserWarning, match="there is no checkpoint"):
        trainer(tmp_path).run()
    assert_same_run(tmp_path, whole)


def test_checkpoints_can_be_read_by_whoever_reads_other_files(whole, tmp_path):
    other = tmp_path / "other"
    other.touch()
    for path in whole.iterdir():
        if path.is_file():
            assert path.stat().st_mode == other.stat().st_mode, path
