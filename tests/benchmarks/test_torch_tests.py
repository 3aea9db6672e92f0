"""The runner of PyTorch's own tests: what it counts, and what it skips."""

import json

import pytest

SMALL = """
import pickle
import torch
from torch import nn

X = torch.randn(5, 2, 3)

def test_ours():
    lstm = nn.LSTM(3, 4)
    assert "rbn" in str(type(lstm).__mro__[1])
    assert type(pickle.loads(pickle.dumps(lstm))) is nn.LSTM
    lstm(X)

def test_with_projection():
    lstm = nn.LSTM(3, 4, proj_size=2)
    assert isinstance(lstm, nn.LSTM)
    assert lstm(X)[0].shape == (5, 2, 2)

def test_double_backward():
    x = X.clone().requires_grad_()
    gradient, = torch.autograd.grad(nn.LSTM(3, 4)(x)[0].square().sum(), x, create_graph=True)
    gradient.sum().backward()

def test_wrong():
    assert nn.LSTM(3, 4)(X)[0].shape == (5, 2, 5)

def test_only_in_torch():
    assert hasattr(nn.LSTM(3, 4), "bias_hh_l0")

def test_other():
    nn.GRU(3, 4)
"""


@pytest.mark.slow
def test_outcomes_are_told_apart(bench, tmp_path, monkeypatch):
    (tmp_path / "test_small.py").write_text(SMALL)
    runner = bench("torch_tests")
    monkeypatch.setattr(runner, "FILES", {"test_small.py": ""})
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["torch_tests.py", str(tmp_path), "--out", str(out)])
    runner.main()
    found = json.loads(out.read_text())
    assert found["counts"] == {
        "double backward": 1,
        "failed": 1,
        "fails with torch's LSTM too": 1,
        "passed": 1,
        "proj_size": 1,
    }
    assert [name.rpartition("::")[2] for name in found["errors"]] == [
        "test_double_backward",
        "test_only_in_torch",
    ]


def test_the_committed_results(bench):
    found = json.loads(bench("torch_tests").OUT.read_text())
    assert "failed" not in found["counts"]
    assert found["counts"]["passed"] >= 58
    assert len(found["errors"]) == found["counts"]["double backward"]
    assert all("second derivative" in error for error in found["errors"].values())
