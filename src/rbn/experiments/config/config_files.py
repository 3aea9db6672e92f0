"""The configs that come with the package, and users' own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rbn.experiments.config.yaml_loader import read_yaml
from rbn.experiments.task_kinds import LAYERS, READERS, TASKS

CONFIGS = Path(__file__).parents[1] / "configs"
_ALL_MODELS = tuple(dict.fromkeys((*LAYERS, *READERS)))


def for_model(values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A file's settings for one model: its entry in ``variants`` overrides the others."""
    if not isinstance(model, str):  # a file may contain anything
        raise ValueError(f"model must be one of {', '.join(_ALL_MODELS)}, got {model!r}")
    settings = dict(values)
    variants = settings.pop("variants", None) or {}
    if not isinstance(variants, Mapping) or not all(
        isinstance(each, Mapping) for each in variants.values()
    ):
        raise ValueError(f"variants must be settings by model, got {variants!r}")
    for name, variant in variants.items():
        if name not in _ALL_MODELS:
            raise ValueError(f"variants must be one of {', '.join(_ALL_MODELS)}, got {name!r}")
        for key in ("task", "model", "variants"):
            if key in variant:
                raise ValueError(f"variants: {name} cannot set {key}")
    return {**settings, **variants.get(model, {}), "model": model}


def published(task: str) -> dict[str, Any]:
    """The paper's settings for a task."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return read_yaml(CONFIGS / f"{task}.yaml")


def names() -> list[str]:
    """The configs that come with the package, such as ``mnist-code`` or ``beyond/ptb``."""
    return sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml"))


def find(name: str) -> Path:
    """The file of a config: one of `names`, or a path."""
    included = CONFIGS / f"{name}.yaml"
    if name in names() and included.exists():
        return included
    if "." not in name and not Path(name).exists():
        raise ValueError(f"there is no file {name}, and no such config: {', '.join(names())}")
    return Path(name)
