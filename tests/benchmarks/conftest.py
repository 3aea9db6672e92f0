import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bench():
    """Import a module of the benchmarks by name, as their scripts do."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
