"""In what our runs differ from the paper's, read from their settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.paper.published import Result

_WHY = {
    "decay_from": "the learning rate falls linearly to 0 after this part of the steps, where the "
    "paper keeps it constant: a fixed, small number of steps then does what early stopping does "
    "in more",
    "patience": "evaluations without a better one before a run stops",
    "precision": "bf16-mixed rounds the factors of matrix products to bfloat16; parameters, "
    "statistics and cells stay in float32",
    "epochs": "passes over the training data, at most",
    "evaluate_every": "steps between looks at the validation data",
    "layer.output": "what an answer is chosen from",
    "data.words": "size of the vocabulary",
    "data.min_count": "how often the training set has each word of the vocabulary, at least",
}
_QUESTIONS = ("cnn", "cnn-built")
_SKIPPED = ("task", "model", "tag")

GENERAL = (
    "The best model of a run is chosen by the validation figure with population statistics, for "
    "both models; the paper chose with minibatch statistics, which understate a batch-normalized "
    "model by the noise of a small batch.",
    "On MNIST, RMSProp has momentum 0.9 and decay 0.9 where nothing else is said above: the paper "
    "says momentum 0.9, the authors' code has none and decay 0.5. The recurrent weights start from "
    "the identity for the candidate and orthogonal for the gates, as in the code. The permutation "
    "takes every pixel once, as the paper says; the code draws pixels with replacement. The "
    "configs mnist-code and pmnist-code are the code's.",
    "As long as all rows of a minibatch are alike, constant terms pass no gradient on.",
    "Figure 6: the paper's axis is labelled bits and is in nats, which ours is converted to.",
)


def changed(result: Result) -> dict[str, tuple[Any, Any]]:
    """Settings of a run that differ from the paper's config of its task: (paper's, the run's).

    Questions that were made have the paper's settings of its own.
    """
    name = result.task
    if name in _QUESTIONS:
        whole = result.config.get("data", {}).get("sentences") is None
        name = "cnn-full" if whole else "cnn"
    found = configs.read(configs.find(name))
    chosen = configs.for_model(found, result.model)
    paper = configs.from_mapping({"task": result.task, **chosen})
    theirs, ours = configs.flat(asdict(paper)), configs.flat(result.config)
    return {
        key: (theirs.get(key), ours.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if key.partition(".")[0] not in _SKIPPED and ours.get(key) != theirs.get(key)
    }


def sentences(results: Iterable[Result]) -> list[str]:
    """One for each way in which some runs differ, with the runs that do."""
    known = list(results)
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in known:
        if result.gamma_tag is not None or result.task not in configs.TASKS:
            continue
        where = f"{result.task}-{result.tag}" if result.tag else result.task
        for name, (paper, ours) in changed(result).items():
            named = found.setdefault((name, _shown(paper), _shown(ours)), [])
            if where not in named:
                named.append(where)
    texts = []
    for (name, paper, ours), runs in found.items():
        why = f": {_WHY[name]}" if name in _WHY else ""
        alike = " All models alike." if _alike(known, name, runs) else ""
        texts.append(f"{', '.join(runs)}: {name} is {ours} instead of {paper}{why}.{alike}")
    return texts


def _alike(results: Iterable[Result], name: str, where: list[str]) -> bool:
    """Whether every run with these settings has the same value."""
    values = {
        _shown(configs.flat(result.config).get(name))
        for result in results
        if (f"{result.task}-{result.tag}" if result.tag else result.task) in where
    }
    return len(values) == 1


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
