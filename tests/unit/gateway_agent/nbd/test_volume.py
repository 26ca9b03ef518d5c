"""A volume under caps over minutes of a fake clock: the rate holds, whatever is outstanding; leases end."""

import random
from collections import deque

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.groups import SERVER
from pmdaemon.errors import BadCaps
from pmdaemon.wire import frame
from pmdaemon.wire.cut import MOST_LATE, joined_late, parse_late, worst_late
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from pmdaemon.wire.rates import COST_BYTES, NO_CAPS, Rates, RateSet, io_cost
from tests.support.nbd import HOLD_NS, MIB, Rig, admit_within
from tests.support.nbd_proxy import Pair, read, write

SECOND = 10**9


class Busy:
    """A connection with ``depth`` requests outstanding: one that is let through is followed by another."""

    client = "host-a"
    is_closed = False

    def __init__(self, rig, depth, size_bytes=4096):
        self.rig, self.size_bytes, self.admitted = rig, size_bytes, 0
        self.queue = deque([rig.clock.monotonic_ns()] * depth)

    def head_arrived_ns(self):
        return self.queue[0] if self.queue else None

    def head_charge(self):
        return self.size_bytes, 1.0 + self.size_bytes / COST_BYTES

    def admit_head(self, now_ns):
        self.queue.popleft()
        self.admitted += 1
        self.queue.append(now_ns)

    def admit_within(self, now_ns, allowance):
        admit_within(self, now_ns, allowance)

    def push(self, now_ns):
        pass

    def unblock(self):
        return False


def run(caps, seconds, *connections):
    """Connections of (depth, bytes a request) under ``caps``; returns the rig and what they did."""
    rig = Rig(caps=caps)
    busy = [Busy(rig, *connection) for connection in connections]
    for each in busy:
        rig.volume.serve(each, rig.clock.monotonic_ns())
    rig.loop.fire(seconds)
    return rig, busy


@pytest.mark.parametrize(
    ("caps", "connections", "units_per_io", "rate_per_s"),
    [
        (Rates(ops_per_s=10), [(128, 4096)], 1, 10),
        (Rates(ops_per_s=50), [(128, 4096)] * 8, 1, 50),
        (Rates(bytes_per_s=0.5e6), [(1, 4 * MIB)], 4 * MIB, 0.5e6),
        (Rates(bytes_per_s=1e6), [(1, 32 * MIB)], 32 * MIB, 1e6),
        (Rates(bytes_per_s=1e6), [(1, 32 * MIB)] * 4, 32 * MIB, 1e6),
        (Rates(bytes_per_s=1e6), [(1, 32 * MIB), (64, 4096)], None, 1e6),
        (Rates(cost_per_s=5), [(1, 32 * MIB)] * 2, 513, 5),
    ],
)
def test_the_rate_holds_at_any_depth(caps, connections, units_per_io, rate_per_s):
    seconds = 600
    _, busy = run(caps, seconds, *connections)
    units = sum(each.admitted * (units_per_io or each.size_bytes) for each in busy)
    largest = units_per_io or 32 * MIB
    assert units <= rate_per_s * (seconds + 0.02) + largest
    assert units >= rate_per_s * seconds - 2 * largest, "a debt is paid, and no more than that"


def test_every_window_of_a_deep_queue_is_within_the_rate():
    rig, (busy,) = run(Rates(ops_per_s=10), 0, (128, 4096))
    for _ in range(60):
        before = busy.admitted
        rig.loop.fire(1.0)
        assert busy.admitted - before <= 11


def test_a_shallow_connection_waits_for_its_turn_and_not_for_the_depth_of_others():
    _, (deep, shallow) = run(Rates(ops_per_s=10), 60, (1024, 4096), (1, 4096))
    assert abs(deep.admitted - shallow.admitted) <= 1


def test_a_debt_is_kept_in_units_when_the_rate_changes_and_forgotten_without_a_rate():
    rig, (busy,) = run(Rates(bytes_per_s=1e6), 1, (2, 32 * MIB))
    assert busy.admitted == 1
    rig.volume.set_caps(Rates(bytes_per_s=32e6), rig.clock.monotonic_ns())
    rig.loop.fire(1.1)
    assert busy.admitted == 2


