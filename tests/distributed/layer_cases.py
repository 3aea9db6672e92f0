"""Layers called with the rows of a minibatch, on two processes or on one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from recurrence_cases import CALM
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rbn
from rbn.models import AttentiveReader
from rbn.nn.batch_norm_term import BatchNormTerm

INPUTS, HIDDEN = 3, 4
Found = dict[str, Tensor]


@dataclass
class LayerCase:
    """The sequences on each process, and how they are passed to a layer.

    Attributes:
        lengths: lengths of the sequences on each process.
        told: whether the layer gets the lengths; otherwise those of a process are all equal.
        how: ``plain``, ``batch_first``, ``packed``, ``symbols`` or ``pieces`` (of two steps).
        hx: whether initial states are passed.
        steps: training steps, each with new sequences, for the running statistics.
        extra: steps of padding beyond the longest sequence of each of two processes; they must not
            matter, and one process has none.
    """

    layer: type[torch.nn.Module] = rbn.BatchNormLSTM
    lengths: tuple[list[int], list[int]] = ([5, 5, 5], [5, 5])
    told: bool = False
    how: str = "plain"
    hx: bool = False
    steps: int = 1
    extra: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def make(self) -> Any:
        torch.manual_seed(5)
        first = self.how == "batch_first"
        made = self.layer(
            INPUTS, HIDDEN, sync_stats=True, dtype=self.dtype, batch_first=first, **self.options
        )
        for name, parameter in made.named_parameters():
            if not name.startswith("weight"):
                torch.nn.init.normal_(parameter, 0.5, 0.3)
        return made

    def run(self, layer: Any, ranks: list[int]) -> Found:
        """The results for some of the processes; on one process for all of them."""
        found: Found = {}
        for step in range(self.steps):
            found |= self._run(layer, ranks, step)
        for name, p in layer.named_parameters():
            found[f"grad {name}"] = torch.zeros_like(p) if p.grad is None else p.grad
        return found | {name: value.clone() for name, value in layer.named_buffers()}

    def _run(self, layer: Any, ranks: list[int], step: int) -> Found:
        rows = [(r, k) for r in ranks for k in range(len(self.lengths[r]))]
        of = torch.tensor([self.lengths[r][k] for r, k in rows], dtype=torch.int64)
        T = max([*of.tolist(), 1]) + (self.extra if len(ranks) == 1 else 0)
        stack = layer.num_layers * layer.directions
        x = torch.zeros(T, len(rows), INPUTS, dtype=self.dtype)
        symbols = torch.zeros(T, len(rows), dtype=torch.int64)
        cotangent = torch.zeros(T, len(rows), HIDDEN * layer.directions, dtype=self.dtype)
        states, wanted = (
            torch.zeros(2, stack, len(rows), HIDDEN, dtype=self.dtype) for _ in range(2)
        )
        for column, (r, k) in enumerate(rows):  # the same on whichever process the row is
            g = torch.Generator().manual_seed(1000 * step + 100 * r + k)
            length = self.lengths[r][k]
            x[:length, column] = torch.randn(length, INPUTS, generator=g, dtype=self.dtype)
            symbols[:length, column] = torch.randint(INPUTS, (length,), generator=g)
            random = torch.randn(length, cotangent.shape[2], generator=g, dtype=self.dtype)
            cotangent[:length, column] = random
            states[:, :, column], wanted[:, :, column] = torch.randn(
                2, 2, stack, HIDDEN, generator=g, dtype=self.dtype
            )
        x.requires_grad_()
        options: dict[str, Any] = {"lengths": of} if self.told or len(set(of.tolist())) > 1 else {}
        if self.hx:
            options["hx"] = tuple(states) if len(layer.states) == 2 else states[0]
        if self.how == "packed":
            packed, finals = layer(pack_padded_sequence(x, of, enforce_sorted=False))
            output = pad_packed_sequence(packed)[0]
        elif self.how == "pieces":
            hx, pieces = None, []
            for start in range(0, T, 2):
                piece, hx = layer(x[start : start + 2], hx, start=start)
                pieces.append(piece)
            output, finals = torch.cat(pieces), hx
        elif self.how == "batch_first":
            output, finals = layer(x.transpose(0, 1), **options)
            output = output.transpose(0, 1)
        else:
            output, finals = layer(symbols if self.how == "symbols" else x, **options)
        finals = finals if isinstance(finals, tuple) else (finals,)
        loss = (output * cotangent).sum()
        for final, random in zip(finals, wanted, strict=False):
            loss = loss + (final * random).sum()
        loss.backward()
        found: Found = {}
        for column, (r, k) in enumerate(rows):
            length, name = self.lengths[r][k], f"row {r} {k} "
            assert not output[length:, column].any()
            found[name + "output"] = output[:length, column].detach()
            if x.grad is not None:
                found[name + "grad"] = x.grad[:length, column]
            for state, final in zip("hc", finals, strict=False):
                found[name + state] = final[:, column].detach()
        return found


def _cases() -> dict[str, LayerCase]:
    ragged = ([5, 2, 4], [7, 1, 3, 3])
    cases = {
        "plain": LayerCase(),
        "other lengths, known": LayerCase(lengths=ragged, told=True),
        "other lengths, padded rows count": LayerCase(
            lengths=ragged, told=True, options={"padding": "include"}
        ),
        "other lengths, over the sequence": LayerCase(
            lengths=ragged, told=True, options={"input_stats": "sequence"}
        ),
        "other steps on the second, not told": LayerCase(lengths=([4, 4], [6, 6, 6])),
        "other steps, padded rows count": LayerCase(
            lengths=([6, 6], [4, 4]), told=True, options={"padding": "include"}
        ),
        "more padding than needed": LayerCase(lengths=ragged, told=True, extra=2),
        "two directions, two layers": LayerCase(
            lengths=ragged, told=True, options={"num_layers": 2, "bidirectional": True}
        ),
        "no rows on the second": LayerCase(lengths=([4, 2, 3], []), told=True),
        "no rows on the first, three layers": LayerCase(
            lengths=([], [4, 4]), options={"num_layers": 3}
        ),
        "one row on each": LayerCase(lengths=([4], [4])),
        "packed": LayerCase(lengths=ragged, how="packed"),
        "batch first": LayerCase(lengths=ragged, told=True, how="batch_first"),
        "symbols": LayerCase(lengths=ragged, told=True, how="symbols"),
        "in pieces": LayerCase(how="pieces"),
        "states given": LayerCase(hx=True),
        "running averages": LayerCase(lengths=ragged, told=True, steps=3),
        "plain averages": LayerCase(
            lengths=ragged, told=True, steps=3, options={"momentum": None, "max_length": 4}
        ),
        "no bias, zeros": LayerCase(options={"bias": False, "initial_state": "zeros"}),
        "float32": LayerCase(lengths=ragged, told=True, dtype=torch.float32, options={"eps": CALM}),
    }
    for name in ("shared_stats", "joint_terms", "pass_normalized_cell", "raw_output"):
        options: dict[str, Any] = {"ablations": [name]}
        cases[name] = LayerCase(lengths=ragged, told=True, options=options)
    for name in ("tanh", "relu"):
        options = {"nonlinearity": name, "num_layers": 2, "bidirectional": name == "relu"}
        cases[f"simple, {name}"] = LayerCase(
            rbn.BatchNormRNN, ragged, told=True, steps=2, options=options
        )
    cases["gru"] = LayerCase(
        rbn.BatchNormGRU, ragged, told=True, steps=2, options={"bidirectional": True}
    )
    return cases


CASES = _cases()


def cell(kind: type[Any], ranks: list[int]) -> Found:
    """Four steps of a cell, with two rows on the first process and three on the second."""
    torch.manual_seed(5)
    made = kind(INPUTS, HIDDEN, sync_stats=True, dtype=torch.float64)
    x = torch.randn(4, 5, INPUTS, dtype=torch.float64)
    wanted = torch.randn(5, HIDDEN, dtype=torch.float64)
    rows = [row for r in ranks for row in ([0, 1], [2, 3, 4])[r]]
    hx = None
    for step in range(4):
        hx = made(x[step, rows], hx, step)
    h = hx[0] if isinstance(hx, tuple) else hx
    (h * wanted[rows]).sum().backward()
    found = {f"row {row}": h[column].detach() for column, row in enumerate(rows)}
    found |= {f"grad {name}": p.grad for name, p in made.named_parameters()}
    return found | dict(made.named_buffers())


def term(ranks: list[int]) -> Found:
    """The attention's normalization over positions with padding among them."""
    torch.manual_seed(5)
    made = BatchNormTerm(HIDDEN, sync_stats=True, dtype=torch.float64)
    x = torch.randn(4, 5, HIDDEN, dtype=torch.float64)
    wanted = torch.randn(4, 5, HIDDEN, dtype=torch.float64)
    valid = torch.arange(4)[:, None] < torch.tensor([4, 1, 3, 2, 2])
    rows = [row for r in ranks for row in ([0, 1], [2, 3, 4])[r]]
    found = {}
    for name, mask in (("all", None), ("valid", valid[:, rows])):
        part = x[:, rows].requires_grad_()
        output = made(part, mask)
        (output * wanted[:, rows]).sum().backward()
        for column, row in enumerate(rows):
            found[f"row {row} {name}"] = output[:, column].detach()
            found[f"row {row} {name} grad"] = part.grad[:, column]
    return found | {"grad gamma": made.gamma.grad} | dict(made.named_buffers())


