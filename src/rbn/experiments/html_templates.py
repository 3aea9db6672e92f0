"""HTML pages from the Jinja2 templates of this package. All values are escaped."""

from __future__ import annotations

from typing import Any


def render(name: str, **values: Any) -> str:
    """Fill in a template of the folder ``templates``, such as ``"report.html"``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("rbn.experiments", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(name).render(**values)
