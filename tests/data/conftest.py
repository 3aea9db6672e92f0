"""Tiny data sets, a web server for them, and the real files if available."""

import gzip
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rbn.data import Text, text8
from rbn.data.sources import DATASETS, DataSet, Published, Source

REASON = "RBN_DATA is not set: no real data here"


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of the real data files."""
    if not os.environ.get("RBN_DATA"):
        pytest.skip(REASON)
    return Path(os.environ["RBN_DATA"])


@pytest.fixture(scope="session")
def real_text8(real: Path) -> Text:
    return text8(root=real)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_source(name: str, content: bytes, packed: str = "", urls: tuple[str, ...] = ()) -> Source:
    """A source with this content, published as is or, with ``packed=".gz"``, gzipped."""
    file = gzip.compress(content, mtime=0) if packed == ".gz" else content
    published = Published(name + packed, len(file), sha256(file), urls)
    return Source(name, len(content), sha256(content), published)


@pytest.fixture(name="make_source")
def make_source_fixture() -> Callable[..., Source]:
    return make_source


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataSet]:
    """Replaces the files of a data set for one test."""

    def put(name: str, *sources: Source) -> DataSet:
        data = DataSet(name, "a test", name, sources)
        monkeypatch.setitem(DATASETS, name, data)
        return data

    return put


class Server:
    """The contents that a web server offers, and the requests it got."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/"
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []  # range header of each request
        self.tilings: list[int] = []  # the first requests break off after this many bytes
        self.knows_ranges = True
        self.says_length = True

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers["Range"]
        self.ranges.append(wanted)
        content = self.files.get(handler.path[1:])
        if content is None:
            handler.send_error(404)
            return
        start = int(wanted[len("bytes=") : -1]) if wanted and self.knows_ranges else 0
        if start and start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.says_length:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        cut = self.tilings.pop(0) if self.tilings else len(content)
        handler.wfile.write(content[start : start + cut])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An empty web server on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state = Server(http.server_address[1])
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where no server answers."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"