def reader(ranks: list[int]) -> Found:
    """A complete model, with everything normalized and both directions."""
    torch.manual_seed(5)
    model = AttentiveReader(
        9, 4, 2, HIDDEN, "bn-e**", sync_stats=True, dtype=torch.float64, eps=1e-3
    )
    documents, questions = torch.randint(9, (6, 5)), torch.randint(9, (4, 5))
    lengths, asked = torch.tensor([6, 2, 4, 5, 3]), torch.tensor([2, 4, 1, 3, 3])
    answers = torch.randint(4, (5,))
    rows = [row for r in ranks for row in ([0, 1], [2, 3, 4])[r]]
    logits, _ = model(documents[:, rows], questions[:, rows], lengths[rows], asked[rows])
    torch.nn.functional.cross_entropy(logits, answers[rows], reduction="sum").backward()
    found = {f"row {row}": logits[column].detach() for column, row in enumerate(rows)}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    return found | dict(model.named_buffers())


MODELS: dict[str, Any] = {
    "cell of an LSTM": lambda ranks: cell(rbn.BatchNormLSTMCell, ranks),
    "cell of a simple RNN": lambda ranks: cell(rbn.BatchNormRNNCell, ranks),
    "cell of a GRU": lambda ranks: cell(rbn.BatchNormGRUCell, ranks),
    "term of the attention": term,
    "reader": reader,
} | {name: lambda ranks, c=case: c.run(c.make(), ranks) for name, case in CASES.items()}
