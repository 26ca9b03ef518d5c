"""What ``services`` ordered last: caps of each gateway, and its sign of life.

The book keeps the newest caps of a gateway as an encoded frame, ready to be sent now and again whenever it
registers. Threshold sets are passed on and not kept: ``services`` answers each announcement of a gateway with
its set. It decides nothing: a cap is never changed, invented or dropped here. ``services`` renews
its lease once a second; polls carry ``lease: true`` only while the last renewal is younger than 3 s, so a
dead controller lets all caps expire at the gateways within their own lease.

Thread: belongs to the outbound thread.

Source: P7, P9; DESIGN.md 5 and 6 (leases).
"""

from __future__ import annotations

from typing import Final

from pmdaemon.wire.messages.orders import CapsOrder

LEASE_FRESH_NS: Final = 3 * 10**9  # services renews each second: two renewals may be lost


class StandingCaps:
    """The newest orders of ``services``."""

    def __init__(self) -> None:
        self._caps: dict[str, tuple[int, bytes]] = {}
        self._lease_ns: int | None = None
        self._shortest_us: int | None = None

    def set_caps(self, order: CapsOrder) -> bytes:
        """Keep an order; returns the CAPS frame to send.

        Raises:
            FrameTooLarge: more caps than a folded header holds.
        """
        encoded = order.caps_frame()
        if isinstance(order.lease_us, int):
            self._shortest_us = min(order.lease_us, self._shortest_us or order.lease_us)
        self._caps[order.gateway_id] = (order.gen, encoded)
        return encoded

    def caps_of(self, gateway_id: str) -> tuple[int, bytes] | None:
        """Generation and CAPS frame last ordered for a gateway."""
        return self._caps.get(gateway_id)

    def outlast(self, silence_ns: int) -> bool:
        """Whether no lease of caps ends within so long without a renewal."""
        return self._shortest_us is None or silence_ns < self._shortest_us * 1000

    def renew_lease(self, now_ns: int) -> None:
        """``services`` is alive."""
        self._lease_ns = now_ns

    def lease_is_fresh(self, now_ns: int) -> bool:
        """Whether polls may renew the lease of caps."""
        return self._lease_ns is not None and now_ns - self._lease_ns < LEASE_FRESH_NS
