"""Random histories of one stream against a model that looks at every I/O; and the rules one by one."""

from collections import defaultdict

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway_agent.nbd.accounting import FAILED_BIT, REFUSED_BIT, StreamAccount, word_of
from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE, LEAST_STALL_MS
from pmdaemon.wire.cut import COL, FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE

MS = 1_000_000
IO_OF = {IO_ANY: (KIND_READ, KIND_WRITE), IO_READ: (KIND_READ,), IO_WRITE: (KIND_WRITE,)}


class Session:
    """Requests by number, in the order of their arrival."""

    def __init__(self):
        self.pending = {}

    def gauges(self):
        return len(self.pending), 0

    def outstanding(self):
        return list(self.pending.values())


class History:
    """One stream, driven in milliseconds; and what happened to every request, for the model."""

    def __init__(self, sessions=2, limits=()):
        self.stream = StreamAccount(0, "vol-1", "host-a", "disk")
        self.now_ns = 5 * MS
        self.sessions = []
        self.requests = []  # {kind, arrived, ended, how: done, failed, refused, left or None}
        self.cuts = []  # entries of each
        self.ends = []
        self.in_force = []  # limits in each cut
        self.limits = tuple(limits)
        self.set_limits(limits)
        for _ in range(sessions):
            self.connect()

    def connect(self):
        self.sessions.append(Session())
        self.stream.sessions.append(self.sessions[-1])

    def pass_ms(self, ms):
        self.now_ns += round(ms * MS)

    def arrive(self, kind=KIND_READ, session=0):
        self.sessions[session].pending[len(self.requests)] = (self.now_ns, kind)
        self.requests.append({"kind": kind, "arrived": self.now_ns, "ended": None, "how": None})
        self.stream.arrived += kind in (KIND_READ, KIND_WRITE)
        return len(self.requests) - 1

    def complete(self, number, how="done"):
        session = next(each for each in self.sessions if number in each.pending)
        arrived_ns, kind = session.pending.pop(number)
        bits = {"done": 0, "failed": FAILED_BIT, "refused": FAILED_BIT | REFUSED_BIT}[how]
        finished = (0, word_of(kind, 512, False) | bits, arrived_ns, arrived_ns, self.now_ns)
        self.stream.record([finished], self.now_ns)
        self.requests[number] |= {"ended": self.now_ns, "how": how}

    def leave(self, session):
        for number in self.sessions[session].pending:
            self.requests[number] |= {"ended": self.now_ns, "how": "left"}
        self.stream.leave(self.sessions[session], self.now_ns)
        self.sessions[session] = Session()
        self.stream.sessions.append(self.sessions[session])

    def cut(self):
        taken = self.stream.take(self.now_ns)
        self.cuts.append(taken.missed if taken is not None else [])
        self.ends.append(self.now_ns)
        self.in_force.append(self.limits)
        return self.cuts[-1]

    def set_limits(self, limits):
        self.limits = tuple(limits)
        self.stream.set_limits(self.limits)

    def sums(self):
        """By entry kind, io and threshold: the sums of both figures over all cuts."""
        found = defaultdict(lambda: [0, 0])
        for entries in self.cuts:
            for io, threshold_us, counted, missed in entries:
                found[io, threshold_us][0] += counted
                found[io, threshold_us][1] += missed
        return found


def beyond(history, limit, request):
    """Whether a request took longer than a limit, at its own end or a cut's, while it was in force."""
    io, threshold_us = limit
    start_ns = 0
    for end_ns, limits in zip(history.ends, history.in_force, strict=True):
        if limit in limits and request["kind"] in IO_OF[io] and request["arrived"] < end_ns:
            seen_ns = end_ns if request["ended"] is None else min(end_ns, request["ended"])
            if seen_ns > start_ns - 1 and seen_ns - request["arrived"] > threshold_us * 1000:
                has_ended_before = request["ended"] is not None and request["ended"] <= start_ns
                if not has_ended_before:
                    return True
        start_ns = end_ns
    return False


def stalled_ms(history, start_ns, end_ns):
    """The longest stall that ended within a cut or reached its end, request by request."""
    times = sorted(
        {end_ns}
        | {r["arrived"] for r in history.requests if r["arrived"] <= end_ns}
        | {r["ended"] for r in history.requests if r["ended"] is not None and r["ended"] <= end_ns}
    )
    completions = {r["ended"] for r in history.requests if r["how"] in ("done", "failed")}
    longest_ns, since_ns = 0, None
    for at_ns in times:
        if since_ns is not None and at_ns > start_ns:
            longest_ns = max(longest_ns, at_ns - since_ns)
        is_busy = any(
            r["arrived"] <= at_ns and (r["ended"] is None or r["ended"] > at_ns) for r in history.requests
        )
        if at_ns in completions or not is_busy:
            since_ns = None
        if is_busy and since_ns is None:
            since_ns = at_ns
    return longest_ns // MS


