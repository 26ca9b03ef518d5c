"""A task of the agent: what the cluster keeps for itself has as many copies as ``replicas`` says (C5, C16).

Leases, shared documents, the catalogue, ``_LOG`` and the rest are made with as many copies as there are nodes
at that time. A cluster that grows from two to three, or whose first session asked for fewer, would keep them
so: with one of two gone there would be no lease, and no server could act, though two of three nodes run. The
node that leads such a stream raises its copies; the engine fills them up. Destinations have the copies that
they were created with.

State: problems that were logged; nothing outlives it. Thread: the agent's.
"""

from __future__ import annotations

import asyncio
from typing import Final

import nats.js.errors
import structlog
from nats.aio.client import Client

from sla_server.cluster import documents, leases, log_stream
from sla_server.cluster.messages import catalogue, fragments, mirror_records, transaction_records
from sla_server.cluster.messages.link import BorrowedLink, EngineLink
from sla_server.cluster.messages.mirror_streams import stream_info

log = structlog.get_logger("cluster")
ROUND_S: Final = 60.0
BUCKETS: Final = (leases.BUCKET, documents.BUCKET, catalogue.BUCKET, mirror_records.BUCKET)
OWN: Final = (
    *(f"KV_{bucket}" for bucket in BUCKETS),
    log_stream.STREAM,
    fragments.STREAM,
    transaction_records.STREAM,
)


class OwnCopies:
    """See the module.

    Args:
        node: its name.
        copies: that each stream should have.
    """

    def __init__(self, node: str, copies: int) -> None:
        self._node = node.lower()
        self._copies = copies
        self._said: dict[str, str] = {}

    async def run(self, client: Client) -> None:
        """Go on until something fails; then it may be called again.

        Raises:
            nats.errors.Error, OSError: of the engine.
        """
        link = BorrowedLink(client, self._node)
        while True:
            await self.round(link)
            await asyncio.sleep(ROUND_S)

    async def round(self, link: EngineLink) -> list[str]:
        """Once for each stream that is led from here; those that were given copies."""
        return [stream for stream in OWN if await self._raise_copies(link, stream)]

    async def _raise_copies(self, link: EngineLink, stream: str) -> bool:
        info = await stream_info(link, stream)
        if info is None or str((info.get("cluster") or {}).get("leader", "")).lower() != self._node:
            return False
        had = int(info["config"].get("num_replicas") or 1)
        if had >= self._copies:
            return False
        try:
            await link.ask(f"STREAM.UPDATE.{stream}", {**info["config"], "num_replicas": self._copies})
        except nats.js.errors.APIError as exc:  # not so many nodes run, or one has no room
            if self._said.get(stream) != (problem := str(exc.description or exc)):
                self._said[stream] = problem
                log.warning("stream-copies-missing", stream=stream, copies=had, problem=problem)
            return False
        log.info("stream-copies-raised", stream=stream, copies=self._copies, had=had)
        return True
