"""Judging against a slow and obvious reference: single I/Os on a line of time.

Made-up I/Os become cuts, cuts go through the same window that ingest uses, and what it stores is judged
(``io_histories``). The reference looks at the I/Os alone and never at a cut's counters: when each was first
seen beyond the limit, when it completed, and how long nothing did. Refused clients, stopped planes and steps
of a curve: ``test_slices_oracle``.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pmdaemon.wire import cut as cuts
from sla_server.agreements.slices import HUNG_US, SliceVerdict
from tests.support import io_histories
from tests.support.agreements import in_force, simple
from tests.support.io_histories import (
    SECOND_US,
    SLICE_US,
    Io,
    joined,
    longest_stall_us,
    part_of,
    stalls,
    stalls_by_kind,
    stored,
)

LIMIT_US = 12_000
SLICES = 4


def judged(
    ios: list[Io], promise_keys: str = "", io: str = "any", by_kind: bool = True
) -> list[SliceVerdict]:
    """Each slice's verdict; ``by_kind``: not of an agent of before."""
    text = simple(value_ms=LIMIT_US / 1000).replace("clients:", f"io: {io}, clients:")
    text = text.replace("    budgeting:", f"    {promise_keys}\n    budgeting:") if promise_keys else text
    (promise,) = in_force(text).all_promises
    stalled = stalls_by_kind(ios)
    spans = [(second * SECOND_US, (second + 1) * SECOND_US) for second in range(10 * SLICES)]
    made = [
        joined(seq, span, [part_of(ios, stalled, span, (LIMIT_US,), by_kind=by_kind)])
        for seq, span in enumerate(spans, 1)
    ]
    return io_histories.judged(stored(made), promise, SLICES)[0]


# -- The reference