LIMITS = [(io, ms * 1000) for io in (IO_ANY, IO_READ, IO_WRITE) for ms in (2, 7, 20)]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from([KIND_READ, KIND_WRITE, KIND_FLUSH]), st.integers(0, 1)),
        st.tuples(st.just("complete"), st.integers(0, 50), st.sampled_from(["done", "done", "failed"])),
        st.tuples(st.just("pass"), st.sampled_from([0, 0.5, 1, 2, 5, 30]), st.none()),
        st.tuples(st.just("cut"), st.none(), st.none()),
        st.tuples(st.just("limits"), st.sets(st.sampled_from(LIMITS), max_size=5), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 1), st.none()),
        st.tuples(st.just("fold"), st.none(), st.none()),
    ),
    max_size=80,
)


def play(happened, tick_ns=0):
    """``tick_ns`` passes with each step, so that no two happen at one instant."""
    history = History(limits=LIMITS[:4])
    for what, one, two in happened:
        history.now_ns += tick_ns
        waiting = [number for session in history.sessions for number in session.pending]
        if what == "arrive":
            history.arrive(one, two)
        elif what == "complete" and waiting:
            history.complete(waiting[one % len(waiting)], two)
        elif what == "pass":
            history.pass_ms(one)
        elif what == "cut":
            history.cut()
        elif what == "limits":
            history.cut()
            history.set_limits(sorted(one))
        elif what == "leave":
            history.leave(one)
        elif what == "fold":
            history.stream.fold()
    history.pass_ms(1)
    history.cut()
    return history


@settings(deadline=None, max_examples=300)
@given(happened=steps)
@example(
    happened=[
        ("arrive", 0, 0),
        ("limits", set(), None),
        ("pass", 5, None),
        ("limits", {(0, 2000)}, None),
        ("complete", 0, "done"),
    ]
)
def test_each_io_beyond_a_limit_is_counted_once_over_any_cuts_sets_and_departures(happened):
    history = play(happened, tick_ns=10)  # no I/O ends at the instant of a cut
    sums = history.sums()
    for limit in LIMITS:
        io, threshold_us = limit
        expected = sum(beyond(history, limit, request) for request in history.requests)
        missed = sums[limit][1]
        overdue, settled = sums[OVERDUE + io, threshold_us]
        assert missed + overdue - settled == expected, limit
        assert settled <= missed


@settings(deadline=None, max_examples=200)
@given(happened=steps)
def test_failures_are_counted_once_with_or_without_a_limit(happened):
    history = play([step for step in happened if step[0] != "limits"])
    sums = history.sums()
    failed = [request for request in history.requests if request["how"] == "failed"]
    for io, kinds in IO_OF.items():
        of_kind = [r for r in failed if r["kind"] in kinds or io == IO_ANY]
        assert sums[FAILED + io, 0] == [len(of_kind), 0]
    for io, threshold_us in LIMITS[:4]:
        compared = [r for r in failed if r["kind"] in IO_OF[io]]
        late = [r for r in compared if r["ended"] - r["arrived"] > threshold_us * 1000]
        assert sums[FAILED + io, threshold_us] == [len(compared), len(late)]


@settings(deadline=None, max_examples=300)
@given(happened=steps)
def test_the_longest_stall_and_the_oldest_age_equal_those_found_moment_by_moment(happened):
    history = play(happened, tick_ns=10)
    start_ns = 0
    for end_ns, entries in zip(history.ends, history.cuts, strict=True):
        pending = [
            r["arrived"]
            for r in history.requests
            if r["arrived"] <= end_ns and (r["ended"] is None or r["ended"] > end_ns)
        ]
        found = [entry for entry in entries if entry[0] == OUTSTANDING]
        if found:
            assert found[0][2] == ((end_ns - min(pending)) // MS if pending else 0)
            assert found[0][3] == stalled_ms(history, start_ns, end_ns)
        else:
            assert not pending or end_ns - min(pending) < MS
            assert stalled_ms(history, start_ns, end_ns) < LEAST_STALL_MS
        start_ns = end_ns


ANY_5MS = (IO_ANY, 5000)


def test_a_hang_is_overdue_once_grows_older_and_is_settled_when_it_ends():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(1000)
    assert history.cut() == [(OVERDUE, 5000, 1, 0), (OUTSTANDING, 0, 1000, 1000)]
    history.pass_ms(1000)
    assert history.cut() == [(OUTSTANDING, 0, 2000, 2000)]
    history.pass_ms(500)
    history.complete(number)
    history.pass_ms(500)
    assert history.cut() == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 0, 1), (OUTSTANDING, 0, 0, 2500)]
    history.pass_ms(1000)
    assert history.cut() == []