class Paced(Busy):
    """One request at a time, the next one a while after the one before."""

    def __init__(self, rig, pause_s):
        super().__init__(rig, 1)
        self.pause_ns, self.waits = round(pause_s * SECOND), []

    def admit_head(self, now_ns):
        self.waits.append(now_ns - self.queue.popleft())
        self.admitted += 1
        self.rig.loop.at(self, now_ns + self.pause_ns, self.again)

    def again(self, now_ns):
        self.queue.append(now_ns)
        self.rig.volume.serve(self, now_ns)


def test_a_large_request_does_not_take_the_second_of_a_small_client_of_the_same_volume():
    rig = Rig(caps=Rates(bytes_per_s=32e6))
    small, large = Paced(rig, 0.01), Busy(rig, 2, 32 * MIB)
    rig.volume.serve(small, rig.clock.monotonic_ns())
    rig.loop.fire(1)
    rig.volume.serve(large, rig.clock.monotonic_ns())
    small.waits.clear()
    rig.loop.fire(60)
    assert max(small.waits) <= SECOND // 10
    assert large.admitted * 32 * MIB == pytest.approx(60 * 32e6, rel=0.05), "and the rate is used"


def test_two_that_wait_have_the_same_bytes_whatever_the_size_of_their_requests():
    _, (large, small) = run(Rates(bytes_per_s=10e6), 60, (4, 4 * MIB), (256, 65_536))
    assert large.admitted * 4 * MIB == pytest.approx(small.admitted * 65_536, rel=0.05)


def test_alone_on_its_volume_a_large_request_passes_at_once_and_what_follows_pays_for_it():
    rig, (busy,) = run(Rates(bytes_per_s=32e6), 0, (2, 32 * MIB))
    assert busy.admitted == 1
    rig.loop.fire(1)
    assert busy.admitted == 1
    rig.loop.fire(0.1)
    assert busy.admitted == 2


def test_what_a_large_request_owes_takes_turns_with_a_connection_that_comes_behind_it():
    rig, (large,) = run(Rates(bytes_per_s=1e6), 0, (2, 64 * MIB))
    assert large.admitted == 1
    other = Busy(rig, 8, 65_536)
    rig.volume.serve(other, rig.clock.monotonic_ns())
    rig.loop.fire(60)
    assert other.admitted * 65_536 == pytest.approx(60e6 / 2, rel=0.05), (
        "its fair share, from the first second"
    )
    rig.loop.fire(70)
    assert large.admitted == 1, "what follows waits until all is paid: 64 MiB by half of the rate"
    rig.loop.fire(8)
    assert large.admitted == 1
    assert other.admitted * 65_536 <= 138e6 - 64 * MIB + MIB
    assert rig.volume._debt is None, "its next one is paid for before it passes, as the other is there"


@pytest.mark.parametrize("size_bytes", [32 * MIB, 4096 * MIB])
def test_a_small_client_that_comes_behind_a_large_request_is_not_held_up(size_bytes):
    rig, (large,) = run(Rates(bytes_per_s=1e6, cost_per_s=20), 1, (2, size_bytes))
    small = Paced(rig, 0.01)
    rig.volume.serve(small, rig.clock.monotonic_ns())
    rig.loop.fire(30)
    assert large.admitted == 1
    assert max(small.waits) <= 0.12 * SECOND
    assert small.admitted > 200


def test_what_is_owed_stays_when_the_connection_ends():
    rig, (large,) = run(Rates(bytes_per_s=1e6), 0, (1, 64 * MIB))
    rig.volume.forget(large)
    other = Busy(rig, 8, 65_536)
    rig.volume.serve(other, rig.clock.monotonic_ns())
    rig.loop.fire(120)
    assert other.admitted * 65_536 == pytest.approx(120e6 / 2, rel=0.05)
    rig.loop.fire(120)
    assert other.admitted * 65_536 == pytest.approx(240e6 - 64 * MIB, rel=0.05)


def test_alone_the_rate_holds_over_large_requests_and_connections_that_end_behind_them():
    rig, admitted = Rig(caps=Rates(bytes_per_s=1e6)), 0
    for _ in range(60):
        large = Busy(rig, 1, 32 * MIB)
        rig.volume.serve(large, rig.clock.monotonic_ns())
        rig.loop.fire(10)
        admitted += large.admitted
        rig.volume.forget(large)
    assert admitted * 32 * MIB <= 600e6 + 32 * MIB


