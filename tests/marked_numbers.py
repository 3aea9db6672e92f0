"""Numbers in the text of a page, behind markers such as ``<!-- steps-lstm -->24,500 to 39,000``.

Tests compare them with data files, and the sentences around them may change.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_at(page, name):
    """What follows a marker in a page, which contains it once."""
    _, text = (ROOT / page).read_text().split(f"<!-- {name} -->")
    return text


def numbers_at(page, name, count=1):
    """The first numbers that follow a marker, as printed."""
    return re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text_at(page, name))[:count]
