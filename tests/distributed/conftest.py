import time

import pytest
import torch
from pair import run_pair


def pytest_collection_modifyitems(items):
    """Whatever needs the two processes is slow."""
    for item in items:
        if "pair_folder" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory, request):
    """Where two processes have run all cases, once for all workers that pytest has."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    folder = shared / "pair"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:  # another worker is at it
        deadline = time.monotonic() + 300
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return folder
    run_pair(folder)
    done.touch()
    return folder


@pytest.fixture(scope="session")
def pair(pair_folder):
    """What each of the two found: by case, what it returned."""
    return [torch.load(pair_folder / f"rank{k}.pt", weights_only=False) for k in range(2)]
