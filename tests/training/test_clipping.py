"""Gradients that are large, or too large to be finite."""

import pytest
import torch
from letters_task import Letters, assert_same_run, trainer

from rbn.training import Diverged, Schedule, Trainer


class Overflowing(Letters):
    """Its gradient, but not its loss, is infinite in some steps."""

    steps = (3, 4)

    def batch(self, step):
        self.overflows = step in self.steps
        return super().batch(step)

    def loss(self, *batch):
        loss = super().loss(*batch)
        if self.overflows:
            loss.register_hook(lambda grad: grad * torch.inf)
        return loss


def test_gradients_that_overflow_are_left_out(tmp_path):
    task = Overflowing()
    progress = trainer(tmp_path, task).run()
    assert progress.skipped == 2
    assert all(parameter.isfinite().all() for parameter in task.model.parameters())
    assert trainer(tmp_path).progress.skipped == 2


def test_a_fused_optimiser_clips_and_leaves_out_by_itself(tmp_path):
    """Matches other steps up to rounding; a skipped step changes nothing at all."""
    models = {}
    for fused in (False, True):
        task = Overflowing()
        task.steps = (3, 4) if fused else ()
        optimizer = torch.optim.Adam(task.model.parameters(), 0.01, fused=fused)
        schedule = Schedule(8, evaluate_every=4, clip=0.05)

        def keep(progress, fused=fused, task=task):
            values = torch.cat([p.detach().flatten() for p in task.model.parameters()])
            models[fused, progress.step] = values.clone()

        run = Trainer(task, optimizer, schedule, tmp_path / str(fused), on_step=keep)
        assert run.run().skipped == len(task.steps)
    torch.testing.assert_close(models[True, 3], models[False, 3])
    assert torch.equal(models[True, 4], models[True, 3])
    assert torch.equal(models[True, 5], models[True, 3])
    assert not torch.equal(models[True, 6], models[True, 5])
    assert models[True, 8].isfinite().all()


class Steep(Overflowing):
    """In some steps its gradient is so large that the norm overflows float32."""

    steps = range(3, 100)

    def loss(self, *batch):
        loss = Letters.loss(self, *batch)
        if self.overflows:
            loss.register_hook(lambda grad: grad * 2.0**100)
        return loss


@pytest.mark.parametrize("adam", [False, True])
def test_gradients_beyond_float32_are_clipped_like_others(adam, tmp_path):
    """Two steps are lost until the loss is scaled down enough; then the direction is the same."""
    models = {}
    for kind in (Overflowing, Steep):
        task = kind()
        parameters = task.model.parameters()
        optimizer = (
            torch.optim.Adam(parameters, 0.01, fused=True)
            if adam
            else torch.optim.SGD(parameters, 1.0)
        )
        schedule = Schedule(12, evaluate_every=4, clip=0.01)  # all norms are larger
        run = Trainer(task, optimizer, schedule, tmp_path / kind.__name__)
        assert run.run().skipped == 2
        models[kind] = torch.cat([p.detach().flatten() for p in task.model.parameters()])
    assert run.progress.loss_scale == 2.0**-40
    # To the 1e-6 that is added to a norm of 0.05 or more.
    torch.testing.assert_close(models[Steep], models[Overflowing], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_small_loss_grows_again_and_goes_on_after_a_stop(tmp_path):
    """The factor of the loss is part of the checkpoint."""

    class Once(Steep):
        steps = (3, 4)

    def run(folder):
        return trainer(tmp_path / folder, Once(), Schedule(60, evaluate_every=20, clip=0.01))

    assert run("whole").run().loss_scale == 1
    stopped = run("parts")
    stopped.step_callbacks.append(lambda now: stopped.stop() if now.step == 8 else None)
    assert stopped.run().loss_scale == 2.0**-37
    run("parts").run()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_nothing_but_gradients_that_overflow(tmp_path):
    task = Overflowing()
    task.steps = range(2, 10**6)
    run = trainer(tmp_path, task, Schedule(100, evaluate_every=100))
    with pytest.raises(Diverged, match=r"step \d+: .*50 gradients"):
        run.run()
    assert run.progress.skipped == 50  # including those since the last transfer to the host


@pytest.mark.slow
def test_a_run_that_was_stopped_diverges_at_the_same_step(tmp_path):
    ends = []
    for folder, stops in (("whole", ()), ("parts", (20, 45))):
        for stop in (*stops, None):
            task = Overflowing()
            task.steps = range(2, 10**6)
            run = trainer(tmp_path / folder, task, Schedule(100, evaluate_every=100))
            run.step_callbacks.append(
                lambda now, run=run, stop=stop: run.stop() if now.step == stop else None
            )
            if stop:
                assert run.run().step == stop
            else:
                with pytest.raises(Diverged, match="the last 50 gradients"):
                    run.run()
        ends.append((run.progress.diverged_at, run.progress.skipped))
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_as_many_but_not_in_a_row(tmp_path):
    task = Overflowing()
    task.steps = range(1, 120, 2)
    assert trainer(tmp_path, task, Schedule(120, evaluate_every=120)).run().skipped == 60


def test_the_first_step_of_a_fused_optimiser_with_momentum_is_left_out(tmp_path):
    """PyTorch's would continue with an uninitialized momentum."""
    models = []
    for fused in (False, True):
        task = Overflowing()
        task.steps = (0,)
        optimizer = torch.optim.SGD(task.model.parameters(), 0.01, momentum=0.9, fused=fused)
        schedule = Schedule(8, evaluate_every=4, clip=0.05)
        run = Trainer(task, optimizer, schedule, tmp_path / str(fused))
        assert run.run().skipped == 1
        models.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    torch.testing.assert_close(*models)
