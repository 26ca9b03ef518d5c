"""What people see live is what slices will say, of every indicator: the same I/O, counted by the agent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.nbd.limits import KIND_READ, KIND_WRITE
from tests.support.live_and_stored import SLICE_S, Both, Script, agreement_text, serve
from tests.support.streams import History

HEALTHY = 25  # I/Os a second
SLICES = 4  # the first of them is healthy


def gives_up(after_s: int, again_s: int, depth: int) -> Script:
    """Storage is dead; a client comes with some I/Os, gives up, pauses, and comes again."""

    def script(streams: Sequence[History], second: int) -> None:
        turn = (second - SLICE_S) % (after_s + again_s)
        for _ in range(depth if turn == 0 else 0):
            streams[0].arrive()
        if turn == after_s:
            streams[0].leave(0)

    return script


def refused(every_s: int) -> Script:
    """Storage is gone, and so are its clients; they try again and again."""

    def script(streams: Sequence[History], second: int) -> None:
        if second == SLICE_S:
            streams[0].stream.leave(streams[0].sessions.pop(), streams[0].now_ns)
        if second % every_s == 0:
            streams[0].refuse()

    return script


def hangs(kinds: Sequence[int], other: int | None) -> Script:
    """I/Os of some kinds hang; those of one kind go on."""

    def script(streams: Sequence[History], second: int) -> None:
        for kind in kinds if second == SLICE_S else ():
            for _ in range(4):
                streams[0].arrive(kind)
        if other is not None:
            serve(streams[0], HEALTHY, kind=other)

    return script


def one_stream_hangs(streams: Sequence[History], second: int) -> None:
    """The other one goes on."""
    for _ in range(32 if second == SLICE_S else 0):
        streams[0].arrive()
    serve(streams[1], 100)


def fails(count: int, every_s: int) -> Script:
    """Some I/Os fail at once, and as many as before complete."""

    def script(streams: Sequence[History], second: int) -> None:
        if second % every_s == 0:
            for _ in range(count):
                streams[0].complete(streams[0].arrive(), "failed")
            serve(streams[0], HEALTHY)

    return script


def comes(every_s: int, ios: int, ms: float) -> Script:
    """A client comes from time to time."""

    def script(streams: Sequence[History], second: int) -> None:
        if second % every_s == 0:
            serve(streams[0], ios, ms)

    return script


def floods(how: str) -> Script:
    """200 new I/Os a second, whether or not those before completed: they fail, or hang."""

    def script(streams: Sequence[History], second: int) -> None:
        for _ in range(200):
            number = streams[0].arrive()
            streams[0].pass_ms(4)
            if how == "failed":
                streams[0].complete(number, how)

    return script


def slow_writes(failed: int, every_s: int) -> Script:
    """Writes are slow, and some of them fail."""

    def script(streams: Sequence[History], second: int) -> None:
        serve(streams[0], HEALTHY, 30.0, KIND_WRITE)
        for _ in range(0 if second % every_s else failed):
            streams[0].complete(streams[0].arrive(KIND_WRITE), "failed")

    return script


def one_hangs(every_s: int, ios: int) -> Script:
    """One read hangs for good; others complete from time to time, and fast."""

    def script(streams: Sequence[History], second: int) -> None:
        if second == SLICE_S:
            streams[0].arrive()
        if second % every_s == 0:
            serve(streams[0], ios)

    return script


def two_hang(streams: Sequence[History], second: int) -> None:
    """Two reads hang for good; of the others most fail."""
    for _ in range(2 if second == SLICE_S else 0):
        streams[0].arrive()
    for _ in range(22):
        streams[0].complete(streams[0].arrive(), "failed")
    serve(streams[0], 7)


def play(script: Script, text: str | None = None) -> Both:
    both = Both(("c", "d") if script is one_stream_hangs else ("c",), text)
    both.run(lambda streams, _second: [serve(each, HEALTHY) for each in streams] and None, SLICE_S)
    both.run(script, (SLICES - 1) * SLICE_S)
    return both


def agree(both: Both) -> None:
    """Two bad slices one behind the other have an open episode; without a bad one there is none."""
    for name, slices in both.slices().items():
        opened, bad = both.is_open[name], [each.state == "bad" for each in slices]
        for number in range(1, len(bad)):
            if bad[number - 1] and bad[number]:
                assert opened[(number + 1) * SLICE_S - 1], (name, slices, both.states[name])
        assert any(bad) or not any(opened), (name, slices, both.states[name])


EVERY = ("latency", "mean_latency", "iops", "throughput", "availability")
EXAMPLES: dict[str, tuple[Script, tuple[str, ...]]] = {
    "clients give up after 4 s and come again": (gives_up(4, 1, 8), EVERY),
    "they give up after 2 s and pause for 8": (gives_up(2, 8, 8), EVERY),
    "refused every 10 s": (refused(10), EVERY),
    "one stream of two hangs": (one_stream_hangs, EVERY),
    "reads hang, writes go on": (hangs((KIND_READ,), KIND_WRITE), ("mean_latency",)),
    "one I/O hangs, others come in bursts": (one_hangs(3, 30), ("mean_latency",)),
    "slow, with pauses": (comes(6, 20, 30.0), ("latency", "mean_latency")),
    "fast, with pauses": (comes(6, 20, 2.0), ()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_broken_is_seen_by_both(name: str) -> None:
    script, broken = EXAMPLES[name]
    both = play(script)
    assert tuple(each for each in EVERY if any(both.is_open[each])) == broken
    agree(both)


READS = ", min_read_fraction: 0.5"
CLAUSES: dict[str, tuple[Script, str, tuple[str, ...]]] = {
    "all fail above the curve": (floods("failed"), agreement_text(up_to_iops="50"), EVERY),
    "all hang above the curve": (floods("hung"), agreement_text(up_to_iops="50"), EVERY),
    "dead above the curve now and then": (gives_up(2, 0, 128), agreement_text(up_to_iops="50"), EVERY),
    "they do not apply, and few fail": (slow_writes(1, 6), agreement_text(clause=READS), ()),
    "they do not apply, and many fail": (slow_writes(5, 1), agreement_text(clause=READS), EVERY),
}


def test_what_failed_and_is_excluded_is_no_reason_to_let_others_hang() -> None:
    both = play(two_hang, agreement_text("exclude"))
    assert both.is_open["iops"][-1]
    agree(both)


@pytest.mark.parametrize("name", CLAUSES)
def test_no_clause_excuses_storage_that_is_dead(name: str) -> None:
    script, text, broken = CLAUSES[name]
    both = play(script, text)
    assert tuple(each for each in EVERY if any(both.is_open[each])) == broken
    for each in broken:
        assert set(both.states[each][-SLICE_S:]) == {"violating"}
    agree(both)


TROUBLES: st.SearchStrategy[Script] = st.one_of(
    st.builds(gives_up, st.integers(1, 6), st.integers(1, 9), st.integers(1, 40)),
    st.builds(refused, st.integers(1, 15)),
    st.builds(
        hangs,
        st.sampled_from([(KIND_READ,), (KIND_WRITE,), (KIND_READ, KIND_WRITE)]),
        st.sampled_from([None, KIND_READ, KIND_WRITE]),
    ),
    st.builds(fails, st.sampled_from([0, 2, 10, 50]), st.integers(1, 8)),
    st.builds(comes, st.integers(1, 9), st.integers(1, 30), st.sampled_from([1.0, 30.0])),
)


@settings(max_examples=8)
@given(TROUBLES, st.sampled_from(["bad", "exclude"]))
def test_live_and_stored_agree(script: Script, errors: str) -> None:
    agree(play(script, agreement_text(errors)))
