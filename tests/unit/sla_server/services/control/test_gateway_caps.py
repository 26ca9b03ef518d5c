from __future__ import annotations

from pmdaemon.wire.rates import Rates
from sla_server.services.control.gateway_caps import MAX_GEN, GatewayCaps
from sla_server.services.control.settings import ControlSettings

S = 1_000_000_000
SETTINGS = ControlSettings()


def sent(cost: float = 100.0, gen: int = 5) -> GatewayCaps:
    port = GatewayCaps("A")
    port.send({"v": Rates(cost_per_s=cost)}, {"v": Rates(cost_per_s=cost)}, gen, 0)
    return port


def changed(port: GatewayCaps, share: float, whole: float, now_ns: int = 60 * S) -> set[str]:
    return port.changed({"v": Rates(cost_per_s=share)}, {"v": Rates(cost_per_s=whole)}, SETTINGS, now_ns)


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
    port = sent()
    assert port.report(5)
    assert not port.stray(SETTINGS, 60 * S)
    assert not port.report(0)
    assert not port.stray(SETTINGS, 2 * S)
    assert port.stray(SETTINGS, 3 * S)
    port.up = False
    assert not port.stray(SETTINGS, 3 * S)


def test_a_change_within_the_cut_is_waited_out():
    port = sent()
    assert not port.report(-1)
    assert not port.stray(SETTINGS, 60 * S)


def test_empty_and_zero_agree_but_unknown_caps_are_cleared():
    port = GatewayCaps("A")
    port.report(0)
    assert not port.stray(SETTINGS, 60 * S)
    port.report(17)
    assert port.stray(SETTINGS, 60 * S)


def test_adoption_believes_a_generation_that_can_be_it():
    port = GatewayCaps("A")
    port.adopt({"v": Rates(cost_per_s=100)}, {"v": Rates(cost_per_s=100)}, 8, 0)
    assert changed(port, 100, 100) == set()
    assert changed(port, 50, 100) == set()  # the split is not known and not worth a new generation
    assert not port.report(-1)
    assert port.report(9)
    assert port.gen == 9
    assert not port.stray(SETTINGS, 60 * S)


def test_adoption_fails_when_the_gateway_holds_nothing_or_older_caps():
    for reported in (0, 7, MAX_GEN, (1 << 63) - 1):
        port = GatewayCaps("A")
        port.adopt({"v": Rates(cost_per_s=100)}, {"v": Rates(cost_per_s=100)}, 8, 0)
        assert not port.report(reported)
        assert port.stray(SETTINGS, 3 * S)
