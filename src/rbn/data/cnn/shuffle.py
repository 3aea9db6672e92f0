"""Renames entities at random, so that a model cannot learn their names."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("text", "all")


def entity_table(
    present: Tensor, generator: torch.Generator | None = None, kind: str = "text"
) -> Tensor:
    """A random renaming for each example.

    Args:
        present: which entities occur in the example's text, bool ``[B, E]``.
        generator: on the tensor's device.
        kind: ``"text"`` permutes the names that occur in the text among themselves, as the paper
            does; ``"all"`` draws them from all E.

    Returns:
        The new number of each entity, int64 ``[B, E]``, a permutation in each row.
    """
    keys = torch.rand(present.shape, device=present.device, generator=generator)
    if kind == "all":
        return keys.argsort(dim=1)
    # Those that occur come first: in their order, and in a random order. The others follow in the
    # same order both times, and so keep their names.
    ordered = torch.where(present, 0.0, 2.0).argsort(dim=1, stable=True)
    drawn = torch.where(present, keys, 2.0).argsort(dim=1, stable=True)
    return torch.empty_like(ordered).scatter_(1, ordered, drawn)


def occurring(texts: tuple[Tensor, ...], first: int, count: int) -> Tensor:
    """Which entities occur in any of the texts.

    Args:
        texts: symbols, int64 ``[T, B]`` each.
        first: symbol of the first entity.
        count: number of entity symbols E.

    Returns:
        bool ``[B, E]``.
    """
    present = torch.zeros(
        texts[0].shape[1], count + 1, dtype=torch.bool, device=texts[0].device
    )  # the last column collects everything that is not an entity
    for text in texts:
        number = text - first
        number = torch.where((number >= 0) & (number < count), number, count)
        present.scatter_(1, number.t(), True)
    return present[:, :count]


def renamed(text: Tensor, table: Tensor, first: int) -> Tensor:
    """Rename the entities of a text.

    Args:
        text: symbols, int64 ``[T, B]``.
        table: result of `entity_table`, int64 ``[B, E]``.
        first: symbol of the first entity.
    """
    number = text - first
    entity = (number >= 0) & (number < table.shape[1])
    new = table.gather(1, torch.where(entity, number, 0).t()).t() + first
    return torch.where(entity, new, text)
