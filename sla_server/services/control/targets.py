"""Targets of caps: a volume, or one client of a volume.

A target is a name, so that what shares, sends and confirms rates by name does so for both. A volume's target
is its own name, a client's is ``VOLUME/CLIENT``: no name of either holds a slash (``wire.names``).

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SEPARATOR: Final = "/"
MOST_NAMED: Final = 10
"""Targets that a text names: each throttle's row has the text, and a volume may have hundreds of clients."""


def target_of(volume: str, client: str = "") -> str:
    """The target of a client of a volume, or without one that of the volume."""
    return f"{volume}{SEPARATOR}{client}" if client else volume


def volume_of(target: str) -> str:
    """Its volume."""
    return target.partition(SEPARATOR)[0]


def client_of(target: str) -> str:
    """Its client; "" for a whole volume."""
    return target.partition(SEPARATOR)[2]


def named(targets: Iterable[str]) -> str:
    """Targets in words: the first of them in order of name, and how many more there are."""
    every = sorted(targets)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more