def test_without_rates_nothing_is_owed():
    rig, (large,) = run(Rates(bytes_per_s=1e3), 1, (2, 32 * MIB))
    assert large.admitted == 1
    large.admit_all = large.admit_head
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns())
    assert large.admitted == 2
    assert rig.volume not in rig.loop.timers
    rig.volume.set_caps(Rates(bytes_per_s=1e3), rig.clock.monotonic_ns())
    rig.volume.serve(large, rig.clock.monotonic_ns())
    assert large.admitted == 3


def test_what_is_refused_does_not_wait_for_what_is_owed():
    rig, (large,) = run(Rates(bytes_per_s=1e3), 1, (2, 32 * MIB))
    large.head_charge = lambda: None
    large.queue.append(rig.clock.monotonic_ns())
    pushed = []
    large.admit_head = lambda now_ns: pushed.append(large.queue.popleft())
    rig.volume.serve(large, rig.clock.monotonic_ns())
    assert (len(pushed), large.admitted) == (3, 1)


def test_what_waits_behind_a_debt_of_its_own_is_reported_as_held():
    rig, _ = run(Rates(bytes_per_s=1e3), 6, (2, 32 * MIB))
    assert rig.volume.take_late(rig.clock.monotonic_ns()) == (0, 6_000_000)


def test_a_large_burst_pays_what_is_owed_in_few_charges():
    """The loop does nothing else meanwhile."""
    rig = Rig(caps=Rates(bytes_per_s=10e6, burst_s=60))
    charge, charges = rig.rates.charge, []
    rig.rates.charge = lambda now_ns, *what: charges.append(charge(now_ns, *what))
    large = Busy(rig, 2, 4096 * MIB)
    rig.volume.serve(large, rig.clock.monotonic_ns())
    assert large.admitted == 1
    assert len(charges) <= 20, "half of what is left of the burst at a time"
    rig.loop.fire(60)
    assert large.admitted == 1, "the rate holds: 4 GiB take seven minutes"
    rig.loop.fire(4096 * MIB / 10e6 - 60 - 60 - 1)
    assert large.admitted == 1
    rig.loop.fire(2)
    assert large.admitted == 2


def test_a_rate_of_operations_alone_asks_for_no_parts():
    _, (one, two) = run(Rates(ops_per_s=10), 60, (4, 32 * MIB), (4, 4096))
    assert abs(one.admitted - two.admitted) <= 1


def test_a_connection_that_ends_within_its_parts_leaves_nothing_behind():
    rig = Rig(caps=Rates(bytes_per_s=1e6))
    small, large = Paced(rig, 0.01), Busy(rig, 1, 32 * MIB)
    rig.volume.serve(small, rig.clock.monotonic_ns())
    rig.volume.serve(large, rig.clock.monotonic_ns())
    rig.loop.fire(5)
    assert large.admitted == 0
    rig.volume.forget(large)
    small.waits.clear()
    rig.loop.fire(60)
    assert max(small.waits) <= SECOND // 10
    assert not rig.volume._parts


def late_in(rig):
    now_ns = rig.clock.monotonic_ns()
    got = rig.cuts._kept[0][0] if rig.cuts._kept else 0
    return frame.decode(rig.cuts.collect(got, now_ns, rig.clock.unix_us())).header.get("late")


def test_cuts_say_what_was_held_for_too_long():
    rig, _ = run(Rates(ops_per_s=10), 4.9, (128, 4096))
    assert late_in(rig) is None
    assert late_in(rig) is None
    rig.loop.fire(1.0)  # requests that arrived first pass at the rate; from 5 s on they are late
    first = late_in(rig)["vol-1"]
    assert first[0] == 9
    assert HOLD_NS // 1000 <= first[1] <= 5_900_000
    rig.loop.fire(10)
    ios, longest_us = late_in(rig)["vol-1"]
    assert ios == 100
    assert 12_000_000 < longest_us < 13_000_000


def test_one_that_is_still_held_is_said_before_it_is_let_through():
    rig, (busy,) = run(Rates(bytes_per_s=1e6), 6, (2, 32 * MIB))
    assert busy.admitted == 1
    assert late_in(rig) == {"vol-1": [0, 6_000_000]}


