from __future__ import annotations

import numpy as np
import pytest

from pmdaemon.wire.rates import Rates
from sla_server.services.control.client_use import ClientUse
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.stream_states import Span
from sla_server.services.control.throttle import LEAST, MAX_GEN, GatewayCaps, Throttle, exceeds
from sla_server.services.control.usage import Usage, UsageTable

S = 1_000_000_000
SETTINGS = ControlSettings()


@pytest.fixture
def throttle() -> Throttle:
    return Throttle("t", "v", "disk", "control", Rates(cost_per_s=100.0), "promise-violated", "text")


def use_of(cost: float, ops: float, size: float = 0.0, inflight: int = 0) -> Usage:
    """A place whose newest cut lasted a second."""
    usage_table = UsageTable()
    place = usage_table.allot("v", "disk")
    sums = np.array([[cost * 1000], [ops], [size], [0.0], [inflight], [0.0], [0.0], [0.0]])
    span = Span(np.zeros(1), np.full(1, 1e6), np.zeros(1, np.int64))
    usage_table.update(np.array([place]), sums, np.ones(1), span, np.ones(1, np.bool_))
    return Usage(usage_table, place)


def used(cost: float) -> Usage:
    return use_of(cost, cost)


def measure(throttle: Throttle, gateway: str, cost: float, inflight: int = 0) -> bool:
    use = use_of(cost, cost, inflight=inflight)
    return throttle.measured(gateway, Rates(cost_per_s=100.0), use, 1.0, SETTINGS, 9)


def test_its_life(throttle):
    throttle.issued("A", 5, 0)
    throttle.issued("B", 5, 0)
    assert (throttle.state, throttle.gen) == ("requested", 5)
    assert not throttle.confirmed("A", 4, 1)
    assert not throttle.confirmed("A", 5, 1)  # B is still missing
    assert throttle.confirmed("B", 5, 2)
    assert (throttle.state, throttle.confirmed_us) == ("confirmed", 2)
    assert not measure(throttle, "A", 90)
    assert measure(throttle, "B", 100)
    assert throttle.row()["state"] == "seen"
    assert throttle.row()["seen_us"] == 9


