import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.rates import (
    DEFAULT_BURST_S,
    Allowance,
    FormerRates,
    Gcra,
    Rates,
    RateSet,
    at_once_s,
    whole_rate,
)

TAU = 20_000_000
SECOND = 10**9


def run(gcra, start_ns, end_ns, amount=1.0, late_ns=0):
    """Admit greedily; wake-ups come ``late_ns`` too late. Returns the number admitted."""
    now_ns, count = start_ns, 0
    while now_ns < end_ns:
        if gcra.ready_ns() > now_ns:
            now_ns = gcra.ready_ns() + late_ns
            continue
        gcra.charge(now_ns, amount)
        count += 1
    return count


@pytest.mark.parametrize("rate", [50, 500, 5_000, 123_456.7])
def test_the_average_is_the_rate_plus_one_burst(rate):
    admitted = run(Gcra(rate, TAU), 0, 10 * SECOND)
    assert 10 * rate <= admitted <= 10 * rate + rate * TAU / 1e9 + 2


def test_late_wakeups_within_the_burst_depth_cost_nothing():
    rate = 1_000
    assert run(Gcra(rate, TAU), 0, 10 * SECOND, late_ns=15_000_000) >= 10 * rate - 20


def test_an_idle_bucket_holds_one_burst_and_not_more():
    gcra = Gcra(1_000, TAU)
    run(gcra, 0, SECOND)
    now_ns, burst = 100 * SECOND, 0
    while gcra.ready_ns() <= now_ns:
        gcra.charge(now_ns, 1)
        burst += 1
    assert burst == 21  # depth 20 ms * 1,000 and the one that passes at the edge


def test_an_io_of_any_size_passes_and_is_paid_for_afterwards():
    gcra = Gcra(1_000_000, TAU)
    assert gcra.ready_ns() <= 0
    gcra.charge(0, 3_000_000)
    assert gcra.ready_ns() == 3 * SECOND - TAU


def test_the_debt_has_no_bound():
    gcra = Gcra(1, TAU)
    for _ in range(100):
        gcra.charge(0, 1)
    assert gcra.ready_ns() == 100 * SECOND - TAU


def test_another_rate_keeps_what_is_owed_beyond_the_burst_in_units():
    gcra = Gcra(100, TAU)
    gcra.charge(0, 200 + 100 * TAU / SECOND)  # two seconds of it beyond the burst
    gcra.change(400, TAU, SECOND)  # 100 units are left: a quarter of a second at the new rate
    assert gcra.ready_ns() == SECOND + SECOND // 4
    gcra.change(1000, TAU, 100 * SECOND)  # nothing owed, and the whole burst of 8 units left
    assert gcra.ready_ns() == 100 * SECOND - 8 * SECOND // 1000


def test_a_longer_burst_accumulates_from_its_beginning():
    gcra = Gcra(100, TAU)
    gcra.charge(10 * SECOND, 2)
    gcra.change(100, 30 * SECOND, 10 * SECOND)
    assert gcra.ready_ns() == 10 * SECOND, "no more than was left of the former"


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_is_above_zero(rate):
    with pytest.raises(ValueError, match="above 0"):
        Gcra(rate, TAU)
    with pytest.raises(ValueError, match="above 0"):
        Gcra(1, TAU).change(rate, TAU, 0)


@given(
    rate=st.floats(0.1, 1e6),
    amounts=st.lists(st.floats(0, 1e5), max_size=50),
    gaps=st.lists(st.integers(0, SECOND), min_size=50, max_size=50),
)
def test_tat_never_moves_back(rate, amounts, gaps):
    gcra, now_ns = Gcra(rate, TAU), 0
    for amount, gap in zip(amounts, gaps, strict=False):
        before, now_ns = gcra.tat_ns, now_ns + gap
        gcra.charge(now_ns, amount)
        assert gcra.tat_ns >= max(before, now_ns)


BURST = Rates(ops_per_s=100.0, burst_s=10.0, peak_ops_per_s=300.0)


