"""Values of a peer in our messages and logs: bounded in length and depth, and without control characters.

A peer chooses what it sends. ``repr`` of nested lists ends in a RecursionError, a long text fills a log, and
an escape sequence reaches the terminal of its reader. Everything that a peer has sent passes through
here on its way into an error, a log line or a table.
"""

from __future__ import annotations

import reprlib
from typing import Any, Final

EXCERPT_CHARACTERS: Final = 60
_REPLACEMENT: Final = "\ufffd"
_MOST_BITS: Final = 512


class _Bounded(reprlib.Repr):
    """``reprlib`` with small limits; types it does not know are named, never asked for their own repr."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxlong = self.maxother = EXCERPT_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write thousands of digits, and hundreds say no more than their number."""
        return (
            super().repr_int(x, level) if x.bit_length() <= _MOST_BITS else f"<int of {x.bit_length()} bits>"
        )

    def repr_bytes(self, x: bytes, _level: int) -> str:
        """The first bytes alone are formatted."""
        return repr(x[: self.maxother])

    def repr_instance(self, x: Any, _level: int) -> str:
        """Numbers and the constants are short; of anything else the type is enough."""
        return repr(x) if x is None or isinstance(x, bool | float) else f"<{type(x).__name__}>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the order of the map: sorting the keys of a peer's map would be work without bound."""
        if level <= 0:
            return "{...}" if x else "{}"
        some = [
            f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}"
            for key, _ in zip(x, range(self.maxdict), strict=False)
        ]
        return "{" + ", ".join(some + ["..."] * (len(x) > self.maxdict)) + "}"


_bounded: Final = _Bounded()


def excerpt(value: Any, limit: int = EXCERPT_CHARACTERS) -> str:
    """``repr`` of a peer's value, at most ``limit`` characters; never raises."""
    text = _bounded.repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(value: Any, limit: int) -> str:
    """A peer's text as it may be shown: at most ``limit`` characters, each of them printable.

    White space becomes a blank, other characters that are not printable become U+FFFD; a value that is no
    text becomes its ``excerpt``.
    """
    if not isinstance(value, str):
        return excerpt(value, limit)
    if len(value) > limit:
        value = value[: limit - 3] + "..."
    return value if value.isprintable() else "".join(map(_shown, value))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else _REPLACEMENT


def printable_lines(text: str) -> str:
    """Text of several lines for a terminal: its line ends stay, other characters are as in ``printable``."""
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))
