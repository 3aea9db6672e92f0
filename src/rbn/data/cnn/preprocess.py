"""Converts all question files of a folder, in parallel, into a cache of arrays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbn.data.cnn import shards, store
from rbn.data.cnn.passages import Passages, Reading
from rbn.data.cnn.shards import Job, Reduction
from rbn.data.cnn.vocabulary import UNKNOWN, Vocabulary, entity_count
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.file_lock import file_lock
from rbn.data.process_pool import ProcessPool
from rbn.nn import checks

PARTS = {"train": "training", "valid": "validation", "test": "test"}
_FOLDERS = {folder: part for part, folder in PARTS.items()}
SECOND_TEST = "test-cnn"  # name of a part and its folder, which most question sets do not have
SHARD = 500  # files
FORMAT = 2  # version of the cache's format; increase it to rebuild all caches

Progress = Callable[[int, int], None]
"""Called with the number of files read and the total number of files."""


@dataclass(frozen=True)
class Choice:
    """How to convert the files.

    Attributes:
        reduction: what to keep of the documents.
        min_count: words that are rarer in the training set become ``@unknown``.
        words: keep only this many words, the most frequent; None keeps all.
    """

    reduction: Reduction = field(default_factory=Reduction)
    min_count: int = 1
    words: int | None = None

    def __post_init__(self) -> None:
        checks.positive_integer("min_count", self.min_count)
        if self.words is not None:
            checks.positive_integer("words", self.words)

    @property
    def key(self) -> str:
        """A name for the cache of this choice of options."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        sentences = self.reduction.sentences
        kind = "full" if sentences is None else f"{sentences}-sentences"
        return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class QuestionFile(NamedTuple):
    """A file's name, size and modification time, which show whether it has changed."""

    name: str
    size: int
    changed: int  # nanoseconds


def question_files(folder: Path) -> dict[str, list[QuestionFile]]:
    """The question files of each part, sorted by name.

    A folder ``test-cnn`` is optional.

    Raises:
        DataNotFound: a part has no files; names its folder.
    """
    files = {}
    for name, part in (PARTS | _second_test(folder)).items():
        place = folder / part
        entries = os.scandir(place) if place.is_dir() else ()
        files[name] = sorted(_listed(e) for e in entries if e.name.endswith(".question"))
        if not files[name]:
            raise DataNotFound(f"no .question files in {place}")
    return files


def _second_test(folder: Path) -> dict[str, str]:
    return {SECOND_TEST: SECOND_TEST} if (folder / SECOND_TEST).is_dir() else {}


def _listed(entry: os.DirEntry[str]) -> QuestionFile:
    try:
        about = entry.stat()
    except OSError:  # a broken link; reading the file reports it
        return QuestionFile(entry.name, -1, -1)
    return QuestionFile(entry.name, about.st_size, about.st_mtime_ns)


