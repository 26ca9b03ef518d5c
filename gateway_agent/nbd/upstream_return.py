"""Attempts to reach an upstream again that has gone, until one succeeds or their time has passed.

One after another, from the plan of the connection that was lost. A client goes on with another connection
only if that can lose or repeat nothing (``ReturnRule``):

    no change is under way         one that was sent may be done late, after a newer one to the same place
    all that was acknowledged is   a restart may have lost it, and no later answer would say so (``ledger``)
    stable
    no flush has failed since      what is lost may be said on connections from before only (``ledger``)
    the client came
    nothing was answered before    the rest of its payload would be requests to another connection
    it was sent whole
    no other process of this       its changes are not known here (``ledger.OtherProcess``)
    plane, by an upgrade

Thread: the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway_agent.errors import GatewayError
from gateway_agent.nbd.buffers import COMMAND, RequestBuffer
from gateway_agent.nbd.ledger import ChangeLedger, OtherProcess
from gateway_agent.nbd.loop import EventLoop, OnFailure
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.replies import CHANGES, AskedRequests
from gateway_agent.nbd.upstream import Upstream, UpstreamOpening, UpstreamPlan

AGAIN_NS: Final = 200_000_000  # between two attempts


class ReturnRule:
    """Whether a client may go on with another connection; see the module docstring.

    Attributes:
        counted: where its changes are counted, if they are.

    Args:
        ledger: of its upstream; None: it changes nothing, and so can lose nothing.
        is_counted: whether its changes are in the ledger.
        other: whether the ledger can be believed.
    """

    def __init__(self, ledger: ChangeLedger | None, other: OtherProcess, *, is_counted: bool) -> None:
        self._ledger = ledger
        self._other = other
        self._failed_before = ledger.failed_flushes if ledger is not None else 0
        self.counted = ledger.joined() if ledger is not None and is_counted else None
        if ledger is not None and self.counted is None:
            ledger.uncounted(1)

    def may_open(self) -> bool:
        """Whether a new connection would say, too, if something is lost that the client wrote."""
        return self._ledger is None or self._ledger.failed_flushes == self._failed_before

    def allows(self, asked: AskedRequests, requests: RequestBuffer, *, is_back: bool) -> bool:
        """Whether it may go on, having asked this.

        Args:
            asked: what has no answer.
            requests: what it sent.
            is_back: the upstream has returned. Before, others may not know yet what became of their changes.
        """
        if self._other.may_serve or is_torn(asked, requests) or not self.may_open():
            return False
        if any(request[COMMAND] in CHANGES for request in asked.sent(requests.sent_pos)):
            return False
        ledger, counted = self._ledger, self.counted
        if ledger is None:
            return True
        is_stable = counted is not None and counted.is_covered
        return is_stable and (not is_back or ledger.is_quiet(asked.changes))

    def has_returned(self) -> None:
        """It goes on with another connection."""
        if self._ledger is not None and self.counted is not None:
            self._ledger.renewed(self.counted)

    def ended(self) -> None:
        """Nothing of the client is under way any more."""
        if self._ledger is None:
            return
        if self.counted is not None:
            self._ledger.left(self.counted)
        else:
            self._ledger.uncounted(-1)


def is_torn(asked: AskedRequests, requests: RequestBuffer) -> bool:
    """Whether a request was sent in part and has its answer already: no other connection takes the rest."""
    return not requests.is_drained and not asked.has_byte(requests.sent_pos)


class UpstreamReturn:
    """See the module docstring. Calls one of ``on_back`` and ``on_late`` once, never from its constructor.

    Args:
        loop: what watches the attempts.
        plan: how to reach the upstream.
        for_ns: how long to try.
        on_back: gets the new connection, in transmission and not watched.
        on_late: no attempt has succeeded in time.
        on_failure: gets what either raises.
    """

    def __init__(
        self,
        loop: EventLoop,
        plan: UpstreamPlan,
        for_ns: int,
        on_back: Callable[[Upstream], None],
        on_late: Callable[[], None],
        on_failure: OnFailure,
    ) -> None:
        self._loop = loop
        self._plan = plan
        self._on_back = on_back
        self._on_late = on_late
        self._on_failure = on_failure
        self._opening: UpstreamOpening | None = None
        now_ns = loop.clock.monotonic_ns()
        loop.at((self, "late"), now_ns + for_ns, lambda _now_ns: self._late(), on_failure)
        loop.at(self, now_ns, self._open)

    def _open(self, _now_ns: int) -> None:
        self._opening = UpstreamOpening(
            self._loop,
            self._plan.uri,
            self._on_ready,
            self._on_failed,
            on_failure=self._on_failure,
            will_transmit=True,
            wants_block_size=self._plan.wants_block_size,
            tls=self._plan.tls,
            mode=self._plan.mode,
        )

    def _on_failed(self, _error: GatewayError) -> None:
        self._opening = None
        self._loop.at(self, self._loop.clock.monotonic_ns() + AGAIN_NS, self._open)

    def _on_ready(self, upstream: Upstream | None, _facts: ExportFacts) -> None:
        assert upstream is not None  # it was asked to transmit
        self._opening = None
        self.stop()
        self._on_back(upstream)

    def _late(self) -> None:
        self.stop()
        self._on_late()

    def stop(self) -> None:
        """Try no more. Safe to call twice."""
        self._loop.cancel((self, "late"))
        self._loop.cancel(self)
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
