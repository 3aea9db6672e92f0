"""The training loop."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rbn
from rbn.data import Split
from rbn.models import SequenceClassifier
from rbn.training import Record, accuracy, train


def examples(count: int, steps: int = 4) -> Split:
    """Sequences whose label is whether their mean is positive."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(steps, count, 1, generator=generator)
    return Split(inputs, (inputs.mean(dim=(0, 2)) > 0).long())


def classifier(layer: type = rbn.BatchNormLSTM) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(layer(1, 4, hidden_noise=0.1), 2)


def run(model: nn.Module, learning_rate: float = 0.1, **options: Any) -> list[Record]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    options = {"epochs": 2, "batch_size": 8, "evaluate_every": 3, "seed": 1} | options
    return train(model, optimizer, examples(30), examples(21), **options)


class Counting(nn.Module):
    """A classifier that remembers which sequences it was given; each has its number as pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append([int(v) for v in x[0, :, 0]])
        return torch.stack([x[0, :, 0], -x[0, :, 0]], dim=1) * self.scale * 1e-3


def numbered(count: int) -> Split:
    return Split(torch.arange(float(count))[None, :, None], torch.zeros(count, dtype=torch.int64))


def test_epochs_are_shuffled_full_minibatches() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = numbered(30)
    train(model, optimizer, data, data, epochs=3, batch_size=8, evaluate_every=100, seed=3)
    assert [len(batch) for batch in model.seen] == [8] * 9
    epochs = [list(chain.from_iterable(model.seen[i : i + 3])) for i in (0, 3, 6)]
    for epoch in epochs:
        assert len(set(epoch)) == 24
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again, other = Counting(), Counting()
    for copy, seed in ((again, 3), (other, 4)):
        train(copy, optimizer, data, data, epochs=3, batch_size=8, evaluate_every=100, seed=seed)
    assert again.seen == model.seen
    assert other.seen != model.seen


def test_records_at_intervals_and_at_the_end() -> None:
    steps: list[tuple[int, float]] = []
    seen: list[Record] = []
    model = classifier()
    records = run(
        model,
        epochs=3,
        evaluate_every=4,
        on_step=lambda step, loss: steps.append((step, loss)),
        on_record=seen.append,
    )
    assert [r.step for r in records] == [4, 8, 9]
    assert seen == records
    assert [step for step, _ in steps] == list(range(1, 10))
    losses = [loss for _, loss in steps]
    # The same floats added up in the same way.
    assert [r.train_loss for r in records] == [
        math.fsum(losses[a:b]) / (b - a) for a, b in ((0, 4), (4, 8), (8, 9))
    ]
    assert 0 < records[0].seconds < records[1].seconds < records[2].seconds
    assert model.training


def test_one_record_where_the_last_step_is_an_interval() -> None:
    assert [r.step for r in run(classifier(), evaluate_every=3)] == [3, 6]


def test_validation_with_both_kinds_of_statistics() -> None:
    model = classifier()
    records = run(model, epochs=20, evaluate_every=60)
    valid = examples(21)
    model.eval()
    with torch.no_grad():
        # Batches of 7: 21 sequences in as many equal parts as batches of 8 would need.
        parts = [(valid.inputs[:, i : i + 7], valid.labels[i : i + 7]) for i in (0, 7, 14)]
        population = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
        with rbn.batch_statistics(model):
            batch = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    assert records[-1].valid_population == population / 21
    assert records[-1].valid_batch == batch / 21


def test_a_model_without_statistics_has_one_accuracy() -> None:
    for record in run(classifier(rbn.LSTM)):
        assert record.valid_batch == record.valid_population


@pytest.mark.parametrize("layer", [rbn.LSTM, rbn.BatchNormLSTM])
def test_same_seed_same_numbers_bit_for_bit(layer: type) -> None:
    first, second = classifier(layer), classifier(layer)
    a, b = run(first), run(second)
    assert [(r.train_loss, r.valid_batch, r.valid_population) for r in a] == [
        (r.train_loss, r.valid_batch, r.valid_population) for r in b
    ]
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    other = run(classifier(layer), seed=2)
    assert [r.train_loss for r in other] != [r.train_loss for r in a]


def test_it_learns() -> None:
    records = run(classifier(), learning_rate=1.0, epochs=60, evaluate_every=60)
    assert records[-1].train_loss < 0.5 * math.log(2)  # chance is log 2


def test_gradients_are_clipped_by_their_global_norm() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(rbn.LSTM(1, 4), 2)
    with torch.no_grad():
        model.classifier.weight.mul_(100)  # makes the gradient long
    data = examples(8)
    before = [p.detach().clone() for p in model.parameters()]
    loss = F.cross_entropy(model(data.inputs), data.labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert norm > 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, optimizer, data, data, epochs=1, batch_size=8, evaluate_every=1, seed=0, clip=0.5)
    moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    for step, gradient in zip(moved, gradients, strict=True):
        # float32: the minibatch's order differs, which changes sums in their last digits, and the
        # difference of parameters of size 100 loses as many as that costs.
        torch.testing.assert_close(step, -0.5 * gradient / norm, rtol=1e-3, atol=2e-5)


class Broken(nn.Module):
    """Fine until the given step, then not a number, in the loss or only in the gradient."""

    def __init__(self, step: int, *, only_gradient: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.step, self.only_gradient, self.calls = step, only_gradient, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        score = self.weight * x[-1, :, 0]
        if self.calls == self.step:
            # The square root of 0 is 0 and its slope infinite.
            bad = (self.weight - self.weight.detach()).abs().sqrt()
            score = score + (bad if self.only_gradient else bad / 0)
        return torch.stack([score, -score], dim=1)


@pytest.mark.parametrize("only_gradient", [False, True])
def test_a_number_that_is_not_finite_stops_with_the_step(only_gradient: bool) -> None:
    model = Broken(3, only_gradient=only_gradient)
    what = "gradient's norm" if only_gradient else "loss"
    with pytest.raises(FloatingPointError, match=rf"the {what} is (nan|inf) at step 3"):
        run(model, evaluate_every=100)
    assert bool(model.weight.isfinite())  # the step was not taken


def test_accuracy_restores_the_mode_and_leaves_no_small_rest() -> None:
    model = classifier()
    data = examples(9)  # by eights a rest of 1 would be left, and the layer warn of it
    for mode in (True, False):
        model.train(mode)
        with rbn.batch_statistics(model):
            found = accuracy(model, data, 8)
        assert model.training is mode
        assert 0 <= found <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1, got 0"),
        ({"batch_size": 31}, "batch_size must be from 1 to the 30 sequences, got 31"),
        ({"batch_size": 0}, "batch_size must be from 1 to the 30 sequences, got 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(classifier(), **options)
