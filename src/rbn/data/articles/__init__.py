"""Builds questions from news articles and their highlights, in the archive's format."""

from rbn.data.articles.run import Built, build

__all__ = ["Built", "build"]
