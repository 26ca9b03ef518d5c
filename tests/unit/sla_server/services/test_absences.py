"""Gateways whose session the server itself ended: back in time, or lost after all."""

from __future__ import annotations

from pmdaemon.wire.kinds import Kind
from sla_server.db.ingest.records import check_row
from sla_server.services.health import LIMIT_S, AwaitedGateways
from sla_server.services.startup import Start
from tests.support.services import GATEWAY, Bench
from tests.unit.sla_server.services.test_core import gateway

S = 1_000_000_000


def test_who_is_back_in_time_is_not_missed() -> None:
    book = AwaitedGateways({"g-1": "host-1"}, 0)
    book.await_return("g-2", "host-2", 5 * S)
    book.settled("g-1")
    assert book.overdue(round((LIMIT_S + 4.9) * S), 7) == []
    (stored, (table, event)) = book.overdue(round((LIMIT_S + 5) * S), 7)
    assert (stored[0], stored[1]["gateway_id"], stored[1]["state"]) == ("gateways", "g-2", "lost")
    assert (table, event["kind"], event["subject"], event["at_us"]) == ("events", "gateway-lost", "host-2", 7)
    assert book.overdue(10**15, 8) == []


def test_who_is_detached_again_has_the_whole_time_again() -> None:
    book = AwaitedGateways({"g-1": "host-1"}, 0)
    book.await_return("g-1", "host-1", 50 * S)
    assert book.overdue(100 * S, 7) == []
    assert len(book.overdue(110 * S, 7)) == 2  # its state, and the event


def test_a_gateway_detached_by_a_restart_of_ours_is_lost_only_if_it_stays_away() -> None:
    bench = Bench(Start(awaited={"g-2": "host-2"}))
    bench.message(Kind.GATEWAY, gateway())
    bench.message(Kind.GATEWAY, gateway("detached"))
    assert bench.controller.last("gateway_lost")[0] == GATEWAY  # control does not reckon with it meanwhile
    bench.tick(50)
    bench.message(Kind.GATEWAY, gateway())
    bench.confirm()
    bench.tick(11)
    assert bench.controller.last("gateway_lost")[0] == "g-2"  # shown as up no longer
    rows = bench.confirm()
    (stored,) = [row for table, row in rows if table == "gateways"]
    assert check_row("gateways", stored)[1]["last_seen_us"] == bench.clock.unix_us() - LIMIT_S * 500_000
    (event,) = [row for table, row in rows if table == "events"]
    assert (event["kind"], event["severity"], event["subject"]) == ("gateway-lost", "critical", "host-2")
    bench.tick(100)
    assert bench.records() == []


def test_the_end_of_a_session_taken_after_its_successor_elsewhere_changes_nothing() -> None:
    """A shard move: mailboxes keep no order between the pair that ends and the one that begins."""
    bench = Bench(Start())
    bench.message(Kind.GATEWAY, gateway(), sender="pair-0")
    bench.message(Kind.GATEWAY, gateway(), sender="pair-1")
    for state in ("detached", "lost", "stalled", "recovered"):
        bench.message(Kind.GATEWAY, gateway(state), sender="pair-0")
    assert "gateway_lost" not in bench.controller.names()
    bench.confirm()
    bench.tick(LIMIT_S + 1)
    assert not [row for table, row in bench.confirm() if row.get("kind") == "gateway-lost"]
    bench.message(Kind.GATEWAY, gateway("detached"), sender="pair-1")
    assert bench.controller.last("gateway_lost")[0] == GATEWAY
