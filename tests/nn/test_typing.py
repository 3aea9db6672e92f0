"""What a type checker sees: exact return types of calls, options by name, no `Any`."""

import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import rbn

ROOT = Path(__file__).parents[2]
USAGE = Path(__file__).with_name("typed_usage.py")
EXPORTED = [getattr(rbn, name) for name in rbn.__all__ if name not in ("__version__", "init")]
FUNCTIONS = [one for one in EXPORTED if inspect.isfunction(one)]
FUNCTIONS += [one for name, one in vars(rbn.init).items() if name.endswith("_") and callable(one)]
METHODS = [
    getattr(one, name)
    for one in EXPORTED
    if inspect.isclass(one)
    for name in ("__init__", "forward", "from_lstm", "to_lstm", "from_cells", "to_cells")
    if hasattr(one, name) and one is not rbn.PopulationStatistics
]


def test_mypy_sees_the_types():
    """With the cache of `make lint`, which makes it fast."""
    pytest.importorskip("mypy", reason="the checker itself")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(USAGE)],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        cwd=ROOT,
    )
    error = re.compile(r"typed_usage\.py:(\d+): error: .*\[([\w-]+)\]$", flags=re.M)
    expected = set()
    for number, line in enumerate(USAGE.read_text().splitlines(), 1):
        expected |= {(str(number), code) for code in re.findall(r"# expected: ([\w-]+)", line)}
    assert set(error.findall(done.stdout)) == expected, done.stdout + done.stderr


def contains_any(hint):
    return hint is typing.Any or any(map(contains_any, typing.get_args(hint)))


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda f: f.__qualname__)
def test_no_any(function):
    hints = typing.get_type_hints(function)
    assert hints
    assert not [name for name, hint in hints.items() if contains_any(hint)]
