"""Events about the state of a gateway, which two processes raise: whoever notices first, and who stores it.

``services`` raises them at once, so that people are notified of a lost gateway while the database is away or
dbmanager stands still; dbmanager writes them with the row of the gateway. Both make one event of what
happened: its identity follows from that, and delivery drops the second one.

Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.wire.messages.stored import StoredGateway

NAMESPACE: Final = uuid.UUID("6f0c7a52-5d3b-4f0e-9a51-2f6f0d9c1b77")
SEVERITIES: Final = {
    "up": "info",
    "recovered": "info",
    "stalled": "warning",
    "lost": "critical",
    "stopped": "info",
    "refused": "warning",
}


def event_identity(kind: str, identity: Sequence[object]) -> str:
    """Id of an event, made of what happened."""
    return str(uuid.uuid5(NAMESPACE, "\0".join(str(part) for part in (kind, *identity))))


@dataclass(frozen=True, slots=True)
class GatewayStateEvent:
    """What an event about a state says.

    Attributes:
        epoch: of the gateway; that of its row where the message names none.
    """

    gateway: StoredGateway
    state: str
    epoch: str
    at_us: int

    @property
    def identity(self) -> tuple[object, ...]:
        """Of which its id is made, with its kind."""
        return self.gateway.gateway_id, self.epoch, self.state, self.at_us

    @property
    def shown_state(self) -> str:
        """The state in words for people: an agent that said goodbye is no loss, and no alarm."""
        return "stopped" if self.state == "lost" and self.gateway.is_planned else self.state

    @property
    def kind(self) -> str:
        """Of the event."""
        return f"gateway-{self.shown_state}"

    @property
    def severity(self) -> str:
        """Of the event."""
        return SEVERITIES.get(self.shown_state, "warning")

    @property
    def text(self) -> str:
        """For people."""
        reason = f": {self.gateway.reason}" if self.gateway.reason else ""
        return f"gateway {self.gateway.shown_name} is {self.shown_state}{reason}"

    @property
    def details(self) -> dict[str, Any]:
        """Names that belong to it."""
        gateway = self.gateway
        return {"gateway_id": gateway.gateway_id, "epoch": self.epoch, "address": gateway.address}
