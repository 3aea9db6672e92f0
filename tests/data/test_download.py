"""Downloads, from a web server on this machine."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbn.data import DataAltered
from rbn.data.download import download
from rbn.data.sources import Published

CONTENT = bytes(range(256)) * 1000  # several chunks


@pytest.fixture
def publish(make_source: Callable[..., Any], server: Any) -> Callable[..., Published]:
    """Offers a file on the server; the content may differ from the expected one."""

    def put(given: bytes = CONTENT, **options: Any) -> Published:
        server.files["file"] = given
        urls = options.get("urls", (server.address + "file",))
        published: Published = make_source("file", CONTENT, urls=urls).published
        return published

    return put


def test_whole_file_in_a_new_folder(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    path = download(publish(), tmp_path / "a" / "b", lambda *step: seen.append(step))
    assert path == tmp_path / "a" / "b" / "file"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert server.ranges == [None]
    assert {step[0] for step in seen} == {"file"}
    assert {step[2] for step in seen} == {len(CONTENT)}
    done = [step[1] for step in seen]
    assert done == sorted(set(done))
    assert done[-1] == len(CONTENT)


def test_goes_on_in_the_same_call_after_cut_connections(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    server.tilings = [100_000, 1, 50_001]
    assert download(publish(), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=100001-", "bytes=150002-"]


def test_goes_on_where_an_earlier_call_stopped(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    published = publish()
    server.tilings = [70_000, 0]
    with pytest.raises(ConnectionError, match=r"stopped after 70,000 of 256,000 bytes"):
        download(published, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.part"]
    seen: list[int] = []
    assert download(published, tmp_path, lambda *step: seen.append(step[1]))
    assert server.ranges[-1] == "bytes=70000-"
    assert seen[0] > 70_000
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_complete_part_needs_no_request(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert download(publish(), tmp_path).read_bytes() == CONTENT
    assert server.ranges == []


def test_server_without_ranges_starts_again(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    server.knows_ranges = False
    server.tilings = [100_000]
    assert download(publish(), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


@pytest.mark.parametrize("size", [10, len(CONTENT), len(CONTENT) + 1])
def test_part_of_another_file_is_thrown_away(
    publish: Callable[..., Published], tmp_path: Path, size: int
) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * size)
    assert download(publish(), tmp_path).read_bytes() == CONTENT
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_wrong_checksum(publish: Callable[..., Published], tmp_path: Path) -> None:
    published = publish(CONTENT[:-1] + b"!")
    with pytest.raises(DataAltered, match=published.sha256) as caught:
        download(published, tmp_path)
    assert published.urls[0] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("given", [CONTENT + b"!", b"<html>log in first</html>"])
def test_wrong_size(
    publish: Callable[..., Published],
    server: Any,
    tmp_path: Path,
    given: bytes,
    says_length: bool,
) -> None:
    server.says_length = says_length
    published = publish(given)
    with pytest.raises((DataAltered, ConnectionError), match=re.escape("256,000")):
        download(published, tmp_path)
    assert not (tmp_path / "file").exists()
    server.files["file"] = CONTENT
    assert download(published, tmp_path).read_bytes() == CONTENT


def test_range_beyond_the_servers_file(
    publish: Callable[..., Published], server: Any, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataAltered, match="expected 256,000 bytes, found 1,000"):
        download(publish(CONTENT[:1000]), tmp_path)
    server.files["file"] = CONTENT
    assert download(publish(), tmp_path).read_bytes() == CONTENT


def test_second_address_helps_out(
    publish: Callable[..., Published], server: Any, nowhere: str, tmp_path: Path
) -> None:
    server.files["other"] = CONTENT[::-1]
    urls = (
        nowhere + "file",
        server.address + "none",
        server.address + "other",
        server.address + "file",
    )
    assert download(publish(urls=urls), tmp_path).read_bytes() == CONTENT


def test_no_network_and_no_file(
    publish: Callable[..., Published], server: Any, nowhere: str, tmp_path: Path
) -> None:
    urls = (nowhere + "file", server.address + "none")
    with pytest.raises(ConnectionError) as caught:
        download(publish(urls=urls), tmp_path)
    first, second = str(caught.value).split("; ")
    assert first.startswith(urls[0])
    assert second == f"{urls[1]}: HTTP Error 404: Not Found"
