"""Questions from articles: what becomes a question, what does not, and the files."""

import gzip
import json
import lzma
from collections import Counter

import pytest

from rbn.data.articles import build, run
from rbn.data.articles.anonymous import anonymous
from rbn.data.articles.names import Usage
from rbn.data.articles.questions import Article, make
from rbn.data.articles.source import article
from rbn.data.cnn.question import MalformedQuestion, read
from rbn.data.errors import DataAltered

TEXT = (
    "(CNN)Zully Broussard decided to give a kidney to a stranger in San Francisco. "
    '"It was time," Broussard told reporters. Doctors from the clinic praised Zully on Friday. '
    "The clinic lies near the sea, and Broussard's friends came from Oakland."
)
HIGHLIGHTS = (
    "Zully Broussard gave a kidney to a stranger .",
    "Broussard lives near San Francisco and works in Reno .",
    "It was all over the news yesterday .",
    "Broussard smiled .",
    "Friends of Broussard say Broussard is a hero in Oakland .",
)
USAGE = Usage(Counter(dict.fromkeys(["it", "the", "doctors", "friends"], 9)), Counter())


def lines(count=12):
    for k in range(count):
        yield json.dumps(
            {
                "id": k,
                "source": "dailymail" if k % 3 else "cnn",
                "part": "validation" if k % 2 else "test",
                "article": TEXT.replace("Oakland", "Oakland" if k % 2 else "Berkeley"),
                "highlights": list(HIGHLIGHTS),
            }
        )


def test_the_questions_of_an_article():
    dropped = Counter()
    found = make(Article("url", "training", TEXT, HIGHLIGHTS), USAGE, dropped)
    asked = {(" ".join(q.question), q.entities[q.answer]) for q in found}
    assert asked == {
        ("@placeholder gave a kidney to a stranger", "Zully Broussard"),
        ("@placeholder lives near @entity2 and works in @entity4", "Zully Broussard"),
        ("@entity1 lives near @placeholder and works in @entity4", "San Francisco"),
        ("friends of @entity1 say @entity1 is a hero in @placeholder", "Oakland"),
    }
    assert all(q.answerable for q in found)
    document = " ".join(found[0].document)
    assert document.startswith("( @entity0 ) @entity1 decided to give a kidney to a stranger in @e")
    assert "@entity1 's friends came from @entity3 ." in document
    assert dropped == {
        "highlight without an entity": 1,
        "highlight of fewer than 5 words": 1,
        "entity that is not in the document": 1,
        "entity that is twice in the highlight": 1,
    }


@pytest.mark.parametrize(
    ("text", "highlights", "reason"),
    [
        ("", HIGHLIGHTS, "article without text"),
        (TEXT, (), "article without highlights"),
        (TEXT, (HIGHLIGHTS[0],) * 2, "the same question twice"),
        (TEXT, (HIGHLIGHTS[0] + " and so on" * 30,), "highlight of more than 60 words"),
    ],
)
def test_what_is_dropped(text, highlights, reason):
    dropped = Counter()
    make(Article("url", "test", text, highlights), USAGE, dropped)
    assert dropped[reason] == 1


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_files_and_counts(tmp_path):
    file = tmp_path / "articles.jsonl"
    bad = ["no json\n", '{"id": 1}\n', '{"id": 1, "part": "x", "article": "", "highlights": []}\n']
    bad += [f'{{"id": 1, "article": "a", "highlights": {given}}}\n' for given in ("null", "[1]")]
    file.write_text("".join(line + "\n" for line in lines()) + "".join(bad))
    told = []
    built = build(file, tmp_path / "a", processes=1, progress=lambda *now: told.append(now))
    assert built.articles == {"training": 8, "validation": 2, "test": 2}
    assert set(built.questions) == {"training", "validation", "test"}
    for part, count in built.questions.items():
        found = list((tmp_path / "a" / "questions" / part).iterdir())
        assert len(found) == count > 0
        assert all(read(path).answerable for path in found)
    for reason, count in (("JSON", 1), ("(no 'article')", 1), ("(part 'x')", 1), ("its text", 2)):
        assert [n for why, n in built.dropped.items() if reason in why] == [count], reason
    assert {q.url.split("/")[0] for q in built.sample} == {"cnn", "dailymail"}
    assert told[-1] == ("writing", 12)
    summary = json.loads((tmp_path / "a" / "build.json").read_text())
    assert summary["questions"] == dict(built.questions)
    with pytest.raises(FileExistsError, match="already exists"):
        build(file, tmp_path / "a")


@pytest.mark.slow
def test_held_out_articles(tmp_path):
    texts = [TEXT.replace("Oakland", f"Oakland{k // 2}") for k in range(600)]  # each twice
    file = tmp_path / "articles.jsonl"
    about = [
        {"id": k, "source": "dailymail" if k < 500 else "cnn", "part": "test", "article": text}
        for k, text in enumerate(texts)
    ]
    file.write_text("".join(json.dumps(a | {"highlights": HIGHLIGHTS[0]}) + "\n" for a in about))
    built = build(file, tmp_path / "a", split="held-out", processes=1)
    assert built.articles["test-cnn"] == 100
    assert sum(built.articles.values()) == 600
    # 3.4 % of 250 pairs of equal articles: 17 articles, with a standard deviation of 6.
    assert 2 <= built.articles["validation"] <= 40
    assert 2 <= built.articles["test"] <= 40
    assert json.loads((tmp_path / "a" / "build.json").read_text())["split"] == "held-out"
    parts = [article(line, "held-out").part for line in file.read_text().splitlines()]
    assert parts[:500:2] == parts[1:500:2]
    with pytest.raises(ValueError, match=r"split.*'source', 'held-out', got 'half'"):
        build(file, tmp_path / "b", split="half")


