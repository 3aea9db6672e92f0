"""Storages of trials: what is rejected, and what is not shown."""

import pytest

pytest.importorskip("optuna")

from rbn.experiments.search.storage import load_study, redacted


@pytest.mark.slow
def test_another_sweep_of_that_name_is_refused(where, make, tmp_path, worker):
    worker(make(f"mine-{tmp_path.name}"), where)
    worker(make(f"mine-{tmp_path.name}", heartbeat=3), where)
    with pytest.raises(ValueError, match=r"sweep mine-.*another config and space"):
        worker(make(f"mine-{tmp_path.name}", space={"clip": [1.0]}, settings=["epochs=3"]), where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("trials.txt", r"URL .*\.db, .*, got 'trials\.txt'"),
        ("nosuch://host/db", "cannot open the storage nosuch://host/db: "),
        ("postgresql+psycopg://me:secret@/x?host=/nowhere", r"me:\*\*\*@/x\?host=/nowhere: "),
        ("broken.db", "broken.db is damaged: file is not a database"),
    ],
)
def test_storages_that_cannot_be_opened(where, message, make, tmp_path, monkeypatch, worker):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rbn.experiments.search.storage.time.sleep", lambda _: None)
    (tmp_path / "broken.db").write_text("not a database" * 100)
    with pytest.raises(ValueError, match=message) as caught:
        worker(make(), where)
    assert "secret" not in str(caught.value)


def test_no_such_sweep(where):
    message = "there is no sweep never" if "://" in where else "there is no sweep never yet"
    with pytest.raises(ValueError, match=message):
        load_study("never", where)


def test_passwords_are_not_shown():
    assert redacted("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert redacted("postgresql://host/db") == "postgresql://host/db"
    assert redacted("runs/sweep.db") == "runs/sweep.db"


def test_a_damaged_last_line_of_a_journal_is_named(make, tmp_path, worker):
    """Optuna would ignore it, as if a kill had left half a line."""
    path, sweep = tmp_path / "sweep.log", make("mine")
    worker(sweep, str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + b"?" + whole[-2:])
    with pytest.raises(ValueError, match=r"sweep\.log is damaged: line \d+"):
        load_study("mine", str(path))
    path.write_bytes(whole + b'{"half')
    load_study("mine", str(path))
