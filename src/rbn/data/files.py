"""The data folder: finds, checks and downloads files."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shlex
import zipfile
from pathlib import Path

from rbn.data.download import Progress, download
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.sources import DataSet, Source, data_set


def data_folder(root: str | Path | None = None) -> Path:
    """The folder of data sets: `root`, else RBN_DATA, else ``rbn/data`` in the user's cache.

    The user's cache is XDG_CACHE_HOME if set, else ``~/.cache``.
    """
    if root is not None:
        return Path(root).expanduser()
    if os.environ.get("RBN_DATA"):
        return Path(os.environ["RBN_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rbn" / "data"


def find(source: Source, folder: Path) -> Path | None:
    """The path of a file, unpacked or packed (unpacked first); None if it is missing."""
    paths = (folder / form for form in source.forms)
    return next((path for path in paths if path.is_file()), None)


def missing(data: DataSet, root: str | Path | None = None) -> list[Source]:
    """The files of a data set that are missing from the data folder."""
    folder = data_folder(root) / data.folder
    return [source for source in data.sources if find(source, folder) is None]


def read(source: Source, path: Path) -> bytes:
    """Read a file, unpack it if needed, and check its SHA-256.

    The check takes 0.1 s per 100 MB, so it is always made.
    """
    packed = path.read_bytes()
    try:
        content = _unpack(source, path, packed)
    except Exception as error:  # a changed byte makes zipfile raise almost anything
        reason = str(error.args[0] if error.args else "") or type(error).__name__
        raise _altered(source, path, f"cannot be unpacked ({reason})", packed) from error
    if len(content) != source.size or hashlib.sha256(content).hexdigest() != source.sha256:
        raise _altered(source, path, "is truncated or altered", packed, content)
    return content


def load(name: str, root: str | Path | None = None, *, fetch: bool = False) -> list[bytes]:
    """The unpacked bytes of every file of a data set, in the order of its sources.

    Args:
        name: name of the data set.
        root: the data folder (see `data_folder`).
        fetch: download missing files.
    """
    data = data_set(name)
    if fetch:
        get(name, root)
    folder = data_folder(root) / data.folder
    paths = {source: path for source in data.sources if (path := find(source, folder))}
    if len(paths) < len(data.sources):
        raise not_found(data, missing(data, root), root)
    return [read(source, path) for source, path in paths.items()]


def get(name: str, root: str | Path | None = None, progress: Progress | None = None) -> list[Path]:
    """Download the missing files of a data set, and return their paths.

    Raises:
        DataNotFound: a download failed. Names the files and the folder they belong in.
        DataAltered: a server sent different content.
    """
    data = data_set(name)
    folder = data_folder(root) / data.folder
    paths = []
    for source in missing(data, root):
        try:
            paths.append(download(source.published, folder, progress))
        except ConnectionError as error:
            raise not_found(data, missing(data, root), root, str(error)) from error
    return paths


def not_found(
    data: DataSet, absent: list[Source], root: str | Path | None = None, reason: str = ""
) -> DataNotFound:
    """Make the error that says how to get the files."""
    folder = data_folder(root) / data.folder
    if reason:
        opening = f"{data.name} could not be downloaded ({reason}): put these files into {folder}"
    else:
        command = f"rbn data get {data.name}"
        if root is not None:
            command += f" --data-dir {shlex.quote(str(root))}"
        opening = f"{data.name} is not in {folder}: run `{command}`, or put these files there"
    files = [source.published for source in absent]
    lines = [f"  {file.name}, {file.size:,} bytes, {' or '.join(file.urls)}" for file in files]
    return DataNotFound("\n".join([opening, *lines]))


def _unpack(source: Source, path: Path, packed: bytes) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(packed)
    if path.suffix == ".zip":
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return archive.read(source.name)
    return packed


def _altered(
    source: Source, path: Path, what: str, packed: bytes, content: bytes | None = None
) -> DataAltered:
    """Make the error for a file with the wrong content."""
    size, sha256 = source.size, source.sha256
    if path.name == source.published.name:
        size, sha256, content = source.published.size, source.published.sha256, packed
    if content is None:
        actual = f"a file of {len(packed):,} bytes"
    else:
        actual = f"{len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}"
    return DataAltered(f"{path} {what}: expected {size:,} bytes, SHA-256 {sha256}; found {actual}")
