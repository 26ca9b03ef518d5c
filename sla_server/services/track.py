"""One objective of one version of an agreement on its way through time: which slices are due.

A slice is *due* when every gateway in scope has reported past its end, or ``judge_late_s`` after it. A
slice that was judged without some gateway, or that had no data, is *open*: it is due again when that
gateway has reported past its end, because a backlog then has filled the gap. The newest ``RECHECK_SLICES``
are due again from time to time, for cuts that belong to them but came after they were judged. A slice whose
judgement changes gets the next revision.

State is rebuilt from SQL after a restart: what was judged, its revision and fingerprint, and what is open.
Belongs to the looker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sla_server.agreements.compile import InForce, promise_of
from sla_server.agreements.objectives import LatencyObjective
from sla_server.agreements.promise import Promise
from sla_server.services.store import Row

SECOND_US: Final = 1_000_000
DAY_US: Final = 86_400 * SECOND_US
RETIRED_US: Final = DAY_US
"""A gateway that has not reported for a day is out of scope, or its slices would be no_data for ever."""
OPEN_US: Final = 2 * DAY_US
"""How long late data may revise a slice: rollups stay in SQL 48 h."""
JUDGE_BACK_US: Final = 7 * DAY_US
"""Slices older than this that nobody judged (server away) stay unjudged."""
RECHECK_SLICES: Final = 3
RECHECK_EVERY_US: Final = 10 * SECOND_US
MAX_DUE: Final = 240  # a pass: four hours of minutes, so that a long catch-up delays nobody

Fingerprint = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream in scope."""

    stream_id: int
    gateway_id: str
    first_seen_us: int


@dataclass(slots=True)
class Judged:
    """The newest revision of a slice, and the gateways whose data it still lacks."""

    revision: int
    fingerprint: Fingerprint
    lacking: frozenset[str] | None = frozenset()
    """None: not known (after a restart), so every gateway in scope."""


def fingerprint_of(row: Row) -> Fingerprint:
    """What must differ for a new revision."""
    keys = ("state", "n", "missed", "threshold_us", "inexact", "ours")
    return tuple(row[key] for key in keys)


class Track:
    """See the module."""

    def __init__(self, item: InForce, objective: LatencyObjective) -> None:
        self.item = item
        self.objective = objective
        self.promise: Promise = promise_of(item, objective)
        self.length_us = objective.budgeting.slice_s * SECOND_US
        self.next_us = -(-item.applied_us // self.length_us) * self.length_us
        self.judged: dict[int, Judged] = {}
        self._rechecked_us = 0

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.promise.key

    def restore(self, rows: Iterable[Row], now_us: int) -> None:
        """Take up where SQL says this version stood."""
        for row in rows:
            if row["version"] != self.item.version or row["length_us"] != self.length_us:
                continue
            self.next_us = max(self.next_us, row["start_us"] + self.length_us)
            if row["start_us"] >= now_us - OPEN_US:
                lacking = None if row["state"] == "no_data" else frozenset[str]()
                self.judged[row["start_us"]] = Judged(row["revision"], fingerprint_of(row), lacking)
        oldest_us = (now_us - JUDGE_BACK_US) // self.length_us * self.length_us
        self.next_us = max(self.next_us, oldest_us)

    def scope(self, streams: Iterable[Row]) -> list[Stream]:
        """The streams this promise covers."""
        return [
            Stream(row["stream_id"], row["gateway_id"], row["first_seen_us"])
            for row in streams
            if self.promise.covers(row["volume"], row["client"])
        ]

    @staticmethod
    def gateways(
        scope: Iterable[Stream], progress: Mapping[str, int], start_us: int, end_us: int
    ) -> frozenset[str]:
        """Gateways whose data a slice needs: with a stream in scope by its end, and not retired."""
        return frozenset(
            stream.gateway_id
            for stream in scope
            if stream.first_seen_us < end_us and progress.get(stream.gateway_id, 0) >= start_us - RETIRED_US
        )

    def due(self, scope: list[Stream], progress: Mapping[str, int], now_us: int, late_us: int) -> list[int]:
        """Starts of the slices to judge now, again or for the first time, oldest first."""
        return sorted({*self._new(scope, progress, now_us, late_us), *self._again(scope, progress, now_us)})

    def _new(
        self, scope: list[Stream], progress: Mapping[str, int], now_us: int, late_us: int
    ) -> Iterator[int]:
        start_us = self.next_us
        for _ in range(MAX_DUE):
            end_us, ended_us = start_us + self.length_us, self.item.ended_us
            if end_us > now_us or (ended_us is not None and start_us >= ended_us):
                return
            gateways = self.gateways(scope, progress, start_us, end_us)
            complete = bool(gateways) and all(progress.get(name, 0) >= end_us for name in gateways)
            if not complete and now_us < end_us + late_us:
                return
            if gateways:
                yield start_us
            elif start_us == self.next_us:
                self.next_us = end_us  # the volumes had not appeared yet: there is nothing to judge
            start_us = end_us

    def _again(self, scope: list[Stream], progress: Mapping[str, int], now_us: int) -> Iterator[int]:
        for start_us in [start for start in self.judged if start < now_us - OPEN_US]:
            del self.judged[start_us]
        for start_us, judged in self.judged.items():
            end_us = start_us + self.length_us
            lacking = judged.lacking
            if lacking is None:
                lacking = self.gateways(scope, progress, start_us, end_us)
            if any(progress.get(name, 0) >= end_us for name in lacking):
                yield start_us
        if now_us - self._rechecked_us >= RECHECK_EVERY_US:
            self._rechecked_us = now_us
            yield from sorted(self.judged)[-RECHECK_SLICES:]

    def settle(self, row: Row, lacking: frozenset[str]) -> bool:
        """Note a judgement; sets the row's revision. False if it says nothing new."""
        old = self.judged.get(row["start_us"])
        found = fingerprint_of(row)
        if old is not None and old.fingerprint == found:
            old.lacking = lacking
            return False
        self.next_us = max(self.next_us, row["start_us"] + self.length_us)
        row["revision"] = old.revision + 1 if old is not None else 0
        self.judged[row["start_us"]] = Judged(row["revision"], found, lacking)
        return True
