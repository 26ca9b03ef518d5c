"""The gate of one backend's loop: which cuts were made wholly under the caps last set.

    shut      from when caps go out until each gateway concerned has shown a cut that was made under them,
              and until what neighbours had sent before has left the storage (``drain``)
    evidence  a cut that comes while the gate is open, and began when those caps held at every gateway

The second does not follow from the first: a gateway ends a cut when caps come, so the one that shows them may
be much shorter than the poll interval, and another gateway's cut that comes after it have begun before.

Times are of the server's monotonic clock. Pure. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from sla_server.services.control.drain import Drain
from sla_server.services.control.sharing import Neighbour


@dataclass(slots=True)
class CapGate:
    """See the module.

    Attributes:
        awaiting: gateways that have shown no such cut yet, and the generation that each was sent.
        waiting_ns: when caps went out last.
        in_force_ns: the caps last set held at every gateway from then on, as their cuts show.
        drain: what neighbours had under way when caps went down.
    """

    awaiting: dict[str, int] = field(default_factory=dict)
    waiting_ns: int = 0
    in_force_ns: int = 0
    drain: Drain = field(default_factory=Drain)

    @property
    def is_confirmed(self) -> bool:
        """Whether every gateway with changed caps has shown a cut made wholly under them."""
        return not self.awaiting

    @property
    def is_open(self) -> bool:
        """The same, and that nothing drains that was sent before."""
        return not self.awaiting and not self.drain.is_on

    def is_evidence(self, began_ns: int) -> bool:
        """Whether a cut that began then, and came now, was made wholly under the caps last set."""
        return self.is_open and began_ns >= self.in_force_ns

    def wait_for(self, gateway_id: str, gen: int, now_ns: int) -> None:
        """Caps of this generation went out; the gate is shut until the gateway shows a cut under them."""
        self.awaiting[gateway_id], self.waiting_ns = gen, now_ns

    def confirm(self, gateway_id: str, throttle_gen: int, issued: int, began_ns: int) -> None:
        """A cut reported the generation held during the whole of it.

        Args:
            gateway_id: whose cut.
            throttle_gen: as reported.
            issued: the newest that the gateway was sent.
            began_ns: when the cut began.
        """
        wanted = self.awaiting.get(gateway_id)
        if wanted is not None and wanted <= throttle_gen <= issued:
            del self.awaiting[gateway_id]
            self.in_force_ns = max(self.in_force_ns, began_ns)

    def follow_drain(self, managed: Collection[Neighbour], most: float, limit_s: float, now_ns: int) -> None:
        """A step of the loop: has what these had under way left?

        Args:
            managed: those with caps.
            most: I/Os that their caps let be under way.
            limit_s: from when caps went out until the gate opens in any case.
            now_ns: monotonic.
        """
        if self.is_confirmed and self.drain.is_on:
            until_ns = self.waiting_ns + round(limit_s * 1e9)
            left_ns = self.drain.check(managed, most, self.in_force_ns, until_ns)
            self.in_force_ns = max(self.in_force_ns, left_ns)
            if now_ns > until_ns:
                self.drain.stop()

    def stop_waiting(self, limit_s: float, now_ns: int) -> None:
        """A gateway that does not confirm in time must not blind the loop; the policy manager reports it."""
        if self.awaiting and now_ns - self.waiting_ns > limit_s * 1e9:
            self.awaiting.clear()
