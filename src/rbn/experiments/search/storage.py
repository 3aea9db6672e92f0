"""Where a sweep's trials are kept: an SQLite file, a journal file, or a database's URL."""

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


def shown(where: str) -> str:
    """A storage's name without its password."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    password = f":{parts.password}@"
    return where.replace(password, ":***@", 1) if parts.password else where


def open_study(sweep: Sweep, where: str) -> tuple[Study, BaseStorage]:
    """The study of a sweep, made if there is none; refused if it is of other trials."""
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
            f"{shown(where)} holds a sweep {sweep.name} with another {' and '.join(different)}; "
            "go on with what it was started with, or name another --out or --storage"
        )
    study.set_user_attr("trials", sweep.trials)
    return study, storage


def load_study(name: str, where: str) -> Study:
    """The study of a sweep that was begun."""
    import optuna

    if "://" not in where and not Path(where).exists():
        raise ValueError(f"there is no sweep {name} yet: there is no {where}")
    try:
        study = optuna.load_study(study_name=name, storage=_open(where))
        study.user_attrs["sweep"]  # another program's study has none
    except KeyError as error:
        raise ValueError(f"there is no sweep {name} in {shown(where)}") from error
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
            # The other lock of Optuna's stays for ever when its holder is killed, if the path is
            # relative; this one is broken after half a minute.
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
    """Open a database; again if another worker was making its tables at the same moment."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import NullPool

    # A worker says something every few seconds: it need not keep a connection, and so does not
    # mind a server that was restarted.
    options["poolclass"] = NullPool
    for left in (2, 1, 0):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except ImportError as error:
            raise ImportError(f"{shown(url)} needs a driver: {error.__cause__ or error}") from error
        except (SQLAlchemyError, ValueError) as error:
            if left == 0:
                reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
                raise ValueError(f"cannot open the storage {shown(url)}: {reason}") from error
            time.sleep(1)
    raise AssertionError


def _one_writer(storage: RDBStorage) -> None:
    """Let SQLite's transactions begin with the write lock.

    Python's driver begins them at the first write, so two workers could both read that a trial is
    waiting, and then both take it.
    """
    from sqlalchemy import event

    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", connect)
    event.listen(storage.engine, "begin", begin)
