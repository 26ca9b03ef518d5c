"""The end of a plane: the link spools what was counted, and connections to upstreams end.

A link that was here and is not may have been started again just now: it comes for what is left.

Thread: the loop's.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

import structlog

from gateway_agent.nbd.control import ControlServer
from gateway_agent.nbd.cuts import CutMaker
from gateway_agent.nbd.loop import EventLoop

DRAIN_LIMIT_NS: Final = 2 * 10**9  # the link needs some milliseconds; the parent kills after 12 s
RETURN_LIMIT_NS: Final = 6 * 10**9  # one that is started again needs a second, or some on a busy host
log = structlog.get_logger("plane")


def hand_over_counts(loop: EventLoop, control: ControlServer, cuts: CutMaker, farewells: Sized) -> None:
    """Go on until the link has everything and has closed the connection, and until no farewell is under way.

    Args:
        loop: of the plane; it is stepped here.
        control: where the link is, or comes to.
        cuts: finished, so that no I/O is counted any more.
        farewells: connections to upstreams that are ending.
    """

    def is_owed() -> bool:
        return control.has_link or (control.had_link and cuts.has_kept)

    def too_long(_now_ns: int) -> None:
        if is_owed():
            log.warning("link-does-not-collect")

    limit_ns = DRAIN_LIMIT_NS if control.has_link else RETURN_LIMIT_NS
    end_ns = loop.clock.monotonic_ns() + limit_ns
    loop.at("drain", end_ns, too_long)
    while (is_owed() or farewells) and loop.clock.monotonic_ns() < end_ns:
        loop.step()
