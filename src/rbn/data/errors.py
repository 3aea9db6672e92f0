"""Errors about a data set's files."""

from __future__ import annotations


class DataNotFound(FileNotFoundError):
    """Files of a data set are missing; says which, how large, from where, and where they go."""


class DataAltered(ValueError):
    """A file is truncated or changed; names it, with the sizes and sums expected and found."""
