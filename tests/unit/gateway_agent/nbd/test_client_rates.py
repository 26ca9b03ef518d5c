"""Caps of single clients of a volume, on a fake clock: both caps hold, and one client holds up no other."""

from __future__ import annotations

from collections import deque

import pytest

from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.client_rates import MOST_KNOWN, NO_OTHERS, ClientRates
from pmdaemon.errors import BadCaps
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from pmdaemon.wire.rates import NO_CAPS, Rates, io_cost
from tests.support.nbd import MIB, Rig, admit_within

SECOND = 10**9
BURST = 3  # I/Os of the burst depth, and one that is admitted at the last moment


class Connection:
    """``depth`` requests outstanding of a client."""

    is_closed = False

    def __init__(self, rig, client, depth=64, size_bytes=4096):
        self.rig, self.client, self.admitted, self.size_bytes = rig, client, 0, size_bytes
        self.queue = deque([rig.clock.monotonic_ns()] * depth)

    def head_arrived_ns(self):
        return self.queue[0] if self.queue else None

    def head_charge(self):
        return self.size_bytes, io_cost(1.0, self.size_bytes)

    def admit_head(self, now_ns):
        self.queue.popleft()
        self.admitted += 1
        self.queue.append(now_ns)

    def admit_all(self, _now_ns):
        self.admitted += len(self.queue)
        self.queue.clear()

    def admit_within(self, now_ns, allowance):
        admit_within(self, now_ns, allowance)

    def push(self, now_ns):
        pass

    def unblock(self):
        return False


def serve(volume_caps, client_caps, seconds, *clients, others=NO_OTHERS):
    rig = Rig(caps=volume_caps)
    now_ns = rig.clock.monotonic_ns()
    rig.volume.set_caps(volume_caps, now_ns, client_caps, others)
    connections = [Connection(rig, client) for client in clients]
    for each in connections:
        rig.volume.serve(each, now_ns)
    rig.loop.fire(seconds)
    return rig, connections


def test_a_capped_client_is_held_and_the_other_is_not_even_delayed():
    rig, (greedy, promised) = serve(NO_CAPS, {"greedy": Rates(ops_per_s=10)}, 60, "greedy", "promised")
    assert 600 <= greedy.admitted <= 600 + BURST
    assert promised.admitted == 64
    assert not promised.queue, "an open volume passes all of it at once"
    rig.volume.forget(greedy)


def test_both_caps_hold():
    caps = {"greedy": Rates(ops_per_s=10)}
    _, (greedy, other) = serve(Rates(ops_per_s=100), caps, 60, "greedy", "other")
    assert 590 <= greedy.admitted <= 600 + BURST
    assert greedy.admitted + other.admitted <= 6000 + BURST
    assert other.admitted >= 5380, "what the greedy one may not have is the other's"


def test_the_volumes_cap_may_be_the_lower_one():
    _, (one, two) = serve(Rates(ops_per_s=10), {"one": Rates(ops_per_s=1000)}, 60, "one", "two")
    assert one.admitted + two.admitted <= 600 + BURST
    assert abs(one.admitted - two.admitted) <= 1


def test_the_connections_of_a_client_share_its_rate():
    caps = {"greedy": Rates(cost_per_s=10.625)}
    _, (one, two, other) = serve(NO_CAPS, caps, 60, "greedy", "greedy", "other")
    assert 595 <= one.admitted + two.admitted <= 600 + BURST
    assert abs(one.admitted - two.admitted) <= 1
    assert other.admitted == 64


def test_a_cap_that_ends_lets_go_at_once():
    rig, (greedy,) = serve(NO_CAPS, {"greedy": Rates(ops_per_s=10)}, 1, "greedy")
    before = greedy.admitted
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns())
    assert greedy.admitted - before == 64
    assert not greedy.queue
    assert not rig.volume.clients


def test_a_cap_of_a_client_that_is_not_there_holds_from_its_first_request():
    rig, () = serve(NO_CAPS, {"late": Rates(ops_per_s=10)}, 5)
    late = Connection(rig, "late")
    rig.volume.serve(late, rig.clock.monotonic_ns())
    rig.loop.fire(10)
    assert 100 <= late.admitted <= 100 + BURST


def test_clients_that_are_not_named_share_one_rate_also_under_names_never_seen():
    caps = {"*": Rates(ops_per_s=10)}
    rig, (first, promised) = serve(NO_CAPS, caps, 20, "job-1", "db-1", others={"*": ["db-*"]})
    assert 200 <= first.admitted <= 200 + BURST
    assert promised.admitted == 64
    rig.volume.forget(first)
    later = [Connection(rig, name) for name in ("job-2", "job-3")]
    for each in later:
        rig.volume.serve(each, rig.clock.monotonic_ns())
    rig.loop.fire(20)
    assert 195 <= sum(each.admitted for each in later) <= 200 + BURST
    assert abs(later[0].admitted - later[1].admitted) <= 1


SHARED = Rates(bytes_per_s=10e6)


