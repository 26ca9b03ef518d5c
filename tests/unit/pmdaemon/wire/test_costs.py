"""COSTS: round trips, what a session allows, what an agent refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Hello
from pmdaemon.wire.messages.costs import FITTED_COSTS, MAX_BACKENDS, Costs
from pmdaemon.wire.messages.orders import CostsOrder
from pmdaemon.wire.messages.planes import DpCosts, DpHandOver
from pmdaemon.wire.session import TABLE, SessionState, Side

DISK = {"backend": "disk", "cost_write": 2.5, "cost_bytes": 32768.0}
TAPE = {"backend": "tape", "cost_write": None, "cost_bytes": 1e6}


def test_costs_travel_from_services_to_a_plane_in_the_same_keys() -> None:
    order = CostsOrder.of("gw", Costs(4, (DISK, TAPE)))
    received = CostsOrder.parse(frame.decode(order.encode()).header)
    sent = frame.decode(received.costs_frame())
    assert (received.gateway_id, sent.kind) == ("gw", Kind.COSTS)
    costs = Costs.parse(sent.header)
    assert costs == Costs(4, (DISK, TAPE))
    assert DpCosts.parse(frame.decode(DpCosts(4, costs.backends).encode()).header) == DpCosts(4, (DISK, TAPE))


def test_the_most_backends_with_the_longest_names_fit_a_frame() -> None:
    entries = tuple({**DISK, "backend": f"{number:03}" + "x" * 125} for number in range(MAX_BACKENDS))
    assert len(Costs.parse(frame.decode(Costs(1, entries).encode()).header).backends) == MAX_BACKENDS
    with pytest.raises(FrameTooLarge):
        Costs.parse({"version": 1, "backends": [DISK] * (MAX_BACKENDS + 1)})


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (7, "expected maps"),
        ({**DISK, "backend": "a b"}, "'backend'"),
        ({**DISK, "cost_bytes": None}, "cost_bytes of 'disk' is None"),
        ({**DISK, "cost_bytes": 511}, "from 512 to 1e\\+09"),
        ({**DISK, "cost_write": True}, "cost_write of 'disk' is True"),
        ({**DISK, "cost_write": float("nan")}, "cost_write of 'disk' is nan"),
        ({**DISK, "cost_write": 0}, "from 0.001 to 1000"),
    ],
)
def test_what_no_export_could_charge_is_refused(entry: Any, problem: str) -> None:
    with pytest.raises(MalformedFrame, match=problem):
        Costs.parse({"version": 1, "backends": [entry]})


def test_an_agent_says_that_it_takes_them_and_the_daemon_may_send_them_once_it_is_registered() -> None:
    assert FITTED_COSTS in Hello.of("gw", "g", 7, "s").features
    allowed = {state for state, side, kind in TABLE if (side, kind) == (Side.DAEMON, Kind.COSTS)}
    assert allowed == {SessionState.REGISTERED, SessionState.POLLING}


def test_a_process_of_before_hands_over_no_costs() -> None:
    said = DpHandOver(["unix:x"], None, None, None, 1, 2)
    assert "costs" not in said.header()
    assert DpHandOver.parse(said.header()).costs is None
    with_costs = DpHandOver(["unix:x"], None, None, None, 1, 2, Costs(4, (DISK,)).header())
    received = frame.decode(with_costs.encode()).header
    assert DpHandOver.parse(received).costs == {"version": 4, "backends": [DISK]}
