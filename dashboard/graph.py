"""A drawing of who did what to whom: names on the left, names on the right, lines between them. Pure.

``draw`` makes SVG for an ``img`` of the page: no script and no style, so any Content-Security-Policy allows
it, and colours that can be read on a light ground and on a dark one. Whatever it shows must be in a table
beside it, too: a line has its words as a title, and no program reads a picture aloud.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape, quoteattr

MOST_LINES: Final = 20
WIDTH: Final = 720
ROW: Final = 34
NAME_WIDTH: Final = 230
MOST_LETTERS: Final = 30  # of a name; the whole of it is its title
THICKEST: Final = 14.0
THINNEST: Final = 1.5
INK: Final = "#7a828c"
SURE: Final = "#c8553d"
UNSURE: Final = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Line:
    """From one name to another.

    Attributes:
        weight: 0..1, its width.
        sure: drawn whole; else dashed.
        words: what it says, its title.
    """

    source: str
    target: str
    weight: float
    sure: bool
    words: str


def draw(lines: Sequence[Line], title: str) -> str:
    """The heaviest lines as SVG; without any it is a picture without lines."""
    shown = sorted(lines, key=lambda line: -line.weight)[:MOST_LINES]
    sources = _places(line.source for line in shown)
    targets = _places(line.target for line in shown)
    height = ROW * max(len(sources), len(targets), 1)
    left, right = _centred(sources, height), _centred(targets, height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label={quoteattr(title)} font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        *(_path(line, left[line.source], right[line.target]) for line in reversed(shown)),
        *(_name(name, NAME_WIDTH - 8, y, "end") for name, y in left.items()),
        *(_name(name, WIDTH - NAME_WIDTH + 8, y, "start") for name, y in right.items()),
        "</svg>",
    ]
    return "\n".join(parts)


def _places(names: Iterable[str]) -> list[str]:
    """Each name once, in order."""
    return list(dict.fromkeys(names))


def _centred(names: Sequence[str], height: int) -> dict[str, float]:
    """The height of each name; the shorter column is centred."""
    top = (height - ROW * len(names)) / 2
    return {name: top + ROW * (number + 0.5) for number, name in enumerate(names)}


def _path(line: Line, from_y: float, to_y: float) -> str:
    begin, end = NAME_WIDTH, WIDTH - NAME_WIDTH
    middle = (begin + end) / 2
    width = max(THINNEST, THICKEST * min(max(line.weight, 0.0), 1.0))
    dashes = "" if line.sure else ' stroke-dasharray="6 5"'
    return (
        f'<path d="M{begin} {from_y:g}C{middle:g} {from_y:g} {middle:g} {to_y:g} {end} {to_y:g}" fill="none" '
        f'stroke="{SURE if line.sure else UNSURE}" stroke-opacity="0.7" stroke-width="{width:.1f}"{dashes}>'
        f"<title>{escape(line.words)}</title></path>"
    )


def _name(name: str, x: int, y: float, anchor: str) -> str:
    short = name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
    return (
        f'<text x="{x}" y="{y + 4:g}" text-anchor="{anchor}" fill="{INK}">{escape(short)}'
        f"<title>{escape(name)}</title></text>"
    )
