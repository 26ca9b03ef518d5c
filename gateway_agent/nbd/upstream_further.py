"""Opening of connections to an upstream beside the first one, for sessions that have several.

One after another, from the first one's plan. Nothing waits for them: one that cannot be made is tried again
after ``AGAIN_NS``, then after twice as long up to 80 s, and so is one that has ended. One that answers
otherwise on another connection is asked for no more. Thread: the loop's.

After a loss, or a failure, a new connection may be to an upstream that was restarted and has lost what it
acknowledged without a flush, while those that are there have not noticed (its host went down): a flush on the
new one would succeed for changes that are gone. So it is used only when one of them has answered what was
asked since: an answer to what was asked before, or the rest of one, may have been on its way. Until then it
is watched for its end: what is sent on a connection that has ended already would count as lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway_agent.errors import GatewayError, UpstreamError
from gateway_agent.nbd.buffers import COOKIE, END, FINISHED_INTS, Finished
from gateway_agent.nbd.loop import IN, EventLoop
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.replies import AskedRequests
from gateway_agent.nbd.upstream import Upstream, UpstreamOpening
from gateway_agent.nbd.upstream_runs import UsedUpstream

AGAIN_NS: Final = 5 * 10**9
_MOST_DOUBLED: Final = 4  # times; an upstream that takes no more is asked by each client's session


class FurtherConnections:
    """See the module docstring.

    Args:
        loop: what watches them.
        first: the connection that is there.
        missing: how many are wanted beside it.
        asked: what those that are there have to answer.
        is_within: whether the reply to a request that ``asked`` no longer has is here in part.
        may_open: whether one that is made now may be used; asked before it is, and when it is.
        on_made: gets each, in transmission and not watched.
        on_refused: gets the reason why one could not be made.
    """

    def __init__(
        self,
        loop: EventLoop,
        first: Upstream,
        missing: int,
        asked: AskedRequests,
        is_within: Callable[[], bool],
        may_open: Callable[[], bool],
        on_made: Callable[[Upstream], None],
        on_refused: Callable[[GatewayError], None],
    ) -> None:
        self._loop = loop
        self._first = first
        self._missing = missing
        self._asked = asked
        self._is_within = is_within
        self._may_open = may_open
        self._on_made = on_made
        self._on_refused = on_refused
        self._opening: UpstreamOpening | None = None
        self._failed = 0  # attempts, since the last one that did not
        self._needs_proof = False  # that the upstream is the one that the others are connected to
        self._unproven: Upstream | None = None
        self._before: dict[int, int] = {}  # cookie -> end of what had no answer when that one was made
        self._answered = 0  # requests, since then; without the one whose reply had begun
        self._open(loop.clock.monotonic_ns())

    def _open(self, _now_ns: int) -> None:
        if self._missing <= 0 or self._opening is not None or self._unproven is not None:
            return
        if not self._may_open():
            return
        plan = self._first.plan
        self._opening = UpstreamOpening(
            self._loop,
            plan.uri,
            self._on_ready,
            self._on_failed,
            will_transmit=True,
            wants_block_size=plan.wants_block_size,
            tls=plan.tls,
            mode=plan.mode,
        )

    def _on_ready(self, upstream: Upstream | None, _facts: ExportFacts) -> None:
        assert upstream is not None  # it was asked to transmit
        self._opening, self._failed = None, 0
        if not self._may_open():
            upstream.leave(self._loop)
            return
        if upstream.is_like(self._first):
            self._unproven = upstream
            self._before = {request[COOKIE]: request[END] for request in self._asked.values()}
            self._answered = -self._is_within()
            self._loop.watch(
                upstream.sock.fileno(), IN, self._on_unproven, lambda _exc: self._unproven_gone()
            )
            if not self._needs_proof:
                self._use()
            return
        upstream.leave(self._loop)
        self._missing = 0
        problem = "another connection to it has another size, other flags or other block sizes"
        self._on_refused(UpstreamError(upstream.plan.uri, problem))

    def _on_failed(self, error: GatewayError) -> None:
        self._opening = None
        self._needs_proof = True
        self._on_refused(error)
        self._open_later()
        self._failed += 1

    def answered(self, used: UsedUpstream, finished: Finished) -> None:
        """One of those that are there says something just now, which completes these."""
        used.asked_ns = None
        if self._unproven is None:
            return
        self._answered += len(finished) // FINISHED_INTS
        before = self._before
        left = sum(1 for request in self._asked.values() if before.get(request[COOKIE]) == request[END])
        if self._answered > len(before) - left:
            self._use()

    def _use(self) -> None:
        upstream = self._take_unproven()
        self._missing -= 1
        self._on_made(upstream)
        self._open(0)

    def _take_unproven(self) -> Upstream:
        upstream, self._unproven = self._unproven, None
        assert upstream is not None  # callers have looked
        self._loop.forget(upstream.sock.fileno())
        return upstream

    def _on_unproven(self, _events: int) -> None:
        """It was asked nothing: what comes is its end, or TLS on its own."""
        assert self._unproven is not None  # watched only while it is there
        try:
            self._unproven.sock.recv(1)
        except BlockingIOError:
            return
        except OSError:  # an end, too
            pass
        self._unproven_gone()

    def _unproven_gone(self) -> None:
        self._take_unproven().close()
        self._open_later()

    def _open_later(self) -> None:
        wait_ns = AGAIN_NS << min(self._failed, _MOST_DOUBLED)
        self._loop.at(self, self._loop.clock.monotonic_ns() + wait_ns, self._open)

    def lost(self) -> None:
        """One of those that were there has ended."""
        self._missing += 1
        self._needs_proof = True
        self._open_later()

    def stop(self) -> None:
        """Open none any more."""
        self._missing = 0
        self._loop.cancel(self)
        if self._unproven is not None:
            self._take_unproven().leave(self._loop)
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
