"""Recurrences with rows on two processes match one process with all rows, including gradients."""

import pytest
import torch
from op_cases import BY_ROW, CASES, RESULT_ROWS, part, split_of
from recurrence_cases import GRADIENT_TOLERANCE, RESULT_TOLERANCE, assert_same, differentiate


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one_with_all_rows(name, pair):
    case, split = CASES[name], split_of(CASES[name])
    results, gradients = differentiate(case, "reference")
    for rank, (its_results, _) in enumerate(f[f"op {name}"] for f in pair):
        expected = {
            k: part(v, RESULT_ROWS[k], split, rank) if k in RESULT_ROWS else v
            for k, v in results.items()
        }
        assert_same(its_results, expected, RESULT_TOLERANCE)
    (first, grads), (second, grads2) = (f[f"op {name}"] for f in pair)
    for k in first:
        if k not in RESULT_ROWS and first[k] is not None:
            assert torch.equal(first[k], second[k]), f"{k} is not the same on both"
    together = {
        k: torch.cat([grads[k], grads2[k]], BY_ROW[k]) if k in BY_ROW else grads[k] + grads2[k]
        for k in grads
    }
    assert_same(together, gradients, GRADIENT_TOLERANCE)


def test_the_cases_have_what_they_should():
    split = [split_of(case) for case in CASES.values()]
    rows = [case.present()["wx"].shape[1] for case in CASES.values()]
    assert any(s == r for s, r in zip(split, rows, strict=True))  # a process without any row
    assert any(2 * s < r for s, r in zip(split, rows, strict=True))  # uneven parts
