"""Random calls of the recurrences: generated from a seed, run on a backend, differentiated."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import rbn.ops
from rbn.ops import Statistics
from rbn.ops.cpu import compiled_layer_lstm, compiled_lstm
from rbn.ops.definition import GRU, LSTM, RNN, Arguments, Definition
from rbn.ops.operator import Operator

OPS = ("bn_lstm", "lstm", "ln_lstm", "bn_rnn", "bn_gru")
NORMALIZED_BY_BATCH = ("bn_lstm", "bn_rnn", "bn_gru")
ONE_STATE = {"bn_rnn": RNN, "bn_gru": GRU}  # the others are LSTMs
BACKENDS = ("reference", "cpu")

# The differentiable arguments of each op, in order, and the results that have a gradient.
ARGUMENTS = {
    "bn_lstm": ["wx", "weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0"],
    "lstm": ["wx", "weight_hh", "bias", "beta_c", "h0", "c0"],
    "ln_lstm": ["wx", "weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0"],
    "bn_rnn": ["wx", "weight_hh", "bias", "gamma_x", "gamma_h", "h0"],
    "bn_gru": ["wx", "weight_hh", "bias", "gamma_x", "gamma_h", "h0", "beta_n"],
}
RESULTS = dict.fromkeys(OPS, ("output", "h_n", "c_n")) | dict.fromkeys(ONE_STATE, ("output", "h_n"))
OPTIONAL = {
    "bn_lstm": ("bias", "gamma_x", "gamma_c", "beta_c"),
    "lstm": ("bias", "beta_c"),
    "ln_lstm": ("bias",),
    "bn_rnn": ("bias",),
    "bn_gru": ("bias", "beta_n"),
}


# Two correct float64 computations differ by rounding, which dividing by a small standard deviation
# enlarges: by 1 / sqrt(eps) = 316 at most in a normalization's value (where the variance is 0, as
# in a batch of one row, or nearly so in one of two), and by as much again in its derivative, whose
# terms cancel to the last digits there. The factors in front are for the roundings that add up over
# seven steps; the largest differences in 8,000 random calls of each op were 4e-13 and 3e-12.
EPS64 = torch.finfo(torch.float64).eps
RESULT_TOLERANCE = 32 * EPS64 / 1e-5**0.5  # 2e-12
GRADIENT_TOLERANCE = 2 * EPS64 / 1e-5  # 4e-11


# In float32 that would leave little to compare, so these calls have eps 0.1: it magnifies by 3 and
# by 10. The largest differences in 2,500 random calls of each op were 8 and 155 units.
EPS32 = torch.finfo(torch.float32).eps
CALM = 0.1
TOLERANCES = {
    torch.float64: (RESULT_TOLERANCE, GRADIENT_TOLERANCE),
    torch.float32: (64 * EPS32, 1024 * EPS32),  # 8e-6 and 1e-4
}

# The fused LSTMs have steps compiled from C for float32, and steps of PyTorch operations.
STEPS = ("compiled", "torch")


def has_compiled_step(op: str) -> bool:
    return op in ("bn_lstm", "lstm", "ln_lstm")


_fresh = random.Random(int(os.environ["RBN_TEST_SEED"]))


def fresh_seed() -> int:
    """The seed of a new random call on a GPU; a fixed one without a GPU."""
    if not torch.cuda.is_available():
        return 0
    seed = _fresh.randrange(2**31)
    print(f"seed {seed}")  # pytest shows it if the test fails
    return seed


def calm(op: str) -> dict[str, float]:
    """Options that make a float32 call well-conditioned."""
    return {} if op == "lstm" else {"eps": CALM}


@contextlib.contextmanager
def cpu_step(name: str) -> Iterator[None]:
    """Select one of the two; skips if the compiled one was not built."""
    if name == "compiled":
        if compiled_lstm.load() is None:
            pytest.skip("the compiled step is not built: python hatch_build.py")
        yield
    else:
        with contextlib.ExitStack() as stack:
            for module in (compiled_lstm, compiled_layer_lstm):
                stack.enter_context(mock.patch.object(module, "usable", return_value=False))
            yield


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory contains NaN until it is written (part of torch's deterministic mode)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class Case:
    """One call: its differentiable arguments, the other arguments, and what is differentiated."""

    op: str
    tensors: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)

    def present(self) -> dict[str, Tensor]:
        return {name: v for name, v in self.tensors.items() if v is not None}

    def with_tensors(self, **tensors: Tensor | None) -> Case:
        return replace(self, tensors=self.tensors | tensors)

    def with_options(self, **options: Any) -> Case:
        return replace(self, options=self.options | options)

    def on(self, device: str) -> Case:
        """The same call on another device."""

        def moved(value: Any) -> Any:
            if isinstance(value, Statistics):
                return Statistics(*map(moved, value))
            return value.to(device) if isinstance(value, Tensor) else value

        return Case(
            self.op,
            {name: moved(v) for name, v in self.tensors.items()},
            {name: moved(v) for name, v in self.options.items()},
            {name: moved(v) for name, v in self.cotangents.items()},
        )

    def to(self, dtype: torch.dtype) -> Case:
        """The same call in another dtype, with rounded values."""
        population = self.options.get("population")
        options = dict(self.options)
        if population is not None:
            full = torch.float64 if dtype == torch.float64 else torch.float32
            options["population"] = Statistics(
                *(None if p is None else p.to(full) for p in population)
            )
        return Case(
            self.op,
            {name: None if v is None else v.to(dtype) for name, v in self.tensors.items()},
            options,
            {name: v.to(dtype) for name, v in self.cotangents.items()},
        )


def call(case: Case, backend: str | None = None) -> dict[str, Tensor | None]:
    """All results by name, including statistics."""
    function = getattr(rbn.ops, case.op)
    if backend is None:
        values = function(*case.tensors.values(), **case.options)
    else:
        with rbn.ops.backend(backend):
            values = function(*case.tensors.values(), **case.options)
    found = dict(zip(RESULTS[case.op], values, strict=False))
    if isinstance(values[-1], Statistics):
        found |= values[-1]._asdict()
    return found


def definition_of(op: str) -> Definition:
    return ONE_STATE.get(op, LSTM)


def arguments(case: Case) -> Arguments:
    """The same call for `rbn.ops.dispatch.run`."""
    definition = definition_of(case.op)
    given = dict.fromkeys(definition.gradients) | case.tensors
    given["input"] = given.pop("wx")
    options = ({} if case.op == "lstm" else {"eps": 1e-5}) | case.options
    population = options.pop("population", None)
    for name in [name for name in options if name.startswith("zoneout")]:
        value, state = options.pop(name), name.removeprefix("zoneout_")
        options[("mask_" if isinstance(value, Tensor) else "rate_") + state] = value
    if definition is LSTM:
        options["norm"] = {"bn_lstm": "batch", "lstm": "none", "ln_lstm": "layer"}[case.op]
    if definition is GRU:
        options["nonlinearity"] = "gates"
    return definition.with_population(definition.arguments(**given, **options), population)


def operator_call(case: Case, backend: str) -> tuple[str, Arguments]:
    """The name of the operator that a call runs, and its arguments."""
    found: list[tuple[str, Any]] = []
    run = Operator.__call__

    def counted(operator: Operator, calls: Any) -> Any:
        found.append((operator.name, calls))
        return run(operator, calls)

    with mock.patch.object(Operator, "__call__", counted):
        call(case, backend)
    ((name, (given,)),) = found
    return name, given


def from_input(given: Arguments, features: int = 2) -> Arguments:
    """Arguments like these, with an input and W_x, and initial states that all rows share."""
    g = torch.Generator().manual_seed(1)
    term = given.input

    def leaf(value: Tensor) -> Tensor:
        return value.to(term).detach().requires_grad_(term.requires_grad)

    x = torch.randn(*term.shape[:2], features, generator=g)
    weight = torch.randn(term.shape[2], features, generator=g)
    states = {n: leaf(getattr(given, n)[0]) for n in ("h0", "c0") if n in given._fields}
    return given._replace(input=leaf(x), weight_ih=leaf(weight), **states)


def results_to_keep(op: str, results: Sequence[Tensor]) -> list[Tensor]:
    """The forward operator's arguments that the backward operator gets: not the last states."""
    return [results[0], *results[1 + len(definition_of(op).states) :]]


