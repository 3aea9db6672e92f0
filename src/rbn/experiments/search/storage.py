"""The storage of a sweep's trials: an SQLite file, a journal file, or a database URL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rbn.experiments.search import sampling
from rbn.experiments.search.sweep import Sweep

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.study import Study

SQLITE = (".db", ".sqlite", ".sqlite3")
JOURNAL = (".journal", ".jsonl", ".log")
_LOCKED = 60  # seconds that SQLite waits for other processes


def default(out: Path) -> str:
    """The storage of a sweep whose runs are in a folder."""
    return str(out / "sweep.db")


def redacted(where: str) -> str:
    """A storage's name without its password."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    password = f":{parts.password}@"
    return where.replace(password, ":***@", 1) if parts.password else where


def open_study(sweep: Sweep, where: str) -> tuple[Study, BaseStorage]:
    """The study of a sweep, created if it does not exist. Refuses one with other settings."""
    import optuna

    storage = _open(where)
    study = optuna.create_study(
        storage=storage,
        study_name=sweep.name,
        direction="maximize" if sweep.maximize else "minimize",
        pruner=sampling.make_pruner(sweep),
        load_if_exists=True,
    )
    if "sweep" not in study.user_attrs:
        study.set_user_attr("sweep", sweep.identity())
    different = sweep.differences(study.user_attrs["sweep"])
    if different:
        raise ValueError(
            f"{redacted(where)} holds a sweep {sweep.name} with another {' and '.join(different)}; "
            "use its original settings, or choose another --out or --storage"
        )
    study.set_user_attr("trials", sweep.trials)
    return study, storage


def load_study(name: str, where: str) -> Study:
    """The study of an existing sweep."""
    import optuna

    if "://" not in where and not Path(where).exists():
        raise ValueError(f"there is no sweep {name} yet: there is no {where}")
    try:
        study = optuna.load_study(study_name=name, storage=_open(where))
        study.user_attrs["sweep"]  # another program's study has none
    except KeyError as error:
        raise ValueError(f"there is no sweep {name} in {redacted(where)}") from error
    return study


def _open(where: str) -> BaseStorage:
    """The storage of a name: a file by its ending, else a URL as SQLAlchemy has them."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    url = where
    if "://" not in where:
        path = Path(where).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in JOURNAL:
            # Optuna's other lock stays forever if its holder is killed and the path is relative;
            # this one expires after half a minute.
            lock = JournalFileOpenLock(str(path))
            return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        if path.suffix not in SQLITE:
            known = ", ".join((*SQLITE, *JOURNAL))
            raise ValueError(f"storage must be a URL or a file ending in {known}, got {where!r}")
        url = f"sqlite:///{path}"
    if not url.startswith("sqlite"):
        return _database(url)
    storage = _database(url, connect_args={"timeout": _LOCKED})
    _one_writer(storage)
    return storage


def _database(url: str, **options: Any) -> RDBStorage:
    """Open a database; retry if another worker is creating its tables at the same time."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError
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
        except (SQLAlchemyError, ValueError) as error:
            if left == 0:
                reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
                raise ValueError(f"cannot open the storage {redacted(url)}: {reason}") from error
            time.sleep(1)
    raise AssertionError


def _one_writer(storage: RDBStorage) -> None:
    """Let SQLite's transactions start with the write lock.

    Python's driver starts them at the first write, so two workers could both see that a trial is
    waiting, and then both take it.
    """
    from sqlalchemy import event

    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver starts no transactions itself

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", connect)
    event.listen(storage.engine, "begin", begin)
