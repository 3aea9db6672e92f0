import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from made_up import publish


@pytest.fixture
def results(tmp_path):
    """Both models on Penn Treebank with two seeds, and a sweep of one gamma."""
    folder = tmp_path / "results"
    for seed in (1, 2):
        publish(folder, seed=seed, test=1.37 + 0.02 * seed)
        publish(folder, model="bn-lstm", seed=seed, test=1.31 + 0.01 * seed)
    publish(folder, model="bn-lstm", tag="gamma-0.3")
    return folder
