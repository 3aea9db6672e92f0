"""When things happen in a training run, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """When things happen.

    Attributes:
        steps: optimisation steps in all.
        evaluate_every: steps between looks at the validation data; one follows the last step too.
        checkpoint_every: steps between checkpoints; one follows every evaluation too.
        patience: evaluations without a better one before training stops; None never does.
        clip: largest global norm of all gradients together; None leaves them alone. A step whose
            norm is not finite is made without a gradient, or left out by a fused optimiser, and
            counted; the gradients of the next are those of a smaller loss, which clipping makes
            the same.
        decay_from: the part of the steps after which the learning rate falls linearly, to 0 at the
            last; 1 keeps it constant.
        average: the decay of a running average of the parameters, which is then what evaluations
            look at and what is kept as the best; None looks at the parameters themselves.
        checkpoint_seconds: shortest time between two checkpoints that are not the last one.
        max_minutes: of this process, after which it saves and stops unfinished; None has no limit.
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
        """What the learning rate is multiplied with at a step, from 0."""
        first = self.decay_from * self.steps
        return 1.0 if step < first else (self.steps - step) / (self.steps - first)


@dataclass
class Progress:
    """Where a run is: all of it that is no tensor."""

    step: int = 0
    seconds: float = 0.0  # of training, over all processes that took part
    together: int = 1  # runs that shared the device, and so the time, at most
    best: float | None = None
    best_step: int = 0
    bad_looks: int = 0  # evaluations since the best one
    loss: float = 0.0  # mean of the steps that were looked at last
    loss_sum: float = 0.0  # since the last evaluation
    loss_count: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    in_a_row: int = 0  # of those, the last ones
    loss_scale: float = 1.0  # what the next loss is multiplied with for that reason
    finished: bool = False
    stopped_early: bool = False
    diverged_at: int | None = None  # the step, if training ended that way
    history: list[dict[str, float]] = field(default_factory=list)
