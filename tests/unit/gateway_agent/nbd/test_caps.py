import pytest

from gateway_agent.errors import BadCaps
from gateway_agent.nbd.caps import CapsInForce
from pmdaemon.wire.rates import NO_CAPS, Rates, RateSet

SECOND = 10**9


def order(gen=1, lease_us=30_000_000, **caps):
    return {
        "gen": gen,
        "lease_us": lease_us,
        "caps": [{"volume": volume, "cost_per_s": rate} for volume, rate in caps.items()],
    }


def test_the_set_is_complete_and_idempotent():
    caps = CapsInForce({})
    caps.apply(order(1, a=10, b=20), 0)
    assert caps.of("a") == Rates(cost_per_s=10.0)
    caps.apply(order(2, b=30), 0)
    caps.apply(order(2, b=30), 0)
    assert (caps.of("a"), caps.of("b"), caps.generation) == (NO_CAPS, Rates(cost_per_s=30.0), 2)


def test_the_lease_ends_unless_renewed_and_static_caps_stay():
    caps = CapsInForce({"a": Rates(ops_per_s=100)})
    caps.apply(order(5, a=10), 0)
    caps.renew(20 * SECOND)
    assert not caps.expire(50 * SECOND - 1)
    assert caps.of("a") == Rates(ops_per_s=100, cost_per_s=10.0)
    assert caps.expire(50 * SECOND)
    assert (caps.of("a"), caps.generation) == (Rates(ops_per_s=100), 0)
    assert not caps.expire(51 * SECOND)


def test_a_renewal_after_the_end_brings_nothing_back_but_the_set_anew_does():
    caps = CapsInForce({})
    caps.apply(order(5, a=10), 0)
    caps.expire(30 * SECOND)
    caps.renew(31 * SECOND)
    assert (caps.lease_end_ns, caps.of("a")) == (None, NO_CAPS)
    caps.apply(order(5, a=10), 32 * SECOND)
    assert (caps.generation, caps.of("a")) == (5, Rates(cost_per_s=10.0))


def test_of_two_caps_the_smaller_holds():
    assert Rates(10, None, 5).tighter(Rates(20, 7, 3)) == Rates(10, 7, 3)


@pytest.mark.parametrize("rate", [0, -1, 1e-300, 10**400, float("inf"), float("nan"), "10", True])
def test_an_impossible_rate_changes_nothing(rate):
    caps = CapsInForce({})
    caps.apply(order(1, a=10), 0)
    with pytest.raises(BadCaps, match=r"cost_per_s of .a."):
        caps.apply(order(2, a=rate), 0)
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
        CapsInForce({}).apply(header, 0)


def admitted_in_a_second(caps, transfer_bytes, base):
    rates = RateSet(1)
    assert rates.set_caps(caps, 0)
    now_ns, count = 0, 0
    while now_ns < SECOND:
        if rates.ready_ns() > now_ns:
            now_ns = rates.ready_ns()
            continue
        rates.charge(now_ns, transfer_bytes, base)
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
