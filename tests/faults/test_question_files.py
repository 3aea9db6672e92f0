"""Every file of a set of questions, damaged: it is named, or the damage has no effect."""

import json
import os
import random
import shutil
from collections import Counter

import pytest
from damage import faults

from rbn.data.articles import build
from rbn.data.cnn import load_questions, preprocess

PARTS = ("training", "validation", "test")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A data folder with a set built from articles, preprocessed."""
    root = tmp_path_factory.mktemp("data")
    lines = []
    for k in range(24):
        record = {
            "id": str(k),
            "source": "cnn",
            "part": PARTS[k % 3],
            "article": f"Anna Berg met Carl Dorn in Oslo on day {k} . Carl Dorn left for Rome .",
            "highlights": [f"Anna Berg met Carl Dorn on day {k}"],
        }
        lines.append(json.dumps(record))
    (root / "articles.jsonl").write_text("\n".join(lines) + "\n")
    build(root / "articles.jsonl", root / "cnn-built", processes=1)
    (root / "articles.jsonl").unlink()
    load(root)
    return root


def load(root):
    """The content of all questions, as plain values."""
    reading, summary = load_questions("cnn-built", root=root, processes=1)
    parts = {
        name: [passages.example(k) for k in range(len(passages))]
        for name, passages in reading.parts.items()
    }
    return parts, reading.vocabulary, summary["parts"]


def outcome(root, path, expected):
    try:
        found = load(root)
    except (OSError, ValueError) as error:
        return "named" if path.name in str(error) else f"unnamed: {error}"
    return "no effect" if found == expected else f"silent: {found}"


def inject(source, path, root, expected, count):
    """Damage a file in copies of a data folder, and count the outcomes."""
    outcomes, failures = Counter(), []
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    for what, content in faults(path.read_bytes(), draw, count):
        shutil.rmtree(root)
        shutil.copytree(source, root)
        (root / path.relative_to(source)).write_bytes(content)
        found = outcome(root, path, expected)
        outcomes[found.partition(":")[0]] += 1
        if found.startswith(("silent", "unnamed")):
            failures.append((path.name, what, found))
    assert not failures, failures[:3]
    return outcomes


@pytest.mark.parametrize("cache", ["cached", "not cached", "half cached"])
def test_damage_in_any_file_of_a_question_set(
    cache, whole, tmp_path, tries, count_outcomes, monkeypatch
):
    expected, root, source = load(whole), tmp_path / "data", tmp_path / "source"
    shutil.copytree(whole, root)
    if cache != "cached":
        shutil.rmtree(root / "cnn-built" / "cache")
    if cache == "half cached":  # as after a kill before the shards are merged
        monkeypatch.setattr(preprocess, "SHARD", 5)

        def killed(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(preprocess, "_merge", killed)
            with pytest.raises(KeyboardInterrupt):
                load(root)
    shutil.copytree(root, source)
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    questions = [path for path in paths if path.suffix == ".question"]
    assert len(questions) == 48
    others = [path for path in paths if path.suffix != ".question"]
    outcomes = Counter()
    for path in [*draw.sample(questions, tries(2, 8)), *draw.sample(others, tries(1, len(others)))]:
        outcomes += inject(source, path, root, expected, tries(1, 3))
    count_outcomes(f"faults in the files of a question set, {cache}", outcomes)


def test_a_question_that_is_missing_or_added(whole, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(whole, root)
    folder = root / "cnn-built" / "questions" / "training"
    path = min(folder.iterdir())
    path.rename(folder.parent / path.name)
    with pytest.raises(ValueError, match=r"training.* 15 .* 16 "):
        load(root)
    (folder.parent / path.name).rename(folder / "copy.question")
    with pytest.raises(ValueError, match=r"copy\.question is damaged"):
        load(root)
