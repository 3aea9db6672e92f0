"""Every file that a run leaves behind, damaged: it is named, or the damage has no effect."""

import json
import os
import random
import shutil
import warnings
from collections import Counter

import pytest
import torch
from damage import faults

from rbn.cli.runs import _figures
from rbn.experiments import results, run_folder
from rbn.experiments.config import from_mapping
from rbn.experiments.question_answering import read_vocabulary
from rbn.experiments.trained_models import load_weights
from rbn.experiments.training_session import TrainingSession
from rbn.training import CheckpointError

CPU = torch.device("cpu")
LOADED = {}
SMALL = {
    "task": "digits",
    "hidden_size": 2,
    "epochs": 1,
    "evaluate_every": 4,
    "batch_size": 300,
    "population_batch": 600,
}


def train(folder, steps=None):
    """Train a run from its current state to its end, or for some steps."""
    fit = TrainingSession([(folder, from_mapping(SMALL), 1)], CPU, loaded=LOADED)

    class Stop:
        def add(self, trainer, *_):
            def on_step(now):
                if now.step == steps:
                    trainer.stop()

            trainer.step_callbacks.append(on_step)

    fit.train(observer=Stop())
    return list(fit.results())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in the middle, after two checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(folder, 2)
    train(folder, 3)
    return folder


@pytest.fixture(scope="module")
def finished(stopped, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(stopped, folder)
    train(folder)
    return folder


def numbers(folder):
    """The outcome of a run, without times."""
    result = json.loads((folder / "result.json").read_text())
    for name in ("seconds", "metrics_sha256", "sha256", "commit", "date"):
        result.pop(name)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    weights, _ = load_weights(folder)
    return result, lines, {name: value.tolist() for name, value in weights.items()}


def resumed(folder):
    run_folder.read_config(folder)
    train(folder)
    return numbers(folder)


def published(folder):
    target = results.publish(folder, folder / "to")
    return target.relative_to(folder), target.read_text(), target.with_suffix(".csv").read_text()


def evaluated(folder):
    run_folder.read_config(folder)
    weights, _ = load_weights(folder)
    return {name: value.tolist() for name, value in weights.items()}


USES = {"resume": resumed, "publish": published, "runs": _figures, "evaluate": evaluated}


def outcome(use, folder, name, expected):
    """``named``, ``no effect`` or ``silent``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = USES[use](folder)
        except (CheckpointError, OSError, ValueError) as error:
            return "named" if name in str(error) else f"unnamed: {error}"
    if found == expected:
        said = [str(warning.message) for warning in caught]
        return "named, and the copy before it used" if any(name in s for s in said) else "no effect"
    if use == "runs" and f"{name} is damaged" in " ".join(found):
        return "named"
    return f"silent: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_damage_in_any_file_of_a_run(state, request, tmp_path, tries, count_outcomes):
    source = request.getfixturevalue(state)
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    uses = ("resume", "runs", "evaluate") if state == "stopped" else tuple(USES)
    expected, outcomes = {}, Counter()
    for use in uses:
        shutil.copytree(source, tmp_path / use / "run")
        expected[use] = USES[use](tmp_path / use / "run")
    for path in sorted(source.iterdir()):
        found = list(faults(path.read_bytes(), draw, tries(1, 12)))
        for what, content in draw.sample(found, tries(min(1, len(found)), len(found))):
            for use in uses:
                folder = tmp_path / "damaged" / "run"
                shutil.copytree(source, folder)
                (folder / path.name).write_bytes(content)
                found = outcome(use, folder, path.name, expected[use])
                shutil.rmtree(folder)
                assert not found.startswith(("silent", "unnamed")), (path.name, what, use, found)
                outcomes[found] += 1
    count_outcomes(f"faults in the files of a {state} run", outcomes)


def test_a_missing_file_is_named_or_made_again(finished, tmp_path):
    wanted = numbers(finished)
    for path in sorted(finished.iterdir()):
        folder = tmp_path / path.name / "run"
        shutil.copytree(finished, folder)
        (folder / path.name).unlink()
        if path.name == "config.json":  # as after an rm -r in the middle of training
            with pytest.raises(FileExistsError, match=r"of a run, but no config.json"):
                train(folder)
            other = from_mapping(SMALL | {"optimizer": {"name": "adam", "lr": 0.5}})
            with pytest.raises(FileExistsError, match=r"of a run, but no config.json"):
                TrainingSession([(folder, other, 2)], CPU)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert numbers_or_named(folder, path.name) in (wanted, "named")


def numbers_or_named(folder, name):
    try:
        return resumed(folder)
    except CheckpointError as error:
        return "named" if name in str(error) else str(error)


def test_the_vocabulary_of_a_reader(tmp_path, tries):
    from rbn.data.cnn import Vocabulary
    from rbn.experiments.reading import VOCABULARY
    from rbn.training.atomic_files import write_checked

    whole = Vocabulary(3, ("the", "a", "run"))
    write_checked(tmp_path / VOCABULARY, {"entities": 3, "words": whole.words})
    assert read_vocabulary(tmp_path) == whole
    content = (tmp_path / VOCABULARY).read_bytes()
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    for what, damaged in faults(content, draw, tries(20, 200)):
        (tmp_path / VOCABULARY).write_bytes(damaged)
        try:
            found = read_vocabulary(tmp_path)
        except ValueError as error:
            found = whole if VOCABULARY in str(error) else error
        assert found == whole, what
