"""In what our runs differ from the paper's, read from their settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.paper.published import Result
from rbn.experiments.task_kinds import TASKS

_WHY = {
    "decay_from": "the learning rate falls linearly to 0 after this part of the steps, where the "
    "paper keeps it constant: a fixed, small number of steps then does what early stopping does "
    "in more",
    "patience": "evaluations without a better one before a run stops",
    "precision": "bf16-mixed rounds the factors of matrix products to bfloat16; parameters, "
    "statistics and cells stay in float32",
    "epochs": "passes over the training data, at most",
    "select": "the statistics with which validation chooses the best model",
    "evaluate_every": "steps between looks at the validation data",
    "layer.output": "what an answer is chosen from",
    "layer.bilinear": "a similarity of document state and question in the attention, as in the "
    "authors' code",
    "layer.document_skip": "the mean of the document's states enters the output layer, as in the "
    "authors' code",
    "layer.initialization": "that of the reader in the authors' code: the same small block for "
    "every gate, forget bias 0, initial cells fixed at 0",
    "data.words": "size of the vocabulary",
    "data.min_count": "how often the training set has each word of the vocabulary, at least",
    "optimizer.momentum": "what the paper says, if it does not mean the decay",
    "layer.hidden_noise": "noise in the initial state, which the authors give the BN-LSTM alone",
}
_QUESTIONS = ("cnn", "cnn-built", "dailymail-built")
_SKIPPED = ("task", "model", "tag")
_UNSAID = {"optimizer.momentum": 0}  # what a setting is that a config leaves out
Runs = dict[tuple[str, str, int], str]  # model, tag and seed; what the model is called

GENERAL = (
    "The best model of a run is chosen by the validation figure with population statistics, for "
    "both models, but where select is batch above; the paper chose with minibatch statistics, "
    "which understate a batch-normalized model by the noise of a small batch.",
    "The paper gives no number of epochs and no patience. What is named in their place above is of "
    "the configs with the names of its tasks: the steps of its figures (MNIST, CNN), the epochs of "
    "the authors' scripts (Penn Treebank, text8), and a patience of ours.",
    "On MNIST, the '0.9 momentum' that the paper says RMSProp has is taken for the decay of the "
    "squared gradients, since the authors' code never had momentum, a decay of 0.9 at first and of "
    "0.5 at last, and Table 5 has 0.5 and 0.9. Runs that do have momentum learn faster, and some "
    "diverge. The recurrent weights "
    "start from the identity for the candidate and orthogonal for the gates, as in the code. The "
    "permutation takes every pixel once, as the paper says; the code draws pixels with "
    "replacement. The configs mnist-code and pmnist-code are the code's.",
    "While all rows of a minibatch are identical, constant terms pass on no gradient.",
    "Noise in the initial state is drawn in training alone; the authors' code draws it when it "
    "evaluates, too.",
    "The reader's padded positions count in no statistic; in the authors' statistics of single "
    "steps they do (padding: include).",
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
    read = configs.read_yaml(configs.find(name))
    chosen = configs.for_model(read, result.model)
    paper = configs.from_mapping({"task": result.task, **chosen})
    theirs, ours = configs.flat(asdict(paper)), configs.flat(result.config)
    for key, value in _UNSAID.items():
        if key in ours or key in theirs:
            ours.setdefault(key, value)
            theirs.setdefault(key, value)
    return {
        key: (theirs.get(key), ours.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if key.partition(".")[0] not in _SKIPPED and ours.get(key) != theirs.get(key)
    }


def sentences(results: Iterable[Result]) -> list[str]:
    """One for each way in which some runs differ, with the runs that do.

    A model is named where not all runs of those settings, or those of one model alone, do.
    """
    differing: dict[tuple[str, str, str], dict[str, Runs]] = {}
    runs: dict[str, Runs] = {}
    for result in results:
        if result.task not in TASKS:
            continue
        where = _settings_of(result)
        run, model = (result.model, result.tag, result.seed), NAMES[result.model]
        runs.setdefault(where, {})[run] = model
        for name, (paper, ours) in changed(result).items():
            if name == "normalization.gamma" and result.gamma_tag is not None:
                continue  # what the sweep is of
            key = name, _shown(paper), _shown(ours)
            differing.setdefault(key, {}).setdefault(where, {})[run] = model
    texts = []
    for (name, paper, ours), places in differing.items():
        named = [_named(where, of, runs[where]) for where, of in places.items()]
        why = f": {_WHY[name]}" if name in _WHY else ""
        texts.append(f"{', '.join(named)}: {name} is {ours} instead of {paper}{why}.")
    return texts


def _settings_of(result: Result) -> str:
    if result.gamma_tag is not None:
        return f"{result.task}-gamma-*"
    return result.settings


def _named(where: str, some: Runs, every: Runs) -> str:
    """The settings' name, with what of their runs is meant if it is not all of several models."""
    models = list(dict.fromkeys(some.values()))
    if some == every and len(models) > 1:
        return where
    seeds = {seed for _, _, seed in some}
    whole = all(run in some for run, model in every.items() if model in models)
    which = "" if whole else f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
    return f"{where} ({', '.join(models)}{which})"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
