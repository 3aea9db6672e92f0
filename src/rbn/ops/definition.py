"""The operators, each defined once.

`LSTMArguments` and `RNNArguments` list everything that a recurrence takes: tensors with a gradient,
tensors without one, options. Everything else is derived from these lists: the schema, the autograd
wrapper (`rbn.ops.operator`), the argument checks, and the arguments of every backend. To add an
option, add a field here and implement it in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from rbn.ops.types import Statistics, check_lengths, compute_dtype, readable

VECTORS = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c")  # parameters of the LSTM, [G] or [H]


class LSTMArguments(NamedTuple):
    """Arguments of the plain, the batch-normalized and the layer-normalized LSTM.

    Shapes: T steps, B rows, I features, H units, G = 4H.
    """

    # Tensors with a gradient.
    input: Tensor  # [T, B, I]; if weight_ih is None, the input term W_x x_t itself, [T, B, G]
    weight_ih: Tensor | None  # [G, I]
    weight_hh: Tensor  # [G, H]
    bias: Tensor | None  # [G]
    gamma_x: Tensor | None  # [G]; None with a norm: the sum of both terms is normalized
    gamma_h: Tensor | None  # [G]
    gamma_c: Tensor | None  # [H]
    beta_c: Tensor | None  # [H]
    h0: Tensor  # [B, H], or [H] if all rows share it
    c0: Tensor  # like h0
    # Tensors without a gradient.
    lengths: Tensor | None = None  # [B], integers
    mask_c: Tensor | None = None  # zoneout, bool [T, B, H]
    mask_h: Tensor | None = None
    mean_x: Tensor | None = None  # population statistics [S, G]; all None: use the minibatch's
    var_x: Tensor | None = None
    mean_h: Tensor | None = None  # [S, G]
    var_h: Tensor | None = None
    mean_c: Tensor | None = None  # [S, H]
    var_c: Tensor | None = None
    # Options.
    rate_c: float = 0.0  # zoneout rate: uses the expected value
    rate_h: float = 0.0
    norm: str = "none"  # "none", "batch" or "layer"
    eps: float = 0.0
    input_stats: str = "step"  # "step" or "sequence"
    padding: str = "exclude"  # "exclude" or "include"
    min_rows: int = 1  # a step with fewer rows uses constants: `rbn.ops.few_rows`
    pass_normalized_cell: bool = False
    save: bool = False  # save tensors for the backward pass
    tf32: bool = False  # float32 products may use tf32

    @property
    def definition(self) -> Definition:
        """The recurrence."""
        return LSTM

    @property
    def population(self) -> bool:
        """Whether population statistics are given."""
        return self.mean_h is not None

    @property
    def batch_stats(self) -> bool:
        """Whether terms are normalized with the statistics of the minibatch."""
        return self.norm == "batch" and self.mean_h is None

    @property
    def joint(self) -> bool:
        """Whether the sum of the input term and the recurrent term is normalized."""
        return self.norm != "none" and self.gamma_x is None

    @property
    def sequence(self) -> bool:
        """Whether the input term has sequencewise statistics: over all steps together."""
        return self.input_stats == "sequence" and self.batch_stats and not self.joint

    @property
    def include(self) -> bool:
        """Whether padded rows count in the statistics."""
        return self.padding == "include" and self.lengths is not None and self.batch_stats

    @property
    def exclude(self) -> bool:
        """Whether padded rows are left out of the statistics: later steps may have few rows."""
        return self.padding == "exclude" and self.lengths is not None and self.batch_stats

    @property
    def fewest(self) -> int:
        """How many rows a step needs for its own statistics; at most the batch size."""
        return min(self.min_rows, self.input.shape[1]) if self.exclude else 1

    @property
    def zoned(self) -> bool:
        """Whether zoneout is on."""
        masked = self.mask_c is not None or self.mask_h is not None
        return masked or bool(self.rate_c or self.rate_h)


class RNNArguments(NamedTuple):
    """Arguments of networks whose only state is h, the batch-normalized simple RNN and GRU.

    See `LSTMArguments`; here G = H, or 3H for the GRU.
    """

    input: Tensor
    weight_ih: Tensor | None
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor
    gamma_h: Tensor
    h0: Tensor
    beta_n: Tensor | None = None  # [H], of the GRU: the shift of the candidate's recurrent term
    lengths: Tensor | None = None
    mask_h: Tensor | None = None
    mean_x: Tensor | None = None
    var_x: Tensor | None = None
    mean_h: Tensor | None = None
    var_h: Tensor | None = None
    rate_h: float = 0.0
    eps: float = 0.0
    input_stats: str = "step"
    padding: str = "exclude"
    min_rows: int = 1
    nonlinearity: str = "tanh"  # or "relu", or "gates" for the GRU
    save: bool = False
    tf32: bool = False

    @property
    def definition(self) -> Definition:
        """The recurrence."""
        return GRU if self.gated else RNN

    @property
    def gated(self) -> bool:
        """Whether the recurrence is the GRU."""
        return self.nonlinearity == "gates"

    @property
    def population(self) -> bool:
        """Whether population statistics are given."""
        return self.mean_h is not None

    @property
    def batch_stats(self) -> bool:
        """Whether terms are normalized with the statistics of the minibatch."""
        return self.mean_h is None

    @property
    def sequence(self) -> bool:
        """Whether the input term has sequencewise statistics: over all steps together."""
        return self.mean_h is None and self.input_stats == "sequence"

    @property
    def include(self) -> bool:
        """Whether padded rows count in the statistics."""
        return self.padding == "include" and self.lengths is not None and self.mean_h is None

    @property
    def exclude(self) -> bool:
        """Whether padded rows are left out of the statistics: later steps may have few rows."""
        return self.padding == "exclude" and self.lengths is not None and self.mean_h is None

    @property
    def fewest(self) -> int:
        """How many rows a step needs for its own statistics; at most the batch size."""
        return min(self.min_rows, self.input.shape[1]) if self.exclude else 1


Arguments = Any  # LSTMArguments or RNNArguments

_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?"}
_TYPES |= {kind: kind.__name__ for kind in (float, int, str, bool)}


@dataclass(frozen=True, eq=False)
class Definition:
    """One recurrence: its arguments, and the names and shapes that all backends share.

    Attributes:
        name: the operators are called ``rbn::cpu_NAME`` and ``rbn::gpu_NAME``.
        arguments: `LSTMArguments` or `RNNArguments`.
        gates: the number of gates; W_h has ``gates * H`` rows.
        shapes: shapes, as letters, of the tensors with a gradient, except the input and W_x.
        states: names of the results that follow the output.
        terms: the normalized terms, whose means and variances are results too.

    Derived from these:
        gradients: the names of the tensors with a gradient, which come first.
        tensors: the names of all tensors, which come before the options.
        moments: the names of the statistics.
        schema: the arguments as a PyTorch operator schema.
        masks: the names of the zoneout masks.
    """

    name: str
    arguments: type[Any]
    gates: int
    shapes: Mapping[str, str]
    states: tuple[str, ...]
    terms: tuple[str, ...]
    gradients: tuple[str, ...] = field(init=False)
    tensors: tuple[str, ...] = field(init=False)
    moments: tuple[str, ...] = field(init=False)
    schema: str = field(init=False)
    masks: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(self.arguments)
        names: tuple[str, ...] = self.arguments._fields
        derived = {
            "gradients": ("input", "weight_ih", *self.shapes),
            "tensors": tuple(name for name in names if hints[name] in (Tensor, Tensor | None)),
            "moments": tuple(f"{kind}_{term}" for term in self.terms for kind in ("mean", "var")),
            # No argument has a default: PyTorch would drop arguments equal to it, and then count
            # one gradient too many.
            "schema": ", ".join(f"{_TYPES[hints[name]]} {name}" for name in names),
            "masks": tuple(name for name in names if name.startswith("mask_")),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def check(self, a: Arguments, may_be_empty: bool = False) -> None:
        """Reject tensors whose shapes, dtypes or devices do not fit.

        Reads only shapes, dtypes and values in host memory, so it never waits for a GPU.

        Args:
            a: the arguments.
            may_be_empty: whether the batch may be empty, B = 0.
        """
        input = a.input
        device = input.device
        if a.weight_ih is None:
            self._check_term(input, may_be_empty)
            T, B, G = input.shape
            H = G // self.gates
        else:
            T, B, features = input.shape
            H = a.weight_ih.shape[0] // self.gates
            G = self.gates * H
            _check("weight_ih", a.weight_ih, (G, features), device)
        shapes: dict[str, tuple[int, ...]] = {"GH": (G, H), "G": (G,), "H": (H,), "BH": (B, H)}
        # Behind the input and W_x. A tuple, since torch 2.6 cannot trace a slice of a NamedTuple.
        given = (*a,)[2 : 2 + len(self.shapes)]
        for (name, letters), tensor in zip(self.shapes.items(), given, strict=True):
            if tensor is None:
                continue
            # A vector is a state for all rows. Its size is not compared with B, which would become
            # a condition of an exported program.
            shape = shapes["H" if letters == "BH" and tensor.dim() == 1 else letters]
            if tensor.shape != shape or tensor.device != device:
                _check(name, tensor, shape, device)
        if a.lengths is not None:
            check_sequence_lengths(a.lengths, input)
        for name in self.masks:
            if getattr(a, name) is not None:
                self._check_mask(name, a, (T, B, H))
        if a.min_rows < 1:
            raise ValueError(f"min_rows must be at least 1, got {a.min_rows}")
        if a.mean_h is not None:
            self._check_population(a, {"G": G, "H": H})

    def for_run(self, a: Arguments, save: bool, tf32: bool) -> Arguments:
        """The arguments with their last two fields set."""
        return self.arguments(*(*a,)[:-2], save, tf32)

    def _check_term(self, wx: Tensor, may_be_empty: bool) -> None:
        sizes = wx.shape[::2] if may_be_empty else wx.shape
        if wx.dim() != 3 or wx.shape[2] % self.gates or 0 in sizes:
            wanted = "H" if self.gates == 1 else f"{self.gates}H"
            raise ValueError(f"wx must be [T, B, {wanted}] and not empty, got {list(wx.shape)}")
        if not wx.is_floating_point():
            raise TypeError(f"wx must be a floating point tensor, got {wx.dtype}")

    def _check_mask(self, name: str, a: Arguments, shape: tuple[int, ...]) -> None:
        mask: Tensor = getattr(a, name)
        public = name.replace("mask", "zoneout")
        _check_device(public, mask, a.input.device)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"{public} must be a rate or a bool tensor {list(shape)}, "
                f"got {mask.dtype} {list(mask.shape)}"
            )

    def _check_population(self, a: Arguments, sizes: dict[str, int]) -> None:
        for term in self.terms:
            if getattr(a, f"gamma_{term}") is None:
                continue
            columns, rows = sizes["H" if term == "c" else "G"], None
            for name in (f"mean_{term}", f"var_{term}"):
                value: Tensor | None = getattr(a, name)
                if value is None:
                    raise ValueError(f"population.{name} is missing, but its term is normalized")
                good = value.dim() == 2 and value.shape[1] == columns and value.shape[0] >= 1
                if not good or value.shape[0] != (rows or value.shape[0]):
                    wanted = f"[{rows or 'S >= 1'}, {columns}]"
                    raise ValueError(
                        f"population.{name} must have the shape {wanted}, got {list(value.shape)}"
                    )
                _check_device(f"population.{name}", value, a.input.device)
                rows = value.shape[0]

    def statistics_shapes(self, a: Arguments, *lead: int) -> list[tuple[int, ...] | None]:
        """The shape of each term's mean and variance; None if the call does not estimate them.

        lead: leading dimensions, for recurrences side by side.
        """
        if a.population or getattr(a, "norm", "batch") != "batch":
            return [None] * len(self.terms)
        T, H = a.input.shape[0], a.weight_hh.shape[-1]
        G = self.gates * H
        shapes: list[tuple[int, ...] | None] = []
        for term in self.terms:
            rows = 1 if term == "x" and a.sequence else T
            present = getattr(a, f"gamma_{term}") is not None
            shapes.append((*lead, rows, H if term == "c" else G) if present else None)
        return shapes

    def with_population(self, a: Arguments, population: Statistics | None) -> Arguments:
        """Add population statistics to the arguments, as constants; only for normalized terms."""
        if population is None:
            return a
        dtype = compute_dtype(a.input.dtype)
        given: dict[str, Tensor | None] = {}
        for term in self.terms:
            for name in (f"mean_{term}", f"var_{term}"):
                value: Tensor | None = getattr(population, name)
                if value is not None:
                    value = value.detach() if value.requires_grad else value
                    value = value if value.dtype == dtype else value.to(dtype)
                given[name] = None if getattr(a, f"gamma_{term}") is None else value
                if given[name] is None and getattr(a, f"gamma_{term}") is not None:
                    raise ValueError(f"population.{name} is missing, but its term is normalized")
        return self.replaced(a, given)

    def replaced(self, a: Arguments, given: Mapping[str, Any]) -> Arguments:
        """The arguments with other values; torch 2.6 cannot trace `_replace`."""
        names = self.arguments._fields
        return self.arguments(
            *[given.get(name, value) for name, value in zip(names, a, strict=True)]
        )


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on wx's device, {device}, got {tensor.device}")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}")
    _check_device(name, tensor, device)


def check_sequence_lengths(lengths: Tensor, input: Tensor) -> None:
    """Reject lengths that are not integers ``[B]``, or (if in host memory) not from 1 to T."""
    steps, batch = input.shape[:2]
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must have the shape [{batch}], got {list(lengths.shape)}")
    if readable(lengths):
        check_lengths(lengths.tolist(), steps)


LSTM = Definition(
    "lstm",
    LSTMArguments,
    gates=4,
    shapes={
        "weight_hh": "GH",
        "bias": "G",
        "gamma_x": "G",
        "gamma_h": "G",
        "gamma_c": "H",
        "beta_c": "H",
        "h0": "BH",
        "c0": "BH",
    },
    states=("h_n", "c_n"),
    terms=("x", "h", "c"),
)

RNN = Definition(
    "rnn",
    RNNArguments,
    gates=1,
    shapes={"weight_hh": "GH", "bias": "G", "gamma_x": "G", "gamma_h": "G", "h0": "BH"},
    states=("h_n",),
    terms=("x", "h"),
)

GRU = replace(RNN, name="gru", gates=3, shapes={**RNN.shapes, "beta_n": "H"})
