"""Random histories of a stream against a model that goes from moment to moment; and the rules one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE, KIND_ZEROING
from gateway_agent.nbd.stalls import ATTEMPT_NS, LEAST_STALL_MS
from pmdaemon.wire.cut import COL, FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING
from tests.support.streams import IO_OF, MS, History

LEAST_NS = LEAST_STALL_MS * MS


class Model:
    """The stall of one kind: time goes on from event to event, and is added up while something waits."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.waiting = set()
        self.refused_until_ns = None
        self.at_ns = self.wait_ns = self.former_ns = self.longest_ns = 0
        self.has_hung = False

    def pass_until(self, to_ns):
        until_ns = self.refused_until_ns
        if until_ns is not None and until_ns < to_ns:
            self._go(until_ns)
            self.refused_until_ns = None
            self._close()
        self._go(to_ns)

    def _go(self, to_ns):
        if self.waiting or self.refused_until_ns is not None:
            self.wait_ns += to_ns - self.at_ns
            self.longest_ns = max(
                self.longest_ns, self.wait_ns + (self.former_ns if self.wait_ns >= LEAST_NS else 0)
            )
        self.at_ns = to_ns

    def _close(self):
        if not self.waiting and self.refused_until_ns is None:
            self.former_ns, self.wait_ns = self.former_ns + self.wait_ns, 0

    def arrive(self, number, request):
        if request["kind"] in self.kinds:
            self.waiting.add(number)

    def complete(self, number, request):
        if request["kind"] not in (KIND_READ, KIND_WRITE):
            return
        if request["kind"] in self.kinds:
            self.waiting.remove(number)
            self.wait_ns = self.former_ns = 0
            self.refused_until_ns, self.has_hung = None, False
        else:
            self.found()

    def found(self):
        self.refused_until_ns = None
        self._close()
        if not self.waiting and not self.has_hung:
            self.former_ns = 0

    def left(self, numbers):
        if not self.waiting & numbers:
            return
        self.waiting -= numbers
        self.has_hung = True
        self.longest_ns = max(self.longest_ns, self.former_ns + self.wait_ns)
        self._close()

    def refuse(self, now_ns):
        self.refused_until_ns = now_ns + ATTEMPT_NS


def stalls_of(history, io):
    """The longest stall of an io kind in each cut, ns."""
    model, found = Model(IO_OF[io]), []
    for now_ns, what, about in history.events:
        model.pass_until(now_ns)
        if what == "arrive":
            model.arrive(about, history.requests[about])
        elif what in ("done", "failed"):
            model.complete(about, history.requests[about])
        elif what == "left":
            model.left({*about.pending, *about.held})
        elif what == "refuse":
            model.refuse(now_ns)
        elif what == "found":
            model.found()
        elif what == "cut":
            found.append(model.longest_ns)
            model.longest_ns = 0
    return found


STEPS = [
    *[("arrive", kind, 0) for kind in (KIND_READ, KIND_READ, KIND_WRITE, KIND_FLUSH)],
    *[("arrive", kind, 1) for kind in (KIND_READ, KIND_WRITE)],
    *[("complete", number, how) for number, how in ((0, "done"), (1, "done"), (0, "failed"))],
    *[("pass", ms, None) for ms in (0.5, 5, 700, 1500, 20_000, 40_000)],
    *[(what, None, None) for what in ("cut", "cut", "refuse", "refuse", "found", "fold")],
    *[("leave", session, None) for session in (0, 0, 1)],
]
steps = st.lists(st.sampled_from(STEPS), min_size=10, max_size=80)


def play(happened):
    """With 10 ns between two steps, so that no two happen at one instant."""
    history = History()
    history.play(happened, 10)
    return history


def oldest_ns(history, io, at_ns):
    ages = [
        at_ns - r["arrived"]
        for r in history.requests
        if r["kind"] in IO_OF[io] and r["arrived"] <= at_ns and (r["ended"] is None or r["ended"] > at_ns)
    ]
    return max(ages, default=None)