@pytest.mark.parametrize("volume_caps", [NO_CAPS, Rates(bytes_per_s=20e6)], ids=["open", "capped"])
@pytest.mark.parametrize("is_small_first", [True, False])
def test_a_large_request_leaves_those_their_share_that_share_a_rate_with_its_client(
    volume_caps, is_small_first
):
    rig, () = serve(volume_caps, {"*": SHARED}, 0, others={"*": ["db-*"]})
    small, large = Connection(rig, "job-1", 4, 65_536), Connection(rig, "job-2", 2, 4096 * MIB)
    for each in (small, large) if is_small_first else (large, small):
        rig.volume.serve(each, rig.clock.monotonic_ns())
    rig.loop.fire(60)
    assert small.admitted * 65_536 == pytest.approx(60 * 10e6 / 2, rel=0.05)
    assert large.admitted == (0 if is_small_first else 1)
    assert (rig.volume._debt is None) == is_small_first


def test_what_is_owed_to_a_shared_rate_is_paid_in_full_and_holds_up_no_named_client():
    rig, () = serve(NO_CAPS, {"*": SHARED, "db-1": Rates(ops_per_s=100)}, 0, others={"*": ["db-*"]})
    large = Connection(rig, "job-1", 2, 64 * MIB)
    rig.volume.serve(large, rig.clock.monotonic_ns())
    assert large.admitted == 1, "alone it passes at once, and the next one waits until it is paid"
    rig.loop.fire(6.5)
    assert large.admitted == 1
    rig.loop.fire(0.5)
    assert large.admitted == 2
    named = Connection(rig, "db-1")
    rig.volume.serve(named, rig.clock.monotonic_ns())
    rig.loop.fire(60)
    assert 5995 <= named.admitted <= 6000 + BURST
    assert 9 <= large.admitted <= 2 + 9
    rig.volume.forget(large)
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns())
    assert rig.volume._debt is None, "no rate is left that it could be owed to"


def test_a_client_with_a_rate_of_its_own_has_both():
    caps = {"*": Rates(ops_per_s=10), "job-1": Rates(ops_per_s=2)}
    _, (one, two) = serve(NO_CAPS, caps, 60, "job-1", "job-2")
    assert 115 <= one.admitted <= 120 + BURST
    assert 595 <= one.admitted + two.admitted <= 600 + BURST


def test_clients_of_a_glob_share_a_rate_under_any_name_and_leave_the_others_theirs():
    caps = {"job-*": Rates(ops_per_s=10), "*": Rates(ops_per_s=20)}
    others = {"job-*": ["job-1"], "*": ["job-1", "job-*"]}
    names = ("job-2", "job-3", "x", "y", "job-1")
    _, (one, two, three, four, listed) = serve(NO_CAPS, caps, 60, *names, others=others)
    assert 595 <= one.admitted + two.admitted <= 600 + BURST
    assert 1195 <= three.admitted + four.admitted <= 1200 + BURST
    assert listed.queue == deque()


def test_whom_the_shared_rate_is_for_may_change():
    rates = ClientRates(20_000_000)
    assert rates.set_caps({"*": Rates(ops_per_s=1)}, 0, {"*": ["db-*"]})
    assert ("db-1" in rates, "x" in rates) == (False, True)
    assert not rates.set_caps({"*": Rates(ops_per_s=1)}, 0, {"*": ["db-*"]})
    assert rates.set_caps({"*": Rates(ops_per_s=1)}, 0, {"*": ["x"]})
    assert ("db-1" in rates, "x" in rates) == (True, False)
    for number in range(MOST_KNOWN + 1):
        assert f"n{number}" in rates


def test_what_a_client_is_held_for_too_long_is_said_of_its_volume():
    rig, _ = serve(NO_CAPS, {"greedy": Rates(ops_per_s=1)}, 60, "greedy")
    late = rig.volume.take_late(rig.clock.monotonic_ns())
    assert late is not None
    assert late[0] > 0


def test_a_client_that_was_held_for_long_has_no_credit_with_the_others_when_its_cap_ends():
    caps = Rates(ops_per_s=100)
    rig, (held, other) = serve(caps, {"held": Rates(ops_per_s=1)}, 60, "held", "other")
    before = held.admitted, other.admitted
    rig.volume.set_caps(caps, rig.clock.monotonic_ns())
    rig.loop.fire(10)
    assert held.admitted - before[0] == pytest.approx(500, abs=BURST)
    assert other.admitted - before[1] == pytest.approx(500, abs=BURST)


def test_connections_of_a_client_share_its_rate_also_when_they_shared_the_volumes_unequally():
    rig = Rig(caps=Rates(bytes_per_s=1e6))
    now_ns = rig.clock.monotonic_ns()
    large, small = Connection(rig, "c", depth=4, size_bytes=2 * MIB), Connection(rig, "c")
    for each in (large, small):
        rig.volume.serve(each, now_ns)
    rig.loop.fire(30)
    before = large.admitted, small.admitted
    assert before[0] < before[1]
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns(), {"c": Rates(ops_per_s=50)})
    rig.loop.fire(30)
    assert large.admitted - before[0] == pytest.approx(750, abs=110), "what one is ahead is bounded"
    assert small.admitted - before[1] == pytest.approx(750, abs=110)


