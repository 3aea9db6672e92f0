"""Smaller SVG files: every line and every letter stays where it was."""

import io
import itertools
import math
import random
import re
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from rbn.experiments.paper.svg import TOLERANCE, compact, thinned_path

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
# The tolerance of thinning, plus the rounding of both coordinates to hundredths.
FAR = TOLERANCE + math.hypot(0.005, 0.005) + 1e-9
NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")


@pytest.fixture(scope="module")
def pair():
    """A picture with everything in our figures, as written by matplotlib and shortened."""
    draws = random.Random(1)
    noise = [draws.gauss(0, 1) for _ in range(300)]
    noise[150] = math.nan  # two strokes
    picture = Figure(figsize=(6.4, 3.6))
    axes = picture.subplots()
    axes.plot(noise, linestyle="--")
    axes.plot([k / 10 for k in range(300)], label="straight & <long>")
    axes.plot(range(0, 300, 30), marker="o", markevery=2)
    axes.fill_between(range(300), -2, [abs(n) if n == n else 0 for n in noise], alpha=0.2)
    axes.set(title="a title", xlabel="10$^{-3}$", ylim=(-1, 40))
    axes.legend()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "a"}):
        picture.savefig(text := io.StringIO(), format="svg", metadata={"Date": None})
    return text.getvalue(), compact(text.getvalue())


def elements(text, kind):
    return list(ElementTree.fromstring(text).iter(SVG + kind))


def strokes(data):
    """Lists of absolute positions, from M, L and l only."""
    found = []
    for part in re.findall("M[^M]*", data):
        head, _, rest = part.replace("z", "").partition("l")
        numbers = iter(map(float, NUMBER.findall(head)))
        points = list(zip(numbers, numbers, strict=True))
        numbers = iter(map(float, NUMBER.findall(rest)))
        for right, down in zip(numbers, numbers, strict=True):
            points.append((points[-1][0] + right, points[-1][1] + down))
        found.append(points)
    return found


def distance(point, line):
    """The distance from a point to the nearest point of a line."""
    found = []
    for ends in itertools.pairwise(line):
        p, a, b = (complex(*place) for place in (point, *ends))
        along = ((p - a) * (b - a).conjugate()).real / abs(b - a) ** 2 if a != b else 0.0
        found.append(abs(p - a - min(1.0, max(0.0, along)) * (b - a)))
    return min(found)


@pytest.mark.slow
def test_every_line_is_where_it_was(pair):
    before, after = (elements(text, "path") for text in pair)
    assert len(before) == len(after)
    thinned = 0
    for old, new in zip(before, after, strict=True):
        one, two = (path.get("d", "") for path in (old, new))  # a space has none
        if re.search("[QC]", one):
            assert list(map(float, NUMBER.findall(one))) == list(map(float, NUMBER.findall(two)))
            continue
        assert one.count("z") == two.count("z")
        for line, other in zip(strokes(one), strokes(two), strict=True):
            assert max(distance(point, other) for point in line) < FAR
            assert max(distance(point, line) for point in other) < FAR
            thinned += len(line) - len(other)
    assert thinned > 0


def test_every_letter_and_mark_is_where_it_was(pair):
    before, after = (elements(text, "use") for text in pair)
    assert len(before) == len(after) > 50
    names = {LINK + "href", "x", "y", "transform"}
    for old, new in zip(before, after, strict=True):
        moves = []
        for use in (old, new):
            moved = re.match(r"translate\((\S+) (\S+)\)", use.get("transform", ""))
            more = map(float, moved.groups() if moved else (0, 0))
            moves.append([float(use.get(k, 0)) + m for k, m in zip("xy", more, strict=True)])
        assert moves[1] == pytest.approx(moves[0], abs=0.005 + 1e-9)
        scales = [re.findall(r"scale\(.*?\)", use.get("transform", "")) for use in (old, new)]
        assert scales[0] == scales[1]
        rest = [{k: v for k, v in use.items() if k not in names} for use in (old, new)]
        assert {k: v.replace(" ", "") for k, v in rest[0].items()} == rest[1]


def test_what_is_referred_to_is_there(pair):
    known = {e.get("id"): e for e in ElementTree.fromstring(pair[1]).iter() if e.get("id")}
    referred = re.findall(r'(?:href="|url\()#([^")]+)', pair[1])
    assert set(referred) <= set(known)
    old = {e.get("id"): e for e in ElementTree.fromstring(pair[0]).iter() if e.get("id")}
    for one, two in zip(*(elements(text, "use") for text in pair), strict=True):
        shapes = [table[use.get(LINK + "href")[1:]] for table, use in ((old, one), (known, two))]
        assert shapes[0].get("transform") == shapes[1].get("transform")
        outlines = [re.sub(r"[^A-Za-z]", "", shape.get("d", "")).upper() for shape in shapes]
        assert outlines[0].replace("L", "") == outlines[1].replace("L", "")


def test_it_is_much_shorter(pair):
    before, after = map(len, pair)
    assert after < 0.6 * before
    data = [path.get("d", "") for path in elements(pair[1], "path")]
    straight = [text for text in data if not re.search("[QC]", text)]
    assert max(len(decimals) for decimals in re.findall(r"\.(\d+)", " ".join(straight))) == 2
    assert pair[1].startswith("<?xml")


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(0, 0), (1, 0.009), (2, 0)], [(0, 0), (2, 0)]),
        ([(0, 0), (1, 0.011), (2, 0)], [(0, 0), (1, 0.011), (2, 0)]),
        ([(0, 0), (5, 0), (1, 0)], [(0, 0), (5, 0), (1, 0)]),  # there and back
        ([(0, 0), (1, 1), (0, 0)], [(0, 0), (1, 1), (0, 0)]),
        ([(3, 4)], [(3, 4)]),
        ([(1, 1), (1, 1)], [(1, 1), (1, 1)]),
    ],
)
def test_points_on_the_way_go(points, kept):
    assert thinned_path(points) == kept
