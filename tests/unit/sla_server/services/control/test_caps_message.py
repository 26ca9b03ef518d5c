"""Which caps go into the message to a gateway."""

from __future__ import annotations

import pytest

from pmdaemon.wire.messages.agent import CLIENT_CAPS, LARGE_CAPS, CapSet
from pmdaemon.wire.messages.orders import CapsOrder
from pmdaemon.wire.rates import Rates
from sla_server.services.control.caps_message import entries, fitting
from tests.support.worlds import A, Feeder, caps_of, controller, events_of

LONG = "x" * 120


def shares(volumes: int, clients: int) -> dict[str, Rates]:
    """Rates that rise with the number in the name."""
    found = {f"v{n:04}{LONG}": Rates(cost_per_s=1.0 + n) for n in range(volumes)}
    return found | {f"v{LONG}/c{n:04}{LONG}": Rates(ops_per_s=1.0 + n) for n in range(clients)}


@pytest.mark.parametrize(("is_large", "volumes", "clients"), [(False, 3, 400), (True, 40, 3000)])
def test_what_is_chosen_fits_and_is_what_uses_most(is_large, volumes, clients):
    wanted = shares(volumes, clients)
    found = fitting(wanted, is_large)
    caps, of_clients, *_ = entries(found)
    encoded = CapsOrder.of(A, CapSet(1 << 52, 30_000_000, tuple(caps), tuple(of_clients))).encode()
    assert (len(encoded) < 66_000) is not is_large
    assert len(caps) == volumes
    assert 100 < len(of_clients) < clients
    assert {cap["ops_per_s"] for cap in of_clients} == {
        1.0 + n for n in range(clients - len(of_clients), clients)
    }


def test_what_a_gateway_holds_keeps_its_place_while_use_is_noisy():
    wanted = {t: Rates(cost_per_s=100.0) for t in shares(0, 1000)}
    held = fitting(wanted, is_large=False)
    noisy = {t: Rates(cost_per_s=90.0 if t in held else 110.0) for t in wanted}
    assert fitting(noisy, is_large=False, held=held).keys() == held.keys()
    greedy = max(wanted.keys() - held.keys())
    much = {**noisy, greedy: Rates(cost_per_s=200.0)}
    found = fitting(much, is_large=False, held=held)
    assert greedy in found
    assert len(held.keys() - found.keys()) == 1, "one made room"


def test_as_a_rule_all_fit():
    wanted = shares(50, 50)
    assert fitting(wanted, is_large=False) == wanted
    assert fitting(shares(100, 1000), is_large=True) == shares(100, 1000)


def test_an_entry_with_the_longest_names_fits_and_is_no_longer_than_reckoned():
    volume, client = "v" * 128, "c" * 128
    (entry,) = entries({f"{volume}/{client}": Rates(1 / 3, 1 / 3, 1 / 3)})[1]
    alone = CapsOrder.of(A, CapSet(1 << 52, 1 << 50, (), (entry,))).encode()
    more = CapsOrder.of(A, CapSet(1 << 52, 1 << 50, (), (entry,) * 101)).encode()
    assert (len(more) - len(alone)) / 100 <= 96 + 257


def throttled(features: tuple[str, ...]):
    """A gateway with 300 clients that are throttled by hand; the decisions of a tick."""
    names = [f"c{n:03}{LONG}" for n in range(300)]
    fed = Feeder(controller(()), (A, tuple(f"erp{LONG}/{name}" for name in names)), features=features)
    for number, name in enumerate(names):
        fed.controller.manual_set(f"t{number}", f"erp{LONG}", ops_per_s=100.0 + number, client=name)
    return fed, fed.step()


def test_an_agent_of_before_is_sent_what_it_takes_and_the_rest_is_named_once():
    fed, found = throttled((CLIENT_CAPS,))
    sent = caps_of(found, A)
    assert 150 < len(sent.clients) < 200
    (event,) = events_of(found, "throttle-not-effective")
    assert (event.element, event.details["left_out"]) == ("gateway", 300 - len(sent.clients))
    assert "upgrade its agent" in event.text
    assert event.text.count("/c") == 10, "it names a few"
    assert events_of(fed.step((A, {}, sent.gen)), "throttle-not-effective") == []
    for number in range(200):
        fed.controller.manual_release(throttle_id=f"t{number}")
    assert len(caps_of(fed.step((A, {}, sent.gen)), A).clients) == 100


def test_an_agent_of_now_is_sent_all():
    _, found = throttled((CLIENT_CAPS, LARGE_CAPS))
    assert len(caps_of(found, A).clients) == 300
    assert events_of(found, "throttle-not-effective") == []