def by_second(rates, start_ns, seconds):
    """I/Os admitted greedily in each second."""
    found = [0] * seconds
    now_ns = start_ns
    while now_ns < start_ns + seconds * SECOND:
        now_ns = max(now_ns, rates.ready_ns())
        if now_ns < start_ns + seconds * SECOND:
            found[(now_ns - start_ns) // SECOND] += 1
            rates.charge(now_ns, 4096, 1.0)
    return found


def test_a_burst_passes_at_its_peak_until_it_is_used_up_and_comes_again_after_a_pause():
    rates = RateSet(TAU)
    assert rates.set_caps(BURST, 0)
    found = by_second(rates, SECOND, 10)
    assert found[:4] == pytest.approx([300] * 4, abs=8)
    assert sum(found[:5]) == pytest.approx(1_500, abs=10)
    assert found[5:] == pytest.approx([100] * 5, abs=1)
    after_half = by_second(rates, 16 * SECOND, 4)  # in 5 s half of it has accumulated
    assert sum(after_half) == pytest.approx(500 + 400, abs=10)


def test_without_its_peak_a_burst_is_not_longer():
    assert BURST.without_burst() == Rates(ops_per_s=100.0)


def test_of_two_caps_the_smaller_peak_and_the_smaller_burst_hold_and_both_are_divided():
    both = BURST.tighter(Rates(cost_per_s=50.0))
    assert (both.ops_per_s, both.cost_per_s, both.burst_s) == (100.0, 50.0, DEFAULT_BURST_S)
    half = BURST.scaled(0.5)
    assert (half.ops_per_s, half.peak_ops_per_s, half.burst_s) == (50.0, 150.0, 10.0)
    assert BURST.differs(Rates(100.0, burst_s=10.0, peak_ops_per_s=310.0), 0.01)
    assert half.at_least(Rates(ops_per_s=400.0)).peak_ops_per_s == 400.0


@pytest.mark.parametrize(
    "other",
    [
        Rates(ops_per_s=5.0, burst_s=10.0, peak_ops_per_s=15.0),  # its share has moved to another gateway
        Rates(ops_per_s=100.0),  # the agreement has no burst any more
        BURST.tighter(Rates(cost_per_s=50.0)),  # a throttle has come
    ],
)
def test_who_has_used_a_burst_goes_on_at_the_rate_when_the_cap_changes(other):
    rates = RateSet(TAU)
    rates.set_caps(BURST, 0)
    by_second(rates, SECOND, 10)
    rates.set_caps(other, 11 * SECOND)
    found = by_second(rates, 11 * SECOND, 10)
    most = min(other.ops_per_s, (other.cost_per_s or 1e9))
    assert found == pytest.approx([most] * 10, abs=3)


def test_no_change_of_a_cap_gives_a_burst_again():
    rates, small = RateSet(TAU), Rates(ops_per_s=5.0, burst_s=10.0, peak_ops_per_s=15.0)
    rates.set_caps(BURST, 0)
    by_second(rates, SECOND, 10)
    admitted = 0
    for number in range(11, 31, 2):
        rates.set_caps(small if number % 4 == 1 else BURST.without_burst(), number * SECOND)
        admitted += sum(by_second(rates, number * SECOND, 1))
        rates.set_caps(BURST, (number + 1) * SECOND)
        admitted += sum(by_second(rates, (number + 1) * SECOND, 1))
    assert admitted <= 20 * 100 + 100


def test_a_floor_above_a_cap_makes_its_bursts_no_longer():
    cap = Rates(ops_per_s=10.0, burst_s=at_once_s(60, 10, 1000), peak_ops_per_s=1000.0)
    assert cap.at_least(Rates(ops_per_s=50.0)).burst_s == pytest.approx(60 * 950 / 50)
    assert cap.at_least(Rates(ops_per_s=2000.0)) == Rates(2000.0, None, None, DEFAULT_BURST_S, 2000.0)
    assert cap.at_least(Rates(ops_per_s=5.0)) == cap


def test_a_floor_above_a_cap_of_cost_leaves_its_burst_its_size():
    """What a policy lets pass at once on a backend is a sum of such bursts."""
    cap = Rates(cost_per_s=5.0, burst_s=4.0)
    raised = cap.at_least(Rates(ops_per_s=47.0, cost_per_s=50.0))
    assert (raised.cost_per_s, raised.burst_s) == (50.0, pytest.approx(0.4)), "20 units at once, as before"
    assert cap.at_least(Rates(cost_per_s=5.0)) == cap
    assert cap.at_least(Rates(cost_per_s=1e6)).burst_s == DEFAULT_BURST_S
    assert Rates(cost_per_s=5.0).at_least(Rates(cost_per_s=50.0)).burst_s is None
    assert Rates(cost_per_s=5.0, burst_s=0.01).at_least(Rates(cost_per_s=50.0)).burst_s == 0.01


def test_a_burst_that_hardly_differs_is_no_other_cap():
    """Of a share that is raised to the least rate the burst follows from the share, which always varies."""
    shares = [BURST.scaled(ratio).at_least(Rates(ops_per_s=1.0)) for ratio in (0.005, 0.005005, 0.0052)]
    assert not shares[0].differs(shares[1], 0.01)
    assert shares[0].differs(shares[2], 0.01)
    assert BURST.differs(Rates(100.0, peak_ops_per_s=300.0), 0.01)


def test_who_changes_between_two_gateways_has_no_burst_at_each():
    """Most of the cap follows the load: what is left of a burst must not grow with the share."""
    large, small = BURST.scaled(0.95), BURST.scaled(0.05)
    used, other = RateSet(TAU), RateSet(TAU)
    used.set_caps(large, 0)
    other.set_caps(small, 0)
    admitted = 0
    for start_s in range(1, 101, 10):
        used.set_caps(large, start_s * SECOND)
        other.set_caps(small, start_s * SECOND)
        admitted += sum(by_second(used, start_s * SECOND, 10))
        used, other = other, used
    assert admitted == pytest.approx(100 * 100 + 10 * 100, rel=0.06), "one burst of a thousand, and the rate"


EXACT = st.builds(
    Rates,
    ops_per_s=st.sampled_from((None, 100.0, 1000.0)),
    bytes_per_s=st.sampled_from((None, 1e6, 1e9)),
    cost_per_s=st.sampled_from((None, 500.0)),
    burst_s=st.sampled_from((None, 1.0)),
)


@given(
    caps=EXACT,
    turns=st.lists(
        st.tuples(st.integers(0, SECOND // 10), st.lists(st.integers(0, 1 << 17), max_size=20)), max_size=20
    ),
)
def test_a_batch_passes_and_is_charged_as_one_after_another(caps, turns):
    single, together, now_ns = RateSet(TAU), RateSet(TAU), SECOND
    for each in (single, together):
        each.set_caps(caps, now_ns)
    for gap_ns, sizes in turns:
        now_ns += gap_ns
        passed = 0
        for size in sizes:
            if single.ready_ns() > now_ns:
                break
            single.charge(now_ns, size, 1.0)
            passed += 1
        allowance = Allowance(1 << 30, 0)
        together.narrow(allowance, now_ns)
        for size in sizes:
            if any(one > most for one, most in zip(allowance.passed, allowance.most, strict=True)):
                break
            ops, size_bytes, cost = allowance.passed
            allowance.passed = ops + 1, size_bytes + size, cost + 1.0
        if allowance.ops:
            together.charge_batch(now_ns, allowance)
        assert allowance.ops == passed
        assert together.ready_ns() == single.ready_ns()


LONG = Rates(ops_per_s=100.0, burst_s=10.0)


def passes(rates, now_ns):
    found = 0
    while rates.ready_ns() <= now_ns:
        rates.charge(now_ns, 4096, 1.0)
        found += 1
    return found


def test_a_rate_that_goes_and_returns_has_the_burst_that_time_has_brought():
    rates, now_ns = RateSet(TAU), 100 * SECOND
    rates.set_caps(LONG, now_ns)
    assert passes(rates, now_ns) == 1001
    rates.charge(now_ns, 4096, 1.0, part=1e6)  # hours of debt, which go with the rate
    rates.set_caps(Rates(), now_ns)
    rates.set_caps(LONG, now_ns + 2 * SECOND)
    assert passes(rates, now_ns + 2 * SECOND) == 201
    rates.set_caps(Rates(), now_ns + 2 * SECOND)
    assert not rates.is_rested(now_ns + 11 * SECOND)
    assert rates.is_rested(now_ns + 13 * SECOND)
    rates.set_caps(LONG, now_ns + 13 * SECOND)
    assert passes(rates, now_ns + 13 * SECOND) == 1001


def test_rates_of_entries_that_went_are_kept_until_they_have_rested():
    former, now_ns = FormerRates(TAU), 100 * SECOND
    used, unused = former.take("used"), former.take("unused")
    for rates in (used, unused):
        rates.set_caps(LONG, now_ns)
    passes(used, now_ns)
    for name, rates in (("used", used), ("unused", unused)):
        former.keep(name, rates, now_ns)
    assert former.take("unused") is not unused
    former.keep("other", former.take("other"), now_ns + SECOND)
    assert former.take("used") is used
    former.keep("used", used, now_ns + SECOND)
    for number in range(100):
        owing = former.take(f"other {number}")
        owing.set_caps(LONG, now_ns + 20 * SECOND)
        owing.charge(now_ns + 20 * SECOND, 0, 0.0)
        former.keep(f"other {number}", owing, now_ns + 20 * SECOND)
    assert former.take("used") is not used
    assert former.take("other 0").is_rested(now_ns + 20 * SECOND) is False


def test_many_entries_that_go_at_once_are_looked_at_a_few_times_each(monkeypatch):
    looked, is_rested = [], RateSet.is_rested

    def counted(rates, now_ns):
        looked.append(rates)
        return is_rested(rates, now_ns)

    monkeypatch.setattr(RateSet, "is_rested", counted)
    former, now_ns = FormerRates(TAU), 100 * SECOND
    for number in range(2000):
        rates = former.take(str(number))
        rates.set_caps(LONG, now_ns)
        rates.charge(now_ns, 0, 0.0)
        former.keep(str(number), rates, now_ns)
    assert len(looked) < 4 * 2000


def test_bursts_may_begin_empty_where_it_is_not_known_what_was_used():
    now_ns = 100 * SECOND
    rates = RateSet(TAU, now_ns)
    rates.set_caps(LONG, now_ns)
    assert passes(rates, now_ns) == 1
    assert passes(rates, now_ns + 2 * SECOND) == 200
    late = RateSet(TAU, now_ns)
    late.set_caps(LONG, now_ns + 50 * SECOND)
    assert passes(late, now_ns + 50 * SECOND) == 1001, "a pause that was seen"


@given(st.integers(1, 10**9), st.floats(0.01, 1))
def test_a_whole_rate_that_was_divided_and_added_up_again_is_whole(rate, share):
    assert whole_rate(rate * share + rate * (1 - share)) == rate
    assert whole_rate(rate - 0.001) == rate - 1