def test_a_volume_within_its_caps_says_nothing():
    rig, (busy,) = run(Rates(ops_per_s=10), 60, (8, 4096))
    assert busy.admitted > 500
    assert late_in(rig) is None


def test_the_worst_volumes_are_named_and_samples_are_joined():
    many = {f"vol-{n}": (1, n) for n in range(40)}
    assert len(worst_late(many)) == MOST_LATE
    assert "vol-39" in worst_late(many)
    assert joined_late([{"a": (1, 5)}, {"a": (2, 9), "b": (0, 1)}]) == {"a": (3, 9), "b": (0, 1)}


@pytest.mark.parametrize(
    "value",
    [None, 7, [], {"a": 1}, {"a": [1]}, {"a": [1, -1]}, {"a": [1, 1 << 60]}, {"": [1, 2]}, {"a": ["x", 2]}],
)
def test_what_a_gateway_says_wrongly_is_left_out(value):
    assert parse_late(value) == {}


def test_what_it_says_rightly_is_read():
    assert parse_late({"vol-1": [3, 7_000_000]}) == {"vol-1": (3, 7_000_000)}


SECOND = 10**9


def order(gen=1, lease_us=30_000_000, **caps):
    return {
        "gen": gen,
        "lease_us": lease_us,
        "caps": [{"volume": volume, "cost_per_s": rate} for volume, rate in caps.items()],
    }


def test_the_set_is_complete_and_idempotent():
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(order(1, a=10, b=20)), 0)
    assert caps.of("a") == Rates(cost_per_s=10.0)
    caps.apply(PlaneCaps.parse(order(2, b=30)), 0)
    caps.apply(PlaneCaps.parse(order(2, b=30)), 0)
    assert (caps.of("a"), caps.of("b"), caps.generation) == (NO_CAPS, Rates(cost_per_s=30.0), 2)


def test_the_lease_ends_unless_renewed_and_static_caps_stay():
    caps = CapsInForce({"a": Rates(ops_per_s=100)})
    caps.apply(PlaneCaps.parse(order(5, a=10)), 0)
    caps.renew(20 * SECOND)
    assert not caps.expire(50 * SECOND - 1)
    assert caps.of("a") == Rates(ops_per_s=100, cost_per_s=10.0)
    assert caps.expire(50 * SECOND)
    assert (caps.of("a"), caps.generation) == (Rates(ops_per_s=100), 0)
    assert not caps.expire(51 * SECOND)


def test_a_renewal_after_the_end_brings_nothing_back_but_the_set_anew_does():
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(order(5, a=10)), 0)
    caps.expire(30 * SECOND)
    caps.renew(31 * SECOND)
    assert (caps.lease_end_ns, caps.of("a")) == (None, NO_CAPS)
    caps.apply(PlaneCaps.parse(order(5, a=10)), 32 * SECOND)
    assert (caps.generation, caps.of("a")) == (5, Rates(cost_per_s=10.0))


def test_the_next_process_holds_the_same_caps_until_the_same_moment():
    former, caps = CapsInForce({}), CapsInForce({"a": Rates(ops_per_s=100)})
    assert former.in_words == (None, None)
    former.apply(PlaneCaps.parse(order(5, a=10)), 0)
    former.renew(20 * SECOND)
    caps.inherit(*former.in_words, 45 * SECOND)
    assert (caps.of("a"), caps.generation) == (Rates(ops_per_s=100, cost_per_s=10.0), 5)
    assert caps.lease_end_ns == 50 * SECOND
    caps.renew(46 * SECOND)
    assert caps.lease_end_ns == 76 * SECOND, "a renewal is for the whole lease"
    caps.expire(76 * SECOND)
    assert caps.in_words == (None, None)
    caps.inherit(*former.in_words, 51 * SECOND)
    assert (caps.of("a"), caps.generation) == (Rates(ops_per_s=100), 0), "it has ended meanwhile"