def test_rates_keep_their_debt_and_go_with_the_set():
    rates = ClientRates(20_000_000)
    assert not rates
    assert not rates.set_caps({"c": NO_CAPS}, 0), "no limit is no cap"
    assert rates.set_caps({"c": Rates(ops_per_s=1)}, 0)
    assert not rates.set_caps({"c": Rates(ops_per_s=1)}, 0)
    rates.held_of("c").own.charge(0, 4096, 1.0)
    assert rates.held_of("other").own is None
    assert rates.ready_ns("c") == SECOND - 20_000_000
    assert rates.ready_ns("other") == 0
    assert rates.set_caps({"c": Rates(ops_per_s=2)}, 0)
    assert rates.ready_ns("c") == (SECOND - 20_000_000) // 2, "what is beyond the burst, at the new rate"
    assert "c" in rates
    assert rates.set_caps({}, 0)
    assert not rates


def entry(volume="v", client="c", **rates):
    return {"volume": volume, "client": client, **rates}


def header(*clients, gen=1):
    return {"gen": gen, "lease_us": 30_000_000, "caps": [], "clients": list(clients)}


def test_a_set_says_who_the_others_are():
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(header(entry(client="*", ops_per_s=7, **{"except": ["db-*"]}))), 0)
    assert (caps.of_clients("v"), caps.named_clients("v")) == ({"*": Rates(ops_per_s=7.0)}, {"*": ("db-*",)})
    assert caps.expire(30 * SECOND)
    assert caps.named_clients("v") == {}
    for wrong in ("db", [7]):
        with pytest.raises(BadCaps, match="no list of globs"):
            caps.apply(PlaneCaps.parse(header(entry(client="*", ops_per_s=7, **{"except": wrong}))), 0)
    with pytest.raises(BadCaps, match="a client that is a glob"):
        caps.apply(PlaneCaps.parse(header(entry(client="c", ops_per_s=7, **{"except": ["db"]}))), 0)


def test_a_set_says_whose_cost_it_limits():
    caps = CapsInForce({"static": Rates(cost_per_s=1)})
    said = header(entry(cost_per_s=5), entry("w", ops_per_s=7))
    said["caps"] = [{"volume": "own", "cost_per_s": 1}, {"volume": "x", "ops_per_s": 1}]
    said["groups"] = [
        {"group": "g", "volumes": {"in-g": 1}, "cost_per_s": 1},
        {"group": "h", "volumes": {"in-h": 1}, "ops_per_s": 1},
    ]
    caps.apply(PlaneCaps.parse(said), 0)
    assert caps.cost_capped(("v", "free")) == {"v", "own", "in-g"}
    caps.apply(PlaneCaps.parse(said | {"whole_clients": [{"client": "c", "cost_per_s": 9}]}), 0)
    assert caps.cost_capped(("v", "free")) == {"v", "free"}, "it may use any of the plane"
    assert caps.expire(30 * SECOND)
    assert caps.cost_capped(("v", "free")) == frozenset()


def test_a_set_names_clients_and_its_lease_ends_them():
    caps = CapsInForce({"v": Rates(ops_per_s=100)})
    assert caps.apply(PlaneCaps.parse(header(entry(cost_per_s=5), entry(client="d", ops_per_s=7))), 0) == 2
    assert caps.of_clients("v") == {"c": Rates(cost_per_s=5.0), "d": Rates(ops_per_s=7.0)}
    assert caps.of("v") == Rates(ops_per_s=100)
    assert caps.of_clients("w") == {}
    assert caps.expire(30 * SECOND)
    assert caps.of_clients("v") == {}
    caps.apply(PlaneCaps.parse(header(entry(cost_per_s=5))), 0)
    caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 30_000_000, "caps": []}), 0)
    assert caps.of_clients("v") == {}, "a set without clients caps none"


@pytest.mark.parametrize(
    "clients",
    [
        "c",
        [7],
        [{"volume": "v", "cost_per_s": 1}],
        [{"client": "c", "cost_per_s": 1}],
        [entry(cost_per_s=0)],
        [entry(cost_per_s=1), entry(cost_per_s=2)],
    ],
)
def test_a_malformed_list_of_clients_changes_nothing(clients):
    caps = CapsInForce({})
    caps.apply(PlaneCaps.parse(header(entry(cost_per_s=5))), 0)
    with pytest.raises(BadCaps, match="caps 2"):
        caps.apply(PlaneCaps.parse({"gen": 2, "lease_us": 1, "caps": [], "clients": clients}), 0)
    assert (caps.generation, caps.of_clients("v")) == (1, {"c": Rates(cost_per_s=5.0)})


def test_a_cap_of_a_client_that_goes_and_returns_gives_no_second_burst():
    caps = {"greedy": Rates(ops_per_s=10, burst_s=10.0)}
    rig, (greedy,) = serve(NO_CAPS, caps, 0, "greedy")
    assert greedy.admitted == 101
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns())
    rig.volume.set_caps(NO_CAPS, rig.clock.monotonic_ns(), caps)
    again = Connection(rig, "greedy")
    rig.volume.serve(again, rig.clock.monotonic_ns())
    assert again.admitted == 1
