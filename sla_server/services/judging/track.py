"""One objective of one version of an agreement on its way through time: which slices are due.

A slice is *due* when every gateway in scope has reported past its end, or ``judge_late_s`` after it. A
slice that was judged without some gateway, or that had no data, is *open*: it is due again when that
gateway has reported past its end, because a backlog then has filled the gap. Any of ``OPEN_US`` is due again
when cuts came late that belong to it (table ``late_cuts``). A slice whose judgement changes gets the next
revision. Only open and newest slices are remembered, of the open ones at most ``most_open``; another one that
is due again is *recalled*: what it was judged as is read from SQL first.

State is rebuilt from SQL after a restart, and when the clock has gone back: what was judged, its revision and
fingerprint, and what is open. Slices that end after now were judged under a clock that was ahead: they are
judged again when their time comes, as the next revision.

Belongs to the SQL worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sla_server.agreements.document import Objective
from sla_server.agreements.promise import InForce, Promise
from sla_server.agreements.rules import Rule, rule_of
from sla_server.rows import Row

SECOND_US: Final = 1_000_000
DAY_US: Final = 86_400 * SECOND_US
RETIRED_US: Final = DAY_US
"""A gateway silent for a day leaves the scope if others that report have its volumes: these have moved."""
OPEN_US: Final = 2 * DAY_US
"""How long late data may revise a slice: rollups stay in SQL 48 h."""
JUDGE_BACK_US: Final = 7 * DAY_US
"""Slices older than this that were not judged (server away) stay unjudged."""
LAG_LEAST_US: Final = 15 * SECOND_US
"""Cuts are stored some seconds after they came; less than this is no lag."""
LAG_MOST_US: Final = 900 * SECOND_US
"""Behind by more than this, a server may never catch up, and slices must be judged by what there is."""
RECHECK_SLICES: Final = 3
NEVER_US: Final = 1 << 62
MAX_DUE: Final = 240  # a pass: four hours of minutes, so that a long catch-up delays no other track

Fingerprint = tuple[Any, ...]


def lag_us(live_us: int, progress: Mapping[str, int], *, is_start: bool = False) -> int:
    """How far the server itself is behind with storing what gateways send; slices wait so much longer.

    What has come waits to be stored then, and slices judged without it would be judged twice, by a server
    that has too much to do.

    Args:
        live_us: when a cut came last, server time; 0: none has come yet.
        progress: how far what each gateway sent is in SQL.
        is_start: nobody knows yet what gateways and the ingest queue have kept of the time before.
    """
    found_us = live_us - max(progress.values(), default=live_us)
    most_us = found_us if is_start else LAG_MOST_US
    return min(found_us, most_us) if found_us >= LAG_LEAST_US else 0


@dataclass(frozen=True, slots=True)
class JudgedStream:
    """A stream in scope, of slices that end in (``chosen_us``, ``until_us``].

    Attributes:
        until_us: after it its volume is not its gateway's own, or has not the labels that are asked for.
        chosen_us: its volume has these labels since; 0: they are not asked for, or it always had them.
        has_left: ``until_us`` is due to labels.
    """

    stream_id: int
    gateway_id: str
    first_seen_us: int
    volume: str = ""
    until_us: int = NEVER_US
    chosen_us: int = 0
    has_left: bool = False

    def counts(self, end_us: int) -> bool:
        """Whether it is a part of a slice that ends there."""
        return self.chosen_us < end_us <= self.until_us

    def is_judged(self, end_us: int) -> bool:
        """Whether there is such a slice to judge because of it, if only to say that it is no part of it."""
        return self.first_seen_us < end_us and (not self.has_left or end_us <= self.until_us)


@dataclass(slots=True)
class Judged:
    """The newest revision of a slice, and the gateways whose data it still lacks."""

    revision: int
    fingerprint: Fingerprint
    lacking: frozenset[str] | None = frozenset()
    """None: not known (after a restart), so every gateway in scope."""


def fingerprint_of(row: Row) -> Fingerprint:
    """What must differ for a new revision."""
    keys = ("state", "n", "missed", "threshold_us", "inexact", "ours", "failed")
    return tuple(row[key] for key in keys)


class Track:
    """See the module."""

    def __init__(self, item: InForce, objective: Objective, not_before_us: int = 0) -> None:
        """``not_before_us``: until then slices of the version before reach; no time is judged twice."""
        self.item = item
        self.objective = objective
        self.promise: Promise = next(p for p in item.all_promises if p.objective == objective.name)
        self.rule: Rule = rule_of(self.promise, objective.applicability)
        self.has_steps = len(self.promise.curve) > 1
        self.length_us = objective.budgeting.slice_s * SECOND_US
        self._not_before_us = not_before_us
        self._first_us = -(-max(item.applied_us, not_before_us) // self.length_us) * self.length_us
        self.next_us = self._first_us
        self.judged: dict[int, Judged] = {}
        self._ahead: dict[int, Judged] = {}
        self.most_open = OPEN_US // self.length_us
        self._late: set[int] = set()
        self._recalled: dict[int, Judged] = {}
        self._newest: list[int] = []
        self._wake: dict[str, int] | None = {}

    def unread(self) -> Track:
        """The same objective as at a start."""
        track = Track(self.item, self.objective, self._not_before_us)
        track.most_open = self.most_open
        return track

    def follow(self, item: InForce) -> None:
        """The same version as it is now: it may have ended, and its labels may choose other volumes."""
        if item.volumes != self.item.volumes:
            self.promise = replace(self.promise, volumes=item.volumes)
        self.item = item

    @property
    def reaches_us(self) -> int:
        """Until when slices of an ended version, and of those before it, reach: the last runs to its end."""
        if self.item.ended_us is None:
            return 0
        last_us = (self.item.ended_us - 1) // self.length_us * self.length_us
        return last_us + self.length_us if last_us >= self._first_us else self._not_before_us

    @property
    def key(self) -> tuple[str, str]:
        """(agreement, objective)."""
        return self.promise.key

    def restore(self, rows: Iterable[Row], now_us: int) -> None:
        """Continue where SQL says this version was; rows oldest first."""
        if self._is_from_the_future(now_us):
            self.next_us = now_us // self.length_us * self.length_us
        for row in rows:
            if row["version"] != self.item.version or row["length_us"] != self.length_us:
                continue
            if row["start_us"] + self.length_us > now_us:
                self._ahead[row["start_us"]] = Judged(row["revision"], fingerprint_of(row))
                continue
            self.next_us = max(self.next_us, row["start_us"] + self.length_us)
            if row["start_us"] >= now_us - OPEN_US:
                lacking = None if row["state"] == "no_data" else frozenset[str]()
                self._remember(row["start_us"], Judged(row["revision"], fingerprint_of(row), lacking))
        self._skip_old(now_us)

    def _skip_old(self, now_us: int) -> None:
        oldest_us = (now_us - JUDGE_BACK_US) // self.length_us * self.length_us
        self.next_us = max(self.next_us, oldest_us)

    def _is_from_the_future(self, now_us: int) -> bool:
        """Whether it was applied under a clock that was ahead; before a later version the former goes on."""
        return self.item.version == 1 and self.item.applied_us > now_us + self.length_us

    def may_have_slices(self, now_us: int) -> bool:
        """Whether an earlier process, or an earlier version, can have judged anything of this objective."""
        began = self.next_us + self.length_us <= now_us
        return began or self.item.version > 1 or self._is_from_the_future(now_us)

    def record_late(self, slot_us: int) -> int | None:
        """Cuts of this slot came after it may have been judged; its slice, if that must be recalled."""
        start_us = slot_us // self.length_us * self.length_us
        if start_us in self.judged:
            self._late.add(start_us)
            return None
        ended_us = self.item.ended_us
        is_mine = start_us >= self.item.applied_us and (ended_us is None or start_us < ended_us)
        return start_us if is_mine and start_us < self.next_us else None

    def recall(self, row: Row) -> None:
        """Judge a slice again of which this is the newest row; not one of another version."""
        if row["version"] == self.item.version and row["length_us"] == self.length_us:
            self._recalled[row["start_us"]] = Judged(row["revision"], fingerprint_of(row))
            self._late.add(row["start_us"])

    @staticmethod
    def gateways(
        scope: Iterable[JudgedStream], progress: Mapping[str, int], start_us: int, end_us: int
    ) -> frozenset[str]:
        """Gateways whose data a slice needs: with a stream in scope that counts by its end, and not retired.

        One that has a volume in scope which no other one has that reports is not retired, however long it is
        silent: what is not observed is no_data.
        """
        seen = frozenset([s.gateway_id for s in scope if s.first_seen_us < end_us <= s.until_us])
        if len(seen) < 2:
            return seen
        alive = frozenset([name for name in seen if progress.get(name, 0) >= start_us - RETIRED_US])
        if len(alive) == len(seen):
            return seen
        there = [stream for stream in scope if stream.first_seen_us < end_us <= stream.until_us]
        moved = {stream.volume for stream in there if stream.gateway_id in alive}
        return alive | {stream.gateway_id for stream in there if stream.volume not in moved}

    def due(
        self, scope: Sequence[JudgedStream], progress: Mapping[str, int], now_us: int, late_us: int
    ) -> list[int]:
        """Starts of the slices to judge now, again or for the first time, oldest first."""
        self._skip_old(now_us)
        return sorted({*self._new(scope, progress, now_us, late_us), *self._again(scope, progress, now_us)})

    def waits_for(
        self, scope: Sequence[JudgedStream], progress: Mapping[str, int], late_us: int
    ) -> tuple[int, dict[str, int]] | None:
        """Nothing is due now: until when, unless a gateway's progress gets as far as said; None: not known.

        Only one of the gateways that the next slice lacks is named. When it has passed, ask again.
        """
        if self._late or self._wake is None:
            return None
        start_us, end_us, ended_us = self.next_us, self.next_us + self.length_us, self.item.ended_us
        waits = dict(self._wake)
        if ended_us is not None and start_us >= ended_us:
            return NEVER_US, waits
        gateways = self.gateways(scope, progress, start_us, end_us)
        lacking = next((name for name in gateways if progress.get(name, 0) < end_us), None)
        if lacking is not None:
            waits[lacking] = min(end_us, waits.get(lacking, end_us))
        elif gateways:
            return end_us, waits
        return end_us + late_us, waits

    def _new(
        self, scope: Sequence[JudgedStream], progress: Mapping[str, int], now_us: int, late_us: int
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
            if any(stream.is_judged(end_us) for stream in scope):
                yield start_us  # without a gateway, too: those that showed the volumes do not own them
            elif start_us == self.next_us:
                self.next_us = end_us  # the volumes had not appeared yet: there is nothing to judge
            start_us = end_us

    def _again(
        self, scope: Sequence[JudgedStream], progress: Mapping[str, int], now_us: int
    ) -> Iterator[int]:
        late, self._late = self._late, set()
        yield from late & (self.judged.keys() | self._recalled.keys())
        if self._wake is not None and all(progress.get(name, 0) < us for name, us in self._wake.items()):
            return
        self._wake = {}
        for start_us in [start for start in self.judged if start < now_us - OPEN_US]:
            del self.judged[start_us]
        for start_us, judged in self.judged.items():
            end_us = start_us + self.length_us
            lacking = judged.lacking
            if lacking is None:
                lacking = self.gateways(scope, progress, start_us, end_us)
            if any(progress.get(name, 0) >= end_us for name in lacking):
                self._wake = None  # until it is settled it is not known what it waits for
                yield start_us
            elif self._wake is not None:
                self._await(lacking, end_us)

    def _await(self, lacking: Iterable[str], end_us: int) -> None:
        if self._wake is not None:
            for name in lacking:
                self._wake[name] = min(end_us, self._wake.get(name, end_us))

    def _remember(self, start_us: int, judged: Judged) -> None:
        """Keep open and newest slices."""
        self.judged[start_us] = judged
        if judged.lacking is None:
            self._wake = None
        else:
            self._await(judged.lacking, start_us + self.length_us)
        if start_us not in self._newest:
            self._newest = sorted((*self._newest, start_us))
            over = self._newest.pop(0) if len(self._newest) > RECHECK_SLICES else None
            if over is not None and over in self.judged and self.judged[over].lacking == frozenset():
                del self.judged[over]
        if len(self.judged) > self.most_open + RECHECK_SLICES:
            del self.judged[min(self.judged)]

    def postpone(self, start_us: int) -> None:
        """A due slice could not be judged; it is due again."""
        if start_us in self.judged or start_us in self._recalled:
            self._late.add(start_us)

    def state_of(self, start_us: int) -> str:
        """The state of a slice that was judged and is remembered, else nothing."""
        judged = self.judged.get(start_us) or self._recalled.get(start_us)
        return str(judged.fingerprint[0]) if judged is not None else ""

    def record(self, row: Row, lacking: frozenset[str]) -> bool:
        """Note a judgement; sets the row's revision. False if it says nothing new."""
        recalled = self._recalled.pop(row["start_us"], None)
        old = self.judged.get(row["start_us"]) or recalled or self._ahead.pop(row["start_us"], None)
        found = fingerprint_of(row)
        self.next_us = max(self.next_us, row["start_us"] + self.length_us)
        if old is not None and old.fingerprint == found:
            self._remember(row["start_us"], Judged(old.revision, found, lacking))
            return False
        row["revision"] = old.revision + 1 if old is not None else 0
        self._remember(row["start_us"], Judged(row["revision"], found, lacking))
        return True
