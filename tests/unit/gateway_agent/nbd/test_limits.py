"""Random histories of one stream against a model that looks at every I/O; and the rules one by one."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE
from pmdaemon.wire.cut import COL, FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE
from tests.support.streams import IO_OF, MS, History


def beyond(history, limit, request):
    """Whether a request took longer than a limit, at its own end or a cut's, while it was in force."""
    io, threshold_us = limit
    start_ns = 0
    for end_ns, limits in zip(history.ends, history.in_force, strict=True):
        if limit in limits and request["kind"] in IO_OF[io] and request["arrived"] < end_ns:
            seen_ns = end_ns if request["ended"] is None else min(end_ns, request["ended"])
            has_ended_before = request["ended"] is not None and request["ended"] <= start_ns
            if not has_ended_before and history.age_ns(request, seen_ns) > threshold_us * 1000:
                return True
        start_ns = end_ns
    return False


LIMITS = [(io, ms * 1000) for io in (IO_ANY, IO_READ, IO_WRITE) for ms in (2, 7, 20)]
arrivals = st.tuples(
    st.just("arrive"), st.sampled_from([KIND_READ, KIND_WRITE, KIND_FLUSH]), st.integers(0, 1)
)
steps = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("complete"), st.integers(0, 50), st.sampled_from(["done", "done", "failed"])),
        st.tuples(st.just("pass"), st.sampled_from([0, 0.5, 1, 2, 5, 30]), st.none()),
        st.tuples(st.just("cut"), st.none(), st.none()),
        st.tuples(st.just("limits"), st.sets(st.sampled_from(LIMITS), max_size=5), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 1), st.none()),
        st.tuples(st.just("fold"), st.none(), st.none()),
    ),
    max_size=80,
)
PAUSES = [
    *[("arrive", kind, 0) for kind in (KIND_READ, KIND_WRITE)],
    *[("hold", kind, 0) for kind in (KIND_READ, KIND_WRITE)],
    *[("go", number, None) for number in (0, 1)],
    *[("complete", number, how) for number, how in ((0, "done"), (1, "done"), (0, "failed"))],
    *[("take", 0, does_take) for does_take in (False, True, False)],
    *[("pass", ms, None) for ms in (1, 3, 5, 30)],
    *[("cut", None, None)] * 3,
    ("leave", 0, None),
    ("arrive", KIND_READ, 1),
]
pauses = st.lists(st.sampled_from(PAUSES), min_size=10, max_size=100)


def play(happened, tick_ns=0):
    """``tick_ns`` passes with each step, so that no two happen at one instant."""
    history = History(limits=LIMITS[:4])
    history.play(happened, tick_ns)
    return history


@settings(deadline=None, max_examples=200)
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
    assert_each_is_counted_once(play(happened, tick_ns=10))  # no I/O ends at the instant of a cut


@settings(deadline=None, max_examples=200)
@given(happened=pauses)
def test_each_is_counted_once_whatever_its_client_takes_and_the_throttle_holds(happened):
    assert_each_is_counted_once(play(happened, tick_ns=10))


def assert_each_is_counted_once(history):
    sums = history.sums()
    for limit in LIMITS:
        io, threshold_us = limit
        expected = sum(beyond(history, limit, request) for request in history.requests)
        missed = sums[limit][1]
        overdue, settled = sums[OVERDUE + io, threshold_us]
        assert missed + overdue - settled == expected, limit
        assert settled <= missed
    for io, kinds in IO_OF.items():
        left = [r for r in history.requests if r["how"] == "left" and r["kind"] in kinds]
        ages_ns = [history.age_ns(request, request["ended"]) for request in left]
        assert sums[OVERDUE + io, 0] == [sum(age_ns > 0 for age_ns in ages_ns), sum(ages_ns) // MS]


@settings(deadline=None, max_examples=100)
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


ANY_5MS = (IO_ANY, 5000)


def waiting(age_ms, stalled_ms=None):
    """The OUTSTANDING entries of reads alone."""
    stalled_ms = age_ms if stalled_ms is None else stalled_ms
    return [(OUTSTANDING, 0, age_ms, stalled_ms), (OUTSTANDING + IO_READ, 0, age_ms, stalled_ms)]


def test_a_hang_is_overdue_once_grows_older_and_is_settled_when_it_ends():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(1000)
    assert history.cut() == [(OVERDUE, 5000, 1, 0), *waiting(1000)]
    history.pass_ms(1000)
    assert history.cut() == waiting(2000)
    history.pass_ms(500)
    history.complete(number)
    history.pass_ms(500)
    assert history.cut() == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 0, 1), *waiting(0, 2500)]
    history.pass_ms(1000)
    assert history.cut() == []


