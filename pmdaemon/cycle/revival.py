"""Has ``services`` restarted? Then it knows no gateway, and every session must be announced to it again.

Its sign is a SET_THRESHOLDS, which it posts at its start. But it also posts one in answer to each GATEWAY up
(a new pair may not have the set), and answering that with announcements would never end. So:

    header has ``inc`` (incarnation)    restarted if it differs from the last one; exact
    no ``inc``, no GATEWAY up was       nobody prompted it: it has started, or its agreements changed;
    posted since the last set           announcing once too often is harmless
    no ``inc``, prompted                an echo, unless LEASE, due each second, had paused: then it died
                                        between our announcement and its answer

Thread: ``prompted`` by the inbound thread, the rest by the outbound thread. The one shared word is a bool.

Source: docs/formats/messages.md (restarts).
"""

from __future__ import annotations

from typing import Any, Final

PAUSE_NS: Final = 1_600_000_000  # a lease is due each second; a process cannot die and be back much faster


class RevivalWatch:
    """Decides on each SET_THRESHOLDS whether it is the sign of a new ``services``."""

    def __init__(self) -> None:
        self._was_prompted = False
        self._incarnation: int | None = None
        self._lease_ns: int | None = None
        self._has_paused = True

    def prompted(self) -> None:
        """A GATEWAY up is on its way to services: one SET_THRESHOLDS will come back."""
        self._was_prompted = True

    def lease(self, now_ns: int) -> None:
        """A LEASE arrived."""
        if self._lease_ns is None or now_ns - self._lease_ns > PAUSE_NS:
            self._has_paused = True
        self._lease_ns = now_ns

    def has_restarted(self, header: dict[str, Any], now_ns: int) -> bool:
        """A SET_THRESHOLDS arrived: whether every session must be announced again."""
        incarnation = header.get("inc")
        if type(incarnation) is int:
            is_new, self._incarnation = incarnation != self._incarnation, incarnation
            return is_new
        silent = self._lease_ns is not None and now_ns - self._lease_ns > PAUSE_NS
        is_echo = self._was_prompted and not self._has_paused and not silent
        self._was_prompted = False
        self._has_paused = False
        return not is_echo