def reference(ios: list[Io], counts_errors: bool, kind: int = cuts.IO_ANY) -> list[tuple[str, int, int]]:
    """(state, n, missed) of each slice, from the I/Os of the promised kind alone."""
    ios = [io for io in ios if io.is_of(kind)]
    found, stalled = [], stalls(ios)
    for index in range(SLICES):
        from_us, to_us = index * SLICE_US, (index + 1) * SLICE_US
        n = missed = failed = new_overdue = 0
        for io in ios:
            # The end of the cut in which it is first seen beyond the limit, or completes.
            seen_us = None
            if io.is_beyond(LIMIT_US):
                beyond_us = io.arrival_us + LIMIT_US
                seen_us = (beyond_us // SECOND_US + 1) * SECOND_US
            done_us = -(-io.end_us // SECOND_US) * SECOND_US if io.end_us is not None else None
            was_overdue = seen_us is not None and (done_us is None or seen_us < done_us)
            counts_us = seen_us if was_overdue else done_us
            is_done_here = done_us is not None and from_us < done_us <= to_us
            failed += io.failed and is_done_here
            if counts_us is not None and from_us < counts_us <= to_us:
                new_overdue += was_overdue
                if was_overdue or counts_errors or not io.failed:
                    n += 1
                    missed += io.is_beyond(LIMIT_US) or io.failed
            if was_overdue and is_done_here:
                new_overdue -= 1
        missed = max(missed, 0)
        n = max(n, missed)
        # Cuts tell of a stall only while something is outstanding at their end.
        ends = range(from_us + SECOND_US, to_us + 1, SECOND_US)
        busy = [at for at in ends if any(io.is_outstanding(at) for io in ios)]
        stall_us = max((longest_stall_us(stalled, at - SECOND_US, at) for at in busy), default=0)
        oldest_us = max((at - io.arrival_us for at in busy for io in ios if io.is_outstanding(at)), default=0)
        stuck = max(new_overdue, 1) if oldest_us >= HUNG_US else 0
        lost = (failed if counts_errors else 0) + stuck
        if stall_us >= HUNG_US or lost * 20 > max(n, lost):
            state = "bad"
        elif n < 10:
            state = "not_applicable"
        else:
            state = "bad" if missed * 20 > n else "good"
        found.append((state, n, missed))
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Io]:
    """Bursts of quick I/O, and some that are slow, late, stuck, or fail; on a grid of 1 ms, off the cuts."""
    ios = []
    for _ in range(draw(st.integers(0, 4))):
        start_ms, count = draw(st.integers(0, 38_000)), draw(st.integers(1, 40))
        latency_ms = draw(st.sampled_from([1, 5, 11, 13, 40]))
        fails = draw(st.sampled_from([0, 0, 0, 1, 5]))
        for number in range(count):
            arrival_us = (start_ms + number) * 1000 + 400
            ios.append(
                Io(arrival_us, arrival_us + latency_ms * 1000 + 100, number % 2 == 1, number % 7 < fails)
            )
    for _ in range(draw(st.integers(0, 5))):
        arrival_us = draw(st.integers(0, 39_000)) * 1000 + 400
        latency_ms = draw(st.sampled_from([None, 900, 1_500, 4_800, 5_200, 12_000, 31_000]))
        end_us = None if latency_ms is None else arrival_us + latency_ms * 1000 + 100
        ios.append(Io(arrival_us, end_us, draw(st.booleans()), draw(st.booleans())))
    return ios


HUNG = [Io(9_500_400 + n, None) for n in range(32)]
READS_HANG = [
    *(Io(n * 100_000 + 400, n * 100_000 + 1_400, write=True) for n in range(390)),
    *(Io(n * 100_000 + 500, n * 100_000 + 1_500) for n in (*range(110), *range(180, 390))),
    *(Io(11_000_450 + n, 18_000_050 + n) for n in range(3)),
]
"""Writes go on; reads stop for 7 s within the second slice, three of them wait."""
EIO = [Io(100_400 + n * 100_000, 100_500 + n * 100_000, failed=True) for n in range(390)]


@pytest.mark.parametrize("io", ["any", "read", "write"])
@pytest.mark.parametrize("errors", ["bad", "exclude"])
@settings(max_examples=25, deadline=None)
@example(ios=HUNG)
@example(ios=EIO)
@example(ios=READS_HANG)
@given(ios=histories())
def test_judging_agrees_with_the_reference(errors: str, io: str, ios: list[Io]) -> None:
    found = judged(ios, f"errors: {errors}", io)
    expected = reference(ios, errors == "bad", cuts.IO_KINDS[io])
    for each, (state, n, missed) in zip(found, expected, strict=True):
        if not each.inexact:
            assert (each.state, each.n, each.missed) == (state, n, missed)
        else:  # a cut does not tell which of its settled completions failed
            assert errors == "exclude"
            assert each.n >= n
            assert each.missed >= missed


@settings(max_examples=25, deadline=None)
@example(io="read", ios=READS_HANG)
@given(io=st.sampled_from(["any", "read", "write"]), ios=histories())
def test_an_agent_of_before_hides_no_hang(io: str, ios: list[Io]) -> None:
    """It does not tell what waits: if some of the kind was overdue, all of a stall is of it."""
    for each, known in zip(judged(ios, "", io, by_kind=False), judged(ios, "", io), strict=True):
        assert (each.n, each.missed) == (known.n, known.missed)
        if known.state in ("bad", "not_applicable") and known.reason != "hung":
            assert each.state in (known.state, "bad")
        assert each.state == known.state or each.inexact or known.reason == "hung"


@settings(max_examples=60, deadline=None)
@given(ios=histories())
def test_every_io_counts_once_over_all_slices(ios: list[Io]) -> None:
    """Those that complete, or are seen beyond the limit, by the end of the last slice."""
    found = judged(ios)
    last_us = SLICES * SLICE_US
    counted = [io for io in ios if (io.end_us or 1 << 60) <= last_us or io.arrival_us + LIMIT_US < last_us]
    assert sum(each.n for each in found) == len(counted)
    assert sum(each.missed for each in found) == sum(io.is_beyond(LIMIT_US) or io.failed for io in counted)


def test_the_examples_are_what_they_seem() -> None:
    assert [state for state, _, _ in reference(HUNG, True)] == ["bad"] * SLICES
    assert [state for state, _, _ in reference(EIO, True)] == ["bad"] * SLICES
    states = {
        kind: [state for state, _, _ in reference(READS_HANG, True, kind)] for kind in cuts.IO_KINDS.values()
    }
    good = ["good"] * SLICES
    assert states == {cuts.IO_ANY: good, cuts.IO_READ: ["good", "bad", "good", "good"], cuts.IO_WRITE: good}