@pytest.mark.slow
def test_packed_files_and_processes_make_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_CHUNK", 4)
    text = "".join(line + "\n" for line in lines(30))
    (tmp_path / "x.jsonl").write_text(text)
    with lzma.open(tmp_path / "x.jsonl.xz", "wt") as file:
        file.write(text)
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(text)
    build(tmp_path / "x.jsonl", tmp_path / "a", processes=1)
    build(tmp_path / "x.jsonl.xz", tmp_path / "b", processes=2)
    build(tmp_path / "x.jsonl.gz", tmp_path / "c", processes=1)
    expected = contents(tmp_path / "a" / "questions")
    assert contents(tmp_path / "b" / "questions") == expected
    assert contents(tmp_path / "c" / "questions") == expected


def test_what_cannot_be_built_from(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        build(tmp_path / "none", tmp_path / "a")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="has no lines"):
        build(tmp_path / "empty.jsonl", tmp_path / "a", processes=1)
    (tmp_path / "bad.xz").write_bytes(b"nothing packed")
    with pytest.raises(DataAltered, match=r"bad\.xz cannot be unpacked"):
        build(tmp_path / "bad.xz", tmp_path / "a", processes=1)
    assert not (tmp_path / "a").exists()


def test_highlights_as_one_text():
    found = article('{"id": "a", "part": "train", "article": "x", "highlights": "one\\n\\ntwo"}')
    assert found == Article("articles/train/a", "training", "x", ("one", "two"))


@pytest.mark.parametrize("url", ['""', '"  "', "null", '"\\n"'])
def test_an_empty_url_is_a_missing_one(url, tmp_path):
    fields = f'"id": "a", "url": {url}, "article": {json.dumps(TEXT)}, '
    line = f'{{{fields} "highlights": {json.dumps(HIGHLIGHTS)}}}\n'
    assert article(line).url == "articles/train/a"
    (tmp_path / "articles.jsonl").write_text(line)
    build(tmp_path / "articles.jsonl", tmp_path / "out", processes=1)
    found = [read(path) for path in (tmp_path / "out" / "questions" / "training").iterdir()]
    assert {question.url for question in found} == {"articles/train/a"}


def test_a_url_is_one_line():
    line = '{"id": "a", "url": " http://x/y \\n\\nmore", "article": "x", "highlights": []}'
    assert article(line).url == "http://x/y"


READY = "@entity1 won the cup ."


@pytest.mark.parametrize("text", [TEXT, READY])
@pytest.mark.parametrize(
    ("question", "tokens"),
    [
        ("who is @placeholder?", "who is @placeholder ?"),
        ("@placeholder's cup", "@placeholder 's cup"),
        ("@placeholder’s cup", "@placeholder 's cup"),
        ('the "@placeholder" cup...', 'the " @placeholder " cup...'),
        ("so ( @placeholder), they say", "so ( @placeholder ) , they say"),
        ("anti-@placeholder", "anti - @placeholder"),
        ("@placeholder", "@placeholder"),
    ],
)
def test_the_gap_is_a_token_whatever_is_close_to_it(text, question, tokens):
    _, found, _ = anonymous(text, question, ["so"])
    if text == TEXT:  # splits all words
        tokens = tokens.replace("cup...", "cup ...")
    assert found == tuple(tokens.split())


def test_entities_close_to_the_gap():
    _, found, _ = anonymous(READY, "@entity1/@placeholder won, they say", [])
    assert found == ("@entity1", "/", "@placeholder", "won,", "they", "say")


@pytest.mark.parametrize("text", [TEXT, READY])
@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("@placeholders won", 0),
        ("@placeholder2 won", 0),
        ("it@placeholder won", 0),
        ("@@placeholder won", 0),
        ("@placeholder met @placeholders", 2),
        ("@placeholder met @placeholder?", 2),
    ],
)
def test_what_is_no_gap_is_refused(text, question, count):
    with pytest.raises(MalformedQuestion, match=f"one @placeholder, got {count}"):
        anonymous(text, question, [])


def test_a_text_of_ones_own():
    document, question, names = anonymous(TEXT, "@placeholder helped a stranger", ["it", "the"])
    assert question[0] == "@placeholder"
    assert names["@entity1"] == "Zully Broussard"
    assert "@entity1" in document
    ready = anonymous("@entity1 won .", "@placeholder won", [])
    assert ready == (("@entity1", "won", "."), ("@placeholder", "won"), {})
    with pytest.raises(MalformedQuestion, match="one @placeholder, got 0"):
        anonymous(TEXT, "who helped ?", [])
