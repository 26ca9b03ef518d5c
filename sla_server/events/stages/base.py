"""What a stage decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StageVerdict(Enum):
    """What becomes of the event for this recipient."""

    SKIP = "skip"
    """The recipient does not get it."""
    HOLD = "hold"
    """It gets it later."""


class StageReason(Enum):
    """Why, as an enum for counts and tests; the text beside it is for people."""

    NOT_ROUTED = "not-routed"
    NOT_ADDRESSED = "not-addressed"
    SILENCED = "silenced"
    QUIET = "quiet"
    BEHIND_HELD = "behind-held"
    OWN_TROUBLE = "own-trouble"
    GATEWAY_GONE = "gateway-gone"
    ALREADY_FIRING = "already-firing"
    OVER = "over"
    PARTNER = "partner"
    """An event of the partner that was delivered there or here."""
    LEFT_TO_PARTNER = "left-to-partner"
    """An event of the partner, which is there, and delivers it."""
    SENT_BY_PARTNER = "sent-by-partner"
    """An event of this server, which the partner has delivered meanwhile."""


@dataclass(frozen=True, slots=True)
class StageDecision:
    """A stage's decision.

    Attributes:
        until_us: with HOLD, when it is looked at again.
    """

    verdict: StageVerdict
    reason: StageReason
    text: str
    until_us: int = 0
