"""Attempts to reach an upstream again that has gone, until one succeeds or their time has passed.

One after another, from the plan of the connection that was lost. What may go on with another connection is
the session's affair (``proxy_session``). Thread: the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway_agent.errors import GatewayError
from gateway_agent.nbd.loop import EventLoop, OnFailure
from gateway_agent.nbd.protocol import ExportFacts
from gateway_agent.nbd.upstream import Upstream, UpstreamOpening, UpstreamPlan

AGAIN_NS: Final = 200_000_000  # between two attempts


class UpstreamReturn:
    """See the module docstring. Calls one of ``on_back`` and ``on_late`` once, never from its constructor.

    Args:
        loop: what watches the attempts.
        plan: how to reach the upstream.
        for_ns: how long to try.
        on_back: gets the new connection, in transmission and not watched.
        on_late: no attempt has succeeded in time.
        on_failure: gets what ``on_late`` raises.
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
