"""How our runs differ from the paper's, read from their settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.paper.published import Result
from rbn.experiments.task_kinds import TASKS

_WHY = {
    "decay_from": "the learning rate falls linearly to 0 after this fraction of the steps; the "
    "paper keeps it constant and stops early, which takes more steps",
    "patience": "the run stops after this many evaluations without an improvement",
    "precision": "bf16-mixed rounds the factors of matrix products to bfloat16; parameters, "
    "statistics and cells stay in float32",
    "epochs": "maximum number of passes over the training data",
    "select": "the statistics used to choose the best model on validation",
    "evaluate_every": "steps between evaluations on the validation data",
    "layer.output": "the candidates for an answer",
    "layer.bilinear": "a similarity of document state and question in the attention, as in the "
    "authors' code",
    "layer.document_skip": "the mean of the document's states is an input of the output layer, as "
    "in the authors' code",
    "layer.initialization": "the initialization in the authors' code: the same small block for "
    "every gate, forget bias 0, initial cells fixed at 0",
    "data.words": "size of the vocabulary",
    "data.min_count": "minimum number of occurrences of a word of the vocabulary",
    "optimizer.momentum": "the paper's value, if it does not mean the decay",
    "layer.hidden_noise": "noise in the initial state, which the authors use for the BN-LSTM only",
}
_QUESTIONS = ("cnn", "cnn-built", "dailymail-built")
_SKIPPED = ("task", "model", "tag")
_DEFAULTS = {"optimizer.momentum": 0}  # values of settings that a config omits
Runs = dict[tuple[str, str, int], str]  # model, tag and seed; name of the model

GENERAL = (
    "The best model of a run is the one with the best validation result with population "
    "statistics, for both models, unless select is batch above. The paper uses minibatch "
    "statistics, which understate a batch-normalized model by the noise of a small batch.",
    "The paper gives no number of epochs and no patience. The values that the list above compares "
    "to come from the configs named after the tasks: the steps of the paper's figures (MNIST, "
    "CNN), the epochs of the authors' scripts (Penn Treebank, text8), and a patience of our own.",
    "On MNIST we read the paper's '0.9 momentum' of RMSProp as the decay of the squared gradients: "
    "the authors' code never had momentum, its decay was 0.9 at first and 0.5 in the end, and "
    "Table 5 lists 0.5 and 0.9. Runs with momentum learn faster, and some diverge. The recurrent "
    "weights are initialized with the identity for the candidate and orthogonally for the gates, "
    "as in the code. The permutation uses every pixel once, as the paper says; the code draws "
    "pixels with replacement. The configs mnist-code and pmnist-code follow the code.",
    "While all rows of a minibatch are identical, constant terms pass on no gradient.",
    "We add noise to the initial state in training only; the authors' code also adds it in "
    "evaluation.",
    "Padded positions do not count in the reader's statistics; in the authors' per-step statistics "
    "they do (padding: include).",
    "Figure 6: the paper's axis is labelled bits but shows nats, so ours shows nats.",
)


def changed(result: Result) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the paper's config of the task, as (paper's, ours).

    Built questions are compared with the paper's settings for its own questions.
    """
    name = result.task
    if name in _QUESTIONS:
        full = result.config.get("data", {}).get("sentences") is None
        name = "cnn-full" if full else "cnn"
    read = configs.read_yaml(configs.find(name))
    chosen = configs.for_model(read, result.model)
    paper = configs.from_mapping({"task": result.task, **chosen})
    theirs, ours = configs.flat(asdict(paper)), configs.flat(result.config)
    for key, value in _DEFAULTS.items():
        if key in ours or key in theirs:
            ours.setdefault(key, value)
            theirs.setdefault(key, value)
    return {
        key: (theirs.get(key), ours.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if key.partition(".")[0] not in _SKIPPED and ours.get(key) != theirs.get(key)
    }


def sentences(results: Iterable[Result]) -> list[str]:
    """One sentence for each difference, with the settings of the runs that have it.

    Names the model if only some runs of those settings, or runs of a single model, differ.
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
                continue  # the sweep varies gamma
            key = name, _shown(paper), _shown(ours)
            differing.setdefault(key, {}).setdefault(where, {})[run] = model
    texts = []
    for (name, paper, ours), by_settings in differing.items():
        named = [_named(where, some, runs[where]) for where, some in by_settings.items()]
        why = f": {_WHY[name]}" if name in _WHY else ""
        texts.append(f"{', '.join(named)}: {name} is {ours} instead of {paper}{why}.")
    return texts


def _settings_of(result: Result) -> str:
    if result.gamma_tag is not None:
        return f"{result.task}-gamma-*"
    return result.settings


def _named(where: str, some: Runs, every: Runs) -> str:
    """The name of the settings, with model and seeds unless all runs of several models differ."""
    models = list(dict.fromkeys(some.values()))
    if some == every and len(models) > 1:
        return where
    seeds = {seed for _, _, seed in some}
    all_seeds = all(run in some for run, model in every.items() if model in models)
    listed = ", ".join(map(str, sorted(seeds)))
    which = "" if all_seeds else f", seed{'s' * (len(seeds) > 1)} {listed}"
    return f"{where} ({', '.join(models)}{which})"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