@settings(deadline=None, max_examples=300)
@given(happened=steps)
def test_stalls_and_ages_by_kind_equal_those_found_moment_by_moment(happened):
    history = play(happened)
    stalls = {io: stalls_of(history, io) for io in IO_OF}
    for cut, (end_ns, entries) in enumerate(zip(history.ends, history.cuts, strict=True)):
        found = said(entries)
        ages = {io: oldest_ns(history, io, end_ns) for io in IO_OF}
        is_due = {io: ages[io] is not None or stalls[io][cut] >= LEAST_NS for io in IO_OF}
        expected = {}
        for io in IO_OF:
            figures = (ages[io] or 0) // MS, stalls[io][cut] // MS
            if (is_due[io] or is_due[IO_ANY]) and any(figures):
                expected[io] = figures
        assert found == ({} if set(expected) == {IO_ANY} else expected)


def said(entries):
    """Io kind to (age, stall), ms; but for the entry that says that nothing waits."""
    return {
        io - OUTSTANDING: (age, stall) for io, _, age, stall in entries if io >= OUTSTANDING and age + stall
    }


def stalls(history):
    """The same of the next cut."""
    return said(history.cut())


@pytest.mark.parametrize("kind", [KIND_FLUSH, KIND_ZEROING])
def test_flush_and_trim_neither_begin_nor_end_a_stall(kind):
    history = History()
    history.arrive(kind)
    history.pass_ms(8000)
    taken = history.stream.take(history.now_ns)
    nothing_waits = (OUTSTANDING + IO_READ, 0, 0, 0)
    assert taken.missed == [nothing_waits], "a trim of 8 s is no hang of reads and writes"
    history.complete(0)
    history.arrive(KIND_READ)
    history.pass_ms(3000)
    history.complete(history.arrive(kind))
    history.pass_ms(3000)
    assert stalls(history) == {IO_ANY: (6000, 6000), IO_READ: (6000, 6000)}


def test_reads_and_writes_stall_apart():
    history = History()
    write = history.arrive(KIND_WRITE)
    for _ in range(4):
        history.pass_ms(2000)
        history.complete(history.arrive(KIND_READ))
    history.arrive(KIND_READ)
    history.pass_ms(500)
    assert stalls(history) == {IO_ANY: (8500, 2000), IO_READ: (500, 500), IO_WRITE: (8500, 8500)}
    history.complete(write)
    assert stalls(history)[IO_WRITE] == (0, 8500)


def test_any_never_comes_alone():
    history = History()
    history.arrive(KIND_READ)
    history.pass_ms(0.6)
    history.arrive(KIND_WRITE, 1)
    history.leave(0)
    history.pass_ms(0.6)
    assert stalls(history) == {}
    history.pass_ms(600)
    history.arrive(KIND_READ)
    history.leave(1)
    history.pass_ms(600)
    history.leave(0)
    assert stalls(history) == {IO_ANY: (0, 1201), IO_READ: (0, 600), IO_WRITE: (0, 600)}


def test_clients_that_give_up_before_the_outage_do_not_hide_it():
    history, found = History(sessions=1), []
    for _ in range(4):
        history.arrive()
        history.pass_ms(4000)
        history.leave(0)
        history.pass_ms(1000)
        found.append(stalls(history)[IO_READ])
    assert found == [(0, 4000), (0, 8000), (0, 12_000), (0, 16_000)]
    history.complete(history.arrive())
    history.arrive()
    history.pass_ms(4000)
    history.leave(0)
    assert stalls(history)[IO_READ] == (0, 4000), "a completion ends it"


def test_a_client_that_gives_up_after_a_stall_leaves_it_in_the_cut():
    history = History()
    history.arrive()
    history.pass_ms(30_000)
    history.leave(0)
    assert not history.stream.is_unused, "the stall is in no cut yet"
    history.pass_ms(500)
    assert stalls(history) == {IO_ANY: (0, 30_000), IO_READ: (0, 30_000)}
    history.stream.sessions.clear()
    assert history.stream.is_unused


def test_a_client_that_comes_an_hour_later_and_is_served_at_once_is_no_stall():
    history = History(sessions=1)
    history.arrive()
    history.pass_ms(30_000)
    history.leave(0)
    history.cut()
    history.pass_ms(3_600_000)
    number = history.arrive()
    history.pass_ms(2)
    assert stalls(history) == {IO_ANY: (2, 2), IO_READ: (2, 2)}
    history.complete(number)
    assert stalls(history) == {}


