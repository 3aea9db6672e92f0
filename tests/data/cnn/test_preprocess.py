"""Preprocessing: once, in parallel, checked, resumable, and with reports of all it skips."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

import pytest
import torch

from rbn.data.cloze import cloze_questions
from rbn.data.cnn import load_questions, preprocess, shards, store
from rbn.data.cnn.preprocess import PARTS, Choice, prepared
from rbn.data.cnn.question import render
from rbn.data.cnn.shards import Reduction
from rbn.data.cnn.vocabulary import Vocabulary, normal
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.file_lock import file_lock

SIZES = (30, 12, 8)


@pytest.fixture
def questions():
    return dict(zip(PARTS, cloze_questions(SIZES), strict=True))


@pytest.fixture
def folder(tmp_path, questions):
    """Question files in the layout of the archives."""
    root = tmp_path / "data" / "cnn" / "questions"
    for part, found in questions.items():
        (root / PARTS[part]).mkdir(parents=True)
        for k, question in enumerate(found):
            (root / PARTS[part] / f"{k:04d}.question").write_text(render(question))
    return root


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(preprocess, "SHARD", 7)


def decoded(reading, part):
    found = getattr(reading, part)
    return [
        tuple(tuple(reading.vocabulary.decode(text)) for text in (d, q, [a]))
        for d, q, a in map(found.example, range(len(found)))
    ]


def whole(**options):
    return Choice(Reduction(sentences=None), **options)


def test_files_in_numbers(folder, questions, tmp_path):
    reading, summary = prepared(folder, tmp_path / "cache", whole(), processes=1)
    for part, found in questions.items():
        expected = [(q.document, q.question, (q.answer,)) for q in found]
        assert decoded(reading, part) == expected
        assert summary["parts"][part] == {
            "questions": len(found),
            "answerable": len(found),
            "kept": len(found),
            "malformed": [],
        }
    assert reading.vocabulary.entities == 12
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [whole().key]


def test_a_second_test_set(folder, questions, tmp_path):
    assert prepared(folder, tmp_path / "cache", whole(), processes=1)[0].test_cnn is None
    (folder / "test-cnn").mkdir()
    with pytest.raises(DataNotFound, match=r"no \.question files in .*test-cnn"):
        prepared(folder, tmp_path / "cache", whole(), processes=1)
    second, _, _ = cloze_questions((9, 0, 0), seed=5)
    for k, question in enumerate(second):
        (folder / "test-cnn" / f"{k}.question").write_text(render(question))
    reading, summary = prepared(folder, tmp_path / "cache", whole(), processes=1)
    assert list(reading.to("cpu").parts) == ["train", "valid", "test", "test-cnn"]
    assert decoded(reading, "test_cnn") == [(q.document, q.question, (q.answer,)) for q in second]
    assert summary["parts"]["test-cnn"]["questions"] == 9
    assert decoded(reading, "test") == [
        (q.document, q.question, (q.answer,)) for q in questions["test"]
    ]


@pytest.mark.slow
def test_several_processes_give_the_same(folder, tmp_path):
    one, _ = prepared(folder, tmp_path / "one", Choice(), processes=1)
    two, _ = prepared(folder, tmp_path / "two", Choice(), processes=2)
    assert one.vocabulary == two.vocabulary
    for part in PARTS:
        for name in ("documents", "document_offsets", "questions", "answers"):
            assert torch.equal(getattr(getattr(one, part), name), getattr(getattr(two, part), name))


def test_the_cache_is_read_without_the_files_and_checked(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first, _ = prepared(folder, cache, Choice(), processes=1)
    monkeypatch.setattr(shards, "make", None)  # nothing is made again
    again, _ = prepared(folder, cache, Choice(), processes=1)
    assert decoded(again, "valid") == decoded(first, "valid")
    prepared(tmp_path / "gone", cache, Choice())
    place = cache / Choice().key
    path = place / "valid.documents.int32"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataAltered, match=r"valid\.documents\.int32 is damaged: remove"):
        prepared(folder, cache, Choice())
    path.write_bytes(content[:-4])
    with pytest.raises(DataAltered, match="missing or truncated"):
        prepared(folder, cache, Choice())
    (place / "manifest.json").write_text("{")
    with pytest.raises(DataAltered, match="damaged"):
        prepared(folder, cache, Choice())


def test_goes_on_after_a_kill(folder, tmp_path, monkeypatch):
    made = []
    real = shards.make

    def dies(job):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(job)
        return real(job)

    monkeypatch.setattr(shards, "make", dies)
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, cache, Choice(), processes=1)
    again, told = [], []
    monkeypatch.setattr(shards, "make", lambda job: again.append(job) or real(job))
    reading, _ = prepared(
        folder, cache, Choice(), processes=1, progress=lambda *now: told.append(now)
    )
    assert not set(made) & set(again)
    assert sum(len(job.files) for job in (*made, *again)) == sum(SIZES)
    assert told[-1] == (sum(SIZES), sum(SIZES))
    monkeypatch.setattr(shards, "make", real)
    plain, _ = prepared(folder, tmp_path / "other", Choice(), processes=1)
    assert decoded(reading, "train") == decoded(plain, "train")


def test_another_file_makes_the_cache_anew(folder, questions, tmp_path):
    cache = tmp_path / "cache"
    prepared(folder, cache, Choice(), processes=1)
    (folder / "test" / "new.question").write_text(render(questions["train"][0]))
    reading, _ = prepared(folder, cache, Choice(), processes=1)
    assert len(reading.test) == SIZES[2] + 1


def changed(path, seconds=1):
    """Change the modification time, as rewriting a file does."""
    about = path.stat()
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + seconds * 10**9))


def test_a_changed_file_makes_the_cache_anew(folder, questions, tmp_path):
    cache, path = tmp_path / "cache", folder / "test" / "0003.question"
    prepared(folder, cache, whole(), processes=1)
    other = questions["train"][0]
    path.write_text(render(other))
    changed(path)
    reading, _ = prepared(folder, cache, whole(), processes=1)
    assert decoded(reading, "test")[3][1] == other.question
    path.write_text(render(other).replace(" the ", " teh "))  # same size
    changed(path)
    reading, _ = prepared(folder, cache, whole(), processes=1)
    assert decoded(reading, "test")[3][1] == tuple(
        "@unknown" if token == "the" else token for token in other.question
    )


def test_shards_of_changed_files_are_made_anew(folder, questions, tmp_path, monkeypatch):
    """Also after a kill: results from the old content of a changed file do not count."""
    real, made = shards.make, []

    def dies(job):
        if made:
            raise KeyboardInterrupt
        made.append(job)
        return real(job)

    monkeypatch.setattr(shards, "make", dies)
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, tmp_path / "cache", whole(), processes=1)
    monkeypatch.setattr(shards, "make", real)
    path = folder / "training" / "0000.question"
    path.write_text(render(questions["test"][0]))
    changed(path)
    reading, _ = prepared(folder, tmp_path / "cache", whole(), processes=1)
    assert decoded(reading, "train")[0][0] == questions["test"][0].document


def test_a_link_to_nowhere_is_skipped(folder, tmp_path):
    (folder / "test" / "lost.question").symlink_to(tmp_path / "nowhere")
    for _ in range(2):
        _, summary = prepared(folder, tmp_path / "cache", Choice(), processes=1)
        (said,) = summary["parts"]["test"]["malformed"]
        assert "lost.question" in said


def test_one_makes_the_cache_and_the_others_wait(folder, tmp_path, monkeypatch, caplog):
    """Each call opens the lock file, so threads wait for each other like processes."""
    real, made = shards.make, []
    begun, go_on = threading.Event(), threading.Event()

    def slow(job):
        begun.set()
        assert go_on.wait(60)
        made.append(job)
        return real(job)

    monkeypatch.setattr(shards, "make", slow)

    class Said(logging.Handler):
        def emit(self, record):
            waiting.release()

    waiting, handler = threading.Semaphore(0), Said()
    logging.getLogger("rbn.data.cnn.preprocess").addHandler(handler)
    cache = tmp_path / "cache"
    try:
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(prepared, folder, cache, Choice(), processes=1)]
            assert begun.wait(60)
            calls += [pool.submit(prepared, folder, cache, Choice(), processes=1) for _ in "ab"]
            there = [waiting.acquire(timeout=60) for _ in "ab"]
            go_on.set()
            readings = [call.result()[0] for call in calls]
    finally:
        logging.getLogger("rbn.data.cnn.preprocess").removeHandler(handler)
    assert all(there)
    assert sum(len(job.files) for job in made) == sum(SIZES)
    assert len({str(decoded(reading, "train")) for reading in readings}) == 1
    # Some versions of filelock leave the lock file.
    assert {p.name for p in cache.iterdir()} - {f"{Choice().key}.lock"} == {Choice().key}
    assert [str(folder) in message for message in caplog.messages] == [True] * 2


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_process_lets_go(folder, tmp_path):
    pytest.importorskip("fcntl")
    cache = tmp_path / "cache"
    cache.mkdir()
    lock = cache / f"{Choice().key}.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(prepared, folder, cache, Choice(), processes=1)
                with pytest.raises(StillRunning):
                    call.result(timeout=0.3)
                holder.kill()
                reading, _ = call.result(timeout=60)
        finally:
            holder.kill()
    assert len(reading.train) == SIZES[0]


def test_a_lock_that_is_refused_instead_of_waited_for(tmp_path):
    def refuse():
        raise FileExistsError("it is held")

    for _ in range(2):
        with (
            file_lock(tmp_path / "a.lock", refuse),
            pytest.raises(FileExistsError, match="it is held"),
            file_lock(tmp_path / "a.lock", refuse),
        ):
            raise AssertionError("both hold it")


def test_a_disk_without_locks(folder, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    reading, _ = prepared(folder, tmp_path / "cache", Choice(), processes=1)
    assert len(reading.train) == SIZES[0]


def test_a_folder_that_cannot_be_written(folder, tmp_path, monkeypatch):
    """An existing cache is used; without one, the error names the folder."""
    cache = tmp_path / "cache"
    prepared(folder, cache, Choice(), processes=1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root could write anywhere
    monkeypatch.setattr("rbn.data.cnn.preprocess.file_lock", None)
    prepared(folder, cache, Choice(), processes=1)
    with pytest.raises(PermissionError, match=r"no up-to-date cache"):
        prepared(folder, cache, whole(), processes=1)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"min_count": "abc"}, TypeError, "min_count.*integer, got str"),
        ({"min_count": 0}, ValueError, "min_count.* 1, got 0"),
        ({"words": 2.5}, TypeError, "words.*integer, got float"),
        ({"words": -1}, ValueError, "words.* 1, got -1"),
        ({"sentences": 2.5}, TypeError, "sentences.*integer, got float"),
        ({"sentences": "four"}, TypeError, "sentences.*integer, got str"),
        ({"sentences": -1}, ValueError, "sentences.* 1, got -1"),
        ({"sentences": 0}, ValueError, "sentences .*1, .*None .*got 0"),
        ({"renumber": "no"}, TypeError, "renumber.*True.*False, got 'no'"),
        ({"processes": 0}, ValueError, "processes.* 1, got 0"),
        ({"processes": "all"}, TypeError, "processes.*integer, got str"),
    ],
)
def test_bad_settings_before_any_work(folder, tmp_path, monkeypatch, options, error, sentence):
    monkeypatch.setattr(os, "scandir", None)
    with pytest.raises(error, match=sentence):
        load_questions("cnn", root=tmp_path / "data", **{"processes": 1, **options})


def test_malformed_files_are_named_and_counted(folder, tmp_path):
    (folder / "training" / "broken.question").write_text("no question")
    (folder / "training" / "bytes.question").write_bytes(b"\xff\xfe")
    (folder / "training" / "notes.txt").write_text("not looked at")
    reading, summary = prepared(folder, tmp_path / "cache", Choice(), processes=1)
    assert len(reading.train) == SIZES[0]
    found = summary["parts"]["train"]["malformed"]
    assert [line.split(":")[0] for line in found] == ["broken.question", "bytes.question"]
    assert summary["parts"]["valid"]["malformed"] == []


def test_a_part_of_malformed_files_alone(folder, tmp_path):
    for path in (folder / "test").iterdir():
        path.write_text("nothing")
    with pytest.raises(ValueError, match=r"no file of test .*0000\.question: "):
        prepared(folder, tmp_path / "cache", Choice(), processes=1)


def test_sentences_and_counts_of_kept_answers(folder, tmp_path):
    text = (
        "url\n\n@entity5 slept . a dog barked . a cat sat . a cow ate . a hen ran . it rained ."
        "\n\n@placeholder and the dog , cat , cow and hen\n\n@entity5\n"
    )
    (folder / "test" / "z.question").write_text(text)
    reading, summary = prepared(folder, tmp_path / "cache", Choice(), processes=1)
    assert decoded(reading, "test")[-1][0][:3] == ("a", "@unknown", "@unknown")
    assert len(decoded(reading, "test")[-1][0]) == 16
    total = SIZES[2] + 1
    assert summary["parts"]["test"]["answerable"] == total
    assert summary["parts"]["test"]["kept"] < total


def test_renumbered_entities(folder, questions, tmp_path):
    choice = Choice(Reduction(sentences=None, renumber=True))
    reading, _ = prepared(folder, tmp_path / "cache", choice, processes=1)
    assert reading.vocabulary.entities == 3
    document, _, answer = decoded(reading, "train")[0]
    assert [t for t in document if t.startswith("@")] == ["@entity0", "@entity1", "@entity2"]
    original = questions["train"][0]
    assert document.index(answer[0]) == original.document.index(original.answer)


def test_the_vocabulary(folder, tmp_path):
    choice = whole(words=10)
    reading, _ = prepared(folder, tmp_path / "cache", choice, processes=1)
    assert len(reading.vocabulary.words) == 10
    assert "." in reading.vocabulary.words[:2]
    assert "@unknown" in decoded(reading, "train")[0][0]
    counts = {"rare": 1, "often": 5, "also": 5, "@entity3": 9, "@number": 4}
    vocabulary = Vocabulary.of(counts, 2, min_count=2)
    assert vocabulary.words == ("also", "often")
    assert vocabulary.symbols[:4] == ("@padding", "@unknown", "@number", "@placeholder")
    assert vocabulary.encode(["@entity1", "often", "rare", "1,200"]) == [5, 7, 1, 2]
    assert vocabulary.decode([5, 7]) == ["@entity1", "often"]


@pytest.mark.parametrize("token", ["1", "2,000", "3.5", "$10", "21st", "10:30", "-5", "40m"])
def test_numbers(token):
    assert normal(token) == "@number"


@pytest.mark.parametrize("token", ["a1", "g20", "one", ".", "@entity1", "-", "u2"])
def test_no_numbers(token):
    assert normal(token) == token


def test_by_name(folder, tmp_path):
    root = tmp_path / "data"
    reading, _ = load_questions("cnn", root=root, processes=1, sentences=1)
    assert len(reading.valid) == SIZES[1]
    assert (root / "cnn" / "cache").is_dir()
    load_questions("cnn", root=root, cache=tmp_path / "elsewhere", processes=1)
    moved = tmp_path / "moved" / "cnn"  # to a machine that only trains
    shutil.copytree(root / "cnn" / "cache", moved / "cache")
    again, _ = load_questions("cnn", root=moved.parent, sentences=1)
    assert torch.equal(again.train.documents, reading.train.documents)
    with pytest.raises(DataNotFound, match="cnn is not in"):
        load_questions("cnn", root=moved.parent, sentences=2)
    assert (tmp_path / "elsewhere").is_dir()
    with pytest.raises(ValueError, match=r"'bbc'.* cnn, dailymail"):
        load_questions("bbc", root=root)
    with pytest.raises(DataNotFound, match=r"dailymail is not in .*checksum"):
        load_questions("dailymail", root=root)
    with pytest.raises(DataNotFound, match="rbn data build-cloze --articles"):
        load_questions("cnn-built", root=root)
    (root / "cnn-built" / "questions").mkdir(parents=True)
    with pytest.raises(DataNotFound, match=r"the build of .* did not finish"):
        load_questions("cnn-built", root=root)


def test_a_missing_part(folder, tmp_path):
    for path in (folder / "validation").iterdir():
        path.unlink()
    with pytest.raises(DataNotFound, match=r"no \.question files in .*validation"):
        prepared(folder, tmp_path / "cache", Choice())
    with pytest.raises(DataNotFound, match="there is no folder"):
        prepared(tmp_path / "nowhere", tmp_path / "cache", Choice())


def test_a_store_appears_whole_or_not_at_all(tmp_path):
    writer = store.Writer(tmp_path / "a")
    writer.append("numbers", torch.tensor([1, 2]))
    assert store.read_metadata(tmp_path / "a") is None
    writer.append("numbers", torch.tensor([3]))
    writer.append("none", torch.empty(0, dtype=torch.int32))
    writer.finish({"of": "a test"})
    arrays, summary = store.read(tmp_path / "a")
    assert arrays["numbers"].tolist() == [1, 2, 3]
    assert arrays["none"].dtype == torch.int32
    assert summary == {"of": "a test"}
    with pytest.raises(TypeError, match="int32 or int64"):
        writer.append("numbers", torch.tensor([1.0]))


def test_any_changed_character_of_the_manifest_is_noticed(folder, tmp_path):
    first, _ = prepared(folder, tmp_path / "cache", Choice(), processes=1)
    path = tmp_path / "cache" / Choice().key / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        old = content[place]
        new = b"7" if old != ord("7") else b"8"
        path.write_bytes(content[:place] + new + content[place + 1 :])
        try:
            found = decoded(prepared(folder, tmp_path / "cache", Choice())[0], "valid")
        except DataAltered as error:
            found = "named" if "manifest.json" in str(error) else error
        assert found in ("named", decoded(first, "valid")), place