def saved_results(op: str, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """The forward operator's arguments that only the backward pass needs."""
    definition = definition_of(op)
    return results[1 + len(definition.states) + len(definition.moments) :]


def differentiate(
    case: Case, backend: str | None = None, wanted: tuple[str, ...] | None = None
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Results, and the gradients of the arguments (all, or those wanted) for the cotangents.

    An argument that the differentiated results do not depend on has a zero gradient, whether
    autograd returns zeros or None.
    """
    leaves = {
        name: v.detach().requires_grad_(wanted is None or name in wanted)
        for name, v in case.present().items()
    }
    results = call(case.with_tensors(**leaves), backend)
    used = [(results[name], cotangent) for name, cotangent in case.cotangents.items()]
    inputs = {name: v for name, v in leaves.items() if v.requires_grad}
    grads = torch.autograd.grad(
        [value for value, _ in used],
        list(inputs.values()),
        [cotangent for _, cotangent in used],
        allow_unused=True,
    )
    gradients = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(inputs.items(), grads, strict=True)
    }
    return {name: None if v is None else v.detach() for name, v in results.items()}, gradients


def make_case(
    op: str,
    T: int,
    B: int,
    H: int,
    seed: int = 0,
    *,
    absent: tuple[str, ...] = (),
    lengths: str | list[int] | None = None,
    population: int | tuple[int, int, int] | None = None,
    zoneout: tuple[Any, Any] = (0.0, 0.0),
    used: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    """A call with random values.

    absent: arguments that are None. lengths: given, or "random". population: rows of the
    statistics, for all terms or for each. zoneout: of the cell and of the hidden state, a rate or
    "mask". used: the results that have a cotangent, all by default.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale + shift

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64) + 0.25

    G = definition_of(op).gates * H
    values = {
        "wx": normal(T, B, G, shift=0.5),
        "weight_hh": normal(G, H, scale=H**-0.5),
        "bias": normal(G, scale=0.5),
        "gamma_x": positive(G),
        "gamma_h": positive(G),
        "gamma_c": positive(H),
        "beta_c": normal(H, scale=0.5),
        "h0": normal(B, H, scale=0.5),
        "c0": normal(B, H),
    }
    if "beta_n" in ARGUMENTS[op]:
        values["beta_n"] = normal(H, scale=0.5)
    tensors = {name: None if name in absent else values[name] for name in ARGUMENTS[op]}

    if lengths == "random":
        options["lengths"] = torch.randint(1, T + 1, (B,), generator=g)
    elif lengths is not None:
        options["lengths"] = torch.tensor(lengths)
    if population is not None:
        rows = (population,) * 3 if isinstance(population, int) else population
        given = []
        for term, S in zip("xhc", rows, strict=True):
            features = H if term == "c" else G
            given += [normal(S, features, scale=0.3), positive(S, features)]
        if tensors.get("gamma_x") is None:
            given[0:2] = None, None
        if tensors.get("gamma_c") is None:
            given[4:6] = None, None
        options["population"] = Statistics(*given)
    for name, z in zip(("zoneout_c", "zoneout_h"), zoneout, strict=True):
        mask = torch.rand(T, B, H, generator=g) < 0.4
        if name in options or (op in ONE_STATE and name == "zoneout_c"):
            continue
        options[name] = mask if z == "mask" else z
    shapes = {"output": (T, B, H), "h_n": (B, H), "c_n": (B, H)}
    cotangents = {name: normal(*shapes[name]) for name in RESULTS[op]}
    if used is not None:
        cotangents = {name: cotangents[name] for name in used}
    case = Case(op, tensors, options, cotangents)
    return case if dtype == torch.float64 else case.to(dtype)


@st.composite
def cases(draw: st.DrawFn, op: str, eps: tuple[float, ...] = (1e-5, 1e-3)) -> Case:
    """Any shape from the smallest on, with any combination of the op's options."""
    T, B, H = draw(st.integers(1, 7)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    options: dict[str, Any] = {}
    options["lengths"] = draw(
        st.none() | st.lists(st.integers(1, T), min_size=B, max_size=B), label="lengths"
    )
    options["absent"] = tuple(name for name in OPTIONAL[op] if draw(st.booleans(), label=name))
    z = st.sampled_from((0.0, "mask", 0.3))
    options["zoneout"] = draw(z), draw(z)
    if op != "lstm":
        options["eps"] = draw(st.sampled_from(eps))
    if op.startswith("bn"):
        rows = st.integers(1, T + 2)  # fewer than the steps, as many, or more
        options["population"] = draw(st.none() | st.tuples(rows, rows, rows), label="population")
        options["input_stats"] = draw(st.sampled_from(("step", "sequence")))
        options["padding"] = draw(st.sampled_from(("exclude", "include")))
        options["min_rows"] = draw(st.sampled_from((1, 2, 3)))
    if op == "bn_lstm":
        options["pass_normalized_cell"] = draw(st.booleans())
    if op == "bn_rnn":
        options["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")))
    used = st.lists(st.sampled_from(RESULTS[op]), min_size=1, unique=True)
    options["used"] = tuple(draw(used, label="used"))
    return make_case(op, T, B, H, draw(st.integers(0, 2**20), label="seed"), **options)


