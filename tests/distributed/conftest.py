import functools

import pytest
import torch
from pair import run_pair


def pytest_collection_modifyitems(items):
    """Everything that needs two processes is slow."""
    for item in items:
        if "pair_folder" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pair_folder(make_once, warm_process):
    """The folder in which two processes have run all cases."""
    return make_once("pair", functools.partial(run_pair, warm_process))


@pytest.fixture(scope="session")
def pair(pair_folder):
    """The results of both processes, by case."""
    return [torch.load(pair_folder / f"rank{k}.pt", weights_only=False) for k in range(2)]
