"""Caps of one NBD data plane: DP_CAPS over its control socket.

The plane does not acknowledge DP_CAPS. But its control socket keeps order, so the answer to a DP_COLLECT that
was sent *behind* a DP_CAPS shows what became of it: its ``tg`` is -1 (the caps changed within this cut) or
the generation itself. Another ``tg`` may be an older cut that the plane had kept; twice in a row it
means that the plane refused the caps, as it does with values it cannot apply (its own log says why).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway_agent.sources.nbd import NbdSource
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.messages.planes import DpCaps, DpLease

CHANGED_WITHIN: Final = -1
DENIALS: Final = 2  # the first answer may be a cut kept from before the caps


class NbdEnforcer:
    """See ``Enforcer``. State: the generation sent last, which answers count for it, and what they said."""

    tells_clients = True

    def __init__(
        self,
        name: str,
        send: Callable[[bytes], None],
        source: NbdSource,
        configured: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self._configured = configured
        self._send = send
        self._source = source
        self.reachable = False
        self.took: int | None = None
        self._sent_gen: int | None = None
        self._proof_at = 0
        self._denials = 0

    def configure(self, volumes: frozenset[str]) -> None:
        """The agent's file says that the plane serves these."""
        self._configured = volumes

    def connected(self) -> None:
        """The control socket is open: nothing is proved on it yet."""
        self.reachable = True
        self._sent_gen = self.took = None

    def disconnected(self) -> None:
        """The control socket is gone."""
        self.reachable = False
        self._sent_gen = self.took = None

    @property
    def volumes(self) -> frozenset[str]:
        """See ``Enforcer``: those in the agent's file, also while the plane is not there."""
        return self._configured | {export["volume"] for export in self._source.exports()}

    @property
    def refused(self) -> int | None:
        """See ``Enforcer``."""
        return self._sent_gen if self._denials >= DENIALS else None

    def apply(self, caps: CapSet, lease_us: int) -> None:
        """See ``Enforcer``."""
        self._sent_gen, self.took, self._denials = caps.gen, None, 0
        # A question that is open now was sent before the caps: only the next one's answer proves anything.
        self._proof_at = self._source.questions + 1
        sets = caps.caps, caps.clients, caps.groups, caps.whole_clients
        self._send(DpCaps(caps.gen, lease_us, *sets).encode())

    def renew_lease(self) -> None:
        """See ``Enforcer``."""
        if self.reachable:
            self._send(DpLease().encode())

    def lapsed(self) -> None:
        """See ``Enforcer``: the plane counts the lease itself, also while the link is not there."""

    def source_answered(self) -> None:
        """The source received a DP_CUT: find which generation it was made under."""
        sample = self._source.sample
        if self._sent_gen is None or sample is None or self._source.answers < self._proof_at:
            return
        if sample.throttle_gen in (CHANGED_WITHIN, self._sent_gen):
            self.took = self._sent_gen
        elif not sample.more:
            self._denials += 1
