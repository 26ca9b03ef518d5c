"""Oracles of what ``test_slices_reference`` has not: steps of a curve, refused clients, planes that stop.

Each is written by the text of SLA-MODEL.md 2 and docs/formats/agreement.md, from I/Os, attempts and stops on
a line of time. What is judged must agree, but where it says ``inexact``: then it may be worse, never better.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from sla_server.agreements.promise import Promise
from sla_server.agreements.slices import HUNG_US
from tests.support.agreements import in_force, simple
from tests.support.io_histories import (
    FOREVER_US,
    SECOND_US,
    SLICE_US,
    Io,
    joined,
    judged,
    longest_stall_us,
    part_of,
    stalls,
    stalls_by_kind,
    stored,
)

SLICES = 5
SECONDS = SLICES * 10
few = settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])


def promise(curve: str = "{up_to_iops: 500, value_ms: 12}", io: str = "any", errors: str = "bad") -> Promise:
    text = (
        simple()
        .replace("{up_to_iops: 500, value_ms: 12.0}", curve)
        .replace("clients:", f"io: {io}, clients:")
    )
    (found,) = in_force(text.replace("    budgeting:", f"    errors: {errors}\n    budgeting:")).all_promises
    return found


def second_of(us: int) -> int:
    """The cut that an instant belongs to: of the second (from, to]."""
    return -(-us // SECOND_US) - 1


# -- Steps of a demand curve

STEPS = ((4, 800_000), (15, 2_000_000), (500, 3_500_000))
CURVE = ", ".join(f"{{up_to_iops: {up_to}, value_ms: {us // 1000}}}" for up_to, us in STEPS)


def step_of(ios: list[Io], index: int, kind: int, counts_errors: bool) -> int:
    """The limit at the rate that was offered; of one kind as its completions share all of them.

    What failed and is excluded is in no figure, so it is no demand.
    """
    inside = [io for io in ios if second_of(io.arrival_us) // 10 == index]
    done = [io for io in ios if io.end_us is not None and second_of(io.end_us) // 10 == index]
    share = sum(io.is_of(kind) for io in done) / max(len(done), 1) if kind else 1.0
    left_out = 0 if counts_errors else sum(io.failed and io.is_of(kind) for io in done)
    demand = len(inside) * share - left_out
    return next((us for up_to, us in STEPS if demand / 10 <= up_to), -1)


def by_steps(ios: list[Io], kind: int, counts_errors: bool) -> list[tuple[int, int, int]]:
    """(limit, n, missed) of slices: an I/O counts once, where it completes or is first beyond the step."""
    limits = [step_of(ios, index, kind, counts_errors) for index in range(SLICES)]
    sums = [[0, 0] for _ in limits]
    for io in ios:
        if not io.is_of(kind):
            continue
        for second in range(second_of(io.arrival_us), SECONDS):
            at_us, limit_us, found = (second + 1) * SECOND_US, limits[second // 10], sums[second // 10]
            is_done = io.end_us is not None and io.end_us <= at_us
            if is_done and (counts_errors or not io.failed):
                found[0] += 1
                found[1] += io.is_beyond(limit_us) or io.failed
            elif not is_done and at_us - io.arrival_us > limit_us >= 0:
                found[0] += 1
                found[1] += 1
                break
            if is_done:
                break
    return [(limit_us, n, missed) for limit_us, (n, missed) in zip(limits, sums, strict=True)]


@st.composite
def demands(draw: st.DrawFn) -> list[Io]:
    """Slices of different rates; some I/Os take as long as the steps, and cross the ends of slices."""
    ios = []
    for index in range(SLICES):
        rate = draw(st.sampled_from([2, 2, 8, 30]))
        ios += [
            Io(us := index * SLICE_US + n * SECOND_US // rate + 401_000, us + 5_100, n % 3 == 0, n % 29 == 7)
            for n in range(rate * 10)
        ]
    for _ in range(draw(st.integers(0, 12))):
        arrival_us = draw(st.integers(0, SECONDS * 20 - 1)) * 50_000 + 400
        latency_us = draw(st.sampled_from([300, 900, 1_200, 2_500, 3_200, 4_500])) * 1000 + 377
        ios.append(Io(arrival_us, arrival_us + latency_us, draw(st.booleans()), draw(st.booleans())))
    return ios


BOTH_BORDERS = [
    *(Io(s * SLICE_US + n * SECOND_US // r + 401_000, s * SLICE_US + n * SECOND_US // r + 406_000)
      for s, r in enumerate((8, 2, 8, 2, 2)) for n in range(r * 10 - 20 * (s < 2))),
    *(Io(s * SLICE_US + 8_500_401 + n * 1000, s * SLICE_US + 11_000_900 + n * 1000)
      for s in range(2) for n in range(20)),
]  # fmt: skip
"""At both ends of slice 1 twenty I/Os are 1.5 s old: in time for one step, too old for the other."""


@pytest.mark.parametrize("errors", ["bad", "exclude"])
@few
@example(io="any", ios=BOTH_BORDERS)
@given(io=st.sampled_from(["any", "read", "write"]), ios=demands())
def test_steps_of_a_curve(errors: str, io: str, ios: list[Io]) -> None:
    stalled = stalls_by_kind(ios)
    spans = [(second * SECOND_US, (second + 1) * SECOND_US) for second in range(SECONDS)]
    limits = [us for _, us in STEPS]
    made = [joined(seq, span, [part_of(ios, stalled, span, limits)]) for seq, span in enumerate(spans, 1)]
    found, steps_us = judged(stored(made), promise(CURVE, io, errors), SLICES)
    expected = by_steps(ios, cuts.IO_KINDS[io], errors == "bad")
    assert steps_us.tolist() == [limit_us for limit_us, _, _ in expected]
    for each, (limit_us, n, missed) in zip(found, expected, strict=True):
        if limit_us < 0:
            continue
        if not each.inexact:
            assert (each.n, each.missed) == (n, missed)
        elif n >= 10 and missed * 20 > n:
            assert each.state == "bad", "the worst of what is possible"


# -- Clients that are refused, of agents that count them and do not report the stall


def by_attempts(ios: list[Io], attempts: set[int]) -> list[str]:
    """State of each slice: refused clients are a hang, from the first attempt to a completion.

    Attempts less than a minute apart belong together; the last one counts to the end of its slice.
    """
    done, stalled = {second_of(io.end_us or 0) for io in ios}, stalls(ios)
    since = newest = -1000
    longest: dict[int, int] = defaultdict(int)
    for second in range(SECONDS):
        if second in done:
            since = newest = -1000
        elif second in attempts:
            since = second if second - newest > 60 else since
            newest = second
        if since >= 0 and second // 10 == newest // 10:
            longest[second // 10] = max(longest[second // 10], (second + 1 - since) * SECOND_US)
    states = []
    for index in range(SLICES):
        inside = [io for io in ios if second_of(io.end_us or 0) // 10 == index]
        ends = range(index * SLICE_US + SECOND_US, (index + 1) * SLICE_US + 1, SECOND_US)
        busy = [at for at in ends if any(io.is_outstanding(at) for io in ios)]
        hung_us = max((longest_stall_us(stalled, at - SECOND_US, at) for at in busy), default=0)
        is_refused = not inside and any(second // 10 == index for second in attempts)
        if max(hung_us, longest[index]) >= HUNG_US or is_refused:
            states.append("bad")
        elif len(inside) < 10:
            states.append("not_applicable")
        else:
            states.append("good")
    return states


@few
@given(
    bursts=st.lists(st.tuples(st.integers(0, SECONDS - 3), st.integers(1, 20)), max_size=4),
    attempts=st.sets(st.integers(0, SECONDS - 1), max_size=8),
)
def test_refused_clients(bursts: list[tuple[int, int]], attempts: set[int]) -> None:
    ios = [
        Io(second * SECOND_US + n * 40_000 + 400, second * SECOND_US + n * 40_000 + 1_500)
        for second, count in bursts
        for n in range(count)
    ]
    stalled, made = stalls_by_kind(ios), []
    attempts -= {second_of(io.end_us or 0) for io in ios}  # with I/O in the same cut the storage is there
    for second in range(SECONDS):
        span = second * SECOND_US, (second + 1) * SECOND_US
        part = part_of(ios, stalled, span, (12_000,), by_kind=False, refused=int(second in attempts))
        made.append(joined(second + 1, span, [part]))
    found, _ = judged(stored(made), promise(), SLICES)
    assert [each.state for each in found] == by_attempts(ios, attempts)


# -- Two planes, one of which is stopped for a while


@dataclass(frozen=True)
class Stop:
    """A plane runs no instruction from the first second to the last; its cut then comes late."""

    first: int
    last: int

    @property
    def span(self) -> tuple[int, int]:
        return self.first * SECOND_US, self.last * SECOND_US

    def counted_in(self, second: int) -> int:
        """The second in whose slot the I/O of another one counts.

        The late cut belongs to the slot of its beginning, like any other, if it reaches no more than a tenth
        of a slot beyond that (``spread``).
        """
        beyond = self.last + 1 - (self.first // 10 + 1) * 10
        is_late = self.first < self.last and self.first <= second <= self.last
        return self.first if is_late and beyond <= 1 else second

    def delayed(self, io: Io) -> Io:
        """What comes, or would complete, while the plane is stopped is heard of when it goes on."""
        from_us, to_us = self.span
        times = [io.arrival_us, io.end_us or FOREVER_US]
        moved = [to_us + 100 + (us - from_us) // 1000 if from_us < us <= to_us else us for us in times]
        return replace(io, arrival_us=moved[0], end_us=max(moved[1], moved[0] + 90))


RUNS = Stop(0, 0)


def cuts_of(mine: list[Io], others: list[Io], stop: Stop, says: bool) -> list[cuts.Cut]:
    """Of a gateway with planes a and b: one a second, of b alone while a is stopped; ``says``: key ``un``."""
    made: list[cuts.Cut] = []
    marks, stalled, other_stalled = {"a": 0, "b": 0}, stalls_by_kind(mine), stalls_by_kind(others)
    for second in range(SECONDS):
        span = second * SECOND_US, (second + 1) * SECOND_US
        marks["b"] += 1
        part = part_of(others, other_stalled, span, (12_000,)) if others else None
        if stop.first <= second <= stop.last and stop.first < stop.last:
            made.append(joined(len(made) + 1, span, [part] if part else [], dp=dict(marks), of={"b": b"\1"}))
            if second < stop.last:
                continue
            marks["a"] += 1
            late, more = (stop.first * SECOND_US, span[1]), {}
            if says and stop.last - stop.first >= 5:
                more = {"un": {"a": (stop.last - stop.first) * SECOND_US}}
            one = [part_of(mine, stalled, late, (12_000,))] if mine else []
            made.append(joined(len(made) + 1, late, one, dp=dict(marks), of={"a": b"\1"}, **more))
            continue
        marks["a"] += 1
        parts = [part_of(mine, stalled, span, (12_000,))] if mine else []
        rows = {"a": bytes([bool(mine)]), "b": bytes([2 * bool(part) if mine else bool(part)])}
        made.append(joined(len(made) + 1, span, [*parts, *([part] if part else [])], dp=dict(marks), of=rows))
    return made


@dataclass(frozen=True)
class Load:
    """Quick or slow I/O all the time, or but for some seconds."""

    every_ms: int
    latency_ms: int
    quiet: frozenset[int]

    @property
    def ios(self) -> list[Io]:
        starts = range(37_400, SECONDS * SECOND_US - 100_000, self.every_ms * 1000)
        latency_us = self.latency_ms * 1000 + 90
        return [Io(us, us + latency_us) for us in starts if us // SECOND_US not in self.quiet]


loads = st.builds(
    Load,
    st.sampled_from([50, 100, 900]),
    st.sampled_from([1, 13]),
    st.frozensets(st.integers(0, SECONDS - 1), max_size=20),
)


def plain_states(ios: list[Io], stop: Stop = RUNS) -> list[str]:
    """Of I/O that is quick or slow, and never hangs; ``stop``: of its plane."""
    found = []
    for index in range(SLICES):
        inside = [io for io in ios if stop.counted_in(second_of(io.end_us or 0)) // 10 == index]
        slow = sum(io.is_beyond(12_000) for io in inside)
        found.append("not_applicable" if len(inside) < 10 else "bad" if slow * 20 > len(inside) else "good")
    return found


@pytest.mark.parametrize("says", [False, True], ids=["an agent of before", "an agent that says it"])
@few
@example(load=Load(900, 1, frozenset({27})), beside_it=Load(100, 1, frozenset()), first=17, seconds=3)
@given(load=loads, beside_it=loads, first=st.integers(2, 30), seconds=st.integers(0, 15))
def test_a_plane_that_is_stopped(says: bool, load: Load, beside_it: Load, first: int, seconds: int) -> None:
    stop = Stop(first, first + seconds)
    mine = [stop.delayed(io) for io in load.ios]
    others = [replace(io, stream=2) for io in beside_it.ios]
    rows = stored(cuts_of(mine, others, stop, says))
    beside, _ = judged(rows, promise(), SLICES, streams=(2,))
    # A long cut may be rounded; those of the plane that runs on are what they always are.
    assert [each.state for each in beside] == plain_states(others)
    found, _ = judged(rows, promise(), SLICES)
    for index, (each, state) in enumerate(zip(found, plain_states(mine, stop), strict=True)):
        stopped = [s for s in range(stop.first, stop.last) if s // 10 == index]
        if seconds >= 5 and len(stopped) > 1:
            assert (each.state, each.reason) == ("no_data", "no-samples"), "it served nothing"
        elif not each.inexact and seconds < 4:  # the cut that ends a stop covers a second more
            # Of an agent of before a short stop may look like an absent link: never good without proof.
            assert each.state == state or (not says and each.state == "no_data")


@few
@given(
    latency_ms=st.sampled_from([1, 13]),
    first=st.integers(2, 30),
    seconds=st.integers(0, 18),
    both=st.booleans(),
)
def test_a_link_that_was_away_while_its_planes_served(
    latency_ms: int, first: int, seconds: int, both: bool
) -> None:
    """One long cut of both planes, or of the only one: shared out, and no time is without proof."""
    ios = Load(50, latency_ms, frozenset()).ios
    spans = [(second, second + 1) for second in range(SECONDS) if not first <= second < first + seconds]
    spans = [(first, to) if seconds and start == first + seconds else (start, to) for start, to in spans]
    stalled, made = stalls_by_kind(ios), []
    for seq, (start, to) in enumerate(spans, 1):
        span = start * SECOND_US, to * SECOND_US
        marks = {"a": seq, "b": seq} if both else {"a": seq}
        made.append(joined(seq, span, [part_of(ios, stalled, span, (12_000,))], dp=marks))
    found, _ = judged(stored(made), promise(), SLICES)
    assert [each.state for each in found] == plain_states(ios)
    assert sum(each.n for each in found) == len(ios)


def test_the_oracles_see_what_they_should() -> None:
    assert [limit_us for limit_us, _, _ in by_steps(BOTH_BORDERS, 0, True)][:3] == [
        2_000_000,
        800_000,
        2_000_000,
    ]
    quick = [Io(n * 100_000 + 400, n * 100_000 + 1_400) for n in range(SECONDS * 10)]
    assert by_attempts(quick, set()) == ["good"] * SLICES
    assert by_attempts([], {3, 20}) == ["bad", "not_applicable", "bad", "not_applicable", "not_applicable"]
