"""Gateways whose session the server itself ended, or forgot in a restart: do they come back?

A pair that stops says ``detached``, not ``lost``: the fault is ours, and the agent dials in again within
seconds, so nobody is alarmed. One that has not come back when ``LIMIT_S`` is over is lost after all: that
is said once and stored, so that the next restart does not await it again.

Plain state, no clock. Belongs to the main loop of ``services``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sla_server.services.rows import Rows, event_row

LIMIT_S: Final = 60.0
"""PMDaemon pauses at most 10 s before its restart, agents at most 5 s between two tries (their default)."""
REASON: Final = f"has not come back within {LIMIT_S:g} s of the server's own restart"


class AwaitedGateways:
    """Who is awaited, by gateway_id: its name and until when (monotonic ns)."""

    def __init__(self, awaited: Mapping[str, str], now_ns: int) -> None:
        self._due: dict[str, tuple[str, int]] = {}
        for gateway_id, name in awaited.items():
            self.await_return(gateway_id, name, now_ns)

    def await_return(self, gateway_id: str, name: str, now_ns: int) -> None:
        """Its session ended by our doing."""
        self._due[gateway_id] = name, now_ns + round(LIMIT_S * 1e9)

    def settled(self, gateway_id: str) -> None:
        """It is back, or its loss was told."""
        self._due.pop(gateway_id, None)

    def overdue(self, now_ns: int, now_us: int) -> Rows:
        """Of those that did not come back in time, once each: the new state of ``gateways``, and an event.

        The state is stored only if SQL saw nothing of it meanwhile either: a return that is on its way to us
        must not be overwritten.
        """
        late = {gateway_id: name for gateway_id, (name, due_ns) in self._due.items() if now_ns >= due_ns}
        rows: Rows = []
        for gateway_id, name in late.items():
            del self._due[gateway_id]
            unseen_us = now_us - round(LIMIT_S / 2 * 1e6)  # half: what is on its way, and clocks that are set
            state = {"gateway_id": gateway_id, "state": "lost", "reason": REASON, "last_seen_us": unseen_us}
            text, details = f"gateway {name} {REASON}", {"gateway_id": gateway_id}
            rows.append(("gateways", state))
            rows.append(event_row("gateway-lost", "critical", "gateway", name, text, now_us, details))
        return rows
