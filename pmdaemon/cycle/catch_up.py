"""How much backlog a pair asks its gateways for, so that catching up leaves room for the present.

After an outage every gateway of a fleet holds a backlog, and each answer may carry 256 KB of it: thirty times
what the present needs. Asked for by all at once, it fills the pair, dbmanager and the database, and answers
come late, on which control depends. So a poll of a gateway that is behind asks for backlog only while this
budget lasts; otherwise it asks for the newest cut alone, as during a pause (``cycle.pause``). Gateways that
have caught up need none of the budget, so those that wait get their turn.

A token is one answer of up to ``BACKLOG_BYTES``. Pure; thread: outbound only. Source: DESIGN.md 4 ("paced").
"""

from __future__ import annotations

from typing import Final

BACKLOG_BYTES: Final = 256 << 10  # of cuts in one answer, at most (gateway_agent.link.reply)
SAVED_S: Final = 0.25  # what was not asked for is forgotten after this long: no burst after a quiet time


class CatchUp:
    """A token bucket of backlog answers.

    Args:
        bytes_per_s: backlog asked for at most, over all gateways of the pair.
    """

    __slots__ = ("_filled_ns", "_per_ns", "_tokens", "most")

    def __init__(self, bytes_per_s: int) -> None:
        self._per_ns = bytes_per_s / BACKLOG_BYTES / 1e9
        self.most = max(1.0, self._per_ns * SAVED_S * 1e9)
        self._tokens = self.most
        self._filled_ns: int | None = None

    def grant(self, now_ns: int) -> bool:
        """Whether a gateway that is behind may be asked for backlog now; takes a token if so."""
        if self._filled_ns is not None:
            self._tokens = min(self.most, self._tokens + (now_ns - self._filled_ns) * self._per_ns)
        self._filled_ns = now_ns
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
