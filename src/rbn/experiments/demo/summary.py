"""Sentences about the outcome, computed from the numbers."""

from __future__ import annotations

import math

from rbn.experiments.demo.result import THRESHOLDS, Result, Trained


def percent(accuracy: float) -> str:
    """An accuracy from 0 to 1 in percent."""
    return f"{100 * accuracy:.1f}%"


def faster(result: Result) -> Trained | None:
    """The model that first reached the highest threshold reached; None if neither was first."""
    plain, normalized = result.models
    for threshold in sorted(THRESHOLDS, reverse=True):
        a, b = plain.reached(threshold), normalized.reached(threshold)
        if a is None and b is None:
            continue
        steps_a, steps_b = (math.inf if r is None else r.step for r in (a, b))
        if steps_a == steps_b:
            return None
        return plain if steps_a < steps_b else normalized
    return None


def headline(result: Result) -> str:
    """The outcome in one line."""
    first = faster(result)
    if first is None:
        lowest = min(THRESHOLDS)
        if all(model.reached(lowest) is None for model in result.models):
            return f"In this run neither model reached {100 * lowest:.0f}%"
        return "In this run neither model learned faster"
    if first is result.lstm:
        return "In this run the plain LSTM learned faster"
    return "The batch-normalized LSTM learned faster"


def to_threshold(result: Result, threshold: float) -> str:
    """When each model first reached a validation accuracy."""
    goal = f"{100 * threshold:.0f}% validation accuracy"
    pairs = [(model, model.reached(threshold)) for model in result.models]
    there = sorted(((m, r) for m, r in pairs if r is not None), key=lambda pair: pair[1].step)
    absent = [m for m, r in pairs if r is None]
    if not there:
        best = " and ".join(
            f"{percent(m.best.valid_population)} for the {m.name}" for m in result.models
        )
        return f"Neither model reached {goal}; the best was {best}."
    first, at = there[0]
    text = f"The {first.name} reached {goal} after {at.step} steps ({at.seconds:.0f} s of training)"
    if absent:
        (other,) = absent
        return (
            f"{text}; the {other.name} did not reach it in {other.last.step} steps "
            f"({other.last.seconds:.0f} s): its best was {percent(other.best.valid_population)}."
        )
    second, then = there[1]
    if then.step == at.step:
        return f"Both models reached {goal} after {at.step} steps."
    return (
        f"{text}, the {second.name} after {then.step} steps ({then.seconds:.0f} s), "
        f"{then.step / at.step:.1f} times as many."
    )


def cost(result: Result) -> str:
    """The time of a training step of each model."""
    plain, normalized = (1000 * m.last.seconds / m.last.step for m in result.models)
    return (
        f"A training step took {plain:.0f} ms for the LSTM and {normalized:.0f} ms for the "
        f"BN-LSTM, {normalized / plain:.1f} times as long, so compare the seconds as well as the "
        "steps."
    )


def on_test(result: Result) -> str:
    """The test accuracies, and whether their difference is significant."""
    images = result.sizes[2]
    plain, normalized = (model.test_accuracy for model in result.models)
    text = (
        f"On the {images} test images the BN-LSTM has an accuracy of {percent(normalized)}, the "
        f"LSTM of {percent(plain)}"
    )
    difference = normalized - plain
    # Two standard errors of a difference of two proportions.
    noise = 2 * math.sqrt((plain * (1 - plain) + normalized * (1 - normalized)) / images)
    if abs(difference) <= noise:
        return f"{text}: too close to tell apart with so few images."
    better = "BN-LSTM" if difference > 0 else "LSTM"
    return f"{text}. The {better} is {100 * abs(difference):.1f} points better."


def outcome(result: Result) -> list[str]:
    """All sentences about the numbers."""
    sentences = []
    for threshold in THRESHOLDS:
        sentences.append(to_threshold(result, threshold))
        if not any(model.reached(threshold) for model in result.models):
            break  # neither reaches the next threshold
    return [*sentences, cost(result), on_test(result)]


def expectation(result: Result) -> str:
    """How the outcome compares with the paper's."""
    if faster(result) is result.bn_lstm:
        return "The paper reports the same for its larger tasks."
    return (
        "The paper reports faster learning for the BN-LSTM on its larger tasks; this run does not "
        "show it."
    )


def on_reach(result: Result) -> str:
    """How far back the gradient reaches before training."""
    plain, normalized = (_share(model.reach) for model in result.models)
    return (
        "Before the first training step of this run, the gradient at the first eight pixels has "
        f"{plain} of its norm at the last eight in the LSTM, and {normalized} in the BN-LSTM."
    )


def _share(ratio: float) -> str:
    if ratio >= 0.1:
        return f"{100 * ratio:.0f}%"
    if ratio == 0:
        return "nothing"
    digits = 1 - math.floor(math.log10(1 / ratio))  # two significant digits
    return f"1/{round(1 / ratio, digits):,.0f}"
