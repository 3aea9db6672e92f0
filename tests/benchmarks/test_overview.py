from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("shapes", "way"), [("SHAPES", ""), ("SHAPES", ", CUDA graph"), ("OTHERS", "")]
)
def test_the_readme_compares_with_the_fastest_of_cudnn(shapes, way, bench):
    shapes = getattr(bench("gpu_rows"), shapes)
    ratios = [cudnn / ours for cudnn, ours in bench("overview").times(way, shapes).values()]
    text = " ".join(README.read_text().split())
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in text


def test_the_figure_shows_both_models_to_the_end(bench):
    curves = bench("overview").curves()
    assert set(curves) == {"LSTM", "BN-LSTM"}
    (steps, lstm), (same, bn) = curves["LSTM"], curves["BN-LSTM"]
    assert steps == same
    assert steps[-1] == 100_000
    assert 90 < lstm[-1] < bn[-1] < 96
