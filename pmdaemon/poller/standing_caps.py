"""What ``services`` ordered last: caps of each gateway, and its sign of life.

The book keeps the newest caps of a gateway as an encoded frame, ready to be sent now and again whenever it
registers. Threshold sets are passed on and not kept: ``services`` answers each announcement of a gateway with
its set. It decides nothing: a cap is never changed, invented or dropped here. ``services`` renews
its lease once a second; polls carry ``lease: true`` only while the last renewal is younger than 3 s, so a
dead brain lets all caps expire at the gateways within their own lease.

Thread: belongs to the outbound thread.

Source: P7, P9; DESIGN.md 5 and 6 (leases).
"""

from __future__ import annotations

from typing import Any, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

LEASE_FRESH_NS: Final = 3 * 10**9  # services renews each second: two renewals may be lost
_END_OF_GENERATIONS: Final = 1 << 63  # an agent takes none from here on


class StandingCaps:
    """The newest orders of ``services``."""

    def __init__(self) -> None:
        self._caps: dict[str, tuple[int, bytes]] = {}
        self._lease_ns: int | None = None

    def set_caps(self, header: dict[str, Any]) -> tuple[str, int, bytes]:
        """Take a SET_CAPS: (gateway_id, generation, the CAPS frame to send).

        Raises:
            MalformedFrame: ``gw`` or ``gen`` is missing, of the wrong type, or no agent would take it.
            FrameTooLarge: more caps than a frame holds.
        """
        gateway_id, gen = header.get("gw"), header.get("gen")
        if not isinstance(gateway_id, str) or type(gen) is not int or not 0 <= gen < _END_OF_GENERATIONS:
            raise MalformedFrame(f"SET_CAPS for gateway {excerpt(gateway_id)}, generation {excerpt(gen)}")
        body = {key: value for key, value in header.items() if key != "gw"}
        encoded = frame.encode(Kind.CAPS, body)
        self._caps[gateway_id] = (gen, encoded)
        return gateway_id, gen, encoded

    def inherit(self, gateway_id: str, gen: int, encoded: bytes) -> None:
        """Caps of a gateway that has moved here from another pair; a newer order taken here stays."""
        known = self._caps.get(gateway_id)
        if known is None or known[0] < gen:
            self._caps[gateway_id] = (gen, encoded)

    def caps_of(self, gateway_id: str) -> tuple[int, bytes] | None:
        """Generation and CAPS frame last ordered for a gateway."""
        return self._caps.get(gateway_id)

    def renew_lease(self, now_ns: int) -> None:
        """``services`` is alive."""
        self._lease_ns = now_ns

    def lease_is_fresh(self, now_ns: int) -> bool:
        """Whether polls may renew the lease of caps."""
        return self._lease_ns is not None and now_ns - self._lease_ns < LEASE_FRESH_NS


def thresholds_order(header: dict[str, Any]) -> tuple[str, bytes]:
    """Read a SET_THRESHOLDS: (gateway_id, the THRESHOLDS frame to send).

    Raises:
        MalformedFrame: ``gw`` or ``version`` is missing or of the wrong type.
    """
    gateway_id, version = header.get("gw"), header.get("version")
    if not isinstance(gateway_id, str) or type(version) is not int:
        raise MalformedFrame(f"SET_THRESHOLDS for gateway {excerpt(gateway_id)}, version {excerpt(version)}")
    return gateway_id, frame.encode(Kind.THRESHOLDS, {key: header[key] for key in header if key != "gw"})
