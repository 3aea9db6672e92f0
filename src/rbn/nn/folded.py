"""A batch-normalized LSTM for serving, with normalization folded into scales and shifts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

import rbn.ops as ops
from rbn.nn import checks
from rbn.nn.batch_norm_lstm import BatchNormLSTM
from rbn.nn.layers import Layers
from rbn.nn.recent_calls import RecentCalls
from rbn.nn.recurrence import States
from rbn.nn.statistics import PopulationStatistics
from rbn.ops import steps
from rbn.ops.cpu import inference
from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.types import Statistics, compute_dtype

_ABLATIONS = ("joint_terms", "pass_normalized_cell")
_WEIGHTS = ("weight_ih", "weight_hh")
_TABLES = inference.Tables._fields
_OPTIONAL = ("scale_x", "scale_h", "scale_c")


class FoldedLSTM(Layers[tuple[Tensor, Tensor]]):
    r"""A `BatchNormLSTM` for inference, made by `fold`: smaller and faster.

    $$
    \begin{align*}
    (\tilde f_t, \tilde i_t, \tilde o_t, \tilde g_t) &= s^h_t \odot W_h h_{t-1}
        + s^x_t \odot W_x x_t + d_t \\
    c_t &= \sigma(\tilde f_t) \odot c_{t-1} + \sigma(\tilde i_t) \odot \tanh(\tilde g_t) \\
    h_t &= \sigma(\tilde o_t) \odot \tanh(s^c_t \odot c_t + d^c_t)
    \end{align*}
    $$

    Called like `BatchNormLSTM`. It has no parameters and no training mode. Gradients flow to the
    input and to given initial states. ``load_state_dict`` accepts the state of any folded layer of
    the same sizes, with any number of time steps.

    Args:
        input_size: features of the input.
        hidden_size: units H of each layer and direction.
        num_layers: stacked layers.
        batch_first: input and output as ``[B, T, features]``.
        bidirectional: adds a second recurrence backwards in time.
        initial_state: ``"learned"`` vectors h0 and c0, or ``"zeros"``.
        zoneout: rates (cell, hidden).
        ablations: ``"joint_terms"`` and ``"pass_normalized_cell"`` of `BatchNormLSTM`. The other
            ablations need no option here.

    Buffers of each layer k, with the suffix ``_reverse`` for the backward direction:
    ``weight_ih_lk [4H, I]``, ``weight_hh_lk [4H, H]``, ``scale_x_lk``, ``scale_h_lk``,
    ``shift_lk [S, 4H]``, ``scale_c_lk``, ``shift_c_lk [S, H]``, ``h0_lk``, ``c0_lk [H]``. Time step
    t uses row ``min(t, S - 1)``. A scale that is the same for all steps is multiplied into the
    weights, and ``scale_x_lk`` or ``scale_h_lk`` is None. Half-precision weights keep the scale
    separate, because the product would be rounded.
    """

    definition = LSTM
    step_hint = "layer(input, hx, start=step)"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        initial_state: str = "learned",
        zoneout: tuple[float, float] = (0.0, 0.0),
        ablations: tuple[str, ...] | frozenset[str] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            True,
            batch_first,
            0.0,
            bidirectional,
            0.0,
            initial_state=initial_state,
            hidden_noise=0.0,
            zoneout=zoneout,
        )
        self.ablations = frozenset(checks.choice("ablations", n, _ABLATIONS) for n in ablations)
        self._recent_calls = RecentCalls()  # remembers the last step's state
        self._build(device, dtype)
        self.eval()

    def _add_parameters(self, suffix: str, input_size: int, factory: dict[str, Any]) -> None:
        hidden, gates = self.hidden_size, 4 * self.hidden_size
        weight = torch.zeros(gates, input_size, **factory)
        exact: dict[str, Any] = {"device": weight.device, "dtype": compute_dtype(weight.dtype)}
        self.register_buffer(f"weight_ih{suffix}", weight)
        self.register_buffer(f"weight_hh{suffix}", torch.zeros(gates, hidden, **factory))
        for name in _OPTIONAL:
            self.register_buffer(name + suffix, None)
        self.register_buffer(f"shift{suffix}", torch.zeros(1, gates, **exact))
        self.register_buffer(f"shift_c{suffix}", torch.zeros(1, hidden, **exact))
        if self.initial_state == "learned":
            for state in self.states:
                self.register_buffer(state + suffix, torch.zeros(hidden, **factory))

    def reset_parameters(self) -> None:
        """Does nothing: there is nothing to train."""

    def _zoneout(self, rate: float, x: Tensor) -> tuple[None, float]:
        return None, rate

    # One layer, all its directions --------------------------------------------------------------

    def _layer(
        self,
        directions: list[tuple[str, Tensor, States | None]],
        lengths: Tensor | None,
        start: int,
    ) -> list[tuple[Tensor, States]]:
        weight = self._weight()
        tensors = [t for _, x, given in directions for t in (x, *(given or ()))]
        batch = directions[0][1].shape[1]
        if lengths is None and batch > 0 and steps.kernel_covers(weight, *tensors):
            return [self._run(*direction, start) for direction in directions]
        return super()._layer(directions, lengths, start)

    def _run(
        self, suffix: str, x: Tensor, given: States | None, start: int
    ) -> tuple[Tensor, States]:
        """Run one direction with the compiled kernel."""
        weight, batch = self._own(f"weight_ih{suffix}"), x.shape[1]
        is_symbols = not x.is_floating_point()
        if is_symbols:
            x = ops.symbol_rows(x[..., 0], weight, weight.dtype)
        h0, c0 = self._initial_states(suffix, batch, weight) if given is None else given
        output, *states = inference.sequence(
            x,
            None if is_symbols else weight,
            self._own(f"weight_hh{suffix}"),
            self._tables(suffix),
            h0.expand(batch, -1),
            c0.expand(batch, -1),
            start=start,
            joint="joint_terms" in self.ablations,
            zoneout=self.zoneout,
            pass_normalized_cell="pass_normalized_cell" in self.ablations,
        )
        return output, tuple(states)

    def _tables(self, suffix: str) -> inference.Tables:
        tables: list[Any] = [self._parameter(name + suffix) for name in _TABLES]
        return inference.Tables(*tables)

    def _arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        start: int,
    ) -> LSTMArguments:
        tables: list[Any] = [
            None if table is None else table[min(start, table.shape[0] - 1) :]
            for table in self._tables(suffix)
        ]
        scale_x, scale_h, shift, scale_c, shift_c = tables
        if "joint_terms" in self.ablations:
            bias, norm_h = _as_batch_norm(shift, scale_h)
            norm_x = _NO_NORM
        else:
            bias, norm_x, norm_h = _as_batch_norm(shift, scale_x, scale_h)
        if scale_c is None:
            beta_c, norm_c = shift_c[0], _NO_NORM
        else:
            beta_c, norm_c = _as_batch_norm(shift_c, scale_c)
        arguments = LSTMArguments(
            input=input,
            weight_ih=weight_ih,
            weight_hh=self._recurrent_weight(suffix, input.dtype),
            bias=bias,
            gamma_x=norm_x[0],
            gamma_h=norm_h[0],
            gamma_c=norm_c[0],
            beta_c=beta_c,
            h0=states[0],
            c0=states[1],
            lengths=lengths,
            rate_c=self.zoneout[0],
            rate_h=self.zoneout[1],
            norm="batch",
            pass_normalized_cell="pass_normalized_cell" in self.ablations,
        )
        moments: list[Any] = [*norm_x[1:], *norm_h[1:], *norm_c[1:]]
        with_population: LSTMArguments = LSTM.with_population(arguments, Statistics(*moments))
        return with_population

    def _results(
        self, suffix: str, result: tuple[Any, ...], lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        output, *states, _ = result
        return output, tuple(states)

    def _check_repeated_step(self, hx: Any, states: Any) -> None:
        if "_warned_step" in self.__dict__ or all(
            table is None or len(table) == 1 for table in self._tables("_l0")
        ):
            return
        if self._recent_calls.continues(None if hx is None else hx[0]):
            self._warn_repeated_step()
        self._recent_calls.remember_last(states[0])

    # Loading and casting ------------------------------------------------------------------------

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accepts tables with any number of rows, with or without each scale."""
        for suffix in (s for layer in range(self.num_layers) for s in self._suffixes(layer)):
            if f"{prefix}shift{suffix}" not in state_dict:
                continue
            like = self._own(f"shift{suffix}")
            for name in _TABLES:
                value = state_dict.get(prefix + name + suffix)
                if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] > 0:
                    features = self.hidden_size * (1 if name.endswith("_c") else 4)
                    setattr(self, name + suffix, like.new_zeros(value.shape[0], features))
                elif value is None and name in _OPTIONAL:
                    setattr(self, name + suffix, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts to a 16-bit dtype move scales and shifts without rounding them."""
        names = [n for n in self._buffers if n.startswith(("scale", "shift"))]
        kept = {name: self._buffers[name] for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and compute_dtype(new.dtype) != new.dtype:
                self._buffers[name] = old.to(device=new.device, dtype=torch.float32)
        return self


_NO_NORM: tuple[Any, Any, Any] = (None, None, None)  # gamma, mean, var


def _as_batch_norm(shift: Tensor, *scales: Tensor | None) -> tuple[Any, ...]:
    """Express scales ``[S, F]`` of several terms and a shift ``[S, F]`` as batch normalization.

    Returns:
        A bias ``[F]``, and for each term gamma ``[F]``, mean and var ``[S, F]``, such that with
        eps = 0 ``sum of BN(term; gamma) + bias`` equals ``sum of scale * term + shift``.
    """
    # Smaller scales change a gate less than rounding does, and their inverse squares overflow.
    tiny = 1e-100 if shift.dtype == torch.float64 else 1e-12
    terms: list[tuple[Tensor, Tensor, Tensor]] = []
    for scale in scales:
        if scale is None:
            scale = torch.ones_like(shift[:1])
        used = (scale.abs() > tiny).all(0)
        divisor = torch.where(used, scale, 1)
        mean = torch.where(used, -shift / divisor, 0)
        var = divisor.square().reciprocal().expand(mean.shape[0], -1).contiguous()
        terms.append((torch.where(used, scale[0].sign(), 0), mean, var))
        shift = torch.where(used, 0, shift)  # the first term's mean absorbs it
    return shift[0], *terms


# Folding -----------------------------------------------------------------------------------------


@overload
def fold(module: BatchNormLSTM) -> FoldedLSTM: ...
@overload
def fold(module: nn.Module) -> nn.Module: ...
def fold(module: nn.Module) -> nn.Module:
    """Copy a layer or model for serving, replacing each `BatchNormLSTM` with a `FoldedLSTM`.

    The copy is in `eval()` and computes the same as the original in `eval()`. All other modules are
    copied unchanged. Later changes to the original do not affect the copy.

    Args:
        module: a `BatchNormLSTM`, or a model with at least one. Each must have population
            statistics.

    Returns:
        A `FoldedLSTM` for a layer, a module of the same class for a model.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    layers = {id(m): m for m in module.modules() if isinstance(m, BatchNormLSTM)}
    if not layers:
        raise ValueError(f"module must have a BatchNormLSTM to fold, got {type(module).__name__}")
    for layer in layers.values():
        layer.refresh()
        if not all(statistics.find_estimates() for statistics in layer._all_statistics()):
            raise RuntimeError(
                f"{type(layer).__name__} has no population statistics to fold: train it, or call "
                "rbn.update_population_stats(model, batches), before rbn.fold"
            )
    # deepcopy uses objects in its memo instead of copying, wherever the model refers to them.
    folded: dict[int, Any] = {key: _fold_layer(layer) for key, layer in layers.items()}
    return copy.deepcopy(module, folded).eval()


@torch.no_grad()
def _fold_layer(layer: BatchNormLSTM) -> FoldedLSTM:
    weight = layer._weight()
    new = FoldedLSTM(
        layer.input_size,
        layer.hidden_size,
        layer.num_layers,
        layer.batch_first,
        layer.bidirectional,
        initial_state=layer.initial_state,
        zoneout=(layer.zoneout[0], layer.zoneout[1]),
        ablations=layer.ablations & frozenset(_ABLATIONS),
        device=weight.device,
        dtype=weight.dtype,
    )
    for k in range(layer.num_layers):
        for suffix in layer._suffixes(k):
            state = _fold_direction(layer, suffix)
            for name, value in state.items():
                exact = name in _TABLES
                dtype = compute_dtype(weight.dtype) if exact else weight.dtype
                stored = None if value is None else value.to(device=weight.device, dtype=dtype)
                setattr(new, name + suffix, stored)
    return new


def _fold_direction(layer: BatchNormLSTM, suffix: str) -> dict[str, Tensor | None]:
    """Compute a `FoldedLSTM`'s buffers by name without suffix, in float64 on the CPU."""

    def own(name: str) -> Tensor | None:
        value = layer._parameter(name + suffix)
        return None if value is None else value.detach().to(device="cpu", dtype=torch.float64)

    results: dict[str, Tensor | None] = {name: own(name) for name in (*_WEIGHTS, "h0", "c0")}
    if layer.initial_state != "learned":
        del results["h0"], results["c0"]
    zeros = torch.zeros(1, 4 * layer.hidden_size, dtype=torch.float64)
    bias, beta_c = own("bias"), own("beta_c")
    shift = zeros if bias is None else bias[None]
    shift_c = zeros[:, : layer.hidden_size] if beta_c is None else beta_c[None]
    scales: dict[str, Tensor | None] = {"x": None, "h": None, "c": None}
    for term in layer._normalized_terms():
        mean, var = _rows(layer._statistics(term, suffix))
        gamma = own(f"gamma_{term}")
        assert gamma is not None
        scale = gamma * torch.rsqrt(var + layer.eps)
        scales[term] = scale
        if term == "c":
            shift_c = shift_c - mean * scale
        else:
            shift = shift - mean * scale
    exact = compute_dtype(layer._weight().dtype) == layer._weight().dtype
    joint = "joint_terms" in layer.ablations
    for term, names in (("x", ("weight_ih",)), ("h", _WEIGHTS if joint else ("weight_hh",))):
        scale_or_none = scales[term]
        if scale_or_none is not None and scale_or_none.shape[0] == 1 and exact:
            for name in names:  # all steps have the same scale
                weight = results[name]
                assert weight is not None
                results[name] = scale_or_none[0, :, None] * weight
            scales[term] = None
    return results | {
        "scale_x": scales["x"],
        "scale_h": scales["h"],
        "shift": shift,
        "scale_c": scales["c"],
        "shift_c": shift_c,
    }


def _rows(statistics: PopulationStatistics) -> tuple[Tensor, Tensor]:
    """Mean and variance of all steps up to the last one with an estimate, float64 on the CPU."""
    last = int((statistics.count > 0).nonzero().max()) + 1
    mean, var = (part.to(device="cpu", dtype=torch.float64) for part in statistics.read(0, last))
    return mean[:last], var[:last]
