import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from made_up import fill


@pytest.fixture
def results(tmp_path):
    return fill(tmp_path / "results")
