"""How full the queue of events is, as events: one when it fills, one when it has room again. Pure."""

from __future__ import annotations

from typing import Final

FILLING_RATIO: Final = 0.7
"""Before the recipient that is furthest behind loses events (``engine.FULL_RATIO``)."""
DRAINED_RATIO: Final = 0.5


class FullnessWatch:
    """See the module.

    Args:
        ratio: at the start. A relay of before may have said that its queue fills, so that the end is due.

    Attributes:
        is_filling: between both events.
    """

    def __init__(self, ratio: float) -> None:
        self.is_filling = ratio > DRAINED_RATIO

    def check(self, ratio: float) -> tuple[str, str, str] | None:
        """Kind, severity and text of the event that is due now."""
        if not self.is_filling and ratio >= FILLING_RATIO:
            self.is_filling = True
            return "event-queue-filling", "warning", f"the queue of events is {ratio:.0%} full"
        if self.is_filling and ratio <= DRAINED_RATIO:
            self.is_filling = False
            return "event-queue-drained", "info", "the queue of events has room again"
        return None
