"""Which caps are in force: the static ones of the configuration, and the server's while its lease lives.

The server's set is complete and idempotent: the same generation may come again (a restarted link sends it
anew). It carries a lease; ``renew`` extends it, ``expire`` drops the set. A dropped set does not come back
by a late renewal: the gateway reports generation 0 and the server decides anew.

Both hold together: of static cap and server's cap the smaller one counts. Pure; time is an argument.
"""

from __future__ import annotations

from typing import Any, Final

from gateway_agent.errors import BadCaps
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.rates import LEAST_RATE, MOST_RATE, NO_CAPS, Rates

DEFAULT_LEASE_NS: Final = 30 * 10**9
MAX_LEASE_NS: Final = 3_600 * 10**9  # an hour without a living server would be a static cap, not a lease
NO_GENERATION: Final = 0


def parse_caps(header: dict[str, Any]) -> tuple[int, int, dict[str, Rates]]:
    """Generation, lease in ns and caps by volume, from the header of DP_CAPS.

    Raises:
        BadCaps: a key of the wrong type, a rate that is not above 0, a volume named twice.
    """
    generation, lease_us, entries = header.get("gen"), header.get("lease_us"), header.get("caps")
    if type(generation) is not int or generation < 0 or not isinstance(entries, list):
        raise BadCaps("caps", f"gen {excerpt(generation)} or the list of caps is not well-formed")
    if lease_us is None:
        lease_us = DEFAULT_LEASE_NS // 1000
    if type(lease_us) is not int or not 0 < lease_us <= MAX_LEASE_NS // 1000:
        raise BadCaps(f"caps {generation}", f"lease_us is {excerpt(lease_us)}")
    caps: dict[str, Rates] = {}
    for entry in entries:
        volume = entry.get("volume") if isinstance(entry, dict) else None
        if not isinstance(volume, str) or volume in caps:
            raise BadCaps(
                f"caps {generation}", f"entry {excerpt(entry)} names no volume, or one named before"
            )
        caps[volume] = Rates(
            *(_rate(generation, entry, key) for key in ("ops_per_s", "bytes_per_s", "cost_per_s"))
        )
    return generation, lease_us * 1000, caps


def _rate(generation: int, entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_RATE <= value <= MOST_RATE:
        named = f"{key} of {excerpt(entry['volume'])} is {excerpt(value)}"
        raise BadCaps(f"caps {generation}", f"{named}; a rate is {LEAST_RATE} to {MOST_RATE:g}")
    return float(value)


class CapsInForce:
    """The caps of all volumes of one plane.

    Args:
        static: by volume, from the configuration.
    """

    def __init__(self, static: dict[str, Rates]) -> None:
        self._static = static
        self._server: dict[str, Rates] = {}
        self._lease_ns = DEFAULT_LEASE_NS
        self.generation = NO_GENERATION
        self.lease_end_ns: int | None = None

    def apply(self, header: dict[str, Any], now_ns: int) -> int:
        """Take a DP_CAPS header; returns how many volumes it caps.

        Raises:
            BadCaps: malformed; nothing has changed.
        """
        generation, lease_ns, caps = parse_caps(header)
        self.generation, self._lease_ns, self._server = generation, lease_ns, caps
        self.lease_end_ns = now_ns + lease_ns
        return len(caps)

    def renew(self, now_ns: int) -> None:
        """The server lives: extend the lease of the set in force, if there is one."""
        if self.lease_end_ns is not None:
            self.lease_end_ns = now_ns + self._lease_ns

    def expire(self, now_ns: int) -> bool:
        """Drop the server's set if its lease has run out; returns whether that happened now."""
        if self.lease_end_ns is None or now_ns < self.lease_end_ns:
            return False
        self.generation, self._server, self.lease_end_ns = NO_GENERATION, {}, None
        return True

    def of(self, volume: str) -> Rates:
        """What holds for one volume."""
        return self._static.get(volume, NO_CAPS).tighter(self._server.get(volume, NO_CAPS))
