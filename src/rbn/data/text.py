"""Text as a stream of integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_SYMBOLS = 256  # they are stored as bytes


class _Codes(dict[int, int]):
    """A table for `str.translate` whose error names the missing character."""

    def __missing__(self, character: int) -> int:
        # After a KeyError, translate would keep the character.
        raise ValueError(f"{chr(character)!r} is not one of the {len(self)} symbols")


@dataclass(frozen=True)
class Text:
    """A text in three parts.

    Attributes:
        train: uint8 ``[n]``, each number the position of a character in `symbols`.
        valid: the validation part, in the same form.
        test: the test part, in the same form.
        symbols: the alphabet: distinct characters, at most 256.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    symbols: str

    @classmethod
    def of(cls, train: str, valid: str, test: str, symbols: str | None = None) -> Text:
        """Encode three parts. `symbols` defaults to the sorted characters of `train`."""
        if symbols is None:
            symbols = "".join(sorted(set(train)))
        return cls(
            train=encode(train, symbols),
            valid=encode(valid, symbols),
            test=encode(test, symbols),
            symbols=symbols,
        )

    def to(self, device: torch.device | str) -> Text:
        """Copy to another device."""
        train, valid, test = (part.to(device) for part in (self.train, self.valid, self.test))
        return Text(train, valid, test, self.symbols)

    def encode(self, text: str) -> Tensor:
        """Convert characters to numbers, uint8 ``[len(text)]``."""
        return encode(text, self.symbols)

    def decode(self, stream: Tensor) -> str:
        """Convert numbers ``[n]``, of any integer type and on any device, to characters."""
        return "".join(self.symbols[number] for number in stream.tolist())


def encode(text: str, symbols: str) -> Tensor:
    """Each character's position in `symbols`, uint8 ``[len(text)]``."""
    if len(symbols) > _MOST_SYMBOLS:
        raise ValueError(f"symbols must be at most {_MOST_SYMBOLS} characters, got {len(symbols)}")
    if len(set(symbols)) < len(symbols):
        raise ValueError(f"symbols must differ from each other, got {symbols!r}")
    codes = _Codes({ord(character): number for number, character in enumerate(symbols)})
    numbers = bytearray(text.translate(codes), "latin-1")
    return torch.frombuffer(numbers, dtype=torch.uint8) if numbers else torch.empty(0).byte()
