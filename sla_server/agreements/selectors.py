"""Selection by pattern and by label: what a selector matches, and whether two selectors can meet.

Patterns are shell patterns over names (``*``, ``?``, ``[...]``), case matters. A label selector is
``key=value`` or ``key`` alone (any value), several with commas between them: all must hold. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from typing import Final

MOST_COMPARED: Final = 2000
"""Names that one which is not known is compared with: some 50 us each."""
LENGTHS_APART: Final = 4
"""Names whose lengths differ by more do not resemble each other."""


def is_pattern(text: str) -> bool:
    """Whether a selector is more than one name."""
    return any(character in text for character in "*?[")


def matches(name: str, selectors: Collection[str]) -> bool:
    """Whether a name is meant by one of the selectors."""
    # Names are compared first: a pattern costs a regular expression, once for each of very many names.
    return name in selectors or "*" in selectors or any(fnmatchcase(name, selector) for selector in selectors)


def nearest(name: str, known: Iterable[str]) -> str:
    """Names that resemble one that is not known, as ``one or other``; "" if there are none."""
    like = (each for each in known if abs(len(each) - len(name)) <= LENGTHS_APART)
    return " or ".join(difflib.get_close_matches(name, list(islice(like, MOST_COMPARED)), 3))


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str | None]) -> bool:
    """Whether all wanted labels are there; None: with any value."""
    return all(key in labels and value in (None, labels[key]) for key, value in wanted.items())


def parse_labels(text: str) -> dict[str, str | None]:
    """``customer=acme,tier`` as a map, None for any value.

    Raises:
        ValueError: a part without a key, or the same key twice; the text says what to write.
    """
    wanted: dict[str, str | None] = {}
    for part in text.split(","):
        key, has_value, value = (piece.strip() for piece in part.partition("="))
        if not key or (has_value and not value):
            raise ValueError(f"{part.strip()!r} is no label; write key=value or key, with commas between")
        if key in wanted:
            raise ValueError(f"the label {key!r} is there twice; keep one of the two")
        wanted[key] = value if has_value else None
    return wanted


def can_meet(one: str, other: str) -> bool:
    """Whether some name is matched by both selectors; a set (``[...]``) counts as any character."""
    if one == other:
        return True
    if not is_pattern(one):
        return fnmatchcase(one, other)
    return fnmatchcase(other, one) if not is_pattern(other) else _patterns_meet(one, other)


@lru_cache(maxsize=4096)
def _patterns_meet(one: str, other: str) -> bool:
    """Two patterns side by side: ``reachable`` holds the places in ``other`` for each place in ``one``."""
    left, right = _parts(one), _parts(other)
    reachable = _with_stars({0}, right)
    for part in left:
        if part == "*":  # it takes any number of parts of the other
            reachable = set(range(min(reachable), len(right) + 1)) if reachable else set()
            continue
        after = set()
        for place in reachable:
            if place < len(right):
                if right[place] == "*":
                    after.add(place)
                elif "?" in (part, right[place]) or part == right[place]:
                    after.add(place + 1)
        reachable = _with_stars(after, right)
    return len(right) in reachable


def _with_stars(places: set[int], parts: tuple[str, ...]) -> set[int]:
    """The places, and those behind the stars they are at, which may match nothing."""
    found = set(places)
    for place in sorted(places):
        while place < len(parts) and parts[place] == "*":
            place += 1
            found.add(place)
    return found


def _parts(pattern: str) -> tuple[str, ...]:
    found: list[str] = []
    at = 0
    while at < len(pattern):
        end = pattern.find("]", at + 2) if pattern[at] == "[" else -1
        if end > 0:
            found.append("?")
            at = end + 1
        else:
            found.append(pattern[at])
            at += 1
    return tuple(found)
