"""Calls of the recurrences with the rows of a minibatch on two processes."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from recurrence_cases import Case, constant_beginning, make_case

BY_ROW = {"wx": 1, "h0": 0, "c0": 0, "lengths": 0, "zoneout_c": 1, "zoneout_h": 1}
RESULT_ROWS = {"output": 1, "h_n": 0, "c_n": 0}


def random_case(op: str, seed: int) -> Case:
    """Any combination of options; rows for two processes."""
    draw = random.Random(f"{op} {seed}")
    T, B, H = draw.randint(1, 6), draw.randint(2, 7), draw.randint(1, 4)
    options: dict[str, Any] = {
        "lengths": draw.choice([None, "random"]),
        "input_stats": draw.choice(["step", "sequence"]),
        "padding": draw.choice(["exclude", "include"]),
        "zoneout": (draw.choice([0.0, "mask", 0.3]), draw.choice([0.0, "mask", 0.3])),
    }
    if op == "bn_lstm":
        names = ("bias", "gamma_x", "gamma_c", "beta_c")
        options["absent"] = tuple(name for name in names if draw.random() < 0.3)
        options["pass_normalized_cell"] = draw.random() < 0.3
        options["used"] = draw.choice([None, ("output",), ("h_n",), ("h_n", "c_n")])
    elif op == "bn_gru":
        options["absent"] = tuple(name for name in ("bias", "beta_n") if draw.random() < 0.3)
    else:
        options["nonlinearity"] = draw.choice(["tanh", "relu"])
    return make_case(op, T, B, H, seed, **options)


CASES = {
    f"{op} {seed}": random_case(op, seed)
    for op in ("bn_lstm", "bn_rnn", "bn_gru")
    for seed in range(16)
}
# Identical rows in the first steps: a term that is constant over all rows passes no gradient on. On
# one process the rows are identical for longer, but the rows of both count.
CASES["rows alike"] = constant_beginning("bn_lstm", 3, 6, 6, 4)
alike = CASES["rows alike"].present()["wx"].clone()
alike[3:5, :3] = alike[3:5, :1]
CASES["rows alike, on one process longer"] = CASES["rows alike"].with_tensors(wx=alike)


def split_of(case: Case) -> int:
    """The first process's rows; the second has the rest, possibly none."""
    B = case.present()["wx"].shape[1]
    return B if B == 2 else B // 2


def part(value: torch.Tensor, dim: int, split: int, rank: int) -> torch.Tensor:
    size = value.shape[dim]
    return value.narrow(dim, 0, split) if rank == 0 else value.narrow(dim, split, size - split)


def part_of(case: Case, rank: int) -> Case:
    """The call with one process's rows."""
    split = split_of(case)

    def of(values: dict[str, Any], dims: dict[str, int]) -> dict[str, Any]:
        return {
            name: part(v, dims[name], split, rank)
            if name in dims and isinstance(v, torch.Tensor)
            else v
            for name, v in values.items()
        }

    return Case(
        case.op,
        of(case.tensors, BY_ROW),
        of(case.options, BY_ROW) | {"group": dist.group.WORLD},
        of(case.cotangents, RESULT_ROWS),
    )