def prepared(
    folder: Path,
    cache: Path,
    choice: Choice,
    *,
    built: Mapping[str, int] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> tuple[Reading, dict[str, Any]]:
    """The questions of a folder as arrays, and a summary.

    The first call reads the files, in several processes. Later calls map the cached arrays into
    memory, after a check of their SHA-256. Files that were added, removed or changed (in size or
    time) rebuild the cache. If the work is killed, the next call continues with the remaining
    files. Of several processes, one does the work while the others wait (see `file_lock`).

    Args:
        folder: has ``training``, ``validation``, ``test`` and optionally ``test-cnn``, with
            ``.question`` files in each.
        cache: folder for the arrays, for any `choice`.
        choice: how to convert the files.
        built: the number of files in each folder, for a set made by ``rbn data build-cloze``. These
            numbers are checked, and every file's content against its name. No check if empty.
        processes: number of processes; by default one per processor.
        progress: called every few hundred files.

    Returns:
        The reading, and for each part in ``summary["parts"]``: ``questions``; ``answerable``, those
        with the answer in the document; ``kept``, those with the answer in what is kept of it; and
        ``malformed``, an error message for each file that was skipped.
    """
    place = cache / choice.key
    if folder.is_dir():
        files = question_files(folder)
        for part, expected in (built or {}).items():
            actual = len(files.get(_FOLDERS.get(part, part), ()))
            if actual != expected:
                raise DataAltered(
                    f"{folder / part} has {actual:,} question files, but {expected:,} were built: "
                    "remove the folder of this set and build it again"
                )
        fingerprint = {part: [len(each), _sum(each)] for part, each in files.items()}
        if not _is_of(place, fingerprint):
            _check_writable(cache, folder)

            def log_wait() -> None:
                logging.getLogger(__name__).warning(
                    "waiting for another process that is reading %s", folder
                )

            with file_lock(cache / f"{choice.key}.lock", log_wait):
                if not _is_of(place, fingerprint):  # no other process made it meanwhile
                    jobs = _jobs(folder, files, place, choice, bool(built))
                    _prepare(jobs, place, choice, fingerprint, processes, progress)
    elif store.read_metadata(place) is None:
        raise DataNotFound(f"there is no folder {folder}")
    return _load(place)


def _sum(files: Sequence[QuestionFile]) -> str:
    """A checksum of the names, sizes and times of files."""
    lines = "\n".join(f"{file.name} {file.size} {file.changed}" for file in files)
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def _is_of(place: Path, fingerprint: dict[str, list[Any]]) -> bool:
    """Whether the cache at `place` was made from exactly these files."""
    known = store.read_metadata(place)
    return known is not None and known["files"] == fingerprint


def _check_writable(cache: Path, folder: Path) -> None:
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if not os.access(cache, os.W_OK):
        raise PermissionError(
            f"{cache} has no up-to-date cache of the files in {folder}, and is not writable: set "
            "cache to another folder"
        )


def _work_folder(place: Path) -> Path:
    return place.with_name(place.name + ".shards")


def _jobs(
    folder: Path,
    files: dict[str, list[QuestionFile]],
    place: Path,
    choice: Choice,
    named_by_content: bool,
) -> dict[str, list[Job]]:
    """The shards of each part."""
    work = _work_folder(place)
    jobs: dict[str, list[Job]] = {}
    for part, part_files in files.items():
        begin = str(folder / PARTS.get(part, part))
        pieces = [part_files[k : k + SHARD] for k in range(0, len(part_files), SHARD)]
        jobs[part] = [
            Job(
                tuple(os.path.join(begin, file.name) for file in piece),
                str(work / f"{part}-{k:05d}"),
                choice.reduction,
                _sum(piece),
                named_by_content,
            )
            for k, piece in enumerate(pieces)
        ]
    return jobs


def _prepare(
    jobs: dict[str, list[Job]],
    place: Path,
    choice: Choice,
    fingerprint: dict[str, list[Any]],
    processes: int | None,
    progress: Progress | None,
) -> None:
    every = [job for part in jobs.values() for job in part]
    _run(every, processes or os.cpu_count() or 1, progress)
    _merge(jobs, place, choice, fingerprint)
    shutil.rmtree(_work_folder(place))


def _run(jobs: Sequence[Job], processes: int, progress: Progress | None) -> None:
    """Make all missing shards."""
    total = sum(len(job.files) for job in jobs)
    missing = [job for job in jobs if not _is_made(job)]
    done = total - sum(len(job.files) for job in missing)
    for job in _finished(missing, processes):
        done += len(job.files)
        if progress is not None:
            progress(done, total)


def _finished(jobs: Sequence[Job], processes: int) -> Iterator[Job]:
    """Yield each job when it is done."""
    if processes == 1 or len(jobs) <= 1:
        for job in jobs:
            shards.make(job)
            yield job
        return
    with ProcessPool(min(processes, len(jobs))) as pool:
        for job, _ in zip(jobs, pool.map(shards.make, jobs), strict=True):
            yield job


def _is_made(job: Job) -> bool:
    try:
        existing = store.read_metadata(Path(job.folder))
    except DataAltered:
        return False
    return (
        existing is not None
        and tuple(existing["files"]) == job.files
        and existing["reduction"] == asdict(job.reduction)
        and existing.get("sum") == job.sum
    )


def _merge(
    jobs: dict[str, list[Job]], place: Path, choice: Choice, fingerprint: dict[str, list[Any]]
) -> None:
    """Make one vocabulary from all shards, and concatenate their arrays."""
    counts: Counter[str] = Counter()
    entities = 0
    parts: dict[str, dict[str, Any]] = {}
    for part, made in jobs.items():
        parts[part] = {"questions": 0, "answerable": 0, "kept": 0, "malformed": []}
        for job in made:
            metadata = store.read_metadata(Path(job.folder))
            assert metadata is not None
            entities = max(entities, entity_count(metadata["symbols"]))
            if part == "train":
                counts.update(metadata["counts"])
            for name in parts[part]:
                parts[part][name] += metadata[name]
        if parts[part]["questions"] == 0:
            reason = parts[part]["malformed"][0]
            name = PARTS.get(part, part)
            raise ValueError(f"no file of {name} is a valid question; the first error: {reason}")
    vocabulary = Vocabulary.of(counts, entities, min_count=choice.min_count, most=choice.words)
    unknown = vocabulary.numbers[UNKNOWN]
    with store.Writer(place) as writer:
        for part, made in jobs.items():
            begins = {"documents": 0, "questions": 0}
            for name in begins:
                writer.append(f"{part}.{name}_offsets", torch.zeros(1, dtype=torch.int64))
            for job in made:
                arrays, metadata = store.read(Path(job.folder))
                number = vocabulary.numbers
                table = torch.tensor(
                    [number.get(symbol, unknown) for symbol in metadata["symbols"]],
                    dtype=torch.int32,
                )
                for name in ("documents", "questions", "answers"):
                    local = arrays[name]
                    writer.append(f"{part}.{name}", table[local.long()] if len(local) else local)
                for name, begin in begins.items():
                    ends = arrays[f"{name}_offsets"][1:] + begin
                    writer.append(f"{part}.{name}_offsets", ends)
                    begins[name] = begin + len(arrays[name])
        writer.finish(
            {
                "files": fingerprint,
                "choice": asdict(choice),
                "parts": parts,
                "entities": entities,
                "words": vocabulary.words,
            }
        )


def _load(place: Path) -> tuple[Reading, dict[str, Any]]:
    arrays, metadata = store.read(place)
    vocabulary = Vocabulary(metadata["entities"], tuple(metadata.pop("words")))

    def part(name: str) -> Passages:
        def array(field: str) -> Tensor:
            return arrays[f"{name}.{field}"]

        return Passages(
            array("documents"),
            array("documents_offsets"),
            array("questions"),
            array("questions_offsets"),
            array("answers"),
        )

    second = part(SECOND_TEST) if SECOND_TEST in metadata["parts"] else None
    return Reading(part("train"), part("valid"), part("test"), vocabulary, second), metadata
