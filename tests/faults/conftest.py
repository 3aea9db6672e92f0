"""Faults, injected: how much of each kind the tests try."""

import os

import pytest

# Thousands of faults and hundreds of kills, as docs/results/what-it-survives.md counts them, take
# hours.
THOROUGH = os.environ.get("RBN_FAULTS") == "all"


@pytest.fixture(scope="session")
def tries():
    """How often to try: a few times, or with RBN_FAULTS=all as often as the page says."""
    return lambda few, all_: all_ if THOROUGH else few


@pytest.fixture(scope="session")
def count_outcomes():
    """Print what came of the faults, for the page; shown by ``pytest -s``."""

    def show(what, outcomes):
        print(f"\n{what}: " + ", ".join(f"{n} {how}" for how, n in sorted(outcomes.items())))

    return show
