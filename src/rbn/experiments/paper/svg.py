"""Shrinks matplotlib's SVG files without a visible change."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

Point = tuple[float, float]
TOLERANCE = 0.01  # how far a removed point may be from the line, in points (1/72 inch)
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _LINK)
_HREF = f"{{{_LINK}}}href"
_STROKE = re.compile(r"M([^Mz]*)(z?)")
_TRANSLATE = re.compile(r"translate\((\S+) (\S+)\)")
_AROUND = re.compile(r" ?([A-Za-z]) ?")
_REFERENCE = re.compile(r"(?<=#)[^)]+")


def compact(text: str) -> str:
    """Shrink an SVG written by matplotlib.

    Rounds coordinates to two decimals and removes points that lie on the line between others.
    Paths with curves, such as letters, keep their numbers. Removes metadata, comments and names of
    groups.
    """
    root = ElementTree.fromstring(text)
    names: dict[str, str] = {}  # short names of letters, markers and frames
    for element in root.iter():
        if element.tag == f"{{{_SVG}}}g":
            element.attrib.pop("id", None)
        if "id" in element.attrib:
            names[element.attrib["id"]] = f"i{len(names)}"
    _shorten(root, names)
    body = ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}'


def thinned_path(points: list[Point]) -> list[Point]:
    """Remove points that lie within `TOLERANCE` of the remaining line.

    The first and the last point stay (Douglas-Peucker algorithm).
    """
    kept = {0, len(points) - 1}
    parts = [(0, len(points) - 1)]
    while parts:
        first, last = parts.pop()
        between = range(first + 1, last)
        if not between:
            continue
        far, at = max((_distance(points[k], points[first], points[last]), k) for k in between)
        if far > TOLERANCE:
            kept.add(at)
            parts += [(first, at), (at, last)]
    return [points[k] for k in sorted(kept)]


def _distance(point: Point, start: Point, end: Point) -> float:
    """The distance from a point to the segment between two others."""
    (x, y), (x0, y0), (x1, y1) = point, start, end
    dx, dy = x1 - x0, y1 - y0
    square = dx * dx + dy * dy
    along = 0.0 if square == 0 else ((x - x0) * dx + (y - y0) * dy) / square
    along = min(1.0, max(0.0, along))
    return math.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _shorten(element: ElementTree.Element, names: dict[str, str]) -> None:
    """Shorten an element and its children, in place."""
    for name, value in element.attrib.items():
        element.attrib[name] = _attribute(name, value, names)
    moved = _TRANSLATE.fullmatch(element.get("transform", ""))
    if element.tag == f"{{{_SVG}}}use" and moved and {"x", "y"}.isdisjoint(element.attrib):
        del element.attrib["transform"]
        element.attrib |= {k: v for k, v in zip("xy", moved.groups(), strict=True) if v != "0"}
    children: list[ElementTree.Element] = []
    for child in element:
        if child.tag != f"{{{_SVG}}}metadata":
            _shorten(child, names)
            # A group without attributes has no effect.
            bare = child.tag == f"{{{_SVG}}}g" and not child.attrib
            children += list(child) if bare else [child]
    element[:] = children
    element.tail = "\n"
    if not (element.text or "").strip():
        element.text = "\n" if children else None


def _attribute(name: str, value: str, names: dict[str, str]) -> str:
    if name == "id":
        return names[value]
    if name in (_HREF, "clip-path"):
        return _REFERENCE.sub(lambda match: names[match[0]], value)
    if name == "d":
        return _path(value)
    if name in ("x", "y"):
        return _short(_hundredths(value))
    if name == "transform":
        return _TRANSLATE.sub(
            lambda match: f"translate({' '.join(_short(_hundredths(v)) for v in match.groups())})",
            value,
        )
    if name == "style":
        return value.replace(": ", ":").replace("; ", ";")
    return value


def _path(data: str) -> str:
    """Path data in relative coordinates.

    Differences of rounded coordinates, so that rounding errors do not add up.
    """
    if not set(filter(str.isalpha, data)) <= set("MLz"):
        return _AROUND.sub(r"\1", " ".join(data.split())).replace(" -", "-")
    strokes = []
    for coordinates, end in _STROKE.findall(data):
        numbers = iter(map(float, coordinates.replace("L", " ").split()))
        points = thinned_path(list(zip(numbers, numbers, strict=True)))
        rounded = [(_hundredths(x), _hundredths(y)) for x, y in points]
        (x, y), *_ = rounded
        stroke = f"M{_short(x)} {_short(y)}"
        letter = "l"
        for right, down in rounded[1:]:
            stroke += f"{letter}{_short(right - x)} {_short(down - y)}"
            letter, x, y = " ", right, down
        strokes.append(stroke + end)
    # A minus sign also separates two numbers.
    return "".join(strokes).replace(" -", "-")


def _hundredths(number: float | str) -> int:
    return round(100 * float(number))


def _short(hundredths: int) -> str:
    """A number of hundredths in as few characters as possible."""
    text = f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0\.", r"\1.", text)