def test_the_next_process_holds_the_same_groups():
    former, caps = CapsInForce({}), CapsInForce({})
    group = {"group": "night", "volumes": {"a": 1.0, "b": 2.0}, "ops_per_s": 90, "burst_s": 2.0}
    former.apply(PlaneCaps.parse({**order(5), "groups": [group]}), 0)
    caps.inherit(*former.in_words, SECOND)
    assert caps.groups == former.groups
    assert caps.groups[SERVER, "night"].rates == Rates(ops_per_s=90, burst_s=2.0)


def test_of_two_caps_the_smaller_holds():
    assert Rates(10, None, 5).tighter(Rates(20, 7, 3)) == Rates(10, 7, 3)


@pytest.mark.parametrize("rate", [0, -1, 1e-300, 10**400, float("inf"), float("nan"), "10", True])
def test_an_impossible_rate_changes_nothing(rate):
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(order(1, a=10)), 0)
    with pytest.raises(BadCaps, match=r"cost_per_s of .a."):
        caps.apply(PlaneCaps.parse(order(2, a=rate)), 0)
    assert (caps.generation, caps.of("a")) == (1, Rates(cost_per_s=10.0))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"gen": 1},
        {"gen": "1", "caps": []},
        {"gen": 1, "caps": [7]},
        {"gen": 1, "caps": [], "lease_us": 0},
        {"gen": 1, "caps": [], "lease_us": 10**12},
        {"gen": 1, "caps": [{"volume": "a"}, {"volume": "a"}]},
    ],
)
def test_a_malformed_set_is_refused(header):
    with pytest.raises(BadCaps):
        CapsInForce({}).apply(PlaneCaps.parse(header), 0)


def admitted_in_a_second(caps, transfer_bytes, base):
    rates = RateSet(1)
    assert rates.set_caps(caps, 0)
    now_ns, count = 0, 0
    while now_ns < SECOND:
        if rates.ready_ns() > now_ns:
            now_ns = rates.ready_ns()
            continue
        rates.charge(now_ns, transfer_bytes, io_cost(base, transfer_bytes))
        count += 1
    return count


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        (Rates(ops_per_s=100), 100),
        (Rates(bytes_per_s=65_536 * 50), 50),
        (Rates(cost_per_s=60), 20),  # base 2 and 64 KiB cost 3
        (Rates(ops_per_s=100, bytes_per_s=65_536 * 30, cost_per_s=600), 30),
    ],
)
def test_all_three_rates_must_pass(caps, expected):
    assert admitted_in_a_second(caps, 65_536, 2.0) == pytest.approx(expected, abs=1)


def test_a_rate_that_stays_keeps_its_debt_and_the_same_caps_change_nothing():
    rates = RateSet(1)
    rates.set_caps(Rates(ops_per_s=1), 0)
    rates.charge(0, 0, 1.0)
    assert not rates.set_caps(Rates(ops_per_s=1), 0)
    rates.set_caps(Rates(ops_per_s=1, cost_per_s=1000), 0)
    assert rates.ready_ns() == SECOND - 1
    rates.set_caps(NO_CAPS, 0)
    assert rates.is_open


class OneByOne(Busy):
    def admit_within(self, _now_ns, _allowance):
        pass


@pytest.mark.parametrize("depth", [1, 7, 64])
@pytest.mark.parametrize(
    "caps",
    [
        Rates(ops_per_s=500),
        Rates(bytes_per_s=1e6),
        Rates(cost_per_s=300),
        Rates(2000, 3e6, 1000, burst_s=1.0),
    ],
)
def test_a_batch_admits_as_much_as_one_request_after_another_at_every_moment(caps, depth):
    both = []
    for kind in (Busy, OneByOne):
        rig = Rig(caps=caps)
        busy = kind(rig, depth)
        rig.volume.serve(busy, rig.clock.monotonic_ns())
        both.append((rig, busy))
    for _ in range(100):
        for rig, _ in both:
            rig.loop.fire(0.013)
        assert abs(both[0][1].admitted - both[1][1].admitted) <= 1, "rounding of nanoseconds"


def test_who_comes_while_another_is_served_in_batches_waits_for_no_batch():
    rig, (deep,) = run(Rates(ops_per_s=1000, burst_s=1.0), 2, (64, 4096))
    before, late = deep.admitted, Busy(rig, 64)
    rig.volume.serve(late, rig.clock.monotonic_ns())
    rig.loop.fire(1)
    assert abs(late.admitted - (deep.admitted - before)) <= 2


