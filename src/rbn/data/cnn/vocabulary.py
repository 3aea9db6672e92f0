"""The vocabulary: numbers for words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rbn.data.cnn.question import ENTITY, PLACEHOLDER

PADDING, UNKNOWN, NUMBER = "@padding", "@unknown", "@number"
SPECIAL = (PADDING, UNKNOWN, NUMBER, PLACEHOLDER)
_NUMBER = re.compile(r"[+-]?[$£€]?\d[\d,.:/-]*(st|nd|rd|th|s|m|bn|k|am|pm|%)?")


def normal(token: str) -> str:
    """The token as it is in the vocabulary: numbers become ``@number``."""
    return NUMBER if _NUMBER.fullmatch(token) else token


@dataclass(frozen=True)
class Vocabulary:
    """Four special symbols, then the entities, then words in order of falling frequency.

    Attributes:
        entities: number of entities; ``@entity0`` is number `first_entity`.
        words: distinct words.
    """

    entities: int
    words: tuple[str, ...]

    first_entity = len(SPECIAL)

    @classmethod
    def of(
        cls,
        counts: Mapping[str, int],
        entities: int,
        *,
        min_count: int = 1,
        most: int | None = None,
    ) -> Vocabulary:
        """Choose the words that occur often enough.

        Args:
            counts: counts of the training set's tokens; ignores special symbols and entities.
            entities: number of entity symbols.
            min_count: drop rarer words.
            most: keep at most this many, the most frequent; ties are broken alphabetically.
        """
        kept = (w for w, n in counts.items() if n >= min_count and not w.startswith("@"))
        words = sorted(kept, key=lambda word: (-counts[word], word))
        return cls(entities, tuple(words[:most]))

    def __len__(self) -> int:
        return self.first_entity + self.entities + len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of every symbol."""
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Every symbol, in the order of the numbers."""
        entities = (f"@entity{k}" for k in range(self.entities))
        return (*SPECIAL, *entities, *self.words)

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """The number of each token; that of ``@unknown`` for words not in the vocabulary."""
        unknown = self.numbers[UNKNOWN]
        return [self.numbers.get(normal(token), unknown) for token in tokens]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The symbol of each number."""
        return [self.symbols[number] for number in numbers]


def entity_count(tokens: Sequence[str]) -> int:
    """The number of entity symbols these tokens need: one more than the largest number."""
    matches = (ENTITY.fullmatch(token) for token in tokens)
    return max((int(match[1]) + 1 for match in matches if match), default=0)
