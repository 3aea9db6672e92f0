"""Assignment of trials: each is taken once, and a killed worker's trial is taken again."""

import pickle
import signal
import threading
import time

import pytest
from warm_commands import Command

pytest.importorskip("optuna")
pytest.importorskip("sqlalchemy")  # cannot be imported by several threads at the same time

from rbn.experiments.search import trials as module
from rbn.experiments.search.heartbeat import Heartbeat
from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.storage import load_study
from rbn.experiments.search.trials import SILENT

# Takes a trial and sends heartbeats until it is killed.
HOLDER = """
import pickle, sys, time
from rbn.experiments.search.heartbeat import Heartbeat
from rbn.experiments.search.storage import open_study
from rbn.experiments.search.trials import Trials
with open(sys.argv[1], "rb") as file:
    sweep, where = pickle.load(file)
trials = Trials(sweep, *open_study(sweep, where))
with Heartbeat(trials) as heartbeat:
    number = trials.take()
    trials.begin(number)
    heartbeat.start(number)
    print(number, flush=True)
    time.sleep(600)
"""


def states(trials):
    return [trial.state.name for trial in trials.study.get_trials()]


@pytest.mark.slow
def test_every_trial_is_taken_once(where, make, worker):
    sweep = make(space={"clip": [float(k) for k in range(1, 13)]})
    taken, barrier = [], threading.Barrier(3)

    def work():
        mine = worker(sweep, where)
        barrier.wait()
        while (number := mine.take()) is not None:
            taken.append((number, mine.begin(number)[1]["clip"]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Trial number n is point n of the grid, whichever worker takes it.
    assert sorted(taken) == [(k, float(k + 1)) for k in range(12)]


@pytest.mark.slow
def test_killed_and_taken_up_again(where, make, tmp_path, worker, warm_process):
    sweep = make(heartbeat=1)
    mine = worker(sweep, where)
    (tmp_path / "job").write_bytes(pickle.dumps((sweep, where)))
    (tmp_path / "holder.py").write_text(HOLDER)
    words = [tmp_path / "holder.py", tmp_path / "job"]
    process = Command(warm_process, words, tmp_path, tmp_path)
    try:
        while not process.output.endswith("\n"):
            assert process.poll() is None, process.errors
            time.sleep(0.02)
        number = int(process.output)
        assert number == 0
        other = mine.take()
        assert other == 1
        assert mine.complete(other, 0.5)
        assert mine.take() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        began = time.monotonic()
        while (again := mine.take()) is None:
            # Far more than SILENT heartbeats, for a busy machine.
            assert time.monotonic() - began < 60
            time.sleep(0.1)
    finally:
        process.kill()
    assert again == number
    assert len(mine.frozen(number).user_attrs["dead"]) == 1
    assert mine.begin(number)[1] == {"optimizer.lr": 0.01}  # as chosen before
    assert mine.complete(number, 0.7)
    assert mine.all_finished()
    assert states(mine) == ["COMPLETE", "COMPLETE"]


@pytest.mark.slow
def test_thought_to_be_dead(where, make, monkeypatch, worker):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    sweep = make()
    slow, other = worker(sweep, where), worker(sweep, where)
    assert slow.take() == 0
    assert other.take() == 1
    assert other.complete(1, 0.1)
    assert other.take() is None
    clock[0] += SILENT * sweep.heartbeat
    assert other.take() is None  # but not longer than that
    slow.beat(0)
    clock[0] += 1
    assert other.take() is None  # a heartbeat
    clock[0] += SILENT * sweep.heartbeat + 1
    assert other.take() == 0
    assert not slow.holds(0)
    assert other.holds(0)
    for end in (slow.release, slow.prune):
        assert not end(0)
    assert not slow.complete(0, 0.9)
    assert not slow.fail(0, "of no concern")
    assert other.complete(0, 0.2)
    assert not slow.complete(0, 0.9)
    assert other.frozen(0).value == 0.2


def test_a_trial_that_kills_its_workers_is_given_up(make, tmp_path, monkeypatch, worker):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    sweep, where = make(trials=1), str(tmp_path / "sweep.db")
    workers = [worker(sweep, where) for _ in range(4)]
    for mine in workers[:3]:
        assert mine.take() == 0  # each worker dies
        for other in workers:
            other.take()
        clock[0] += SILENT * sweep.heartbeat + 1
    assert workers[3].take() is None
    assert workers[3].all_finished()
    assert workers[3].frozen(0).user_attrs["record"]["reason"] == "3 workers died while training it"


def test_released_trials_wait(where, make, worker):
    sweep = make()
    first, second = worker(sweep, where), worker(sweep, where)
    assert first.take() == 0
    trial, chosen = first.begin(0)
    trial.report(0.3, 0)
    assert first.release(0)
    assert not first.holds(0)
    assert second.take() == 0
    assert second.begin(0)[1] == chosen
    assert second.frozen(0).intermediate_values == {0: 0.3}
    assert "dead" not in second.frozen(0).user_attrs


def test_more_trials_later(make, tmp_path, worker):
    where = str(tmp_path / "sweep.db")
    few = make("growing", trials=1)
    mine = worker(few, where)
    assert mine.take() == 0
    mine.study.enqueue_trial({})  # as another worker might at the same moment
    assert mine.take() is None
    assert mine.complete(0, 0.5)
    assert mine.all_finished()
    more = worker(make("growing"), where)
    assert not more.all_finished()
    assert more.take() == 1
    assert more.begin(1)[1] == {"optimizer.lr": 0.001}


def test_fewer_trials_later(make, tmp_path, worker):
    """Trials that were finished before are not hidden."""
    where = str(tmp_path / "sweep.db")
    space = {"clip": [1.0, 2.0, 3.0]}
    mine = worker(make("shrinking", space=space), where)
    for number, value in enumerate((0.5, 0.25)):
        assert mine.take() == number
        mine.begin(number)
        assert mine.complete(number, value)
    assert mine.take() == 2  # and is not finished
    fewer = worker(make("shrinking", space=space, trials=1), where)
    assert fewer.all_finished()
    now = sweep_status(load_study("shrinking", where))
    assert [(row.number, row.best) for row in now.rows] == [(0, 0.5), (1, 0.25)]
    assert now.total == 2
    assert "2 of 2 trials finished (2 complete)" in now.summary()


def test_a_heartbeat_renews_and_notices(make, tmp_path, worker):
    sweep, where = make(heartbeat=0.2), str(tmp_path / "sweep.db")
    mine, other = worker(sweep, where), worker(sweep, where)
    number = mine.take()
    first = mine.frozen(number).user_attrs["beat"]
    told = threading.Event()
    with Heartbeat(mine) as heartbeat:
        heartbeat.start(number)
        heartbeat.when_lost(told.set)
        deadline = time.monotonic() + 60
        while mine.frozen(number).user_attrs["beat"]["count"] < first["count"] + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not heartbeat.lost
        other.beat(number)
        assert told.wait(60)
        assert heartbeat.lost
        count = other.frozen(number).user_attrs["beat"]
        time.sleep(0.6)
        assert other.frozen(number).user_attrs["beat"] == count  # the heartbeat has stopped


def test_the_storage_may_be_away_for_a_moment(make, tmp_path, monkeypatch, worker):
    from optuna.exceptions import StorageInternalError

    monkeypatch.setattr(module, "_PAUSES", (0, 0))
    mine = worker(make(), str(tmp_path / "sweep.db"))
    number = mine.take()
    real, calls = mine.study.tell, []

    def tell(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise StorageInternalError("away")
        return real(*arguments, **options)

    monkeypatch.setattr(mine.study, "tell", tell)
    assert mine.complete(number, 0.5)
    assert len(calls) == 3
    monkeypatch.setattr(mine.study, "tell", lambda *_, **__: tell.missing)
    with pytest.raises(AttributeError):
        mine.complete(mine.take(), 0.5)
