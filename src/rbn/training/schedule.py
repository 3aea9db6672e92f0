"""The schedule of a training run, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """How long to train, and when to evaluate and save.

    Attributes:
        steps: number of optimisation steps.
        evaluate_every: steps between evaluations. The last step is always evaluated.
        checkpoint_every: steps between checkpoints. Every evaluation also writes one.
        patience: evaluations without improvement before training stops; None never stops early.
        clip: largest global norm of the gradients; None does not clip. If the norm is not finite,
            the step has a zero gradient (a fused optimiser skips it) and is counted, and the next
            loss is scaled down, which clipping compensates.
        decay_from: fraction of the steps after which the learning rate decays linearly to 0; 1
            keeps it constant.
        average: decay of a running average of the parameters, which is then evaluated and kept as
            the best model; None uses the parameters themselves.
        checkpoint_seconds: minimum time between two checkpoints, except for the last one.
        max_minutes: save and stop unfinished after this time; None: no limit.
    """

    steps: int
    evaluate_every: int
    checkpoint_every: int = 1000
    patience: int | None = None
    clip: float | None = 1.0
    decay_from: float = 1.0
    average: float | None = None
    checkpoint_seconds: float = 0.0
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("clip", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not 0 <= self.decay_from <= 1:
            raise ValueError(f"decay_from must be from 0 to 1, got {self.decay_from}")
        if self.average is not None and not 0 <= self.average < 1:
            raise ValueError(f"average must be at least 0 and below 1, got {self.average}")

    def rate(self, step: int) -> float:
        """The factor of the learning rate at a step, counted from 0."""
        first = self.decay_from * self.steps
        return 1.0 if step < first else (self.steps - step) / (self.steps - first)


@dataclass
class Progress:
    """The progress of a run: all of its state except tensors."""

    step: int = 0
    seconds: float = 0.0  # training time, summed over all sessions
    together: int = 1  # largest number of runs that shared the device and thus the time
    best: float | None = None
    best_step: int = 0
    bad_looks: int = 0  # evaluations since the best one
    loss: float = 0.0  # mean over the most recently fetched steps
    loss_sum: float = 0.0  # since the last evaluation
    loss_count: int = 0
    skipped: int = 0  # steps with a gradient that was not finite
    in_a_row: int = 0  # how many of those were the most recent steps
    loss_scale: float = 1.0  # factor of the next loss, below 1 after such steps
    finished: bool = False
    stopped_early: bool = False
    diverged_at: int | None = None  # step
    history: list[dict[str, float]] = field(default_factory=list)
