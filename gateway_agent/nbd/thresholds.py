"""The threshold set in force: which latencies a stream's I/Os are compared with, exactly and one by one.

A set is complete and has a version. It is matched against a stream once per (stream, set), never per I/O;
clients are matched by glob, so that one never seen before is counted from its first I/O. Pure.

Source: SLA-MODEL.md 2; docs/formats/messages.md, THRESHOLDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from gateway_agent.errors import BadCaps
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.cut import IO_KINDS

MAX_THRESHOLD_US: Final = 0xFFFF_FFFF  # a u32 on the wire: 71 minutes
Limit = tuple[int, int]
"""(io kind, threshold in us) as in a missed entry."""


@dataclass(frozen=True, slots=True)
class ThresholdEntry:
    """One threshold: for one volume and the clients that match a glob."""

    volume: str
    client: str
    io: int
    threshold_us: int


@dataclass(frozen=True, slots=True)
class PlaneThresholds:
    """All thresholds of one version."""

    version: int = 0
    entries: tuple[ThresholdEntry, ...] = ()

    def limits_for(self, volume: str, client: str) -> tuple[Limit, ...]:
        """Distinct limits of one stream, in a fixed order."""
        matching = {
            (entry.io, entry.threshold_us)
            for entry in self.entries
            if entry.volume == volume and fnmatchcase(client, entry.client)
        }
        return tuple(sorted(matching))


def parse_thresholds(header: dict[str, Any]) -> PlaneThresholds:
    """The set in the header of DP_THRESHOLDS.

    Raises:
        BadCaps: a key is missing, of the wrong type or out of range.
    """
    version, entries = header.get("version"), header.get("entries")
    if type(version) is not int or version < 0 or not isinstance(entries, list):
        raise BadCaps("thresholds", f"version {excerpt(version)} or the list of entries is not well-formed")
    return PlaneThresholds(version, tuple(_entry(version, entry) for entry in entries))


def _entry(version: int, entry: Any) -> ThresholdEntry:
    if not isinstance(entry, dict):
        raise BadCaps(f"thresholds {version}", f"entry {excerpt(entry)} is not a map")
    volume, client, io = entry.get("volume"), entry.get("client"), entry.get("io")
    threshold_us = entry.get("threshold_us")
    if (
        not isinstance(volume, str)
        or not isinstance(client, str)
        or not isinstance(io, str)
        or io not in IO_KINDS
    ):
        problem = f"entry {excerpt(entry)} lacks volume, client or a known io kind"
        raise BadCaps(f"thresholds {version}", problem)
    if type(threshold_us) is not int or not 0 < threshold_us <= MAX_THRESHOLD_US:
        problem = f"threshold_us is {excerpt(threshold_us)}, expected 1 to 2**32 - 1"
        raise BadCaps(f"thresholds {version}", problem)
    return ThresholdEntry(volume, client, IO_KINDS[io], threshold_us)
