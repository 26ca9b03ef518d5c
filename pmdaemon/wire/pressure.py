"""PRESSURE: how full is what a process writes to, and how often it was refused.

Posted to ``services`` every ``PERIOD_NS`` by each pair and by dbmanager, best effort: one that finds no room
is not sent again. Pure. Source: docs/formats/messages.md; DESIGN.md 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

PERIOD_NS: Final = 2_000_000_000


class Pressure(NamedTuple):
    """One report.

    Attributes:
        name: of the process.
        fullness: what it writes to (a recipient's name, ``ingest-queue``) to the share in use, 0 to 1.
        refused: what was refused or dropped for want of room, by name, since that process started.
    """

    name: str
    at_us: int
    fullness: dict[str, float]
    refused: dict[str, int]


def encode(name: str, at_us: int, fullness: Mapping[str, float], refused: Mapping[str, int]) -> bytes:
    """A PRESSURE frame."""
    rounded = {what: round(ratio, 3) for what, ratio in fullness.items()}
    header = {"name": name, "at_us": at_us, "fullness": rounded, "refused": dict(refused)}
    return frame.encode(Kind.PRESSURE, header)


def parse(header: Mapping[str, Any]) -> Pressure:
    """What a header of that kind says.

    Raises:
        WireError: it does not have the promised form.
    """
    fullness, refused = header.get("fullness"), header.get("refused")
    if not isinstance(header.get("name"), str) or not isinstance(header.get("at_us"), int):
        raise WireError("PRESSURE: name (text) and at_us (whole number) are required")
    if not isinstance(fullness, dict) or not isinstance(refused, dict):
        raise WireError("PRESSURE: fullness and refused must be maps")
    if not all(isinstance(value, int | float) for value in (*fullness.values(), *refused.values())):
        raise WireError("PRESSURE: fullness and refused hold numbers")
    return Pressure(header["name"], header["at_us"], fullness, refused)
