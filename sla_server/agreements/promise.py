"""A latency promise, reduced to what judging and control need.

The agreement document (``model``) is what people write; a ``Promise`` is one objective of one agreement in
force. Pure data, no I/O. Source: SLA-MODEL.md 1 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase


class Priority(IntEnum):
    """Agreement class; the value is its weight when what is left is shared."""

    BEST_EFFORT = 1
    BRONZE = 2
    SILVER = 4
    GOLD = 8

    @classmethod
    def parse(cls, text: str) -> Priority:
        """From the document's spelling (gold, silver, bronze, best-effort)."""
        return cls[text.upper().replace("-", "_")]

    @property
    def label(self) -> str:
        """The document's spelling."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class CurveStep:
    """One step of a demand curve: up to this offered rate the threshold holds."""

    up_to_iops: float
    threshold_us: int


@dataclass(frozen=True, slots=True)
class Promise:
    """One latency objective of one agreement in force.

    Attributes:
        volumes: names or glob patterns; a stream is in scope if its volume matches one of them
        clients: names or glob patterns, ``("*",)`` for any client
        io: "any", "read" or "write"
        percentile: 0..100, e.g. 95.0
        curve: at least one step, rising in up_to_iops; the last may be infinite
        target_ratio: share of slices that must be good, 0..1
        floor_iops: the volumes in scope are never throttled below this
    """

    sla: str
    version: int
    objective: str
    priority: Priority
    volumes: tuple[str, ...]
    clients: tuple[str, ...]
    io: str
    percentile: float
    curve: tuple[CurveStep, ...]
    target_ratio: float
    slice_s: int
    floor_iops: float
    floor_bytes_per_s: float

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.sla, self.objective

    @property
    def allowed_miss_ratio(self) -> float:
        """1 - q: the share of I/Os that may exceed the threshold."""
        return 1.0 - self.percentile / 100.0

    def threshold_us(self, offered_iops: float) -> int | None:
        """Threshold at this demand, or None when demand is above the curve."""
        for step in self.curve:
            if offered_iops <= step.up_to_iops:
                return step.threshold_us
        return None

    def covers(self, volume: str, client: str) -> bool:
        """Whether a stream of this volume and client is in scope."""
        # A name is compared first: a pattern costs a regular expression, once for each of very many names.
        return (volume in self.volumes or any(fnmatchcase(volume, pattern) for pattern in self.volumes)) and (
            "*" in self.clients or any(fnmatchcase(client, pattern) for pattern in self.clients)
        )


@dataclass(frozen=True, slots=True)
class VolumeClass:
    """What an agreement says of a volume as a neighbour: its priority, floor and static cap.

    A volume without an agreement is best-effort with a floor of 50 IOPS (DESIGN.md 4, "Names").
    """

    sla: str
    priority: Priority
    volumes: tuple[str, ...]
    floor_iops: float = 50.0
    floor_bytes_per_s: float = 0.0
    cap_iops: float | None = None
