"""Language model: the model of the paper's Penn Treebank and text8 experiments."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import rbn.ops as ops
from rbn.models.heads import softmax_layer
from rbn.ops.checks import check_classes, check_targets

States = Tensor | tuple[Tensor, Tensor]  # (h, c) of an LSTM, h of other layers


class LanguageModel(nn.Module):
    """A recurrent layer over symbols and a softmax over the next one.

    Args:
        recurrent: a layer of `rbn` whose `input_size` is the number of symbols.
        dropout: rate of dropout on the layer's output, before the softmax.
        alphabet: the characters that the symbols stand for; kept as an attribute.
    """

    def __init__(
        self, recurrent: nn.Module, dropout: float = 0.0, *, alphabet: str | None = None
    ) -> None:
        super().__init__()
        sizes = [getattr(recurrent, name, None) for name in ("input_size", "hidden_size")]
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(
                "recurrent must be a layer with an input_size and a hidden_size, like rbn.LSTM, "
                f"got {type(recurrent).__name__}"
            )
        if getattr(recurrent, "bidirectional", False):
            raise ValueError("recurrent must have one direction: a backward one sees the targets")
        self.recurrent = recurrent
        self.dropout = nn.Dropout(dropout)
        self.symbols: int = sizes[0]  # type: ignore[assignment]
        if alphabet is not None and len(alphabet) != self.symbols:
            raise ValueError(
                f"alphabet must have {self.symbols} characters, one for each symbol, "
                f"got {len(alphabet)}"
            )
        self.alphabet = alphabet
        self.softmax = softmax_layer(recurrent, sizes[1], self.symbols)  # type: ignore[arg-type]

    def forward(
        self,
        input: Tensor,
        states: States | None = None,
        start: int | None = None,
        targets: Tensor | None = None,
        reduction: str = "mean",
    ) -> tuple[Tensor, States]:
        """Score every symbol as the next one, after each input symbol.

        Args:
            input: symbols, integers ``[T, B]``, or any input that the recurrent layer takes.
            states: the layer's states before the input, as a previous call returned them. Defaults
                to its initial states.
            start: the time step at which the input begins, for a text read in chunks; 0 by default.
            targets: the next symbols, integers ``[T, B]``. If given, returns the loss instead of
                the logits, which takes less time and memory on a GPU.
            reduction: reduction of the loss over all targets, ``"mean"`` or ``"sum"``.

        Returns:
            Logits ``[T, B, symbols]``, or the cross-entropy in nats, a float32 scalar; and the
            states after the input.
        """
        output, states = self.recurrent(input, states, start=start)
        output = self.dropout(output)
        if targets is None:
            return self.softmax(output), states
        return self._loss(output, targets, reduction), states

    def _loss(self, output: Tensor, targets: Tensor, reduction: str) -> Tensor:
        softmax = self.softmax
        # Fuse only a plain linear layer: another module, or one with hooks, must be called.
        if type(softmax) is nn.Linear and not _hooks(softmax):
            return ops.linear_cross_entropy(
                output, softmax.weight, softmax.bias, targets, reduction
            )
        check_targets(output, targets, reduction)
        check_classes(targets, self.symbols)
        logits, wanted = softmax(output).float().flatten(0, -2), targets.flatten().long()
        return F.cross_entropy(logits, wanted, reduction=reduction)


def _hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks besides its `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