def passed_on(caps, clients, seed, one_by_one):
    """What an upstream has got after each step of a random history of a capped client."""
    rng, pair, found = random.Random(seed), Pair(Rig(size_bytes=64 * MIB, caps=caps)), []
    pair.rig.volume.set_caps(caps, pair.rig.clock.monotonic_ns(), clients)
    if one_by_one:
        pair.rig.volume._admit_batch = lambda *_: False  # the way of connections that wait beside others
    requests = [
        rng.choice((read(n, 4096), read(n, 8 * MIB), write(n, bytes(5000)), p.request(p.Cmd.FLUSH, n, 0, 0)))
        for n in range(60)
    ]
    while requests:
        pair.say(*requests[: (count := rng.randrange(1, 12))])
        del requests[:count]
        pair.rig.loop.fire(rng.choice((0.0, 0.001, 0.03)))
        found.append(bytes(pair.far.sent))
    pair.rig.loop.fire(200)
    return [*found, bytes(pair.far.sent)], pair.row()["delay_sum_us"], pair.session.gauges()


@pytest.mark.parametrize("clients", [{}, {"host-a": Rates(ops_per_s=200)}, {"*": Rates(bytes_per_s=2e6)}])
@pytest.mark.parametrize("caps", [Rates(ops_per_s=100), Rates(bytes_per_s=4e6), Rates(5000, 1e9)])
def test_an_upstream_gets_in_batches_what_it_gets_one_by_one(caps, clients):
    for seed in range(3):
        both = [passed_on(caps, clients, seed, one_by_one) for one_by_one in (True, False)]
        assert both[0] == both[1]
        assert both[0][2] == (60, 0)


# -- without memory ------------------------------------------------------------------------------------------


def no_memory(*_what, **_how):
    raise MemoryError


def two_that_wait(caps=Rates(ops_per_s=10)):  # noqa: B008 - frozen
    rig = Rig(caps=caps, size_bytes=64 * MIB)
    pairs = [Pair(rig), Pair(rig)]
    for pair in pairs:
        pair.say(*(read(cookie) for cookie in range(1, 6)))
    assert all(pair.session.head_arrived_ns() is not None for pair in pairs)
    return rig, *pairs


@pytest.mark.parametrize("step", ["admit_head", "push", "unblock"])
def test_a_step_that_fails_in_the_turn_of_all_ends_its_own_connection_and_no_other(step, monkeypatch):
    rig, first, second = two_that_wait()
    monkeypatch.setattr(first.session, step, no_memory)
    rig.loop.fire(3)
    assert first.session.is_closed, "its client would wait for ever"
    assert not second.session.is_closed
    assert len(second.far.sent) == 5 * len(read(1))


def test_a_step_that_fails_in_the_event_of_another_connection_is_not_charged_to_that_one(monkeypatch):
    rig, first, second = two_that_wait()
    monkeypatch.setattr(first.session, "push", no_memory)
    rig.clock.advance(3)
    second.say(read(9))
    assert first.session.is_closed
    assert not second.session.is_closed


def test_one_that_fails_as_caps_are_taken_away_ends_alone(monkeypatch):
    rig, first, second = two_that_wait()
    monkeypatch.setattr(first.session, "admit_all", no_memory)
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns())
    assert first.session.is_closed
    assert len(second.far.sent) == 5 * len(read(1))


def test_a_turn_that_fails_before_it_is_known_for_whom_comes_again(monkeypatch):
    rig, first, second = two_that_wait()
    with monkeypatch.context() as patched:
        patched.setattr(rig.volume, "_may_pass", no_memory)
        rig.loop.fire(0.15)
    rig.loop.fire(5)
    for pair in (first, second):
        assert not pair.session.is_closed
        assert len(pair.far.sent) == 5 * len(read(1)), "it is served although nobody sent anything"


def test_what_was_admitted_before_a_turn_failed_is_pushed_in_the_next(monkeypatch):
    rig, first, second = two_that_wait()
    with monkeypatch.context() as patched:
        patched.setattr(rig.volume, "_plan", no_memory)  # after the admissions
        rig.loop.fire(0.15)
    rig.loop.fire(5)
    assert [len(pair.far.sent) for pair in (first, second)] == [5 * len(read(1))] * 2
