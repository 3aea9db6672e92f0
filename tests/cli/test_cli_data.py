"""The `rbn data` commands."""

import hashlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from rbn.cli.app import app
from rbn.data import DataAltered, DataNotFound
from rbn.data.cnn.sets import SETS
from rbn.data.sources import DATASETS, DataSet, Published, Source

CONTENT = b" no it was n't black monday \n"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments])


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty data folder, and a registry with two small data sets in place of the large ones."""
    monkeypatch.setenv("RBN_DATA", str(tmp_path))
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    for name, files in (("mnist", ("a",)), ("ptb", ("b", "c"))):
        sources = tuple(
            Source(
                file,
                len(CONTENT),
                sha256,
                Published(file, len(CONTENT), sha256, (f"http://web/{file}",)),
            )
            for file in files
        )
        monkeypatch.setitem(DATASETS, name, DataSet(name, f"about {name}", name, sources))
    mnist = DATASETS["mnist"]
    monkeypatch.setitem(DATASETS, "pmnist", DataSet("pmnist", "mixed", "mnist", mnist.sources))
    monkeypatch.delitem(DATASETS, "text8")
    return tmp_path


def put(root: Path, *files: str, content: bytes = CONTENT) -> None:
    for file in files:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(content)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Downloads write the file directly; records the requested addresses."""
    asked: list[str] = []

    def download(published: Published, folder: Path, progress: Any = None) -> Path:
        asked.append(published.urls[0])
        put(folder.parent, f"{folder.name}/{published.name}")
        progress(published.name, 1, published.size)
        progress(published.name, published.size, published.size)
        return folder / published.name

    monkeypatch.setattr("rbn.data.files.download", download)
    return asked


def test_list(root: Path) -> None:
    put(root, "mnist/a", "ptb/c")
    result = call("list")
    assert result.exit_code == 0
    heading, *rows = result.output.splitlines()
    assert heading.split() == ["data", "set", "what", "it", "is", "download", "where"]
    ends = {row.split()[0]: row[heading.index("where") :] for row in rows}
    assert ends == {
        "digits": "comes with scikit-learn",
        "mnist": str(root / "mnist"),
        "pmnist": str(root / "mnist"),
        "ptb": "missing: b",
        "pydoc": "comes with Python",
        "cnn": "missing",
        "dailymail": "missing",
        "cnn-built": "missing",
        "dailymail-built": "missing",
    }
    assert "about ptb" in rows[3]


def test_list_of_an_empty_folder(tmp_path: Path) -> None:
    rows = call("list", "--data-dir", str(tmp_path)).output.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [*DATASETS, *SETS]
    for name, size in (("mnist", "11.6 MB"), ("ptb", "6.0 MB"), ("text8", "31.3 MB")):
        (row,) = (row for row in rows if row.startswith(name))
        assert row.endswith(f"{size}  missing")


def test_list_without_scikit_learn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbn.cli.data.find_spec", lambda _: None)
    assert "missing: scikit-learn" in call("list").output
    result = call("verify", "digits")
    assert result.exit_code == 1
    assert re.search("missing  scikit-learn.*digits", result.output)


def test_get(root: Path, web: list[str]) -> None:
    put(root, "ptb/b")
    result = call("get", "ptb", "mnist", "pmnist", "digits")
    assert result.exit_code == 0
    assert web == ["http://web/c", "http://web/a"]
    *got, last = result.stdout.splitlines()
    assert got == [
        f"got {root / 'ptb' / 'c'}",
        f"got {root / 'mnist' / 'a'}",
        f"pmnist is in {root / 'mnist'}",
    ]
    assert last.startswith("digits ")


def test_get_into_another_folder(root: Path, web: list[str]) -> None:
    other = root / "other"
    other.mkdir()
    assert call("get", "mnist", "--data-dir", str(other)).exit_code == 0
    assert (other / "mnist" / "a").read_bytes() == CONTENT
    assert not (root / "mnist").exists()


def test_get_names_a_file_that_is_there_and_wrong(root: Path, web: list[str]) -> None:
    put(root, "ptb/b", content=b"something else")
    result = call("get", "ptb")
    assert result.exit_code == 1
    assert f"rbn: {root / 'ptb' / 'b'} is truncated or altered: " in result.stderr
    assert web == []


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (DataNotFound("ptb could not be downloaded"), 1, "rbn: ptb could not be downloaded\n"),
        (DataAltered("http://web/b is not the expected b"), 1, "rbn: http://web/b is not the"),
        (PermissionError(13, "Permission denied", "ptb"), 1, "rbn: [Errno 13] Permission denied"),
        (KeyboardInterrupt(), 130, "rbn: interrupted; run the same command to resume"),
    ],
)
def test_get_ends_with_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("rbn.cli.data.get_files", fail)
    result = call("get", "ptb")
    assert result.exit_code == code
    assert result.stdout == ""
    said = result.stderr
    if tuple(map(int, metadata.version("rich").split(".")[:2])) < (14, 3):
        said = said.removeprefix("\n")  # progress output ended with a newline
    assert said.startswith(sentence)
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["get", "verify"])
def test_unknown_name(root: Path, web: list[str], command: str) -> None:
    result = call(command, "mnist", "imagenet")
    assert result.exit_code == 2
    names = "digits, mnist, pmnist, ptb, pydoc"
    assert result.output.startswith("rbn: ")
    assert "'imagenet'" in result.output
    assert names in result.output
    assert result.output.count("\n") == 1
    assert web == []


@pytest.mark.parametrize("command", ["get", "verify"])
def test_questions_are_got_by_hand(root: Path, web: list[str], command: str) -> None:
    result = call(command, "cnn")
    assert result.exit_code == 2
    assert result.output.startswith(f"rbn: cnn belongs in {root / 'cnn'}: download ")
    assert result.output.count("\n") == 1
    assert web == []


@pytest.mark.parametrize("command", ["get", "verify"])
def test_questions_go_into_the_folder_that_was_named(root: Path, command: str) -> None:
    other = root / "other"
    output = call(command, "cnn", "--data-dir", str(other)).output
    assert output.startswith(f"rbn: cnn belongs in {other / 'cnn'}: download ")
    assert f"-C {other};" in output


@pytest.mark.parametrize("arguments", [["get"], ["get", "ptb", "--nonsense"], ["put"]])
def test_bad_usage(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


def test_verify_what_is_right(root: Path) -> None:
    put(root, "mnist/a", "ptb/b", "ptb/c")
    result = call("verify")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"ok       {root / 'mnist' / 'a'}",  # once, although two data sets use it
        f"ok       {root / 'ptb' / 'b'}",
        f"ok       {root / 'ptb' / 'c'}",
    ]


def test_verify_names_what_is_missing_and_what_is_wrong(root: Path) -> None:
    put(root, "ptb/c", content=CONTENT.replace(b"black", b"bleak"))
    result = call("verify", "ptb")
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first == f"missing  {root / 'ptb' / 'b'}"
    assert second.startswith(f"damaged  {root / 'ptb' / 'c'} ")
    assert "29 bytes" in second
    assert re.fullmatch(r"rbn: 2 .*\n", result.stderr)


def test_verify_needs_no_files_for_what_is_built_in(root: Path) -> None:
    result = call("verify", "pydoc", "digits")
    assert result.exit_code == 0
    assert result.output == ""


def test_verify_real_files() -> None:
    if not os.environ.get("RBN_DATA"):
        pytest.skip("RBN_DATA is not set: no real data here")
    result = call("verify", "mnist", "ptb", "text8")
    assert result.exit_code == 0, result.output
    assert result.output.count("ok       ") == 8