def scale_of(value: Tensor) -> float:
    return max(1.0, value.abs().max().item()) if value.numel() else 1.0


def assert_same(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float
) -> None:
    """Compare every named tensor with the expected one, relative to its largest element.

    Relative to the largest, because an element that is small because large ones cancelled has their
    rounding error. Values below 1 do not count as large.
    """
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), f"{name}: got {got}, expected {want}"
        if got is None or want is None:
            continue
        assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
        got = got.cpu()
        error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
        limit = tolerance * scale_of(want.double())
        assert error <= limit, f"{name} differs by {error:.3g}, allowed {limit:.3g}"


def constant_beginning(op: str, constant: int, *shape: int, **options: Any) -> Case:
    """A call ``[T, B, H]`` whose rows are identical in the first steps, as before a first input."""
    case = make_case(op, *shape, **options)
    tensors = case.present()
    wx = tensors["wx"].clone()
    wx[:constant] = wx[:constant, :1]
    states = {
        name: tensors[name][:1].expand_as(tensors[name]).clone()
        for name in ("h0", "c0")
        if name in tensors
    }
    return case.with_tensors(wx=wx, **states)


def could_be_parted(op: str) -> dict[str, Case]:
    """Calls whose rows seem identical, judging by the variances of cells or states, but are not.

    By inputs that differ, behind a gamma of zero; by zoneout, in front of weights of zero, and
    there by a sequence that ends and keeps its state, or by gates that the cells do not show.
    """
    inputs = constant_beginning(op, 0, 2, 6, 3)
    masks = (0.0, "mask") if op in ONE_STATE else ("mask", "mask")
    kept = constant_beginning(op, 1, 3, 6, 3, zoneout=masks)
    gamma, none = inputs.tensors["gamma_x"], torch.zeros_like(kept.tensors["weight_hh"])
    over = {"input_stats": "sequence"}
    ends = constant_beginning(op, 3, 3, 6, 3, lengths=[1, 3, 3, 3, 3, 3], padding="include", **over)
    gates = constant_beginning(op, 3, 3, 6, 3, **over)
    wx = gates.tensors["wx"].clone()
    wx[0, :, -3:] = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    return {
        "inputs": inputs.with_tensors(gamma_x=torch.zeros_like(gamma)),
        "zoneout": kept.with_tensors(weight_hh=none),
        "padding": ends.with_tensors(weight_hh=none),
        "gates": gates.with_tensors(weight_hh=none, wx=wx),
    }


def relative(gradients: dict[str, Tensor], to: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients relative to the largest number of others."""
    largest = max(g.abs().max().item() for g in to.values())
    return {name: g / largest for name, g in gradients.items()}


def shared(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of what all rows share; for a state, of the vector it starts with."""
    found = {name: g for name, g in gradients.items() if name not in ("wx", "h0", "c0")}
    return found | {name: gradients[name].sum(0) for name in ("h0", "c0") if name in gradients}
