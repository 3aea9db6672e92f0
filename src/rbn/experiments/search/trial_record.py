"""The record of a trial: what is reported about it, with a checksum against storage damage.

A record is an attribute of its trial. It covers the trial's settings, its validation curve and its
outcome. It is stored before the trial's state changes, so a kill between the two leaves an
unfinished trial with a correct record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

RECORD = "record"
_SUM = "sha256"
_NEW = {"state": "RUNNING", "value": None, "reason": "", "step": 0, "seconds": 0.0}


def make_record(trial: FrozenTrial, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The new record of a trial.

    Args:
        trial: the trial as stored.
        changed: what differs from its last record: ``state``, ``value``, ``reason`` (why it failed
            or diverged), ``step`` and ``seconds``.
    """
    before = {name: trial.user_attrs.get(RECORD, _NEW)[name] for name in _NEW}
    looks, system = len(trial.intermediate_values), dict(trial.system_attrs)
    return with_checksum({**before, **changed, "looks": looks, "system": system}, _covered(trial))


def check_trials(trials: Sequence[FrozenTrial]) -> None:
    """Check all trials of a study against their records.

    Raises:
        ValueError: names the first trial that does not match.
    """
    numbers = [trial.number for trial in trials]
    if numbers != list(range(len(trials))):
        raise ValueError(f"trials must be numbered from 0 on, got {numbers}")
    for trial in trials:
        record = trial.user_attrs.get(RECORD)
        if record is None:
            if trial.state.is_finished() or trial.intermediate_values:
                raise ValueError(f"trial {trial.number} has no checksum")
        elif not _matches(trial, record):
            raise ValueError(f"trial {trial.number} does not match its checksum")


def _matches(trial: FrozenTrial, record: Mapping[str, Any]) -> bool:
    looks = record["looks"]
    if sorted(trial.intermediate_values) != list(range(len(trial.intermediate_values))):
        return False
    if not is_checked(record, _covered(trial, looks)):
        return False
    if any(trial.system_attrs.get(name) != value for name, value in record["system"].items()):
        return False
    if not trial.state.is_finished():
        return True
    same_state = record["state"] == trial.state.name
    # Optuna gives a pruned trial a value of its own.
    return same_state and (trial.state.name != "COMPLETE" or record["value"] == trial.value)


def _covered(trial: FrozenTrial, looks: int | None = None) -> Any:
    """What a record covers besides its own content. looks: how much of the curve to include."""
    from optuna.distributions import distribution_to_json

    settings = {
        name: [trial.params[name], distribution_to_json(distribution)]
        for name, distribution in trial.distributions.items()
    }
    curve = [trial.intermediate_values[look] for look in sorted(trial.intermediate_values)]
    return [trial.number, settings, curve[:looks]]


def with_checksum(content: Mapping[str, Any], covered: Any = None) -> dict[str, Any]:
    """Content for the storage, with a checksum of it and of `covered`."""
    return {**content, _SUM: _checksum(content, covered)}


def is_checked(content: Mapping[str, Any], covered: Any = None) -> bool:
    """Whether the checksum of `with_checksum` matches."""
    bare = {name: value for name, value in content.items() if name != _SUM}
    return content.get(_SUM) == _checksum(bare, covered)


def _checksum(content: Mapping[str, Any], covered: Any) -> str:
    text = json.dumps([content, covered], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
