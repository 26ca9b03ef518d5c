"""Selection by pattern and by label: what a selector matches, and whether two selectors can meet.

Patterns are shell patterns over names (``*``, ``?``, ``[...]``), case matters. A label selector has
requirements with commas between them, and all must hold: ``key=value``, ``key!=value``, ``key in (a, b)``,
``key notin (a, b)``, ``key`` alone (with any value) and ``!key`` (without it). What has no such label meets
``!=`` and ``notin``, as with kubectl. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
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


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether all wanted labels are there."""
    return all(labels.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One requirement of a label selector.

    Attributes:
        values: the label has one of these; None: any.
        is_negated: it has none of these, or is not there at all.
    """

    key: str
    values: tuple[str, ...] | None
    is_negated: bool = False

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether something with these labels meets it."""
        has_it = self.key in labels and (self.values is None or labels[self.key] in self.values)
        return has_it != self.is_negated


LabelSelector = tuple[LabelRequirement, ...]
_SET: Final = re.compile(r"(\S+)\s+(in|notin)\s*\((.*)\)", re.DOTALL)
_OUTSIDE_SETS: Final = re.compile(r",(?![^()]*\))")
LABEL_FORMS: Final = "key=value, key!=value, key in (a,b), key notin (a,b), key or !key, with commas between"


def parse_labels(text: str) -> LabelSelector:
    """``customer=acme,tier in (1,2)`` as requirements.

    Raises:
        ValueError: a part that is none, or one that is there twice; the text says what to write.
    """
    found: list[LabelRequirement] = []
    for part in _OUTSIDE_SETS.split(text):
        one = _requirement(part.strip())
        if one is None:
            raise ValueError(f"{part.strip()[:80]!r} is no label; write {LABEL_FORMS}")
        if one in found or any(
            _is_one_value(one) and _is_one_value(it) and it.key == one.key for it in found
        ):
            raise ValueError(f"the label {one.key!r} is there twice; keep one of the two")
        found.append(one)
    return tuple(found)


def _is_one_value(one: LabelRequirement) -> bool:
    return one.values is not None and len(one.values) == 1 and not one.is_negated


def _requirement(text: str) -> LabelRequirement | None:
    """One requirement; None if the text is none."""
    if match := _SET.fullmatch(text):
        key, word, inside = match.groups()
        values = tuple(value.strip() for value in inside.split(","))
        is_whole = bool(key) and all(values) and not any("(" in value or ")" in value for value in values)
        return LabelRequirement(key, values, word == "notin") if is_whole else None
    for sign, is_negated in (("!=", True), ("==", False), ("=", False)):
        if sign in text:
            key, _, value = (piece.strip() for piece in text.partition(sign))
            return LabelRequirement(key, (value,), is_negated) if _is_plain(key) and value else None
    key = text.removeprefix("!").strip()
    return LabelRequirement(key, None, text.startswith("!")) if _is_plain(key) else None


def _is_plain(key: str) -> bool:
    return bool(key) and not any(character in key for character in "!=() ")


def selects(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether something with these labels is selected."""
    return all(one.holds(labels) for one in selector)


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
