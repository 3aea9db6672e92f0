"""A claim of the paper without a figure, and the result of our experiment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rbn.training.atomic_files import write_atomic

FOLDER = "findings"


@dataclass(frozen=True)
class Finding:
    """One claim of the paper and the result of our experiment.

    Attributes:
        name: the target of ``rbn reproduce``.
        statement: the paper's claim.
        setup: the experiment.
        columns: column titles of the table.
        rows: rows of the table, as text.
        outcome: the conclusion from the numbers.
        command: the command that reproduces it.
        seconds: how long it took.
        versions: software versions.
    """

    name: str
    statement: str
    setup: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    outcome: str
    command: str
    seconds: float = 0.0
    versions: str = ""

    def write(self, folder: Path) -> Path:
        """Save it in a folder of results."""
        path = folder / FOLDER / f"{self.name}.json"
        write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_findings(folder: Path) -> list[Finding]:
    """The findings in a folder of results."""
    findings = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["columns"] = tuple(values["columns"])
            values["rows"] = tuple(tuple(row) for row in values["rows"])
            findings.append(Finding(**values))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a finding: {error}") from error
    return findings
