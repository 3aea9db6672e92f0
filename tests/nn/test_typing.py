"""What a type checker sees: exact return types of calls, options by name, no `Any`."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import rbn
from rbn import models

ROOT = Path(__file__).parents[2]
USAGE = Path(__file__).with_name("typed_usage.py")
EXPORTED = [getattr(rbn, name) for name in rbn.__all__ if name not in ("__version__", "init")]
FUNCTIONS = [one for one in EXPORTED if inspect.isfunction(one)]
FUNCTIONS += [one for name, one in vars(rbn.init).items() if name.endswith("_") and callable(one)]
ONLY_FOR_CHECKERS = {"ProcessGroup": torch.distributed.ProcessGroup}  # not imported at run time
CLASSES = [one for one in EXPORTED if inspect.isclass(one)]
CLASSES += [getattr(models, name) for name in models.__all__]


def own(member):
    return inspect.isfunction(member) and member.__module__.startswith("rbn.")


def methods():
    """The public ones that are not torch's, with those of base classes."""
    for each in CLASSES:
        for name in dir(each):
            member = inspect.getattr_static(each, name)
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            overrides = hasattr(torch.nn.Module, name) and name not in ("__init__", "forward")
            if (name == "__init__" or name[0] != "_") and not overrides and own(member):
                yield pytest.param(member, id=f"{each.__name__}.{name}")


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


@pytest.mark.parametrize("function", [*FUNCTIONS, *methods()])
def test_no_any(function):
    hints = typing.get_type_hints(function, localns=ONLY_FOR_CHECKERS)
    signature = inspect.signature(function)
    named = [p.name for p in signature.parameters.values() if p.name not in ("self", "cls")]
    assert {*named, "return"} <= set(hints)
    assert not [name for name, hint in hints.items() if contains_any(hint)]


@pytest.mark.parametrize("tool", ["lightning", "transformers"])
def test_no_any_in_the_options_of_callbacks(tool):
    pytest.importorskip(tool)
    callback = importlib.import_module(f"rbn.integrations.{tool}").ExactStatistics
    annotations = callback.__init__.__annotations__
    assert {"batches", "max_batches", "forward"} <= set(annotations)
    assert not [hint for hint in annotations.values() if re.search(r"\bAny\b", hint)]
