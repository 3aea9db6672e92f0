"""Synthetic questions in the format of the news questions; needs no files."""

from __future__ import annotations

import random
from typing import Any

from rbn.data.cnn.passages import Passages, Reading
from rbn.data.cnn.question import PLACEHOLDER, Question
from rbn.data.cnn.vocabulary import Vocabulary
from rbn.nn import checks

ENTITIES = 12
_ACTIONS = ("won", "left", "sold", "found", "painted", "opened")
_THINGS = ("the cup", "the house", "the boat", "the shop", "the bridge", "the garden")
_WHEN = ("on monday", "last year", "in may", "at noon", "in the rain", "again")
_ASKED = (
    "{who} {did} {what}",
    "it was {who} who {did} {what}",
    "{what} is what {who} {did}",
    "so {who} {did} {what} , they say",
)
_CHATTER = (
    "it was a long day .",
    "the weather had been fine .",
    "nobody could say why .",
    "many people came to see it .",
    "there was no more to report .",
)


def cloze(
    sizes: tuple[int, int, int] = (4000, 500, 500), *, facts: int = 3, seed: int = 0
) -> Reading:
    """Synthetic news, with questions about who did what.

    A document describes `facts` actions, each by a different entity, among sentences without
    information. A question repeats one of the actions and leaves out who did it, so it cannot be
    answered without the document.

    Args:
        sizes: number of training, validation and test questions.
        facts: actions in a document, from 1 to 6.
        seed: random seed of everything.
    """
    train, valid, test = cloze_questions(sizes, facts=facts, seed=seed)
    words = sorted({token for q in train for token in (*q.document, *q.question)})
    counts = dict.fromkeys(words, 1)
    vocabulary = Vocabulary.of(counts, ENTITIES)

    def encoded(part: list[Question]) -> Passages:
        return Passages.of(
            (
                vocabulary.encode(q.document),
                vocabulary.encode(q.question),
                vocabulary.numbers[q.answer],
            )
            for q in part
        )

    return Reading(encoded(train), encoded(valid), encoded(test), vocabulary)


def cloze_questions(
    sizes: tuple[int, int, int] = (4000, 500, 500), *, facts: int = 3, seed: int = 0
) -> tuple[list[Question], list[Question], list[Question]]:
    """Like `cloze`, but as questions in words, as in a question file."""
    _check_sizes(sizes)
    if not 1 <= checks.integer("facts", facts) <= len(_ACTIONS):
        raise ValueError(f"facts must be from 1 to {len(_ACTIONS)}, got {facts}")
    draw = random.Random(f"cloze {seed}")
    made = [_question(draw, facts, k) for k in range(sum(sizes))]
    first, second = sizes[0], sizes[0] + sizes[1]
    return made[:first], made[first:second], made[second:]


def _check_sizes(sizes: Any) -> None:
    wanted = "sizes must be three integers of at least 0"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 3:
        raise ValueError(f"{wanted}, got {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"{wanted}, got {sizes!r}")


def _question(draw: random.Random, facts: int, number: int) -> Question:
    names = draw.sample(range(ENTITIES), facts)
    did, what = draw.sample(_ACTIONS, facts), draw.sample(_THINGS, facts)
    sentences = [
        f"@entity{names[k]} {did[k]} {what[k]} {draw.choice(_WHEN)} ." for k in range(facts)
    ]
    for sentence in draw.sample(_CHATTER, draw.randint(0, 2)):
        sentences.insert(draw.randint(0, len(sentences)), sentence)
    asked = draw.randrange(facts)
    # Several forms: if all questions started with the same words, those steps would have no
    # variance to normalize with.
    form = draw.choice(_ASKED)
    question = form.format(who=PLACEHOLDER, did=did[asked], what=what[asked])
    return Question(
        url=f"cloze:{number}",
        document=tuple(" ".join(sentences).split()),
        question=tuple(question.split()),
        answer=f"@entity{names[asked]}",
        entities={f"@entity{name}": f"Person {name}" for name in sorted(names)},
    )
