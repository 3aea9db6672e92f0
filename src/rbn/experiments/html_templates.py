"""HTML pages from the Jinja2 templates of this package; all values are escaped."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def render(name: str, **values: Any) -> str:
    """The page of a template in ``templates``, such as ``"report.html"``."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    source = files("rbn.experiments").joinpath("templates", name).read_text(encoding="utf-8")
    return environment.from_string(source).render(**values)
