"""Measured figures as text, each with its name and unit."""

from __future__ import annotations

from rbn.experiments.config import Config


def quantity(config: Config) -> str:
    """What a task measures."""
    if config.is_text:
        return "bits per character"
    return "error rate" if config.is_reading else "accuracy"


def figure(config: Config, value: float, digits: int = 2) -> str:
    """A value with its unit: ``1.3230 bits per character``, or ``accuracy 58.33 %``.

    Args:
        config: of the run that was measured.
        value: what was measured.
        digits: after the decimal point, of percent; bits per character have four.
    """
    if config.is_text:
        return f"{value:.4f} bits per character"
    return f"{quantity(config)} {100 * value:.{digits}f} %"


def evaluation(config: Config, record: dict[str, float]) -> str:
    """The figures of an evaluation on the validation data."""
    batch, population = record["valid_batch"], record["valid_population"]
    if config.is_text:
        return f"bits per character {batch:.4f} (batch stats), {population:.4f} (population)"
    text = (
        f"{quantity(config)} {100 * batch:.1f} % (batch stats), {100 * population:.1f} % "
        "(population)"
    )
    if "valid_population_nats" in record:
        text += f", loss {record['valid_population_nats']:.3f} nats (population)"
    return text


def test_kind(config: Config) -> str:
    """What the test number of a run measures."""
    return "whole sequence, population stats" if config.is_text else "population stats"