def test_182_seconds_without_a_completion_show_in_every_cut():
    history = History(limits=[ANY_5MS])
    for _ in range(32):
        history.arrive()
    for _ in range(182):
        history.pass_ms(1000)
        history.cut()
    assert [entries[-2:] for entries in history.cuts] == [waiting(1000 * second) for second in range(1, 183)]
    assert history.cuts[0][0] == (OVERDUE, 5000, 32, 0)
    assert history.sums()[OVERDUE, 5000] == [32, 0]


def test_an_io_exactly_at_its_limit_is_neither_overdue_nor_missed():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(5)
    assert history.cut() == waiting(5)
    history.complete(number)
    assert history.cut()[0] == (IO_ANY, 5000, 1, 0)


def test_failed_ios_are_counted_by_kind_by_limit_and_with_the_part_that_is_missed_too():
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
    assert taken.missed == [(IO_ANY, 5000, 1, 0), (OVERDUE, 5000, 1, 0), *waiting(4000)]


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
    first, *abandoned = history.cut()
    assert first == (OVERDUE, 5000, 1, 0), "the first had been counted, the last was in time"
    assert abandoned == [(OVERDUE, 0, 3, 17 + 7 + 1), (OVERDUE + IO_READ, 0, 3, 25)]
    assert history.cut() == []


def test_the_ages_of_what_is_abandoned_add_up_whatever_the_cuts():
    history = History(sessions=1)
    for _ in range(4):
        history.arrive(KIND_WRITE)
        history.pass_ms(0.4)
        history.leave(0)
        history.cut()
    assert history.sums()[OVERDUE + IO_WRITE, 0] == history.sums()[OVERDUE, 0] == [4, 1]
    assert history.stream.take(history.now_ns) is None


def test_a_flush_that_a_client_abandons_is_no_io():
    history = History(sessions=1)
    history.arrive(KIND_FLUSH)
    history.pass_ms(4000)
    history.leave(0)
    assert history.cut() == []


def test_an_io_grows_no_older_while_its_client_takes_no_answers():
    history = History(limits=[ANY_5MS])
    number = history.arrive()
    history.pass_ms(3)
    history.take_answers(0, False)
    for _ in range(3):
        history.pass_ms(1000)
        assert history.cut() == waiting(3)
    history.take_answers(0, True)
    history.pass_ms(3)
    history.complete(number)
    taken = history.stream.take(history.now_ns)
    assert taken.missed == [(IO_ANY, 5000, 1, 1)]
    assert taken.row[COL["lat_sum_us"]] == 6000


def test_what_the_throttle_holds_grows_older_whatever_its_client_takes():
    history = History(limits=[ANY_5MS])
    history.cut()
    number = history.arrive(held=True)
    history.pass_ms(4)
    history.cut()
    history.take_answers(0, False)
    history.pass_ms(3)
    history.let_through(number)
    history.pass_ms(1000)
    history.take_answers(0, True)
    assert history.cut()[0] == (OVERDUE, 5000, 1, 0), "it was 7 ms old when it went"
    history.complete(number)
    taken = history.stream.take(history.now_ns)
    assert taken.missed == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 0, 1)]
    assert taken.row[COL["lat_sum_us"]] == 7000


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
    assert history.cut() == waiting(30)
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
