"""Events about gateways that are lost, stalled or back, raised when ``services`` hears of them.

dbmanager raises the same ones when it stores the state, in a transaction: while the database is away, or
dbmanager stands still, that is minutes or hours later. The two are one event (``sla_server.gateway_states``).
What is no news without the stored row (a gateway that comes for the first time, or is back after a restart of
the server) is left to dbmanager.

State: what was heard last of each gateway; of one that did not answer when the server ended its session,
that. Thread: the main loop.
"""

from __future__ import annotations

from typing import Final

from pmdaemon import reserve
from pmdaemon.wire.messages.stored import StoredGateway
from sla_server.gateway_states import GatewayStateEvent, event_identity
from sla_server.rows import Row

GONE: Final = ("lost", "stalled")
BACK: Final = ("up", "recovered")


class GatewayStates:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}  # state and epoch

    def is_lost(self, gateway_id: str) -> None:
        """It was reported as lost by us, because it has not come back: its return is news."""
        self._known[gateway_id] = "lost", self._known.get(gateway_id, ("", ""))[1]

    def event(self, gateway: StoredGateway) -> Row | None:
        """The event that follows from a message about a gateway, if any."""
        state, before = gateway.state, self._known.get(gateway.gateway_id, ("", ""))
        epoch = gateway.epoch or before[1]
        if state == "detached" and before[0] == "stalled":
            return None  # its return is news
        self._known[gateway.gateway_id] = state, epoch
        is_back = state in BACK and before[0] in GONE
        is_gone = state in GONE and before != (state, epoch)
        if gateway.at_us is None or not (is_back or is_gone):
            return None
        said = GatewayStateEvent(gateway, state, epoch, gateway.at_us)
        event_id = event_identity(said.kind, said.identity)
        return reserve.event_row(
            said.kind,
            said.severity,
            "gateway",
            gateway.shown_name,
            said.text,
            said.at_us,
            said.details,
            event_id,
        )
