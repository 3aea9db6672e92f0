"""Question files: round trips, and errors for invalid ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbn.data.cnn.question import MalformedQuestion, Question, parse, read, render

TEXT = """http://web.archive.org/web/2010/http://www.cnn.com/a.html

( @entity1 ) -- @entity2 won the cup . it rained .

@placeholder won the cup

@entity2

@entity1:CNN
@entity2:Real: Madrid
"""


def test_the_parts_of_a_file():
    question = parse(TEXT)
    assert question.url.endswith("a.html")
    assert question.document[:3] == ("(", "@entity1", ")")
    assert question.question == ("@placeholder", "won", "the", "cup")
    assert question.answer == "@entity2"
    assert question.entities == {"@entity1": "CNN", "@entity2": "Real: Madrid"}
    assert question.answerable
    assert render(question) == TEXT
    assert parse(TEXT.replace("\n", "\r\n")) == question


word = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8)


@given(
    document=st.lists(word, min_size=1, max_size=20),
    before=st.lists(word, max_size=3),
    after=st.lists(word, max_size=3),
    number=st.integers(0, 999),
    names=st.lists(word, max_size=3),
)
def test_round_trip(document, before, after, number, names):
    before, after = ([w for w in part if w != "@placeholder"] for part in (before, after))
    question = Question(
        url="http://example.com/é",
        document=tuple(document),
        question=(*before, "@placeholder", *after),
        answer=f"@entity{number}",
        entities={f"@entity{k}": name for k, name in enumerate(names)},
    )
    assert parse(render(question)) == question


def test_a_question_without_an_address():
    question = Question("", ("a",), ("@placeholder",), "@entity1", {"@entity1": "Ann"})
    assert parse(render(question)) == question


def test_a_file_without_entities_and_an_answer_that_is_not_in_the_document():
    question = parse("url\n\na b\n\n@placeholder c\n\n@entity7\n")
    assert question.entities == {}
    assert not question.answerable


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "question.* 5.*got 1"),
        ("url\n\na b\n\n@placeholder", "got 3"),
        ("url\n\n \n\n@placeholder x\n\n@entity1\n", "it has|empty|one @placeholder"),
        ("url\n\na b\n\nno gap\n\n@entity1\n", "question.*placeholder, got 0"),
        ("url\n\na\n\n@placeholder @placeholder\n\n@entity1\n", "got 2"),
        ("url\n\na\n\n@placeholder\n\nLondon\n", "answer.*entity, got 'London'"),
        ("url\n\na\n\n@placeholder\n\n@entity07\n", "got '@entity07'"),
        ("url\n\na\n\n@placeholder\n\n@entity٣\n", "got '@entity٣'"),
        ("url\n\na\n\n@placeholder\n\n@entity9999999999\n", "got '@entity9999999999'"),
        ("url\n\na\n\n@placeholder\n\n@entity1\n\nnonsense\n", "must look like @entity1:name"),
    ],
)
def test_malformed(text, sentence, tmp_path):
    with pytest.raises(MalformedQuestion, match=sentence):
        parse(text)
    path = tmp_path / "bad.question"
    path.write_text(text)
    with pytest.raises(MalformedQuestion, match=r"bad\.question: "):
        read(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "bad.question"
    path.write_bytes(b"\xff\xfe\x00url")
    with pytest.raises(MalformedQuestion, match=r"bad\.question: not UTF-8"):
        read(path)


def test_an_empty_document():
    with pytest.raises(MalformedQuestion, match="the document is empty"):
        Question("url", (), ("@placeholder",), "@entity1")
