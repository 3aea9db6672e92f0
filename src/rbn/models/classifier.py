"""Sequence classification: the model of the paper's MNIST experiments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbn.models.heads import softmax_layer
from rbn.nn import checks


class SequenceClassifier(nn.Module):
    """A recurrent layer and a softmax classifier on its final hidden state.

    Args:
        recurrent: a layer of `rbn`, or any module called like `torch.nn.LSTM` with a
            `hidden_size`. A stack uses the last layer's state; two directions use both states.
        classes: number of labels.
        dropout: rate of dropout on the final state, before the softmax.
    """

    def __init__(self, recurrent: nn.Module, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = getattr(recurrent, "hidden_size", None)
        if not isinstance(hidden, int):
            raise TypeError(
                "recurrent must be a layer with a hidden_size, like rbn.LSTM, "
                f"got {type(recurrent).__name__}"
            )
        if checks.integer("classes", classes) < 2:
            raise ValueError(f"classes must be at least 2, got {classes}")
        self.recurrent = recurrent
        self.dropout = nn.Dropout(dropout)
        self.directions = 2 if getattr(recurrent, "bidirectional", False) else 1
        self.classifier = softmax_layer(recurrent, hidden * self.directions, classes)

    def forward(self, input: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Score every class for every sequence.

        Args:
            input: ``[T, B, features]``, or as the recurrent layer takes it.
            lengths: number of unpadded steps of each sequence, integers ``[B]``, for `rbn` layers.

        Returns:
            Logits ``[B, classes]``.
        """
        options: dict[str, Any] = {} if lengths is None else {"lengths": lengths}
        _, states = self.recurrent(input, **options)
        h_n = states[0] if isinstance(states, tuple) else states  # [layers * directions, B, H]
        final = torch.cat(list(h_n[-self.directions :]), dim=-1)
        logits: Tensor = self.classifier(self.dropout(final))
        return logits
