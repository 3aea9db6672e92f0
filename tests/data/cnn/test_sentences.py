"""Sentence splitting, and selection of the sentences relevant to a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbn.data.cnn.sentences import relevant, select, split


def words(text):
    return tuple(text.split())


def test_sentences():
    text = words('@entity1 won . " we did it ! " he said . why ? the end')
    assert [" ".join(s) for s in split(text)] == [
        "@entity1 won .",
        '" we did it ! "',
        "he said .",
        "why ?",
        "the end",
    ]


def test_a_quotation_mark_that_begins_a_sentence_stays_with_it():
    text = words('he came . " good morning , " he said .')
    assert [len(s) for s in split(text)] == [3, 8]


@given(st.lists(st.sampled_from(["a", "b", ".", '"', "'", "?", ")"]), max_size=40))
def test_the_sentences_are_the_document(tokens):
    assert [t for s in split(tokens) for t in s] == tokens
    assert all(split(tokens))


def test_the_most_relevant_sentences_in_their_order():
    document = words(
        "nothing here . @entity1 won the cup . the weather was fine . in @entity2 they danced . "
        "the cup was gold . nobody slept ."
    )
    question = words("@placeholder won the gold cup in @entity2")
    found = [" ".join(s) for s in relevant(document, question, 3)]
    # Two words; an entity counts as two; two words again.
    assert found == ["@entity1 won the cup .", "in @entity2 they danced .", "the cup was gold ."]
    assert select(document, question, 1) == words("@entity1 won the cup .")


def test_common_words_and_punctuation_count_nothing():
    document = words("the of and in , . dogs bark . a b c .")
    assert select(document, words("the of in , @placeholder dogs ."), 1) == words("dogs bark .")


def test_short_documents_are_kept_whole():
    document = words("one . two . three")
    assert select(document, words("@placeholder four"), 4) == document
    assert select(("word",), words("@placeholder"), 4) == ("word",)


def test_without_any_match_the_first_sentences_are_kept():
    assert select(words("a . b . c . d ."), words("@placeholder z"), 2) == words("a . b .")


def test_a_long_document():
    document = words("the day was long . " * 1000 + "@entity9 won .")
    assert select(document, words("@placeholder met @entity9"), 1) == words("@entity9 won .")


def test_bad_count():
    with pytest.raises(ValueError, match=r"count.* 1, got 0"):
        relevant(("a",), ("b",), 0)