def test_a_change_must_be_proved_again(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    measure(throttle, "A", 90)
    throttle.issued("A", 6, 0)
    assert (throttle.state, throttle.confirmed_us, throttle.seen_us) == ("requested", None, None)


def test_three_cuts_above_the_cap_are_said_once(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for _ in range(3):  # of the first it is not known what was at the storage before
        measure(throttle, "A", 200)
        assert throttle.failure(SETTINGS, S) == ""
    measure(throttle, "A", 200)
    assert "gateway A" in throttle.failure(SETTINGS, S)
    measure(throttle, "A", 200)
    assert throttle.failure(SETTINGS, S) == ""
    assert throttle.state == "confirmed"


def test_a_cut_within_the_cap_ends_the_count(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for cost in (200, 200, 200, 100, 200, 200):
        measure(throttle, "A", cost)
    assert throttle.failure(SETTINGS, S) == ""


def test_a_deep_queue_that_empties_is_no_cap_without_effect(throttle):
    """400 I/Os were sent before the cap of 100 a second: 200 a second complete, and half as many are sent."""
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for inflight in (400, 300, 200, 100, 0):
        assert not measure(throttle, "A", 200, inflight)
        assert throttle.failure(SETTINGS, S) == ""
    assert measure(throttle, "A", 100, 0), "seen"


def test_a_queue_that_does_not_empty_was_let_in(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for inflight in (400, 400, 430, 400):
        assert not measure(throttle, "A", 200, inflight)
    assert "gateway A" in throttle.failure(SETTINGS, S)


def test_not_confirmed_in_time(throttle):
    throttle.issued("A", 5, 0)
    assert throttle.failure(SETTINGS, 5 * S) == ""
    assert "not confirmed" in throttle.failure(SETTINGS, 6 * S)


def test_a_lost_gateway_has_nothing_to_prove(throttle):
    throttle.issued("A", 5, 0)
    throttle.forget("A")
    assert throttle.failure(SETTINGS, 60 * S) == ""


@pytest.mark.parametrize(("cost", "is_above"), [(100, False), (117, False), (120, True)])
def test_tolerance(cost, is_above):
    assert exceeds(Rates(cost_per_s=100.0), used(cost), 1.0, 0.15) is is_above


def test_ops_and_bytes_are_measured_too():
    use = use_of(0, 50, 50 * 4096)
    assert exceeds(Rates(ops_per_s=10.0), use, 1.0, 0.15)
    assert exceeds(Rates(bytes_per_s=4096.0 * 10), use, 1.0, 0.15)
    assert not exceeds(Rates(bytes_per_s=4096.0 * 50, ops_per_s=50.0), use, 1.0, 0.15)


def test_rates():
    assert Rates(cost_per_s=5, ops_per_s=1).tighter(Rates(cost_per_s=4, bytes_per_s=9)) == Rates(1, 9, 4)
    assert Rates().is_open
    assert Rates(cost_per_s=10).scaled(0.01).at_least(LEAST) == Rates(cost_per_s=1.0)
    assert Rates(cost_per_s=100).differs(Rates(cost_per_s=98), 0.01)
    assert not Rates(cost_per_s=100).differs(Rates(cost_per_s=99.5), 0.01)
    assert Rates(cost_per_s=1).differs(Rates(ops_per_s=1), 0.5)


def sent(cost: float = 100.0, gen: int = 5) -> GatewayCaps:
    gateway = GatewayCaps("A")
    gateway.send({"v": Rates(cost_per_s=cost)}, {"v": Rates(cost_per_s=cost)}, gen, 0)
    return gateway


def changed(gateway: GatewayCaps, share: float, total: float, now_ns: int = 60 * S) -> set[str]:
    return gateway.changed({"v": Rates(cost_per_s=share)}, {"v": Rates(cost_per_s=total)}, SETTINGS, now_ns)


def test_nothing_changed_nothing_sent():
    assert changed(sent(), 100, 100) == set()
    assert changed(sent(), 100.5, 100.5) == set()


def test_a_changed_rate_is_sent_at_once():
    assert changed(sent(), 90, 90, now_ns=1) == {"v"}
    assert sent().changed({}, {}, SETTINGS, 1) == {"v"}


def test_another_split_waits_and_must_be_worth_it():
    assert changed(sent(), 80, 100, now_ns=4 * S) == set()
    assert changed(sent(), 80, 100, now_ns=6 * S) == {"v"}
    assert changed(sent(), 95, 100, now_ns=6 * S) == set()


def test_a_gateway_that_holds_something_else_is_stray_after_a_while():
    gateway = sent()
    assert gateway.report(5)
    assert not gateway.stray(SETTINGS, 60 * S)
    assert not gateway.report(0)
    assert not gateway.stray(SETTINGS, 2 * S)
    assert gateway.stray(SETTINGS, 3 * S)
    gateway.up = False
    assert not gateway.stray(SETTINGS, 3 * S)


def test_a_change_within_the_cut_is_waited_out():
    gateway = sent()
    assert not gateway.report(-1)
    assert not gateway.stray(SETTINGS, 60 * S)


def test_empty_and_zero_agree_but_unknown_caps_are_cleared():
    gateway = GatewayCaps("A")
    gateway.report(0)
    assert not gateway.stray(SETTINGS, 60 * S)
    gateway.report(17)
    assert gateway.stray(SETTINGS, 60 * S)


def test_adoption_believes_a_generation_that_can_be_it():
    gateway = GatewayCaps("A")
    gateway.adopt({"v": Rates(cost_per_s=100)}, {"v": Rates(cost_per_s=100)}, 8, 0)
    assert changed(gateway, 100, 100) == set()
    assert changed(gateway, 50, 100) == set()  # the split is not known and not worth a new generation
    assert not gateway.report(-1)
    assert gateway.report(9)
    assert gateway.gen == 9
    assert not gateway.stray(SETTINGS, 60 * S)


def test_adoption_fails_when_the_gateway_holds_nothing_or_older_caps():
    for reported in (0, 7, MAX_GEN, (1 << 63) - 1):
        gateway = GatewayCaps("A")
        gateway.adopt({"v": Rates(cost_per_s=100)}, {"v": Rates(cost_per_s=100)}, 8, 0)
        assert not gateway.report(reported)
        assert gateway.stray(SETTINGS, 3 * S)


def test_each_repetition_waits_twice_as_long_up_to_a_lease():
    gateway = sent()
    gateway.report(0)
    waited = []
    for _ in range(6):
        issued_s = gateway.issued_ns // S
        waited.append(next(s for s in range(1, 60) if gateway.stray(SETTINGS, (issued_s + s) * S)))
        gateway.send(
            gateway.issued, gateway.totals, gateway.gen + 1, (issued_s + waited[-1]) * S, is_repeat=True
        )
    assert waited == [3, 6, 12, 24, 30, 30]
    assert gateway.report(gateway.gen, gateway.issued_ns + S)
    gateway.report(0)
    assert gateway.stray(SETTINGS, gateway.issued_ns + 3 * S)


def test_over_a_slow_link_a_confirmation_may_take_longer_than_the_last_one_did():
    gateway = sent()
    assert gateway.report(5, gateway.issued_ns + 6 * S)
    gateway.report(0)
    assert not gateway.stray(SETTINGS, gateway.issued_ns + 8 * S)
    assert gateway.stray(SETTINGS, gateway.issued_ns + 9 * S)


def test_bursts_of_which_none_lasts_for_three_cuts_are_found_out(throttle):
    """A cut without demand between two above the cap proves nothing; it is said once, not with each burst."""
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    found = []
    for cost in (100, *(200, 0, 10) * 6):
        measure(throttle, "A", cost)
        found.append(throttle.failure(SETTINGS, S))
    assert [text for text in found if text] == ["measured above the cap in 3 cuts at gateway A"]
    assert found[7], "with the third burst"


def test_cuts_above_the_cap_that_are_far_apart_have_nothing_in_common(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    for _ in range(4):
        for cost in (200, *[0] * 60):
            measure(throttle, "A", cost)
            assert throttle.failure(SETTINGS, S) == ""


def test_a_cut_that_held_ios_back_shows_that_a_cap_holds(throttle):
    throttle.issued("A", 5, 0)
    throttle.confirmed("A", 5, 1)
    measure(throttle, "A", 100)
    for _ in range(4):
        measure(throttle, "A", 200)
        use = ClientUse(last_cost_per_s=20, last_ops_per_s=20, held=3)
        throttle.measured("A", Rates(cost_per_s=100.0), use, 1.0, SETTINGS, 9)
    assert throttle.failure(SETTINGS, S) == ""


def test_changes_without_end_do_not_put_off_what_is_not_confirmed(throttle):
    for second in range(5):
        throttle.issued("A", 5 + second, second * S)
        assert not throttle.confirmed("A", 4, 1), "held before"
        assert throttle.failure(SETTINGS, second * S) == ""
    throttle.issued("A", 10, 5 * S)
    assert throttle.failure(SETTINGS, 5 * S + 1) == "not confirmed within 5 s by gateway A"


def test_a_gateway_that_confirms_each_change_after_the_next_one_is_slow_and_not_deaf(throttle):
    for second in range(20):
        throttle.issued("A", 5 + second, second * S)
        throttle.confirmed("A", 2 + second, 1)
        assert throttle.failure(SETTINGS, second * S) == ""
    assert throttle.confirmed("A", 24, 1)


def test_a_gateway_that_shows_the_same_old_caps_again_and_again_makes_no_progress(throttle):
    throttle.issued("A", 5, 0)
    throttle.issued("A", 6, S)
    for second in range(2, 7):
        throttle.confirmed("A", 5, 1)
        assert throttle.failure(SETTINGS, second * S) == ""
    assert throttle.failure(SETTINGS, 6 * S + 1)
