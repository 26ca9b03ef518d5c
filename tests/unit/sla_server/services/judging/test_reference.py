"""The judge against a slow and obvious reference, on made-up histories.

Two versions of an agreement, the second applied in the middle of a slice of a period; business hours and
maintenance in a zone whose summer time begins; two gateways whose data come late, in any order, or never; a
clock of passes that ends long after. What is stored in the end must be what the reference finds by looking
at the finished data once, slice by slice, whatever was judged and revised on the way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from sla_server.agreements.promise import InForce
from sla_server.services.judging.judge import Judge
from tests.support.agreements import in_force, simple
from tests.support.services import GATEWAY, FakeStore

MINUTE_US = 60_000_000
SLICE_US = 15 * MINUTE_US
OTHER = "99999999-2222-3333-4444-555555555555"
ZONE = ZoneInfo("Europe/Berlin")
BEGAN = datetime(2027, 3, 27, 23, 0, tzinfo=UTC)  # midnight in Berlin; at 01:00 UTC summer time begins
BEGAN_US = round(BEGAN.timestamp() * 1e6)
SLOTS = 10 * 60
EDITED_US = BEGAN_US + 307 * MINUTE_US
RULES = """\
  window: {type: calendar, period: month, tz: Europe/Berlin}
  service_hours: {calendar: business, days: [sun], from: "02:30", to: "08:00"}
  maintenance:
    windows: [{start: 2027-03-28T06:50, duration: 20m, reason: work, author: ann}]
"""


def versions() -> tuple[InForce, InForce]:
    """The first until EDITED_US, with a limit of 12 ms; the second of 20 ms."""
    first = in_force(simple(slice_text="15m", value_ms=12, extra=RULES), applied_us=BEGAN_US)
    second = in_force(simple(slice_text="15m", value_ms=20, extra=RULES), version=2, applied_us=EDITED_US)
    return InForce(first.agreement, 1, BEGAN_US, EDITED_US), second


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

    @property
    def slot_us(self) -> int:
        return BEGAN_US + self.number * MINUTE_US

    def feed(self, store: FakeStore) -> None:
        stream = 1 if self.gateway == GATEWAY else 2
        more = {"stalled_ms": 9_000, "oldest_ms": 9_000} if self.stalled else {}
        store.add_slot(
            self.slot_us, self.reads, self.over_12, stream, self.gateway, gap_cuts=self.gap_cuts, **more
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


def reference(known: list[Minute]) -> dict[int, tuple[str, int, bool]]:
    """Start of each slice to (state, version, ours), from all that came in the end."""
    found = {}
    for start_us in range(BEGAN_US, BEGAN_US + SLOTS * MINUTE_US, SLICE_US):
        version = 1 if start_us < EDITED_US else 2
        inside = [each for each in known if start_us <= each.slot_us < start_us + SLICE_US]
        local = datetime.fromtimestamp(start_us / 1e6, ZONE)
        end = datetime.fromtimestamp(start_us / 1e6, UTC) + timedelta(minutes=15)
        in_service = local.weekday() == 6 and (2, 30) <= (local.hour, local.minute) < (8, 0)
        in_work = end > datetime(2027, 3, 28, 4, 50, tzinfo=UTC) and start_us < round(
            datetime(2027, 3, 28, 5, 10, tzinfo=UTC).timestamp() * 1e6
        )
        counts = Counter(each.gateway for each in inside)
        thin = [name for name in (GATEWAY, OTHER) if counts[name] < 0.9 * 15]
        n = sum(each.reads for each in inside)
        missed = sum(each.over_12 if version == 1 else each.over_20 for each in inside)
        ours = False
        if not in_service or in_work:
            state = "excluded"
        elif thin:
            state = "no_data"
            for name in thin:
                later = [each for each in known if each.gateway == name and each.slot_us >= start_us]
                until = next((each.number for each in later if each.slot_us >= start_us + SLICE_US), SLOTS)
                ours |= any(each.gap_cuts for each in later if each.number <= until)
        elif any(each.stalled for each in inside):
            state = "bad"
        elif n < 10:
            state = "not_applicable"
        else:
            state = "bad" if missed * 20 > n else "good"
        found[start_us] = (state, version, ours)
    return found


def newest(store: FakeStore) -> dict[int, tuple[str, int, bool]]:
    """Start of each slice to what its newest revision says."""
    rows = store.slices("gold", "latency", 0, 1 << 62)
    return {row["start_us"]: (row["state"], row["version"], row["ours"]) for row in rows}


@settings(max_examples=20, deadline=None)
@given(
    known=minutes(),
    delays=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=4, max_size=20),
    restarts=st.sets(st.integers(1, 19), max_size=3),
)
def test_what_is_stored_in_the_end_agrees_with_the_reference(
    known: list[Minute], delays: list[tuple[int, int]], restarts: set[int]
) -> None:
    first, second = versions()
    store = FakeStore()
    for stream, gateway in ((1, GATEWAY), (2, OTHER)):
        store.add_stream(stream, gateway=gateway)
        store.add_slot(BEGAN_US - MINUTE_US, stream_id=stream, gateway=gateway)
    judge = Judge(store, judge_late_s=30)
    judge.set_agreements([InForce(first.agreement, 1, BEGAN_US)], BEGAN_US)
    waiting, is_edited = list(known), False
    steps = [*enumerate(delays, 1), (len(delays) + 1, (0, 0))]
    for step, delay in steps:
        # An agent sends its minutes in order; how far behind it is differs from pass to pass.
        now_us = BEGAN_US + SLOTS * MINUTE_US * step // len(steps) + MINUTE_US
        behind = dict(zip((GATEWAY, OTHER), delay, strict=True))
        limit_us = {name: now_us - (1 + late) * MINUTE_US for name, late in behind.items()}
        for minute in waiting:
            if minute.slot_us <= limit_us[minute.gateway]:
                minute.feed(store)
        waiting = [one for one in waiting if one.slot_us > limit_us[one.gateway]]
        if now_us >= EDITED_US and not is_edited:
            judge.set_agreements([first, second], now_us)
            is_edited = True
        if step in restarts:
            judge = Judge(store, judge_late_s=30)
            judge.set_agreements(
                [first, second] if is_edited else [InForce(first.agreement, 1, BEGAN_US)], now_us
            )
        for second_of_pass in (0, 15, 45):
            found = judge.run(now_us + second_of_pass * 1_000_000)
            store.keep(found.rows)
    assert not waiting
    expected = reference(known)
    assert newest(store) == expected
    counts = judge.run(now_us + 60_000_000).standings["gold", "latency"].counts
    states = Counter(state for state, _, _ in expected.values())
    assert counts.states() == {name: states[name] for name in counts.states()}
    assert counts.no_data_ours == sum(ours for _, _, ours in expected.values())
    revisions = Counter((row["start_us"], row["revision"]) for row in store.tables["slices"])
    assert set(revisions.values()) == {1}, "each revision once"
