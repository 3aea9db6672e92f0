"""Layers with `sync_stats` on two processes match one process with all rows."""

import pytest
import torch
from layer_cases import CASES, MODELS
from recurrence_cases import GRADIENT_TOLERANCE, RESULT_TOLERANCE, TOLERANCES, scale_of

import rbn


def difference(got, want):
    assert got.shape == want.shape
    return (got - want).abs().max().item() / scale_of(want) if want.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_are_one_with_all_rows(name, pair):
    with rbn.backend("reference"):
        expected = MODELS[name]([0, 1])
    first, second = (found[f"layer {name}"] for found in pair)
    small = name in CASES and CASES[name].dtype == torch.float32
    result, gradient = (
        TOLERANCES[torch.float32] if small else (RESULT_TOLERANCE, GRADIENT_TOLERANCE)
    )
    assert expected.keys() == first.keys() | second.keys()
    for key, want in expected.items():
        if key.startswith("row"):
            (got,) = (found[key] for found in (first, second) if key in found)
            limit = gradient if key.endswith("grad") else result
        elif key.startswith("grad"):  # training uses the sum of both
            got, limit = first[key] + second[key], gradient
        else:
            assert torch.equal(first[key], second[key]), f"{key} is not the same on both"
            got, limit = first[key], result
        assert difference(got, want) <= limit, key


def test_alone_it_changes_nothing():
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3)
    outputs = []
    for sync in (False, True):
        torch.manual_seed(1)
        layer = rbn.BatchNormLSTM(3, 4, sync_stats=sync)
        outputs.append(layer(x)[0])
        assert layer.stats_h_l0.group is None
    assert torch.equal(*outputs)
    with pytest.raises(TypeError, match=r"sync_stats.*True.*False, got 1"):
        rbn.BatchNormLSTM(3, 4, sync_stats=1)
