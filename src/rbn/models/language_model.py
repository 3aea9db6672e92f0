"""The next symbol of a text: the model of the paper's Penn Treebank and text8 experiments."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rbn.nn import init


class LanguageModel(nn.Module):
    """A recurrent layer over symbols and a softmax over the next one.

    Args:
        recurrent: a layer of `rbn` whose `input_size` is the number of symbols.
        dropout: of the layer's output, before the softmax.
    """

    def __init__(self, recurrent: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [getattr(recurrent, name, None) for name in ("input_size", "hidden_size")]
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(
                "recurrent must be a layer with an input_size and a hidden_size, like rbn.LSTM, "
                f"got {type(recurrent).__name__}"
            )
        if getattr(recurrent, "bidirectional", False):
            raise ValueError("recurrent must have one direction: the other has seen what is asked")
        self.recurrent = recurrent
        self.dropout = nn.Dropout(dropout)
        self.symbols: int = sizes[0]  # type: ignore[assignment]
        self.softmax = nn.Linear(sizes[1], self.symbols)  # type: ignore[arg-type]
        init.orthogonal_(self.softmax.weight)
        nn.init.zeros_(self.softmax.bias)

    def forward(self, input: Tensor, states: Any = None, start: int = 0) -> tuple[Tensor, Any]:
        """Score every symbol as the next one, after every symbol of the input.

        Args:
            input: symbols, integers ``[T, B]``, or as the recurrent layer takes them.
            states: of the layer before the input, as it returned them; its own by default.
            start: the time step at which the input begins, for a text read in pieces.

        Returns:
            Logits ``[T, B, symbols]`` and the states after the input.
        """
        output, states = self.recurrent(input, states, start=start)
        return self.softmax(self.dropout(output)), states
