"""The data folder: finding, unpacking and checking files."""

import contextlib
import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbn.data import DataAltered, DataNotFound, data_folder, get, sources
from rbn.data.files import find, load, missing, read

CONTENT = b"the quick brown fox\n" * 50

Make = Callable[..., Any]


def write(folder: Path, form: str, content: bytes = CONTENT, member: str = "file") -> Path:
    """The content as a file in one of the accepted forms."""
    path = folder / form
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
    else:
        path.write_bytes(content)
    return path


def test_folder_is_the_argument_then_the_variable_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RBN_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder("~/here") == tmp_path / "here"
    assert data_folder() == tmp_path / "variable"
    monkeypatch.setenv("RBN_DATA", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_folder() == tmp_path / ".cache" / "rbn" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "rbn" / "data"


@pytest.mark.parametrize("form", ["file", "file.gz", "file.zip"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_every_form_is_accepted(
    make_source: Make, register: Make, tmp_path: Path, form: str, packed: str
) -> None:
    register("ptb", make_source("file", CONTENT, packed))
    (tmp_path / "ptb").mkdir()
    write(tmp_path / "ptb", form)
    assert load("ptb", tmp_path) == [CONTENT]


def test_unpacked_form_comes_first(make_source: Make, tmp_path: Path) -> None:
    source = make_source("file", CONTENT)
    assert find(source, tmp_path) is None
    for form in ("file.zip", "file.gz", "file"):
        path = write(tmp_path, form)
        assert find(source, tmp_path) == path


def test_folder_of_the_files_name_is_no_file(make_source: Make, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    assert find(make_source("file", CONTENT), tmp_path) is None


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!", CONTENT + b"!", b""])
@pytest.mark.parametrize("form", ["file", "file.gz", "file.zip"])
def test_altered_content_is_named(
    make_source: Make, tmp_path: Path, form: str, content: bytes
) -> None:
    source = make_source("file", CONTENT)
    path = write(tmp_path, form, content)
    with pytest.raises(DataAltered) as caught:
        read(source, path)
    other = make_source("file", content)
    expected, found = str(caught.value).split("; ")
    for part in (str(path), "1,000 bytes", source.sha256):
        assert part in expected
    for part in (f"{len(content):,} bytes", other.sha256):
        assert part in found


@pytest.mark.parametrize("keep", [0, 5, 12, 30, -1, -8])
def test_truncated_gz_is_named_with_its_own_sum(
    make_source: Make, tmp_path: Path, keep: int
) -> None:
    source = make_source("file", CONTENT, ".gz")
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(CONTENT, mtime=0)[:keep])
    with pytest.raises(DataAltered) as caught:
        read(source, path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    expected = f"expected {source.published.size:,} bytes, SHA-256 {source.published.sha256}"
    assert f"{expected}; found {path.stat().st_size:,} bytes, SHA-256 " in message


@pytest.mark.parametrize("form", ["file.gz", "file.zip"])
@pytest.mark.parametrize("content", [b"", b"neither of them", b"\x1f\x8b\x08\x00 broken" * 9])
def test_what_cannot_be_unpacked(
    make_source: Make, tmp_path: Path, form: str, content: bytes
) -> None:
    source = make_source("file", CONTENT)
    path = tmp_path / form
    path.write_bytes(content)
    with pytest.raises(DataAltered) as caught:
        read(source, path)
    assert str(path) in str(caught.value)
    assert source.sha256 in str(caught.value)
    assert f"{len(content)} bytes" in str(caught.value)


@pytest.mark.parametrize("form", ["file.gz", "file.zip"])
def test_altered_byte_anywhere_is_found(make_source: Make, tmp_path: Path, form: str) -> None:
    source = make_source("file", CONTENT)
    path = write(tmp_path, form)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        # A header byte that does not affect the content may change.
        with contextlib.suppress(DataAltered):
            assert read(source, path) == CONTENT


def test_zip_without_the_member(make_source: Make, tmp_path: Path) -> None:
    path = write(tmp_path, "file.zip", member="another")
    with pytest.raises(DataAltered, match=r"cannot be unpacked \(There is no item"):
        read(make_source("file", CONTENT), path)


def test_missing_files_are_one_error(make_source: Make, register: Make, tmp_path: Path) -> None:
    first = make_source("first", CONTENT, ".gz", urls=("http://a/first.gz", "http://b/first.gz"))
    second = make_source("second", CONTENT, urls=("http://a/second",))
    third = make_source("third", CONTENT, urls=("http://a/third",))
    data = register("ptb", first, second, third)
    (tmp_path / "ptb").mkdir()
    write(tmp_path / "ptb", "second")
    assert missing(data, tmp_path) == [first, third]
    with pytest.raises(DataNotFound) as caught:
        load("ptb", tmp_path)
    assert isinstance(caught.value, FileNotFoundError)
    sentence, *files = str(caught.value).splitlines()
    for part in (str(tmp_path / "ptb"), f"`rbn data get ptb --data-dir {tmp_path}`"):
        assert part in sentence
    assert files == [
        f"  first.gz, {first.published.size:,} bytes, http://a/first.gz or http://b/first.gz",
        "  third, 1,000 bytes, http://a/third",
    ]


def test_get_loads_what_is_missing(
    make_source: Make, register: Make, server: Any, tmp_path: Path
) -> None:
    urls = [server.address + name for name in ("first.gz", "second")]
    register(
        "ptb",
        make_source("first", CONTENT, ".gz", urls=(urls[0],)),
        make_source("second", CONTENT, urls=(urls[1],)),
    )
    server.files = {"first.gz": gzip.compress(CONTENT, mtime=0), "second": CONTENT}
    folder = tmp_path / "ptb"
    assert get("ptb", tmp_path) == [folder / "first.gz", folder / "second"]
    assert get("ptb", tmp_path) == []
    (folder / "second").unlink()
    assert load("ptb", tmp_path, fetch=True) == [CONTENT, CONTENT]
    assert len(server.ranges) == 3


def test_get_without_a_network_says_what_to_do(
    make_source: Make, register: Make, nowhere: str, tmp_path: Path
) -> None:
    names = ("first", "second")
    register("ptb", *(make_source(name, CONTENT, urls=(nowhere + name,)) for name in names))
    with pytest.raises(DataNotFound) as caught:
        get("ptb", tmp_path)
    opening, *lines = str(caught.value).splitlines()
    assert opening.startswith("ptb ")
    assert f"({nowhere}first: " in opening
    assert opening.endswith(f" {tmp_path / 'ptb'}")
    assert lines == [f"  {name}, 1,000 bytes, {nowhere}{name}" for name in names]


def test_unknown_data_set() -> None:
    with pytest.raises(ValueError, match=r"'imagenet'.* digits, mnist"):
        get("imagenet")


def test_registry_is_complete() -> None:
    for name, data in sources.DATASETS.items():
        assert data.name == name
        assert bool(data.sources) != bool(data.comes_with)
        for source in data.sources:
            assert source.published.name in source.forms
            assert len(source.sha256) == len(source.published.sha256) == 64
            assert source.published.urls
            assert all(url.endswith(source.published.name) for url in source.published.urls)
