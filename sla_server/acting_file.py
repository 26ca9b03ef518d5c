"""What the supervisor says of the parts that act, for the process ``cluster``, which has the lease.

    RUNTIME_DIR/acting.json   {"fence": 1795861200, "failing": [["services", 51234, 4, "exit status 1"]]}

``fence``: of the term in which those parts run; null: they have all ended, so the lease may become free.
``failing``: of each part that ends again and again, since when (ns, monotonic), how often, and why last. What
a crash can leave: a file of the former supervisor, which is removed as the server starts.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from pmdaemon.runtime.files import write_whole

NAME: Final = "acting.json"
LEAST_ENDS: Final = 3
"""A part that ended twice may have met one thing twice."""
FORGET_S: Final = 1800.0
"""Ends so far from each other are no series: a part that hangs once in a week has no life that is counted."""
START_S: Final = 15.0
"""The longest back-off, and a start: a part that runs for so much longer than in its series has recovered."""
MOST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class FailingPart:
    """A part that ends again and again.

    Attributes:
        since_ns: when it ended first, on the monotonic clock.
        ends: how often since.
        reason: of the newest.
    """

    name: str
    since_ns: int
    ends: int
    reason: str


@dataclass(frozen=True, slots=True)
class ActingParts:
    """See the module."""

    fence: int | None = None
    failing: tuple[FailingPart, ...] = ()


class RestartSeries:
    """Which parts end again and again: each life was shorter than ``healthy_s``, or it hung. Pure.

    Args:
        healthy_s: a part that lived so long did not die of its start.
    """

    def __init__(self, healthy_s: float) -> None:
        self._healthy_s = healthy_s
        self._series: dict[str, FailingPart] = {}
        self._newest_ns: dict[str, int] = {}
        self._longest_ns: dict[str, int] = {}  # between two ends of the series

    def ended(self, name: str, life_s: float, reason: str, now_ns: int) -> None:
        """A part has ended, or could not be started (``life_s`` 0)."""
        former, gap_ns = self._series.get(name), now_ns - self._newest_ns.get(name, now_ns)
        if former is None or life_s >= self._healthy_s or gap_ns >= FORGET_S * 1e9:
            former, gap_ns = FailingPart(name, now_ns, 0, ""), 0
            self._longest_ns[name] = 0
        self._longest_ns[name] = max(self._longest_ns[name], gap_ns)
        self._series[name] = FailingPart(name, former.since_ns, former.ends + 1, reason[:MOST_REASON])
        self._newest_ns[name] = now_ns

    def failing(self, now_ns: int) -> tuple[FailingPart, ...]:
        """Those whose newest start did not prove to be good yet."""
        return tuple(
            part
            for name, part in sorted(self._series.items())
            if part.ends >= LEAST_ENDS
            and now_ns - self._newest_ns[name]
            < min(self._healthy_s * 1e9, self._longest_ns[name] + START_S * 1e9)
        )

    def clear(self) -> None:
        """All parts were stopped in order."""
        self._series.clear()
        self._newest_ns.clear()
        self._longest_ns.clear()


class ActingFile:
    """Writes and reads it.

    Args:
        runtime_dir: of the server.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._path = runtime_dir / NAME
        self._written: ActingParts | None = None

    def publish(self, parts: ActingParts) -> None:
        """Write it, if it has changed; a file that cannot be written is tried again with the next call."""
        if parts == self._written:
            return
        failing = [astuple(part) for part in parts.failing]
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps({"fence": parts.fence, "failing": failing}))
            self._written = parts

    def read(self) -> ActingParts | None:
        """What the supervisor said last; None: nothing that can be read."""
        try:
            found = json.loads(self._path.read_bytes())
            fence = None if found["fence"] is None else int(found["fence"])
            failing = tuple(
                FailingPart(str(name), int(since_ns), int(ends), str(reason))
                for name, since_ns, ends, reason in found["failing"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return ActingParts(fence, failing)

    def remove(self) -> None:
        """Before the process that reads it starts."""
        self._path.unlink(missing_ok=True)