def test_182_seconds_without_a_completion_show_in_every_cut():
    history = History(limits=[ANY_5MS])
    for _ in range(32):
        history.arrive()
    for _ in range(182):
        history.pass_ms(1000)
        history.cut()
    assert [entries[-1] for entries in history.cuts] == [
        (OUTSTANDING, 0, 1000 * second, 1000 * second) for second in range(1, 183)
    ]
    assert history.cuts[0][0] == (OVERDUE, 5000, 32, 0)
    assert history.sums()[OVERDUE, 5000] == [32, 0]


def test_an_io_exactly_at_its_limit_is_neither_overdue_nor_missed():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(5)
    assert history.cut() == [(OUTSTANDING, 0, 5, 5)]
    history.complete(number)
    assert history.cut()[0] == (IO_ANY, 5000, 1, 0)


def test_failed_ios_are_told_by_kind_by_limit_and_with_the_part_that_is_missed_too():
    history = History(limits=[ANY_5MS, (IO_WRITE, 1000)])
    quick, slow, flush = history.arrive(), history.arrive(KIND_WRITE), history.arrive(KIND_FLUSH)
    history.complete(quick, "failed")
    history.pass_ms(6)
    history.complete(slow, "failed")
    history.complete(flush, "failed")
    assert history.cut() == [
        (IO_ANY, 5000, 2, 1),
        (IO_WRITE, 1000, 1, 1),
        (FAILED, 5000, 2, 1),
        (FAILED + IO_WRITE, 1000, 1, 1),
        (FAILED, 0, 3, 0),
        (FAILED + IO_READ, 0, 1, 0),
        (FAILED + IO_WRITE, 0, 1, 0),
    ]


def test_what_the_gateway_refuses_is_an_error_of_its_client_and_no_sign_of_life():
    history = History(limits=[ANY_5MS])
    history.arrive()
    history.pass_ms(3000)
    history.complete(history.arrive(), "refused")
    history.pass_ms(1000)
    taken = history.stream.take(history.now_ns)
    assert taken.row[COL["errors"]] == 1
    assert taken.missed == [(IO_ANY, 5000, 1, 0), (OVERDUE, 5000, 1, 0), (OUTSTANDING, 0, 4000, 4000)]


def test_a_client_that_leaves_ends_its_ios_and_nothing_is_counted_twice():
    history = History(limits=[ANY_5MS])
    history.arrive()
    history.pass_ms(10)
    history.cut()
    history.arrive()
    history.pass_ms(6)
    history.arrive()
    history.pass_ms(1)
    history.leave(0)
    history.pass_ms(1000)
    assert history.cut() == [(OVERDUE, 5000, 1, 0)], "the first had been counted, the last was in time"
    assert history.cut() == []


def test_a_client_that_gives_up_after_a_stall_leaves_it_in_the_cut():
    history = History()
    history.arrive()
    history.pass_ms(30_000)
    history.leave(0)
    assert not history.stream.is_unused, "the stall is in no cut yet"
    history.pass_ms(500)
    assert history.cut() == [(OUTSTANDING, 0, 0, 30_000)]
    history.stream.sessions.clear()
    assert history.stream.is_unused


def test_a_refused_connection_is_a_failure_of_the_storage():
    history = History(sessions=0)
    history.stream.connection_failed()
    assert not history.stream.is_unused
    taken = history.stream.take(history.now_ns)
    assert (taken.row[COL["others"]], taken.row[COL["errors"]]) == (1, 1)
    assert taken.missed == [(FAILED, 0, 1, 0)]
    assert history.stream.is_unused


def test_a_limit_that_comes_back_does_not_count_a_hanging_io_again():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(10)
    history.cut()
    history.set_limits([(IO_READ, 1000)])
    history.pass_ms(10)
    history.cut()
    history.set_limits([ANY_5MS])
    history.pass_ms(10)
    assert history.cut() == [(OUTSTANDING, 0, 30, 30)]
    history.complete(number)
    assert history.cut()[:2] == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 0, 1)]


def test_a_new_limit_finds_what_hangs_already():
    history = History()
    for _ in range(3):
        history.arrive()
    history.pass_ms(10)
    history.cut()
    history.set_limits([ANY_5MS])
    history.complete(0)
    assert history.cut()[:2] == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 2, 0)]
