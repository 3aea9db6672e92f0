"""Errors about a data set's files."""

from __future__ import annotations


class DataNotFound(FileNotFoundError):
    """Files of a data set are missing. Says which, their size, their source and their folder."""


class DataAltered(ValueError):
    """A file is truncated or altered. Names it, with expected and actual sizes and checksums."""
