"""Batches of questions: shapes, draws, and renamed entities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbn.data.cloze import ENTITIES, cloze, cloze_questions
from rbn.data.cnn import Passages, QuestionBatches, Vocabulary, baselines
from rbn.data.cnn.batches import check_options
from rbn.data.cnn.passages import gather
from rbn.data.cnn.shapes import padded_lengths, padding_share
from rbn.data.cnn.shuffle import entity_table, occurring, renamed

SIZES = (600, 80, 70)


@pytest.fixture(scope="module")
def reading():
    return cloze(SIZES)


def unpadded(batch):
    """The examples of a batch, without padding."""
    return [
        (
            batch.document[: batch.document_lengths[k], k].tolist(),
            batch.question[: batch.question_lengths[k], k].tolist(),
            int(batch.answers[k]),
        )
        for k in range(len(batch.answers))
    ]


def test_gathering_pads_with_zeros_and_cuts():
    passages = Passages.of([([1, 2, 3], [4], 5), ([6], [7, 8], 9)])
    documents, lengths = gather(
        passages.documents, passages.document_offsets, torch.tensor([1, 0, 1]), 2
    )
    assert documents.tolist() == [[6, 1, 6], [0, 2, 0]]
    assert lengths.tolist() == [1, 2, 1]
    assert passages.example(0) == ([1, 2, 3], [4], 5)
    assert len(passages.first(1)) == 1
    assert passages.first(1).documents.tolist() == [1, 2, 3]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_padded_lengths_hold_everything(lengths):
    lengths = torch.tensor(lengths)
    padded = padded_lengths(lengths, 0.12)
    assert list(padded) == sorted(set(padded))
    assert padded[-1] >= lengths.max()
    assert padded[-1] < lengths.max() + 8


def test_few_lengths_are_enough():
    torch.manual_seed(0)
    for lengths in (torch.randint(50, 200, (2000,)), torch.randint(5, 30, (2000,))):
        padded = padded_lengths(lengths, 0.12)
        assert padding_share(lengths, padded) < 0.12
        assert len(padded) <= 8
    assert padded_lengths(torch.tensor([7] * 10)) == (7,)
    assert padded_lengths(torch.tensor([1])) == (1,)


def test_padding_is_below_a_limit(reading):
    batches = QuestionBatches(reading.train, reading.vocabulary, 16)
    assert batches.padding_share < 0.15
    shapes = {
        (tuple(b.document.shape), tuple(b.question.shape)) for b in map(batches.batch, range(60))
    }
    assert len(shapes) <= len(batches.shapes)
    real = sum(int(b.document_lengths.sum()) for b in map(batches.batch, range(60)))
    assert 1 - real / sum(b.document.numel() for b in map(batches.batch, range(60))) < 0.15


def test_a_batch_depends_on_seed_and_step_alone(reading):
    one, two = (QuestionBatches(reading.train, reading.vocabulary, 16, seed=3) for _ in range(2))
    for step in (1500, 2, 1001, 2):
        a, b = one.batch(step), two.batch(step)
        assert torch.equal(a.document, b.document)
        assert torch.equal(a.answers, b.answers)
    other = QuestionBatches(reading.train, reading.vocabulary, 16, seed=4)
    assert unpadded(other.batch(2)) != unpadded(one.batch(2))


def test_every_example_is_drawn_about_equally_often(reading):
    batches = QuestionBatches(reading.train.first(60), reading.vocabulary, 10, rename=None)
    known = {repr(reading.train.example(k)): k for k in range(60)}
    counts = torch.zeros(60)
    for step in range(1200):
        for example in unpadded(batches.batch(step)):
            counts[known[repr(example)]] += 1
    # 12,000 draws with 200 expected of each: five standard deviations of about 14, plus the effect
    # of choosing a bucket for ten draws at once.
    assert counts.min() > 100
    assert counts.max() < 320


def test_all_examples_in_order_once(reading):
    batches = QuestionBatches(reading.valid, reading.vocabulary, 32)
    found = [e for batch in batches.in_order() for e in unpadded(batch)]
    expected = [reading.valid.example(k) for k in range(len(reading.valid))]
    assert sorted(found) == sorted(expected)
    assert {len(b.answers) for b in batches.in_order()} == {26, 27}


@pytest.mark.parametrize("kind", ["text", "all"])
def test_shuffling_keeps_the_answer_right(reading, kind):
    """Renamed back, an example is one of the training set; and the names do change."""
    vocabulary = reading.vocabulary
    names = set(range(vocabulary.first_entity, vocabulary.first_entity + ENTITIES))
    known = set()
    for k in range(len(reading.train)):
        known.add(repr(canonical(reading.train.example(k), names)))
    batches = QuestionBatches(reading.train, vocabulary, 32, rename=kind)
    plain = QuestionBatches(reading.train, vocabulary, 32, rename=None)
    changed = 0
    for step in range(10):
        examples, originals = unpadded(batches.batch(step)), unpadded(plain.batch(step))
        for example, original in zip(examples, originals, strict=True):
            assert repr(canonical(example, names)) in known
            assert canonical(example, names) == canonical(original, names)
            if kind == "text":
                texts = (original[0], example[0])
                assert len({frozenset(names.intersection(text)) for text in texts}) == 1
            changed += example != original
    assert changed > 150


def canonical(example, names):
    """An example with its entities numbered in order of appearance."""
    new = {}
    document, question, answer = example
    for token in (*document, *question, answer):
        if token in names:
            new.setdefault(token, -1 - len(new))
    return (
        [new.get(t, t) for t in document],
        [new.get(t, t) for t in question],
        new.get(answer, answer),
    )


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 5))
def test_a_renaming_is_a_permutation_of_what_occurs(seed, entities, batch):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, entities + 6, (7, batch), generator=generator)
    present = occurring((text,), 3, entities)
    table = entity_table(present, generator)
    assert torch.equal(table.sort(1).values, torch.arange(entities).expand(batch, -1))
    assert torch.equal(occurring((renamed(text, table, 3),), 3, entities), present)
    others = (text < 3) | (text >= 3 + entities)
    assert torch.equal(renamed(text, table, 3)[others], text[others])


def test_answers_that_are_not_in_the_document():
    vocabulary = Vocabulary(3, ("won", "."))
    document, question = vocabulary.encode(["@entity0", "won", "."]), vocabulary.encode(["won"])
    passages = Passages.of([(document, question, vocabulary.numbers["@entity2"])] * 8)
    batch = QuestionBatches(passages, vocabulary, 4).batch(0)
    first = vocabulary.first_entity
    assert ((batch.answers >= first) & (batch.answers < first + 3)).all()
    assert (batch.answers != batch.document[0]).all()  # still not in the document
    assert baselines(passages, vocabulary)["ceiling"] == 0


def test_lengths_of_one_and_five_thousand():
    vocabulary = Vocabulary(2, ("word",))
    entity, word = vocabulary.first_entity, vocabulary.numbers["word"]
    examples = [([entity], [word], entity), ([word] * 4999 + [entity], [word] * 90, entity)]
    batches = QuestionBatches(Passages.of(examples * 4), vocabulary, 2)
    found = {tuple(b.document_lengths.tolist()) for b in map(batches.batch, range(20))}
    assert found == {(1, 1), (5000, 5000)}
    cut = QuestionBatches(Passages.of(examples * 4), vocabulary, 2, longest=100)
    assert {int(b.document_lengths.max()) for b in map(cut.batch, range(20))} == {1, 100}


def test_baselines():
    vocabulary = Vocabulary(4, ("met", "and", "."))

    def example(document, question, answer):
        encode = vocabulary.encode
        return encode(document.split()), encode(question.split()), vocabulary.numbers[answer]

    passages = Passages.of(
        [
            # The most frequent entity is in the question; the next one is correct.
            example(
                "@entity0 met @entity1 . @entity0 and @entity1 . @entity0 met @entity2",
                "@entity0 met @placeholder",
                "@entity1",
            ),
            example("@entity2 met @entity3", "@placeholder met", "@entity2"),  # a tie: the first
            example("@entity2 met @entity3", "@placeholder met", "@entity0"),
            example("met and", "@placeholder met", "@entity0"),  # no entity at all
        ]
    )
    found = baselines(passages, vocabulary)
    assert found == {"frequent": 0.25, "frequent_unasked": 0.5, "ceiling": 0.5}


def test_the_embedded_task():
    train, valid, test = cloze_questions(SIZES, seed=5)
    assert [len(part) for part in (train, valid, test)] == list(SIZES)
    assert cloze_questions(SIZES, seed=5) == (train, valid, test)
    assert cloze_questions(SIZES, seed=6) != (train, valid, test)
    assert all(q.answerable for q in train)
    assert len({len(q.document) for q in train}) > 10
    # The correct answer: the entity whose sentence shares the most with the question.
    for question in train[:100]:
        text = " ".join(question.document)
        sentences = [s.split() for s in text.split(" .") if "@entity" in s]
        best = max(sentences, key=lambda s: len(set(s) & set(question.question)))
        assert best[0] == question.answer
    with pytest.raises(ValueError, match=r"facts.* 1.* 6, got 9"):
        cloze(facts=9)
    with pytest.raises(TypeError, match=r"facts.*integer, got str"):
        cloze(facts="abc")


@pytest.mark.parametrize(
    "sizes", ["abc", tuple("abc"), [10, 10], [100, -5, 20], [9, 9, 2.5], 7, [True] * 3]
)
def test_bad_sizes(sizes):
    with pytest.raises(ValueError, match=r"sizes.* 0, got "):
        cloze(sizes)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"batch_size": 0}, ValueError, "batch_size.* 1"),
        ({"batch_size": 2.5}, TypeError, "batch_size.*integer, got float"),
        ({"rename": "some"}, ValueError, "rename.*text, all"),
        ({"longest": 0}, ValueError, "longest.* 1, got 0"),
        ({"longest": -3}, ValueError, "longest.* 1, got -3"),
        ({"longest": 2.5}, TypeError, "longest.*integer, got float"),
        ({"longest": "abc"}, TypeError, "longest.*integer, got str"),
        ({"padding": "abc"}, TypeError, "padding.*number, got 'abc'"),
        ({"padding": -0.1}, ValueError, "padding.* 0.* 1, got -0.1"),
        ({"padding": float("nan")}, ValueError, "padding.* 0.* 1, got nan"),
    ],
)
def test_bad_options(reading, options, error, sentence):
    with pytest.raises(error, match=sentence):
        QuestionBatches(reading.train, reading.vocabulary, **{"batch_size": 4, **options})
    if "batch_size" not in options:
        with pytest.raises(error, match=sentence):
            check_options(**options)


def test_no_questions(reading):
    with pytest.raises(ValueError, match="there are no questions"):
        QuestionBatches(Passages.of([]), reading.vocabulary, 4)
