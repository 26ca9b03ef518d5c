"""A task of the agent: looks after the mirrors that are on this node (C2).

Each node does so for its own, so each mirror has one keeper, beside its store: it removes what the primary
does not have any more, writes down what both have (``mirror_records``), and sees that no queue is without the
consumer that keeps its mirror from emptying it. The node that leads a primary sees that a mirror that cannot
follow does not fill it. What begins and ends is logged, and so in ``_LOG``: a mirror
that comes or goes, a primary that does not answer, does again, or was set back.

State: what was said last of each mirror; nothing that outlives it. Thread: the agent's.
"""

from __future__ import annotations

import asyncio
from typing import Final

import nats.errors
import structlog
from nats.aio.client import Client

from pmdaemon.runtime.clock import Clock
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages.catalogue import Catalogue
from sla_server.cluster.messages.link import BorrowedLink, EngineLink
from sla_server.cluster.messages.mirror_records import observe, recorded
from sla_server.cluster.messages.mirror_streams import LIMIT_S, parts_of, stream_info
from sla_server.cluster.messages.mirrors import keep_queues, sweep, trim

log = structlog.get_logger("cluster")
ROUND_S: Final = 2.0
IDLE_S: Final = 10.0
"""Without a mirror here; one that is made meanwhile is found then."""
FAILURES: Final = (ClusterError, OSError, nats.errors.Error)


class MirrorKeeper:
    """See the module.

    Args:
        node: its name.
        replicas: copies of what it may have to make.
        clock: of the records.
    """

    def __init__(self, node: str, replicas: int, clock: Clock) -> None:
        self._node = node.lower()
        self._replicas = replicas
        self._clock = clock
        self._answers: dict[str, bool] = {}  # mirror: whether its primary does
        self._set_back: set[str] = set()
        self._failed: set[str] = set()

    async def run(self, client: Client) -> None:
        """Go on until something fails; then it may be called again.

        Raises:
            ClusterError, nats.errors.Error, OSError: of the engine.
        """
        link = BorrowedLink(client, self._node)
        catalogue = Catalogue(link, self._replicas)
        safe: set[str] = set()
        while True:
            found = await self.round(link, catalogue, safe)
            await asyncio.sleep(ROUND_S if found else IDLE_S)

    async def round(self, link: EngineLink, catalogue: Catalogue, safe: set[str]) -> int:
        """Once for each mirror here, and each primary that is led from here; how many there are.

        ``safe`` has the queues that are known to have their consumer; new ones are added.

        Raises:
            ClusterError, nats.errors.Error, OSError: of one of them, when all had their turn.
        """
        names = await link.retry(lambda: recorded(link), "records of mirrors", LIMIT_S)
        own = [name for name in names if (parts := parts_of(name)) is not None and parts[1] == self._node]
        for mirror in sorted(self._answers.keys() - set(own)):
            log.info("mirror-removed", mirror=mirror)
            del self._answers[mirror]
            self._set_back.discard(mirror)
            self._failed.discard(mirror)
        led = 0
        problem: Exception | None = None
        for mirror in own:
            try:
                await self._keep(link, catalogue, mirror, safe)
                self._failed.discard(mirror)
            except FAILURES as exc:
                problem = self._has_failed(mirror, exc)
        for stream in sorted({parts[0] for name in names if (parts := parts_of(name)) is not None}):
            try:
                led += await self._sweep(link, stream)
                self._failed.discard(stream)
            except FAILURES as exc:
                problem = self._has_failed(stream, exc)
        if problem is not None:
            raise problem
        return len(own) + led

    def _has_failed(self, stream: str, problem: Exception) -> Exception:
        """Of one stream, which must not keep the others from being looked after; said once."""
        if stream not in self._failed:
            self._failed.add(stream)
            log.warning("mirror-round-failed", stream=stream, problem=str(problem) or type(problem).__name__)
        return problem

    async def _sweep(self, link: EngineLink, stream: str) -> bool:
        """Whether the primary is led from here."""
        info = await stream_info(link, stream)
        if info is None or str((info.get("cluster") or {}).get("leader", "")).lower() != self._node:
            return False
        if removed := await sweep(link, stream):
            log.info("mirror-not-waited-for", primary=stream, messages=removed)
        return True

    async def _keep(self, link: EngineLink, catalogue: Catalogue, mirror: str, safe: set[str]) -> None:
        parts = parts_of(mirror)
        assert parts is not None
        before = self._answers.get(mirror)
        seen = await observe(link, mirror, self._clock)
        if before is None:
            log.info("mirror-kept", mirror=mirror, primary=parts[0])
        if seen is not None and seen.is_set_back and mirror not in self._set_back:
            self._set_back.add(mirror)
            log.error("mirror-primary-set-back", mirror=mirror, primary=parts[0])
        if seen is None and before is not False:
            log.warning("mirror-without-primary", mirror=mirror, primary=parts[0])
        elif seen is not None and before is False:
            behind = seen.primary_last - seen.mirror_last
            log.info("mirror-has-primary-again", mirror=mirror, primary=parts[0], behind=behind)
        self._answers[mirror] = seen is not None
        if seen is not None:
            await keep_queues(link, catalogue, parts[0], safe)
            await trim(link, mirror)
