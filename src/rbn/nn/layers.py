"""A stack of recurrent layers, called like `torch.nn.LSTM`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from rbn.nn import checks
from rbn.nn.processes import pad_to_longest, with_steps
from rbn.nn.recurrence import GivenStates, Recurrence, States
from rbn.ops import compiling
from rbn.ops.types import to_device, valid_steps

Restore = Callable[[Tensor, States], tuple[Any, Any]]


class Layers(Recurrence, Generic[GivenStates]):
    """A stack of layers with one or two directions, called like `torch.nn.LSTM`.

    Has the attributes of `torch.nn.LSTM`: `mode`, `input_size`, `hidden_size`, `num_layers`,
    `bias`, `batch_first`, `dropout`, `bidirectional`, `proj_size` (always 0) and `all_weights`.
    """

    step_argument = "start"
    step_hint = (
        "layer(input, hx, start=step). If its training batches continue from the states of "
        "earlier ones, pass start=0"
    )

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        weight_dropout: float,
        proj_size: int = 0,
        **options: Any,
    ) -> None:
        """Check the options. The subclass calls `_build` after checking its own."""
        super().__init__(input_size, hidden_size, bias=bias, **options)
        self.bias = bias
        self.num_layers = checks.layer_size("num_layers", num_layers)
        self.batch_first = checks.layer_flag("batch_first", batch_first)
        self.dropout = checks.dropout_rate(dropout)
        if self.dropout and self.num_layers == 1:
            checks.warn(
                "dropout is applied to the output of every layer except the last, so it needs "
                f"num_layers greater than 1, got dropout={dropout} and num_layers=1"
            )
        if proj_size != 0:
            raise ValueError(
                f"proj_size must be 0, got {proj_size}: {type(self).__name__} has no projection of "
                "its output"
            )
        self.proj_size = 0
        self.bidirectional = checks.layer_flag("bidirectional", bidirectional)
        self.directions = 2 if bidirectional else 1
        self.weight_dropout = checks.probability("weight_dropout", weight_dropout)
        if self.weight_dropout == 1:
            raise ValueError(
                "weight_dropout must be below 1, got 1: it would drop every recurrent weight"
            )

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Create and initialize all parameters."""
        checks.floating("dtype", dtype)
        for layer in range(self.num_layers):
            size = self.input_size if layer == 0 else self.hidden_size * self.directions
            for suffix in self._suffixes(layer):
                self._add_parameters(suffix, size, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse")[: self.directions]

    @property
    def mode(self) -> str:
        """The type of network, as torch names it."""
        return self.definition.name.upper()

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction in the form of `torch.nn.LSTM`.

        ``[weight_ih, weight_hh, bias_ih, bias_hh]``, without the biases if ``bias=False``. bias_ih
        is the layer's only bias; bias_hh is a constant of zeros.
        """
        names = ["weight_ih", "weight_hh", *(["bias"] if self.bias else [])]
        weights: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                one = [self._own(name + suffix) for name in names]
                if self.bias:
                    one.append(nn.Parameter(torch.zeros_like(one[-1]), requires_grad=False))
                    if (beta_n := self._parameter(f"beta_n{suffix}")) is not None:  # GRU only
                        one[-1][-len(beta_n) :] = beta_n.detach()
                weights.append(one)
        return weights

    @property
    def _flat_weights(self) -> list[Tensor]:
        """`all_weights` as one list, for tools that read it from `torch.nn.LSTM`."""
        return [weight for one in self.all_weights for weight in one]

    def flatten_parameters(self) -> None:
        """Does nothing. Exists so that code written for `torch.nn.LSTM` runs."""

    @overload
    def forward(
        self,
        input: Tensor,
        hx: GivenStates | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        start: int | None = None,
    ) -> tuple[Tensor, GivenStates]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: GivenStates | None = None, *, start: int | None = None
    ) -> tuple[PackedSequence, GivenStates]: ...

    @compiling.runs_between_graphs
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: GivenStates | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        start: int | None = None,
    ) -> tuple[Tensor | PackedSequence, GivenStates]:
        """Run the layer over a batch of sequences.

        Args:
            input: ``[T, B, input_size]``, ``[B, T, input_size]`` with batch_first,
                ``[T, input_size]`` for one sequence without a batch, or a PackedSequence. Integer
                inputs without the feature dimension are symbols from 0 to input_size - 1: one-hot
                vectors, looked up in the weights instead of multiplied.
            hx: initial states as in `torch.nn.LSTM`, ``[layers * directions, B, H]`` each.
                Overrides the learned ones.
            lengths: number of unpadded steps of each sequence, integers ``[B]`` in any order.
                Values on the CPU are checked; values on an accelerator are not.
            start: the time step at which the input begins, for sequences fed in chunks or step by
                step; 0 by default. Selects the population statistics. One direction only.

        Returns:
            ``output, states`` with the shapes of `torch.nn.LSTM`. Padded positions of the output
            are zero; the states are those after each sequence's last unpadded step.
        """
        result: tuple[Any, GivenStates]
        if torch.compiler.is_compiling():
            if compiling.breaks_graph():
                run = compiling.run_eagerly
                result = run(Layers.forward, self, input, hx, lengths, start=start)
                return result
        elif (compiler := compiling.set_eval_frame(None)) is not None:
            run = compiling.run_in_compiled_code
            result = run(compiler, Layers.forward, self, input, hx, lengths, start=start)
            return result
        x, states, lengths, restore = self._in_steps(input, hx, lengths)
        steps, batch, _ = x.shape
        first = 0 if start is None else start
        given, lengths = self._check_call(x, states, lengths, first)
        single = start is None and not torch.compiler.is_compiling() and steps == 1
        if single:
            self._check_first_step(given)
        untrained = self._check_ready(batch)
        self._keep_call(x, given, lengths, first, batch)
        if not isinstance(input, PackedSequence):
            x = self._zero_padding(x, lengths)
        group = self._group()
        if untrained:
            with self._batch_statistics():
                output, finals = self._stack(x, given, lengths, first)
        elif group is None:
            output, finals = self._stack(x, given, lengths, first)
        else:
            x, lengths, self._all_rows, self._common_steps = pad_to_longest(x, lengths, group)
            try:
                output, finals = self._stack(x, given, lengths, first)
            finally:
                self._all_rows = self._common_steps = None
            output = with_steps(output, steps)
        self._keep_states(finals, first + steps - 1)
        result = restore(output, finals)
        if single and not self.training:
            self._check_repeated_step(hx, result[1])
        return result

    if TYPE_CHECKING:
        __call__ = forward

    def compile(self, *args: object, **options: object) -> None:
        """Like `torch.nn.Module.compile`. Changes nothing without ``fullgraph=True``.

        The layer would run eagerly all the same, after `torch.compile`'s wrapper.
        """
        if options.get("fullgraph") or compiling.traces_layers():
            super().compile(*args, **options)

    def _prepared(self, input: Tensor) -> Tensor:
        """Checks the input and applies autocast. Symbols become int64 ``[..., 1]``."""
        weight = self._weight()
        if checks.is_symbols(input):
            return checks.symbols(input, self.input_size, weight)
        autocast = self._under_autocast()
        checks.sequence_input(input, self.input_size, weight, autocast)
        return input.to(self._type(input)) if autocast else input

    def _in_steps(self, input: Any, hx: Any, lengths: Any) -> tuple[Tensor, Any, Any, Restore]:
        """Brings any supported input layout to ``[T, B, input_size]``.

        Returns the input, states and lengths in that layout, and a function that converts the
        output and the final states back to the user's layout.
        """
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError("lengths must not be given with a PackedSequence: it has its own")
            return self._unpacked(input, hx)
        x = self._prepared(input)
        if x.dim() == 2:
            if lengths is not None:
                raise ValueError("lengths needs a batched input, got an unbatched one")
            if hx is not None:
                shape = (self.num_layers * self.directions, self.hidden_size)
                hx = self._wrap(tuple(h[:, None] for h in self._given_states(hx, shape)))
            return x[:, None], hx, None, self._without_batch
        if self.batch_first:
            return x.transpose(0, 1), hx, lengths, self._with_batch_first
        return x, hx, lengths, self._with_steps_first

    def _with_steps_first(self, output: Tensor, finals: States) -> tuple[Tensor, Any]:
        return output, self._wrap(finals)

    def _with_batch_first(self, output: Tensor, finals: States) -> tuple[Tensor, Any]:
        return output.transpose(0, 1), self._wrap(finals)

    def _without_batch(self, output: Tensor, finals: States) -> tuple[Tensor, Any]:
        return output[:, 0], self._wrap(tuple(state[:, 0] for state in finals))

    def _unpacked(self, packed: PackedSequence, hx: Any) -> tuple[Tensor, Any, Tensor, Restore]:
        """Pads a packed sequence in its sorted row order. The output is packed the same way."""
        checks.packed(packed)
        padded, lengths, pack = padded_sequence(packed.data, packed.batch_sizes)
        x = self._prepared(padded)
        if hx is not None and packed.sorted_indices is not None:
            shape = (self.num_layers * self.directions, x.shape[1], self.hidden_size)
            states = self._given_states(hx, shape)
            hx = self._wrap(tuple(h[:, packed.sorted_indices] for h in states))

        def restore(output: Tensor, finals: States) -> tuple[PackedSequence, Any]:
            if packed.unsorted_indices is not None:
                finals = tuple(state[:, packed.unsorted_indices] for state in finals)
            indices = packed.sorted_indices, packed.unsorted_indices
            return PackedSequence(pack(output), packed.batch_sizes, *indices), self._wrap(finals)

        return x, hx, lengths, restore

    def _check_call(
        self, x: Tensor, hx: Any, lengths: Any, start: int
    ) -> tuple[States | None, Tensor | None]:
        """Check the arguments. Returns the given states and the lengths."""
        steps, batch, _ = x.shape
        if steps == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN, got 0")
        start = checks.integer("start", start)
        if start < 0 or (self.bidirectional and start > 0):
            raise ValueError(f"start must be 0, or positive with one direction, got {start}")
        checked = checks.lengths(lengths, steps, batch, x.device)
        shape = (self.num_layers * self.directions, batch, self.hidden_size)
        return None if hx is None else self._given_states(hx, shape), checked

    def _given_states(self, hx: Any, shape: tuple[int, ...]) -> States:
        if checks.is_integer_vector(hx):
            raise TypeError(
                f"hx must be initial states, got a {type(hx).__name__} of integers: pass lengths "
                "by name, as in layer(input, lengths=lengths)"
            )
        return super()._given_states(hx, shape)

    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        return self._stack(self._zero_padding(x, lengths), states, lengths, start)[1]

    def _zero_padding(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Zero the padding of x ``[T, B, F]``, which may hold anything, if it is ignored."""
        if lengths is None or not self._ignores_padding():
            return x
        valid = valid_steps(lengths, x.shape[0])
        assert valid is not None
        return torch.where(valid[:, :, None], x, 0)

    def _stack(
        self, x: Tensor, given: States | None, lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        """Run all layers and directions over x ``[T, B, input_size]``."""
        finals: list[States] = []
        for layer in range(self.num_layers):
            directions: list[tuple[str, Tensor, States | None]] = []
            for direction, suffix in enumerate(self._suffixes(layer)):
                k = layer * self.directions + direction
                states = None if given is None else tuple(state[k] for state in given)
                directions.append((suffix, reverse(x, lengths) if direction == 1 else x, states))
            outputs = []
            for direction, (output, final) in enumerate(self._layer(directions, lengths, start)):
                outputs.append(reverse(output, lengths) if direction == 1 else output)
                finals.append(final)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        if len(finals) == 1:
            return x, tuple([state.unsqueeze(0) for state in finals[0]])
        return x, tuple(torch.stack(state) for state in zip(*finals, strict=True))

    def _ignores_padding(self) -> bool:
        """Whether padded positions have no influence on any result."""
        return True


def padded_sequence(
    data: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Pad the data of a packed sequence with zeros. The rows keep their order.

    PyTorch's functions copy the rows of each length separately, which takes longer than a
    recurrence on a GPU.

    Args:
        data: ``[N, ...]``.
        sizes: ``[T]``, how many sequences reach each step.

    Returns:
        The padded data ``[T, B, ...]``, the lengths ``[B]`` on the CPU, and a function that packs a
        padded output the same way.
    """
    if torch.compiler.is_compiling():
        padded, lengths = pad_packed_sequence(PackedSequence(data, sizes))
        return padded, lengths, lambda output: pack_padded_sequence(output, lengths).data
    steps, batch = len(sizes), int(sizes[0])
    valid = torch.arange(batch, device="cpu") < sizes[:, None]  # [T, B]
    index = to_device(valid.flatten().nonzero().squeeze(1), data.device)
    padded = data.new_zeros(steps * batch, *data.shape[1:]).index_copy(0, index, data)
    padded = padded.unflatten(0, (steps, batch))
    return padded, valid.sum(0), lambda output: output.flatten(0, 1).index_select(0, index)


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the unpadded part of x ``[T, B, F]`` in time. Padding stays at the end."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(0, index[:, :, None].expand_as(x))
