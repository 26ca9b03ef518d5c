"""What a running node watches of itself: nodes that started together with it, and whether it still stores.

Nodes that start at the same time find no other to compare their essential parameters with (``process``), so
they are compared again while they run. Who differs from most of the nodes ends; among as many, those stay
that have the first name. Without a majority it is decided only when all nodes are there.

An engine that cannot write turns its storage off and goes on without: the cluster goes on with the others,
and nobody would know. It is reported once, and again when it has come back meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from sla_server.cluster import essentials
from sla_server.cluster.admin import Admin, NodeRow
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import ClusterRefused, ClusterUnreachable
from sla_server.cluster.membership import Membership

log = structlog.get_logger("cluster")
WATCH_S: Final = 10.0
ANSWER_S: Final = 2.0
LIMIT_S: Final = 5.0
"""For a whole round: a stop of the process waits for it at most."""
Report = Callable[[str, str, str], None]
"""Kind of an event, severity, text."""


class NodeWatch:
    """See the module.

    Args:
        report: what to do with an event.
        publish: what to do with the nodes that have answered.
    """

    def __init__(
        self,
        config: ClusterConfig,
        member: Membership,
        report: Report,
        publish: Callable[[Sequence[NodeRow]], None] = lambda _rows: None,
    ) -> None:
        self._config = config
        self._publish = publish
        self._member = member
        self._report = report
        self._is_storing = True
        self._is_mixed = False

    def check(self) -> None:
        """One round; nothing if the engine gives no answer.

        Raises:
            EssentialsDiffer: this node is the one that differs.
        """
        try:
            rows = asyncio.run(asyncio.wait_for(self._ask(), LIMIT_S))
        except (ClusterUnreachable, ClusterRefused, TimeoutError) as exc:
            log.debug("cluster-not-watched", problem=str(exc) or type(exc).__name__)
        except Exception:  # of the library's insides, as when a connection breaks: no reason to end the node
            log.exception("cluster-not-watched")
        else:
            self._publish(rows)
            self.judge(rows)

    def judge(self, rows: Sequence[NodeRow]) -> None:
        """Compare what nodes say with what they should.

        Raises:
            EssentialsDiffer: this node is the one that differs.
        """
        own = self._config.node
        here = next((row for row in rows if row.name == own), None)
        if here is None:
            return
        self._judge_store(here)
        parameters = {row.name: row.parameters for row in rows}
        if other := outvoted(own, parameters, len(self._config.peers) + 1):
            essentials.compare(here.parameters, parameters[other], other)
        is_mixed = len({row.digest for row in rows}) > 1
        if is_mixed and not self._is_mixed:
            log.warning("cluster-essentials-differ", nodes={row.name: row.digest for row in rows})
        self._is_mixed = is_mixed

    def _judge_store(self, here: NodeRow) -> None:
        if self._is_storing and not here.is_storing:
            text = (
                f"the engine of node {here.name} has turned its storage off, as it does when its disk is "
                "full or fails. Make room, then restart the node"
            )
            log.error("cluster-store-off", node=here.name)
            self._report("cluster-store-off", "critical", text)
        elif here.is_storing and not self._is_storing:
            log.info("cluster-store-on", node=here.name)
        self._is_storing = here.is_storing

    async def _ask(self) -> tuple[NodeRow, ...]:
        async with Admin(self._config, self._member, [self._config.listen]) as asker:
            return await asker.nodes(ANSWER_S)


def outvoted(node: str, parameters: Mapping[str, Mapping[str, str]], members: int) -> str:
    """A node that stays and ``node`` differs from; "" if it stays itself, or that is not known yet. Pure.

    Args:
        node: whose fate is asked for.
        parameters: of each node that answers, by its name.
        members: how many nodes there should be.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(parameters):
        lowered = {key: value.lower() for key, value in parameters[name].items()}
        groups.setdefault(essentials.digest(lowered), []).append(name)
    stay = min(groups.values(), key=lambda names: (-len(names), names[0]))
    is_decided = 2 * len(stay) > members or len(parameters) >= members
    return stay[0] if is_decided and node not in stay else ""
