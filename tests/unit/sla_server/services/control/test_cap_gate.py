"""What counts as evidence of the caps last set."""

from sla_server.services.control.cap_gate import CapGate

S = 1_000_000_000


def shut(*gateways: str) -> CapGate:
    gate = CapGate()
    for gateway in gateways:
        gate.wait_for(gateway, 7, 10 * S)
    return gate


def test_a_cut_that_began_before_the_caps_held_is_no_evidence_though_it_comes_later() -> None:
    gate = shut("B")
    gate.confirm("B", 7, 7, began_ns=11 * S)  # it ended at 11.1: B ends a cut when caps come
    assert gate.is_open
    assert not gate.is_evidence(began_ns=11 * S - 1)
    assert gate.is_evidence(began_ns=11 * S)


def test_the_last_gateway_decides() -> None:
    gate = shut("A", "B")
    gate.confirm("B", 7, 7, began_ns=12 * S)
    assert not gate.is_evidence(12 * S)
    gate.confirm("A", 7, 7, began_ns=11 * S)
    assert not gate.is_evidence(11 * S)
    assert gate.is_evidence(12 * S)


def test_others_and_what_was_never_issued_confirm_nothing() -> None:
    gate = shut("A")
    for gateway, gen, issued in (("B", 7, 7), ("A", 6, 7), ("A", -1, 7), ("A", 8, 7)):
        gate.confirm(gateway, gen, issued, 11 * S)
        assert not gate.is_open
    gate.confirm("A", 8, 8, 11 * S)
    assert gate.is_open
