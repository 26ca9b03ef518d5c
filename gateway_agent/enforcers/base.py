"""What the link asks of an enforcer of caps.

A cap set is complete: a volume it does not name has no cap of the server's. Enforcers answer by *proof*:
``took`` is the generation that was certainly applied, not the one that was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pmdaemon.wire.messages.agent import RATES, CapSet
from pmdaemon.wire.messages.client_caps import caps_client
from pmdaemon.wire.rates import COST_BYTES, NO_CAPS, Rates


class Enforcer(Protocol):
    """One enforcer of caps. Thread: the link's loop only."""

    @property
    def name(self) -> str:
        """Unique within the agent: the plane's name."""

    @property
    def reachable(self) -> bool:
        """Whether caps can be handed over now."""

    @property
    def volumes(self) -> frozenset[str]:
        """Volumes whose caps it enforces; it ignores all others."""

    @property
    def tells_clients(self) -> bool:
        """Whether it knows which client an I/O is of, and holds caps of whole clients."""

    @property
    def took(self) -> int | None:
        """Generation that was certainly applied, None before the first."""

    @property
    def refused(self) -> int | None:
        """Generation that was certainly not applied; the former caps hold."""

    def apply(self, caps: CapSet, lease_us: int) -> None:
        """Hand over a set; ``lease_us`` is what is left of its lease now."""

    def renew_lease(self) -> None:
        """The server renewed the lease of all caps."""

    def lapsed(self) -> None:
        """The lease of the caps has ended: static caps hold from now on."""


def rates_of(entry: Mapping[str, Any]) -> Rates:
    """The rates in an entry of CAPS, or in a static cap of the agent's file."""
    return Rates(*(entry.get(key) for key in RATES))


def without_cost(cap: Rates, mean_bytes: float | None) -> Rates:
    """I/Os and bytes a second that keep a cap, for an enforcer that knows nothing of cost.

    Cost is 1 an I/O and 1 for each 65,536 bytes. So a cap of cost becomes one of I/Os, by their mean size,
    and one of bytes that holds whatever the size. Where sizes are not known each of the two has half of the
    cost: together they never exceed it. A burst is not given: the kernel's groups know none, and QEMU's are
    of another kind; so the rate alone holds, and less passes than the cap allows.

    Args:
        cap: of which all rates hold.
        mean_bytes: of an I/O recently; None where nothing is counted.
    """
    if cap.cost_per_s is None:
        return Rates(cap.ops_per_s, cap.bytes_per_s)
    if mean_bytes is None:
        ops = by_bytes = cap.cost_per_s / 2
    else:
        ops, by_bytes = cap.cost_per_s / (1 + mean_bytes / COST_BYTES), cap.cost_per_s
    found = Rates(cap.ops_per_s, cap.bytes_per_s).tighter(Rates(ops, by_bytes * COST_BYTES))
    return Rates(found.ops_per_s, found.bytes_per_s)


def caps_by_volume(caps: CapSet, client: str) -> dict[str, Rates]:
    """Caps of volumes that have this client alone: a cap of the client is one of its volume."""
    found: dict[str, Rates] = {}
    for entry in (*caps.caps, *(each for each in caps.clients or () if caps_client(each, client))):
        found[entry["volume"]] = found.get(entry["volume"], NO_CAPS).tighter(rates_of(entry))
    return found
