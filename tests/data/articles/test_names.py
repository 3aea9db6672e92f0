"""Names in running text, and which of them are the same entity."""

from collections import Counter

import pytest

from rbn.data.articles.forms import Mention, form, merged
from rbn.data.articles.names import Usage, count_usage, find_names
from rbn.data.articles.tokens import sentences

USAGE = Usage(
    Counter(
        {
            "he": 90,
            "then": 9,
            "the": 99,
            "share": 5,
            "but": 50,
            "red": 20,
            "will": 40,
            "police": 30,
            "it": 80,
        }
    ),
    Counter({"london": 10, "red": 3, "will": 1, "obama": 9, "police": 2}),
)


def names(text, usage=USAGE, known=frozenset()):
    return [
        " ".join(s.tokens[n.begin : n.end])
        for s in sentences(text)
        for n in find_names(s, usage, known)
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("He doesn't know Obama's dog.", "He does n't know Obama 's dog ."),
        ("“It’s the U.S. team,” he said", '" It \'s the U.S. team , " he said'),
        ("Mr. O'Neill paid $1,200.50 at 10:30am", "Mr. O'Neill paid $ 1,200.50 at 10:30am"),
        ("a two-year-old -- yes", "a two - year - old -- yes"),
        ("(CNN)Share", "( CNN ) Share"),
        ("J. K. Rowling's café…", "J. K. Rowling 's café ..."),
    ],
)
def test_tokens(text, tokens):
    assert " ".join(t for s in sentences(text) for t in s.tokens) == tokens


def test_sentences_end_after_their_quotation_marks():
    found = [" ".join(s.tokens) for s in sentences("He came. 'Why?' he said. Mr. B left! J. Doe.")]
    assert found == ["He came .", "' Why ? '", "he said .", "Mr. B left !", "J. Doe ."]
    assert sentences("") == []
    assert sentences(" \n ") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Then he met Barack Obama in London.", ["Barack Obama", "London"]),
        ("Obama won. He slept.", ["Obama"]),  # usually a name, although it begins the sentence
        ("But Obama won.", ["Obama"]),
        ("Police came to the Bank of England on Monday.", ["Bank of England"]),
        ("it was James Ward-Prowse, I think", ["James Ward - Prowse"]),
        ("then Mr. Smith said It was fine", ["Smith"]),
        ("in March and May he saw The Tate", ["The Tate"]),
        ("SHARE THE RED WILL BUT", []),  # a headline says nothing about its words
        ("a share of it", []),
        ("Obama met Ed Red at London Red Road", ["Obama", "Ed Red", "London Red Road"]),
        ("", []),
    ],
)
def test_names(text, expected):
    assert names(text) == expected


def test_a_known_name_counts_at_the_beginning_too():
    assert names("Red Bull won.") == ["Bull"]
    assert names("Red Bull won.", known=frozenset(["red bull"])) == ["Red Bull"]
    assert names("Will came.") == []
    assert names("Will came.", known=frozenset(["will"])) == ["Will"]


def test_usage_leaves_out_beginnings_and_headlines():
    usage = count_usage(sentences("Dogs bark at Rex. ALL DOGS BARK AT REX. the dogs: Cats sleep."))
    assert usage.upper == Counter({"rex": 1})
    assert usage.lower["dogs"] == 1
    assert usage.share("rex") == 1
    assert usage.share("dogs") == 0
    assert usage.share("unheard") is None


def test_short_forms_stand_for_long_ones():
    written = [
        "Barack Obama",
        "President Barack Obama",
        "Obama",
        "Barack",
        "President Obama",
        "Major League Soccer",
        "MLS",
        "Manchester United",
        "Manchester",
        "London",
        "U.S.",
        "United States",
    ]
    mentions = {
        form(text.split()): Mention(text, k, capitals=text.replace(".", "").isupper())
        for k, text in enumerate(written)
    }
    mentions[("manchester",)].place = True  # "in Manchester"
    root = merged(mentions)
    president = ("president", "barack", "obama")
    assert {root[form(written[k].split())] for k in (0, 1, 2, 4)} == {president}
    assert root[("barack",)] == president
    assert root[("mls",)] == ("major", "league", "soccer")
    assert root[("manchester",)] == ("manchester",)
    assert root[("london",)] == ("london",)
    assert root[("us",)] == ("united", "states")


def test_of_two_long_forms_the_first_mentioned():
    mentions = {
        ("michelle", "obama"): Mention("Michelle Obama", 1),
        ("barack", "obama"): Mention("Barack Obama", 0),
        ("obama",): Mention("Obama", 2),
    }
    assert merged(mentions)[("obama",)] == ("barack", "obama")
