"""Downloads files: resumes after an interruption, and checks size and SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rbn.data.errors import DataAltered
from rbn.data.sources import Published

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far and the total number of bytes."""

TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 16
_RANGE_NOT_SATISFIABLE = 416


def download(published: Published, folder: Path, progress: Progress | None = None) -> Path:
    """Download a file into a folder, and return its path.

    Bytes are collected in ``NAME.part``. If that file exists already, or the connection breaks,
    only the rest is requested. The file is renamed to its name once size and SHA-256 are correct.

    Raises:
        DataAltered: the server sent another file; nothing of it is kept.
        ConnectionError: no address sent the complete file; says why. Keeps what was received.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{published.name}.part"
    altered: DataAltered | None = None
    reasons = []
    for url in published.urls:
        resumed = _size(part) > 0
        try:
            try:
                _load(url, published, part, progress)
            except DataAltered:
                if not resumed:
                    raise
                # The first bytes were there before, and may be from another file.
                _load(url, published, part, progress)
        except DataAltered as error:
            altered = error
        except (OSError, HTTPException) as error:
            reasons.append(f"{url}: {_reason(error)}")
        else:
            path = folder / published.name
            os.replace(part, path)
            return path
    if altered is not None:
        raise altered
    raise ConnectionError("; ".join(reasons))


def _load(url: str, published: Published, part: Path, progress: Progress | None) -> None:
    """Complete the part file and check it. Removes it if it is wrong."""
    if _size(part) > published.size:
        part.unlink()
    # Each round brings the file closer to its size, or raises.
    while (before := _size(part)) < published.size:
        try:
            _transfer(url, published, part, before, progress)
        except (OSError, HTTPException):
            if _size(part) <= before:
                raise
        else:
            if _size(part) <= before:
                raise ConnectionError(f"stopped after {before:,} of {published.size:,} bytes")
    actual = _sha256(part)
    if actual != published.sha256:
        part.unlink()
        raise DataAltered(
            f"{url} is not the expected {published.name}: "
            f"SHA-256 expected {published.sha256}, found {actual}"
        )


def _transfer(
    url: str, published: Published, part: Path, have: int, progress: Progress | None
) -> None:
    """Request the missing bytes once and append them."""
    headers = {"User-Agent": "rbn"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        opened = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
            raise _wrong_size(url, published, f"at most {have:,}") from error
        raise
    with cast(HTTPResponse, opened) as response:
        resumed = (response.headers["Content-Range"] or "").startswith(f"bytes {have}-")
        if not resumed:
            have = 0
            length = response.headers["Content-Length"]
            if length is not None and int(length) != published.size:
                raise _wrong_size(url, published, f"{int(length):,}")
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(_CHUNK):
                have += len(chunk)
                if have > published.size:
                    file.close()
                    part.unlink()
                    raise _wrong_size(url, published, "more")
                file.write(chunk)
                if progress is not None:
                    progress(published.name, have, published.size)


def _wrong_size(url: str, published: Published, actual: str) -> DataAltered:
    return DataAltered(
        f"{url} is not the expected {published.name}: "
        f"expected {published.size:,} bytes, found {actual}"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__
