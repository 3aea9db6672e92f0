"""Text as streams of small numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_SYMBOLS = 256  # what a byte can number


class _Codes(dict[int, int]):
    """A table for `str.translate` that says which character it does not have."""

    def __missing__(self, character: int) -> int:
        # translate would leave the character as it is after a KeyError.
        raise ValueError(f"{chr(character)!r} is not one of the {len(self)} symbols")


@dataclass(frozen=True)
class Text:
    """A text in three parts: to fit, to choose by, and to report on.

    Attributes:
        train: uint8 ``[n]``, each number the position of a character in `symbols`.
        valid: the same, of its own length.
        test: the same, of its own length.
        symbols: the alphabet, each character once, at most 256.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    symbols: str

    @classmethod
    def of(cls, train: str, valid: str, test: str, symbols: str | None = None) -> Text:
        """Encode three parts; without `symbols`, the characters of `train` in sorted order."""
        if symbols is None:
            symbols = "".join(sorted(set(train)))
        return cls(
            train=encode(train, symbols),
            valid=encode(valid, symbols),
            test=encode(test, symbols),
            symbols=symbols,
        )

    def to(self, device: torch.device | str) -> Text:
        """The same on another device."""
        train, valid, test = (part.to(device) for part in (self.train, self.valid, self.test))
        return Text(train, valid, test, self.symbols)

    def encode(self, text: str) -> Tensor:
        """Characters to numbers: uint8 ``[len(text)]``; a ValueError names an unknown one."""
        return encode(text, self.symbols)

    def decode(self, stream: Tensor) -> str:
        """Numbers to characters, from a tensor of integers ``[n]`` of any type and device."""
        return "".join(self.symbols[number] for number in stream.tolist())


def encode(text: str, symbols: str) -> Tensor:
    """Each character's position in `symbols`, uint8 ``[len(text)]``."""
    if len(symbols) > _MOST_SYMBOLS:
        raise ValueError(f"symbols must be at most {_MOST_SYMBOLS} characters, got {len(symbols)}")
    if len(set(symbols)) < len(symbols):
        raise ValueError(f"symbols must be different from each other, got {symbols!r}")
    codes = _Codes({ord(character): number for number, character in enumerate(symbols)})
    numbers = bytearray(text.translate(codes), "latin-1")
    return torch.frombuffer(numbers, dtype=torch.uint8) if numbers else torch.empty(0).byte()
