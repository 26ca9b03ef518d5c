"""PRESSURE: how full is what a process writes to, how often it was refused, and what troubles it.

Posted to ``services`` every ``PERIOD_NS`` by each pair and by dbmanager, best effort: one that finds no room
is not sent again. Pure. Source: docs/formats/messages.md; DESIGN.md 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

PERIOD_NS: Final = 2_000_000_000
MOST_PROBLEMS: Final = 16
DAMAGED: Final = "database-damaged"  # a Problem.what that does not end by itself: the server is down
REASON_CHARS: Final = 400  # a header holds 64 KiB, and a person reads one sentence


class Problem(NamedTuple):
    """What a process cannot use just now, while it goes on with everything else.

    Attributes:
        what: ``database``, ``database-damaged``, ``parquet``,
            ``ingest-queue``, or the process's own name when it dies of it.
        since_us: wall clock.
        reason: a sentence for people.
    """

    what: str
    since_us: int
    reason: str


class Pressure(NamedTuple):
    """One report.

    Attributes:
        name: of the process.
        fullness: what it writes to (a recipient's name, ``ingest-queue``) to the share in use, 0 to 1.
        refused: what was refused or dropped for want of room, by name, since that process started.
        problems: at this moment; a process that has none says so.
    """

    name: str
    at_us: int
    fullness: dict[str, float]
    refused: dict[str, int]
    problems: tuple[Problem, ...] = ()


def encode(
    name: str,
    at_us: int,
    fullness: Mapping[str, float],
    refused: Mapping[str, int],
    problems: Sequence[Problem] = (),
) -> bytes:
    """A PRESSURE frame."""
    header = {
        "name": name,
        "at_us": at_us,
        "fullness": {what: round(ratio, 3) for what, ratio in fullness.items()},
        "refused": dict(refused),
        "problems": [
            {**problem._asdict(), "reason": problem.reason[:REASON_CHARS]}
            for problem in problems[:MOST_PROBLEMS]
        ],
    }
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
    return Pressure(header["name"], header["at_us"], fullness, refused, _problems(header.get("problems", [])))


def _problems(rows: Any) -> tuple[Problem, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WireError("PRESSURE: problems must be a list of maps")
    found = tuple(Problem(row.get("what"), row.get("since_us"), row.get("reason")) for row in rows)
    for what, since_us, reason in found:
        if not isinstance(what, str) or not isinstance(since_us, int) or not isinstance(reason, str):
            raise WireError("PRESSURE: a problem has what (text), since_us (whole number), reason (text)")
    return found
