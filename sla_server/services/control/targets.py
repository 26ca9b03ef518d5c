"""Targets of caps: a volume, or one client of a volume.

A target is a name, so that what shares, sends and confirms rates by name does so for both. A volume's target
is its own name, a client's is ``VOLUME/CLIENT``: no name of either holds a slash (``wire.names``).

Pure functions.
"""

from __future__ import annotations

from typing import Final

SEPARATOR: Final = "/"


def target_of(volume: str, client: str = "") -> str:
    """The target of a client of a volume, or without one that of the volume."""
    return f"{volume}{SEPARATOR}{client}" if client else volume


def volume_of(target: str) -> str:
    """Its volume."""
    return target.partition(SEPARATOR)[0]


def client_of(target: str) -> str:
    """Its client; "" for a whole volume."""
    return target.partition(SEPARATOR)[2]
