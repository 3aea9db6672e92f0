"""A sweep that is killed at any of its changes to files resumes to the same results."""

import os

import pytest

pytest.importorskip("optuna")

thorough = pytest.mark.skipif(
    os.environ.get("RBN_FAULTS") != "all", reason="only with RBN_FAULTS=all"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["before a change", pytest.param("within a write", marks=thorough)]
)
def test_a_kill_at_every_file_operation(moment, tries, kill_at_changes):
    torn = moment == "within a write"
    kill_at_changes("killed_sweeps.py", f"a sweep {moment}", tries(1, 0), torn)
