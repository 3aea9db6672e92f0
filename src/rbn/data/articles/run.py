"""Builds questions from all articles of a file, in two passes and several processes."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rbn.data.articles import questions, source
from rbn.data.articles.names import Usage, count_usage
from rbn.data.articles.tokens import sentences
from rbn.data.cnn.question import Question, render
from rbn.data.cnn.shards import content_name
from rbn.data.cnn.store import checksum
from rbn.data.process_pool import ProcessPool
from rbn.nn import checks

T = TypeVar("T")
DONE = "build.json"
_JOURNAL = "build.journal"
_CHUNK = 200  # articles
_SAMPLE = 3  # questions shown of each source

Progress = Callable[[str, int], None]
"""Called with the current step and the number of articles done."""


@dataclass
class Built:
    """The outcome of a build.

    Attributes:
        articles: number of articles read, by part.
        questions: number of questions written, by part.
        dropped: number of dropped articles, highlights and entities, by reason.
        sample: a few questions from each source.
    """

    articles: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    sample: list[Question] = field(default_factory=list)

    def add(self, other: Built) -> None:
        """Add the counts of other articles."""
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
    """Write ``.question`` files for all articles of a JSON lines file.

    The same file gives the same questions, for any number of processes.

    Args:
        file: JSON lines, plain or packed as .gz or .xz.
        out: gets ``questions/training``, ``questions/validation`` and ``questions/test``, and at
            the end ``build.json`` with the counts. Must not contain questions, unless they are from
            a stopped or killed build of the same file, which is then resumed.
        split: ``"source"`` trains on Daily Mail articles and assigns the others by their part;
            ``"held-out"`` also takes validation and test from the Daily Mail, and uses the other
            articles as a second test set, ``questions/test-cnn``.
        processes: number of processes; by default one per processor.
        progress: called every few hundred articles.
    """
    parts = source.SPLITS[checks.choice("split", split, tuple(source.SPLITS))]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file, not a folder for the questions")
    target = out / "questions"
    about = file.stat()
    identity = {"file": file.name, "size": about.st_size, "changed": about.st_mtime_ns}
    journal = _Journal(out / _JOURNAL, identity | {"split": split, "chunk": _CHUNK})
    if target.exists():
        if not journal.path.exists():
            raise FileExistsError(f"{target} already exists: remove it, or choose another folder")
        journal.resume()
    processes = processes or os.cpu_count() or 1
    usage, seen = Usage(Counter(), Counter()), 0
    with _pool(processes) as pool:
        for count, counted in _each(pool, _usage, _chunks(file)):
            usage.lower.update(counted.lower)
            usage.upper.update(counted.upper)
            seen += count
            if progress:
                progress("reading", seen)
    if seen == 0:
        raise ValueError(f"{file} has no lines")
    out.mkdir(parents=True, exist_ok=True)
    journal.start()
    for part in parts:
        (target / part).mkdir(parents=True, exist_ok=True)
    words = set(usage.lower) & set(usage.upper)
    # Words that are always written one way need no counts.
    lower = {w: n if w in words else 1 for w, n in usage.lower.items()}
    upper = {w: n if w in words else 1 for w, n in usage.upper.items()}
    made = journal.made
    done = sum(made.articles.values())
    with _pool(processes, lower, upper) as pool:
        remaining = itertools.islice(_chunks(file), journal.chunks, None)
        jobs = ((chunk, str(target), split) for chunk in remaining)
        for piece in _each(pool, _write, jobs):
            journal.enter(piece)
            made.sample = _few(made.sample)
            done += sum(piece.articles.values())
            if progress:
                progress("writing", done)
    summary = {
        "file": file.name,
        "split": split,
        "articles": dict(made.articles),
        "questions": dict(made.questions),
        "dropped": dict(made.dropped),
        # Equal questions share a file.
        "files": {part: sum(1 for _ in os.scandir(target / part)) for part in parts},
    }
    summary["sha256"] = checksum(summary)
    _replace(out / DONE, json.dumps(summary, indent=2).encode() + b"\n")
    journal.path.unlink()
    return made


def _chunks(file: Path) -> Iterator[list[str]]:
    lines = source.lines(file)
    while chunk := list(itertools.islice(lines, _CHUNK)):
        yield chunk


def _few(sample: Sequence[Question]) -> list[Question]:
    """The first few questions of each source, which is the start of their address."""
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
        counted = count_usage(sentences(text))
        usage.lower.update(counted.lower)
        usage.upper.update(counted.upper)
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
        new = questions.make(article, _shared, made.dropped)
        made.questions[article.part] += len(new)
        for question in new:
            content = render(question).encode()
            path = Path(target, article.part, content_name(content))
            try:
                path.write_bytes(content)
            except OSError as error:
                said = f"could not write {path}: {error.strerror}"
                raise OSError(error.errno, said) from error
        made.sample = _few([*made.sample, *new[:1]])
    return made


@contextmanager
def _pool(processes: int, *shared: Any) -> Iterator[ProcessPool | None]:
    """A pool of processes that have the word counts; None if one process is enough."""
    if processes == 1:
        if shared:
            _start(*shared)
        yield None
        return
    with ProcessPool(processes, _start if shared else None, *shared) as pool:
        yield pool


def _each(pool: ProcessPool | None, work: Callable[..., T], jobs: Iterable[object]) -> Iterator[T]:
    """The results in the order of the jobs, holding only a few in memory."""
    return map(work, jobs) if pool is None else pool.map(work, jobs)


# Resuming a build ---------------------------------------------------------------------------------


class _Journal:
    """A log of what a build has written: one line with a checksum per chunk of articles.

    Args:
        path: the journal's file.
        identity: identifies the articles and their split; a build with another one cannot resume.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self._identity = path, identity
        self.made = Built()
        self.chunks = 0

    def resume(self) -> None:
        """Read the journal, if there is one."""
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        if not lines:
            return
        if _checked(lines[0]) != self._identity:
            raise FileExistsError(
                f"{self.path.parent / 'questions'} is from a build of another file or with other "
                "settings, or its journal is damaged: remove it, or choose another folder"
            )
        kept = [lines[0]]
        for line in lines[1:]:
            counts = _checked(line)
            if counts is None:  # half written; this chunk and all after it are done again
                break
            read, written, dropped = (Counter(counts[name]) for name in _COUNTS)
            self.made.add(Built(read, written, dropped))
            self.chunks += 1
            kept.append(line)
        _replace(self.path, b"".join(line + b"\n" for line in kept))

    def start(self) -> None:
        """Create the journal if there is none."""
        if not self.path.exists():
            _replace(self.path, _with_sum(self._identity))

    def enter(self, piece: Built) -> None:
        """Record that a chunk is done."""
        self.made.add(piece)
        with self.path.open("ab") as file:
            file.write(_with_sum({name: dict(getattr(piece, name)) for name in _COUNTS}))


_COUNTS = ("articles", "questions", "dropped")


def _with_sum(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _checked(line: bytes) -> dict[str, Any] | None:
    """The content of a line; None if its checksum does not match."""
    check, _, text = line.partition(b" ")
    if check != b"%08x" % zlib.crc32(text):
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, f"could not write {path}: {error.strerror}") from error
