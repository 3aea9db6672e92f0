"""The storage of a sweep's trials: an SQLite file, a journal file, or a database URL."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rbn.experiments.config import from_mapping
from rbn.experiments.search import sampling
from rbn.experiments.search.sweep import Sweep
from rbn.experiments.search.trial_record import check_trials, is_checked, with_checksum

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.study import Study

SQLITE = (".db", ".sqlite", ".sqlite3")
JOURNAL = (".journal", ".jsonl", ".log")
_LOCKED = 60  # seconds that SQLite waits for other processes
_SWEEP = "sweep"  # attribute of a study
_REMEDY = "restore it or remove it; without it, rbn sweep rebuilds it from the runs"


def default(out: Path) -> str:
    """The default storage of a sweep whose runs are in a folder."""
    return str(out / "sweep.db")


def redacted(where: str) -> str:
    """A storage's name without the password."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    password = f":{parts.password}@"
    return where.replace(password, ":***@", 1) if parts.password else where


def open_study(sweep: Sweep, where: str) -> tuple[Study, BaseStorage]:
    """The study of a sweep, created if it does not exist. Rejects one with other settings.

    Raises:
        ValueError: the settings differ, or the storage is damaged; names it.
    """
    import optuna

    storage = _open(where)
    with _reading(where):
        study = optuna.create_study(
            storage=storage,
            study_name=sweep.name,
            direction="maximize" if sweep.maximize else "minimize",
            pruner=sampling.make_pruner(sweep),
            load_if_exists=True,
        )
        about = with_checksum({"identity": sweep.identity(), "trials": sweep.trials})
        if _SWEEP not in study.user_attrs:
            study.set_user_attr(_SWEEP, about)
    _check(study, where)
    different = sweep.differences(description(study)["identity"])
    if different:
        raise ValueError(
            f"{redacted(where)} holds a sweep {sweep.name} with another {' and '.join(different)}; "
            "use its original settings, or choose another --out or --storage"
        )
    if description(study)["trials"] != sweep.trials:
        study.set_user_attr(_SWEEP, about)
    return study, storage


def load_study(name: str, where: str) -> Study:
    """The study of an existing sweep.

    Raises:
        ValueError: there is none, or the storage is damaged; names it.
    """
    import optuna

    if "://" not in where and not Path(where).exists():
        raise ValueError(f"there is no sweep {name} yet: {where} does not exist")
    storage = _open(where)
    with _reading(where):
        try:
            study = optuna.load_study(study_name=name, storage=storage)
            missing = _SWEEP not in study.user_attrs  # another program's study
        except KeyError:
            missing = True
    if missing:
        raise ValueError(f"there is no sweep {name} in {redacted(where)}")
    _check(study, where)
    return study


def description(study: Study) -> dict[str, Any]:
    """The ``identity`` of a study's sweep (see `Sweep.identity`), and how many ``trials`` it has.

    Raises:
        ValueError: they do not match their checksum.
    """
    about: dict[str, Any] = study.user_attrs[_SWEEP]
    if not is_checked(about):
        raise ValueError("the settings of the sweep do not match their checksum")
    return about


def _check(study: Study, where: str) -> None:
    """Check the sweep of a study and all its trials against their checksums."""
    with _reading(where):
        for left in (2, 1, 0):
            try:
                about = description(study)
                _check_direction(study, about)
                check_trials(study.get_trials(deepcopy=False))
                return
            except ValueError:  # may be caused by another worker that is writing
                if left == 0:
                    raise
                time.sleep(0.1)


def _check_direction(study: Study, about: dict[str, Any]) -> None:
    config = from_mapping(next(iter(about["identity"]["config"].values())))
    if (study.direction.name == "MAXIMIZE") != config.kind.higher_is_better:
        raise ValueError("the direction of the sweep does not match its task")


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Inside the ``with`` block, errors caused by a storage's content say that it is damaged."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except (ImportError, OptunaError, OSError):
        raise
    except Exception as error:  # a changed byte makes Optuna and SQLAlchemy raise almost anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{redacted(where)} is damaged: {reason}; {_REMEDY}") from error


def _open(where: str) -> BaseStorage:
    """Open a storage: a file, by its suffix, or an SQLAlchemy URL."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    url = where
    if "://" not in where:
        path = Path(where).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in JOURNAL:
            # Optuna's other lock is never released if its holder is killed and the path is
            # relative; this one expires after half a minute.
            lock = JournalFileOpenLock(str(path))
            with _reading(where):
                _check_journal(path)
                return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        if path.suffix not in SQLITE:
            known = ", ".join((*SQLITE, *JOURNAL))
            raise ValueError(f"storage must be a URL or a file ending in {known}, got {where!r}")
        url = f"sqlite:///{path}"
    if not url.startswith("sqlite"):
        return _database(url)
    _check_file(url)
    storage = _database(url, connect_args={"timeout": _LOCKED})
    _one_writer(storage)
    return storage


def _check_journal(path: Path) -> None:
    """Check that all lines are JSON and name studies and trials that exist.

    A kill can leave half a line at the end. Optuna ignores damage there, and operations on trials
    and studies that do not exist.
    """
    if not path.is_file():
        return
    *lines, rest = path.read_bytes().split(b"\n")
    studies = trials = 0
    for number, line in enumerate(lines, 1):
        try:
            operation = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON") from error
        if operation.get("study_id", -1) >= studies or operation.get("trial_id", -1) >= trials:
            raise ValueError(f"line {number} names a study or trial that does not exist")
        studies += "study_name" in operation
        trials += "datetime_start" in operation and "trial_id" not in operation
    text = rest.decode(errors="replace")
    with contextlib.suppress(json.JSONDecodeError):  # half a line
        _, end = json.JSONDecoder().raw_decode(text)
        if end < len(text):
            raise ValueError("there is extra text after the last line")


def _check_file(url: str) -> None:
    """Let SQLite check the structure of its file."""
    from sqlalchemy import make_url

    path = make_url(url).database
    if path is None or not Path(path).is_file():
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_LOCKED)) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        raise ValueError(f"cannot open the storage {path}: {error}") from error
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        reason = " ".join(verdict.split())
        raise ValueError(f"{path} is damaged: {reason}; {_REMEDY}")


def _database(url: str, **options: Any) -> RDBStorage:
    """Open a database; retry if another worker is creating its tables at the same time."""
    from optuna.storages import RDBStorage
    from sqlalchemy.pool import NullPool

    # A worker writes every few seconds. Without a permanent connection it survives a restart of
    # the server.
    options["poolclass"] = NullPool
    for left in (2, 1, 0):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except ImportError as error:
            raise ImportError(
                f"{redacted(url)} needs a driver: {error.__cause__ or error}"
            ) from error
        except Exception as error:  # damage makes it raise almost anything
            if left == 0:
                reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
                raise ValueError(f"cannot open the storage {redacted(url)}: {reason}") from error
            time.sleep(1)
    raise AssertionError


def _one_writer(storage: RDBStorage) -> None:
    """Make SQLite's transactions start with the write lock.

    Python's driver takes it at the first write, so two workers could both see that a trial is
    waiting, and then both take it.
    """
    from sqlalchemy import event

    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver starts no transactions itself

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", connect)
    event.listen(storage.engine, "begin", begin)
