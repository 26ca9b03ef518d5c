"""The judge against a slow and obvious reference, on made-up histories.

Two versions of an agreement, the second applied at any minute of a period, perhaps with slices of another
length; business hours, and maintenance that was agreed, in a zone whose clock is set forward or back; work
that somebody begins at some minute and ends early; two gateways whose data come late, in any order, or never;
a clock of passes that ends long after. What is stored in the end must be what the reference finds by looking
at the finished data once, slice by slice, whatever was judged and revised on the way. The reference asks a
clock on the wall, minute by minute, what time it is (``wall_clock``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.promise import InForce
from sla_server.services.judging.judge import Judge
from tests.support.agreements import in_force, simple
from tests.support.services import GATEWAY, FakeStore
from tests.support.wall_clock import MINUTE_US, WallClock, wall_clock

OTHER = "99999999-2222-3333-4444-555555555555"
SLOTS = 10 * 60
CHANGES = (
    ("Europe/Berlin", "2027-03-28"),
    ("Europe/Berlin", "2026-10-25"),
    ("America/New_York", "2026-11-01"),
    ("Australia/Lord_Howe", "2026-04-05"),  # by half an hour
    ("Asia/Kathmandu", "2026-07-01"),  # never; a quarter of an hour off
)
NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Judged = tuple[str, int, bool]


@dataclass(frozen=True)
class Rules:
    """What is promised, and when nothing is; minutes since local midnight of the day on which it begins.

    Attributes:
        hours: of the day, from and to, minutes by the clock on the wall.
        agreed: maintenance within the agreement: begin by the clock on the wall, and minutes.
        work: minutes at which somebody begins work, would end it, and ends it.
        edited: when the second version is applied; lengths: of the slices of both.
    """

    zone: str
    day: str
    hours: tuple[int, int]
    agreed: tuple[int, int]
    work: tuple[int, int, int]
    edited: int
    lengths: tuple[int, int]

    @property
    def midnight(self) -> datetime:
        return datetime.fromisoformat(self.day)

    @property
    def began_us(self) -> int:
        return round(self.midnight.replace(tzinfo=ZoneInfo(self.zone)).timestamp() * 1e6)

    def at_us(self, minute: int) -> int:
        return self.began_us + minute * MINUTE_US

    @property
    def clock(self) -> WallClock:
        return wall_clock(self.zone, self.began_us, SLOTS + 60)

    def on_the_wall(self, minute: int) -> datetime:
        return self.midnight + timedelta(minutes=minute)

    def versions(self, now_us: int) -> list[InForce]:
        """As they are known then; the first has a limit of 12 ms, the second of 20 ms."""
        texts = [
            simple(slice_text=f"{length}m", value_ms=value_ms, extra=self._keys)
            for length, value_ms in zip(self.lengths, (12, 20), strict=True)
        ]
        edited_us, work = self.at_us(self.edited), self._work(now_us)
        first = replace(in_force(texts[0], applied_us=self.began_us), work=work)
        if now_us < edited_us:
            return [first]
        second = in_force(texts[1], version=2, applied_us=edited_us)
        return [replace(first, ended_us=edited_us), replace(second, work=work)]

    @property
    def _keys(self) -> str:
        opens, closes = (f"{minute // 60:02}:{minute % 60:02}" for minute in self.hours)
        days = f"days: [{NAMES[self.midnight.weekday()]}]"
        begin, length = self.on_the_wall(self.agreed[0]).isoformat(), self.agreed[1]
        return (
            f"  window: {{type: calendar, period: month, tz: {self.zone}}}\n"
            f'  service_hours: {{calendar: business, {days}, from: "{opens}", to: "{closes}"}}\n'
            "  maintenance:\n"
            f'    windows: [{{start: "{begin}", duration: {length}m, reason: disks, author: ann}}]\n'
        )

    def _work(self, now_us: int) -> tuple[AnnouncedWork, ...]:
        applied_us, until_us, ended_us = map(self.at_us, self.work)
        if now_us < applied_us:
            return ()
        begin = datetime.fromtimestamp(applied_us / 1e6, UTC).replace(tzinfo=None)
        spec = {
            "scope": {"agreements": ["gold"]},
            "start": begin.isoformat(),
            "duration": f"{(until_us - applied_us) // MINUTE_US}m",
            "reason": "fans",
        }
        document = MaintenanceDocument.from_json(
            {
                "apiVersion": "storage-sla/v1",
                "kind": "Maintenance",
                "metadata": {"name": "now"},
                "spec": spec,
            }
        )
        return (AnnouncedWork(document, 1, applied_us, ended_us if ended_us <= now_us else None),)

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """(version, first minute, minutes) of every slice: of the version of its start, no time twice."""
        start = -self._past(0, 0) % self.lengths[0]
        reaches = self.edited
        while start < self.edited:
            reaches = start + self.lengths[0]
            if reaches <= SLOTS:
                yield 1, start, self.lengths[0]
            start = reaches
        start = max(reaches, self.edited)
        start += -self._past(1, start) % self.lengths[1]
        while start + self.lengths[1] <= SLOTS:
            yield 2, start, self.lengths[1]
            start += self.lengths[1]

    def _past(self, version: int, minute: int) -> int:
        """Minutes since a slice of this version would have begun; slices are counted from 1970 on, in UTC."""
        return (self.began_us // MINUTE_US + minute) % self.lengths[version]

    def excluded(self, start: int, length: int) -> bool:
        clock = self.clock
        of_day = (*self.hours, self.agreed[0])
        opens, closes, begins = (clock.first(self.on_the_wall(each)) for each in of_day)
        applied, until, ended = self.work
        inside = range(start, start + length)
        is_agreed = any(begins <= at < begins + self.agreed[1] for at in inside)
        is_begun = applied <= start and any(applied <= at < min(until, ended) for at in inside)
        return not opens <= start < closes or is_agreed or is_begun


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    zone, day = draw(st.sampled_from(CHANGES))
    applied = draw(st.integers(0, SLOTS - 60))
    until = applied + draw(st.integers(1, 120))
    return Rules(
        zone,
        day,
        (draw(st.integers(0, 240)), draw(st.integers(300, 600))),
        (draw(st.integers(0, SLOTS - 60)), draw(st.integers(1, 60))),
        (applied, until, draw(st.integers(applied + 1, until + 30))),
        draw(st.integers(1, SLOTS - 1)),
        (draw(st.sampled_from([5, 15, 20])), draw(st.sampled_from([5, 15, 20]))),
    )


@dataclass(frozen=True)
class Minute:
    """What one gateway counts in a minute: I/Os of its one stream, beyond 12 ms and beyond 20 ms."""

    gateway: str
    number: int
    reads: int
    over_12: int
    over_20: int
    stalled: bool = False
    gap_cuts: int = 0

    def feed(self, store: FakeStore, slot_us: int) -> None:
        stream = 1 if self.gateway == GATEWAY else 2
        more = {"stalled_ms": 9_000, "oldest_ms": 9_000} if self.stalled else {}
        store.add_slot(
            slot_us, self.reads, self.over_12, stream, self.gateway, gap_cuts=self.gap_cuts, **more
        )
        if self.reads:
            (entry,) = [row for row in store.missed[-1:] if row["threshold_us"] == 12_000]
            store.missed.append({**entry, "threshold_us": 20_000, "missed": self.over_20})


@st.composite
def minutes(draw: st.DrawFn) -> list[Minute]:
    """Every minute of both gateways, but for some gaps, of which some are ours."""
    found = []
    for gateway in (GATEWAY, OTHER):
        gaps = {
            number
            for _ in range(draw(st.integers(0, 3)))
            for start in [draw(st.integers(0, SLOTS - 40))]
            for number in range(start, start + draw(st.integers(1, 40)))
        }
        slow = {draw(st.integers(0, SLOTS // 15 - 1)): draw(st.sampled_from([7, 12, 60])) for _ in range(8)}
        hung = {draw(st.integers(0, SLOTS - 1)) for _ in range(draw(st.integers(0, 2)))}
        idle = {draw(st.integers(0, SLOTS // 15 - 1)) for _ in range(draw(st.integers(0, 6)))}
        was_gap = False
        for number in range(SLOTS):
            if number in gaps:
                was_gap = True
                continue
            over = slow.get(number // 15, 0)
            reads = 0 if number // 15 in idle else 100
            lost = draw(st.integers(0, 1)) if was_gap else 0
            was_gap = False
            found.append(
                Minute(gateway, number, reads, min(over, reads), min(over // 2, reads), number in hung, lost)
            )
    return found


def reference(rules: Rules, known: list[Minute]) -> dict[int, Judged]:
    """Start of each slice to (state, version, ours), from all that came in the end."""
    found = {}
    for version, start, length in rules.slices():
        end = start + length
        inside = [each for each in known if start <= each.number < end]
        counts = Counter(each.gateway for each in inside)
        thin = [name for name in (GATEWAY, OTHER) if counts[name] < 0.9 * length]
        n = sum(each.reads for each in inside)
        missed = sum(each.over_12 if version == 1 else each.over_20 for each in inside)
        ours = False
        if rules.excluded(start, length):
            state = "excluded"
        elif thin:
            state = "no_data"
            for name in thin:
                later = [each for each in known if each.gateway == name and each.number >= start]
                until = next((each.number for each in later if each.number >= end), SLOTS)
                ours |= any(each.gap_cuts for each in later if each.number <= until)
        elif any(each.stalled for each in inside):
            state = "bad"
        elif n < 10:
            state = "not_applicable"
        else:
            state = "bad" if missed * 20 > n else "good"
        found[rules.at_us(start)] = (state, version, ours)
    return found


def newest(store: FakeStore) -> dict[int, Judged]:
    """Start of each slice to what its newest revision says."""
    rows = store.slices("gold", "latency", 0, 1 << 62)
    return {row["start_us"]: (row["state"], row["version"], row["ours"]) for row in rows}


@settings(max_examples=25, deadline=None)
@given(
    rules=rules(),
    known=minutes(),
    delays=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=4, max_size=20),
    restarts=st.sets(st.integers(1, 19), max_size=3),
)
def test_what_is_stored_in_the_end_agrees_with_the_reference(
    rules: Rules, known: list[Minute], delays: list[tuple[int, int]], restarts: set[int]
) -> None:
    store = FakeStore()
    for stream, gateway in ((1, GATEWAY), (2, OTHER)):
        store.add_stream(stream, gateway=gateway)
        store.add_slot(rules.at_us(-1), stream_id=stream, gateway=gateway)
    judge, in_use = Judge(store, judge_late_s=30), rules.versions(rules.began_us)
    judge.set_agreements(in_use, rules.began_us)
    waiting = list(known)
    steps = [*enumerate(delays, 1), (len(delays) + 1, (0, 0))]
    for step, delay in steps:
        # An agent sends its minutes in order; how far behind it is differs from pass to pass.
        now_us = rules.at_us(SLOTS * step // len(steps) + 1)
        behind = dict(zip((GATEWAY, OTHER), delay, strict=True))
        limit_us = {name: now_us - (1 + late) * MINUTE_US for name, late in behind.items()}
        is_sent = [rules.at_us(minute.number) <= limit_us[minute.gateway] for minute in waiting]
        for minute, sent in zip(waiting, is_sent, strict=True):
            if sent:
                minute.feed(store, rules.at_us(minute.number))
        waiting = [minute for minute, sent in zip(waiting, is_sent, strict=True) if not sent]
        if step in restarts:
            judge, in_use = Judge(store, judge_late_s=30), []
        if in_use != (versions := rules.versions(now_us)):
            in_use = versions
            judge.set_agreements(in_use, now_us)
        for second_of_pass in (0, 15, 45):
            found = judge.run(now_us + second_of_pass * 1_000_000)
            store.keep(found.rows)
    assert not waiting
    expected = reference(rules, known)
    assert newest(store) == expected
    if rules.lengths[0] == rules.lengths[1]:  # else they are sums of time
        counts = judge.run(now_us + 60_000_000).standings["gold", "latency"].counts
        states = Counter(state for state, _, _ in expected.values())
        assert counts.states() == {name: states[name] for name in counts.states()}
        assert counts.no_data_ours == sum(ours for _, _, ours in expected.values())
    revisions = Counter((row["start_us"], row["revision"]) for row in store.tables["slices"])
    assert set(revisions.values()) == {1}, "each revision once"
