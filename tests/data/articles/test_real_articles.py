"""Questions from real articles, if they are available."""

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from rbn.data.articles import build, source
from rbn.data.cnn.question import PLACEHOLDER, read


@pytest.fixture
def some(tmp_path):
    """The first 150 articles of the real file."""
    if not os.environ.get("RBN_DATA"):
        pytest.skip("RBN_DATA is not set: no real data here")
    file = Path(os.environ["RBN_DATA"], "cnn_dailymail", "articles.jsonl.xz")
    if not file.is_file():
        pytest.skip(f"there is no {file.name} in RBN_DATA")
    path = tmp_path / "some.jsonl"
    path.write_text("".join(itertools.islice(source.lines(file), 150)))
    return path


def test_they_look_like_the_published_ones(some, tmp_path):
    built = build(some, tmp_path / "out", processes=1)
    count = built.questions["validation"]
    assert built.articles == {"validation": 150}
    assert count > 300  # the published validation set has 3.2 per article
    questions = [read(p) for p in (tmp_path / "out" / "questions" / "validation").iterdir()]
    assert len(questions) == count
    assert all(q.answerable and q.question.count(PLACEHOLDER) == 1 for q in questions)
    words = Counter(token for q in questions for token in q.document)
    entities = sum(n for word, n in words.items() if word.startswith("@entity"))
    assert 0.05 < entities / sum(words.values()) < 0.15
    assert not any(word[0].isupper() for word in words)