def test_a_client_that_gives_up_beside_one_that_waits_takes_nothing_with_it():
    history = History()
    history.arrive(session=0)
    history.pass_ms(3000)
    history.arrive(session=1)
    history.pass_ms(1500)
    history.leave(0)
    history.pass_ms(1500)
    assert stalls(history)[IO_READ] == (3000, 6000)


def test_refused_clients_are_a_stall_of_all_kinds_until_one_is_let_in():
    history, found = History(sessions=0), []
    for _ in range(4):
        history.refuse()
        history.pass_ms(5000)
        found.append(history.cut())
    assert found[0][0] == (FAILED, 0, 1, 0)
    said = [{io - OUTSTANDING: stall for io, _, _, stall in each if io >= OUTSTANDING} for each in found]
    assert said == [dict.fromkeys(IO_OF, 5000 * number) for number in range(1, 5)]
    history.pass_ms(1000)
    history.let_in()
    assert stalls(history) == dict.fromkeys(IO_OF, (0, 21000))
    history.pass_ms(60_000)
    assert stalls(history) == {}
    history.connect()
    history.arrive()
    history.pass_ms(1200)
    assert stalls(history)[IO_READ] == (1200, 1200), "the refusals have ended when a client was let in"


def test_a_refused_attempt_counts_for_half_a_minute_and_idle_time_between_attempts_does_not():
    history = History(sessions=0)
    history.refuse()
    history.pass_ms(100_000)
    assert stalls(history)[IO_WRITE] == (0, 30_000)
    history.pass_ms(100_000)
    assert stalls(history) == {}
    history.refuse()
    history.pass_ms(10_000)
    assert stalls(history)[IO_WRITE] == (0, 40_000)


def test_io_that_completes_ends_the_stall_of_refused_clients():
    history = History(sessions=1)
    number = history.arrive()
    history.refuse()
    history.pass_ms(2000)
    history.complete(number)
    assert stalls(history) == dict.fromkeys(IO_OF, (0, 2000))
    history.pass_ms(2000)
    assert stalls(history) == {}


def test_io_that_hung_before_and_after_refusals_has_hung_all_the_time():
    history = History(sessions=1)
    history.arrive()
    history.pass_ms(5000)
    history.refuse()
    history.pass_ms(50_000)
    history.leave(0)
    assert stalls(history)[IO_READ] == (0, 55_000)


def test_a_read_that_completes_ends_the_refusals_for_writes_though_both_are_counted_at_once():
    history = History(sessions=1)
    history.refuse()
    history.pass_ms(2000)
    history.complete(history.arrive(KIND_READ))
    history.pass_ms(5000)
    write = history.arrive(KIND_WRITE)
    history.pass_ms(1000)
    history.complete(write)
    assert stalls(history) == dict.fromkeys(IO_OF, (0, 2000))


def test_storage_that_lets_clients_in_and_then_hangs_is_a_stall_all_the_same():
    history = History(sessions=1)
    for _ in range(3):
        history.let_in()
        history.arrive()
        history.pass_ms(2000)
        history.leave(0)
        history.refuse()
        history.pass_ms(1000)
    assert stalls(history)[IO_READ] == (0, 9000)


def test_a_client_that_gives_up_while_its_storage_is_asked_for_leaves_that_time():
    history = History(sessions=0)
    asked_ns = history.now_ns
    history.pass_ms(2000)
    history.stream.connection_given_up(asked_ns, history.now_ns)
    history.pass_ms(2000)
    assert stalls(history) == dict.fromkeys(IO_OF, (0, 2000))
    assert stalls(history) == {}


def test_a_refused_connection_is_a_failure_of_the_storage():
    history = History(sessions=0)
    history.refuse()
    assert not history.stream.is_unused
    taken = history.stream.take(history.now_ns)
    assert (taken.row[COL["others"]], taken.row[COL["errors"]]) == (1, 1)
    assert taken.missed == [(FAILED, 0, 1, 0)]
    assert history.stream.is_unused
