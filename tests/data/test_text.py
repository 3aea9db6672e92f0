"""Texts: encoding, and the three corpora."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rbn.data import DataNotFound, Text, ptb, pydoc, text8
from rbn.data.ptb import without_first_spaces
from rbn.data.pydoc import SYMBOLS, plain

Make = Callable[..., Any]


def test_symbols_are_the_sorted_training_alphabet() -> None:
    text = Text.of("banana\n", "nab", "")
    assert text.symbols == "\nabn"
    assert text.train.tolist() == [2, 1, 3, 1, 3, 1, 0]
    assert text.valid.tolist() == [3, 1, 2]
    assert text.test.shape == (0,)
    for part in (text.train, text.valid, text.test):
        assert part.dtype == torch.uint8


def test_encode_and_decode() -> None:
    text = Text.of("aé→b", "", "")
    assert text.symbols == "abé→"
    assert text.encode("→a").tolist() == [3, 0]
    assert text.encode("").shape == (0,)
    assert text.decode(text.train) == "aé→b"
    assert text.decode(torch.tensor([1, 0], dtype=torch.int64)) == "ba"
    assert text.decode(torch.empty(0, dtype=torch.uint8)) == ""


def test_256_symbols() -> None:
    symbols = "".join(chr(0x100 + i) for i in range(256))
    text = Text.of(symbols, "", "")
    assert text.train.tolist() == list(range(256))
    assert text.decode(text.train) == symbols
    with pytest.raises(ValueError, match=r"at most 256 characters, got 257"):
        Text.of(symbols + "!", "", "")


def test_unknown_characters_are_named() -> None:
    text = Text.of("abc", "", "")
    with pytest.raises(ValueError, match=r"'Z' .* 3 "):
        text.encode("abZc")
    with pytest.raises(ValueError, match=r"'→' .* 3 "):
        text.encode("a→b")
    with pytest.raises(ValueError, match=r"'d' .* 3 "):
        Text.of("abc", "d", "")


def test_symbols_must_differ() -> None:
    with pytest.raises(ValueError, match="differ"):
        Text.of("ab", "", "", "aba")


def test_ptb_lines_lose_one_space() -> None:
    assert without_first_spaces(b" a b \n c \n  d\ne\n") == "a b \nc \n d\ne\n"


def write(
    make_source: Make, register: Make, root: Path, name: str, files: dict[str, bytes]
) -> None:
    register(name, *(make_source(file, content) for file, content in files.items()))
    (root / name).mkdir()
    for file, content in files.items():
        (root / name / file).write_bytes(content)


def test_tiny_ptb(make_source: Make, register: Make, tmp_path: Path) -> None:
    files = {"train": b" no it \n is n't \n", "valid": b" tin \n", "test": b" so \n"}
    write(make_source, register, tmp_path, "ptb", files)
    text = ptb(root=tmp_path)
    assert text.symbols == "\n 'inost"
    assert text.decode(text.train) == "no it \nis n't \n"
    assert text.decode(text.valid) == "tin \n"
    assert text.decode(text.test) == "so \n"


def test_tiny_text8(
    make_source: Make, register: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(make_source, register, tmp_path, "text8", {"text8": b" anarchism ran  man"})
    monkeypatch.setattr(importlib.import_module("rbn.data.text8"), "SIZES", (10, 5, 4))
    text = text8(root=tmp_path)
    assert text.symbols == " abcdefghijklmnopqrstuvwxyz"
    assert text.decode(text.train) == " anarchism"
    assert text.decode(text.valid) == " ran "
    assert text.decode(text.test) == " man"
    part = text8(root=tmp_path, characters=[3, 1, 4])
    assert part.symbols == text.symbols
    assert [part.decode(p) for p in (part.train, part.valid, part.test)] == [" an", " ", " man"]


@pytest.mark.parametrize(
    "characters", [5, [1, 2], [0, 1, 1], [1.5, 1, 1], "abc", [1, 5_000_001, 1]]
)
def test_numbers_of_characters_are_checked(characters: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^characters must be .* 90,000,000, 5,000,000"):
        text8(root=tmp_path, characters=characters)


def test_corpora_without_their_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"ptb\.train\.txt, 5,101,618 bytes, https://"):
        ptb(root=tmp_path)
    with pytest.raises(DataNotFound, match=r"text8\.zip, 31,344,016 bytes, http://"):
        text8(root=tmp_path)


def test_pydoc() -> None:
    text, again = pydoc(), pydoc()
    size = len(text.train) + len(text.valid) + len(text.test)
    assert size > 300_000
    assert len(text.train) == size * 90 // 100
    assert abs(len(text.valid) - len(text.test)) <= 1
    assert text.symbols == again.symbols == SYMBOLS
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.test, again.test)
    beginning = text.decode(text.train[:20_000])
    assert torch.equal(text.encode(beginning), text.train[:20_000])
    assert "assert" in beginning
    assert "\n" + "".join(map(chr, range(32, 127))) == SYMBOLS


def test_pydoc_alphabet() -> None:
    odd = "\u201ca\u201d \u2018b\u2019 \u2013 \u2014 \u2026\tß\u4e2d\n"
    assert plain(odd) == "\"a\" 'b' - -- ... ??\n"
    assert plain(SYMBOLS) == SYMBOLS


def test_python_without_pydoc_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match="pydoc_data"):
        pydoc()


def test_real_ptb(real: Path) -> None:
    text = ptb(root=real)
    assert [len(text.train), len(text.valid), len(text.test)] == [5_059_550, 396_412, 446_184]
    assert len(text.symbols) == 50
    assert len(text.train.unique()) == 50
    assert text.decode(text.train[:27]) == "aer banknote berlitz callow"
    assert text.decode(text.test[:35]) == "no it was n't black monday \nbut whi"
    assert text.decode(text.test[-13:]) == "ere with us \n"


@pytest.mark.slow
def test_real_text8(real_text8: Text) -> None:
    text = real_text8
    assert text.symbols == " abcdefghijklmnopqrstuvwxyz"
    parts = (text.train, text.valid, text.test)
    assert [len(part) for part in parts] == [90_000_000, 5_000_000, 5_000_000]
    letters = bytes(text.symbols, "ascii") + bytes(256 - 27)
    # Back to characters, all at once: the sums are of the text.
    sums = [
        hashlib.md5(part.numpy().tobytes().translate(letters), usedforsecurity=False).hexdigest()
        for part in parts
    ]
    assert sums == [
        "c11c16d3c5dea4e747fdd2d4e14ae571",
        "8b4e6b95cd624ff2246d77b41af97c80",
        "4aa15c339c5d1d7a85ecf52989ce1113",
    ]
    assert text.decode(text.train[:30]) == " anarchism originated as a ter"
