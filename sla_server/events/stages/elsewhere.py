"""Elsewhere: the partner of a cooperating pair has delivered an event, or will (``pair_ledger`` decides).

The first stage: what was delivered before is neither held back nor looked at by any other stage.
"""

from __future__ import annotations

from collections.abc import Callable

from sla_server.events.queue import QueuedEvent
from sla_server.events.stages.base import StageDecision

Elsewhere = Callable[[QueuedEvent, str], StageDecision | None]
"""Whether a recipient does not get an event here; None: it goes on through the stages."""


def nowhere(_item: QueuedEvent, _recipient: str) -> StageDecision | None:
    """There is no partner."""
    return None
