"""All articles of a file: twice through it, with several processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rbn.data.articles import questions, source
from rbn.data.articles.names import Usage, count_usage
from rbn.data.articles.tokens import sentences
from rbn.data.cnn.question import Question, render
from rbn.data.processes import helpers
from rbn.nn import checks

T = TypeVar("T")
DONE = "build.json"
_CHUNK = 200  # articles
_SAMPLE = 3  # questions shown of each source

Progress = Callable[[str, int], None]
"""Called with what is going on and the articles done so far."""


@dataclass
class Built:
    """What came of it.

    Attributes:
        articles: read, by part.
        questions: written, by part.
        dropped: what did not become a question, by reason.
        sample: a few questions of each source.
    """

    articles: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    sample: list[Question] = field(default_factory=list)

    def add(self, other: Built) -> None:
        """Take in what came of other articles."""
        self.articles += other.articles
        self.questions += other.questions
        self.dropped += other.dropped
        self.sample += other.sample


def build(
    file: Path,
    out: Path,
    *,
    split: str = "source",
    processes: int | None = None,
    progress: Progress | None = None,
) -> Built:
    """Write ``.question`` files for all articles of a file of JSON lines.

    The same file gives the same questions, whatever the number of processes.

    Args:
        file: JSON lines, perhaps packed as .gz or .xz.
        out: gets ``questions/training``, ``questions/validation`` and ``questions/test``, and
            ``build.json`` with the counts when all is done. Must not have questions yet.
        split: ``"source"`` trains on Daily Mail articles and takes the others by their part;
            ``"held-out"`` takes validation and test from the Daily Mail too, and the other articles
            as a second test set, ``questions/test-cnn``.
        processes: at the same time; by default one for each processor.
        progress: told of every few hundred articles.
    """
    parts = source.SPLITS[checks.choice("split", split, tuple(source.SPLITS))]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    target = out / "questions"
    if target.exists():
        raise FileExistsError(f"{target} is there already: remove it, or name another folder")
    processes = processes or os.cpu_count() or 1
    usage, seen = Usage(Counter(), Counter()), 0
    with _pool(processes) as pool:
        for count, found in _each(pool, _usage, _chunks(file), processes):
            usage.lower.update(found.lower)
            usage.upper.update(found.upper)
            seen += count
            if progress:
                progress("reading", seen)
    if seen == 0:
        raise ValueError(f"{file} has no lines")
    for part in parts:
        (target / part).mkdir(parents=True)
    words = set(usage.lower) & set(usage.upper)
    # Words that are always written one way need no counting.
    lower = {w: n if w in words else 1 for w, n in usage.lower.items()}
    upper = {w: n if w in words else 1 for w, n in usage.upper.items()}
    made, done = Built(), 0
    with _pool(processes, lower, upper) as pool:
        jobs = ((chunk, str(target), split) for chunk in _chunks(file))
        for piece in _each(pool, _write, jobs, processes):
            made.add(piece)
            made.sample = _few(made.sample)
            done += sum(piece.articles.values())
            if progress:
                progress("writing", done)
    facts = {
        "file": file.name,
        "split": split,
        "articles": dict(made.articles),
        "questions": dict(made.questions),
        "dropped": dict(made.dropped),
    }
    (out / DONE).write_text(json.dumps(facts, indent=2) + "\n")
    return made


def _chunks(file: Path) -> Iterator[list[str]]:
    found = source.lines(file)
    while chunk := list(itertools.islice(found, _CHUNK)):
        yield chunk


def _few(sample: Sequence[Question]) -> list[Question]:
    """The first questions of each source, which their addresses begin with."""
    kept: Counter[str] = Counter()
    few = []
    for question in sample:
        source = question.url.split("/")[0]
        kept[source] += 1
        if kept[source] <= _SAMPLE:
            few.append(question)
    return few


# In the processes ---------------------------------------------------------------------------------

_shared: Usage = Usage(Counter(), Counter())


def _start(lower: dict[str, int], upper: dict[str, int]) -> None:
    global _shared
    _shared = Usage(Counter(lower), Counter(upper))


def _usage(chunk: list[str]) -> tuple[int, Usage]:
    usage = Usage(Counter(), Counter())
    for line in chunk:
        try:
            text = source.article(line).text
        except ValueError:
            continue  # counted when questions are made
        found = count_usage(sentences(text))
        usage.lower.update(found.lower)
        usage.upper.update(found.upper)
    return len(chunk), usage


def _write(job: tuple[list[str], str, str]) -> Built:
    chunk, target, split = job
    made = Built()
    for line in chunk:
        try:
            article = source.article(line, split)
        except ValueError as error:
            made.dropped[str(error)] += 1
            continue
        made.articles[article.part] += 1
        found = questions.make(article, _shared, made.dropped)
        made.questions[article.part] += len(found)
        for question in found:
            content = render(question).encode()
            name = hashlib.sha1(content).hexdigest()
            Path(target, article.part, f"{name}.question").write_bytes(content)
        made.sample = _few([*made.sample, *found[:1]])
    return made


@contextmanager
def _pool(processes: int, *shared: Any) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that know how words are written; none where one is enough."""
    if processes == 1:
        if shared:
            _start(*shared)
        yield None
        return
    pool = helpers(processes, _start if shared else None, *shared)
    try:
        with pool:
            yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _each(
    pool: ProcessPoolExecutor | None,
    work: Callable[..., T],
    jobs: Iterable[object],
    processes: int,
) -> Iterator[T]:
    """The results in the order of the jobs, a few of which are in memory at a time."""
    if pool is None:
        yield from map(work, jobs)
        return
    waiting: deque[Future[T]] = deque()
    for job in jobs:
        waiting.append(pool.submit(work, job))
        if len(waiting) > 3 * processes:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
