"""What a running node watches of itself: whether it differs from others, stores, and may still connect.

Nodes that start at the same time find no other to compare their essential parameters with (``process``), so
they are compared again while they run. Who differs from most of the nodes ends; among as many, those stay
that have the first name. Without a majority it is decided only when all nodes are there.

An engine that cannot write turns its storage off and goes on without: the cluster goes on with the others,
and nobody would know. It is reported once, and again when it has come back meanwhile.

A certificate ends by its date, and nothing renews it. Connections outlive it, the next ones are refused: the
nodes of a cluster are often made on one day, and would lose each other on one day, with the lease of the
acting server. So it is reported once a day, from ``CERTIFICATE_LEFT_S`` before on (``CertificateWatch``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from pmdaemon.runtime.clock import Clock
from sla_server.cluster import essentials
from sla_server.cluster.admin import Admin, NodeRow
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import ClusterRefused, ClusterUnreachable
from sla_server.cluster.membership import Membership
from sla_server.cluster.server_conf import TlsFiles

log = structlog.get_logger("cluster")
WATCH_S: Final = 10.0
ANSWER_S: Final = 2.0
LIMIT_S: Final = 5.0
"""For a whole round: a stop of the process waits for it at most."""
CERTIFICATE_S: Final = 86_400.0
CERTIFICATE_LEFT_S: Final = 30 * 86_400.0
"""Or a third of its life, if that is less."""
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


class CertificateWatch:
    """The certificate with which this node was started; see the module.

    Args:
        node: its name.
        tls: its files; None: it needs none.
        clock: server time.
        report: what to do with an event.

    Raises:
        ValueError: the file holds no certificate.
        OSError: it cannot be read.
    """

    def __init__(self, node: str, tls: TlsFiles | None, clock: Clock, report: Report) -> None:
        self._node = node
        self._clock = clock
        self._report = report
        self._due_ns = 0
        self._begins_us = self._ends_us = 0
        if tls is not None:
            from pmdaemon.pki.certificates import certificate_in, unix_us

            found = certificate_in(tls.certificate.read_bytes())
            self._begins_us = unix_us(found.not_valid_before_utc)
            self._ends_us = unix_us(found.not_valid_after_utc)

    def check(self) -> None:
        """Report it once a day, when there is reason to."""
        now_us, now_ns = self._clock.unix_us(), self._clock.monotonic_ns()
        least_us = min(CERTIFICATE_LEFT_S * 1e6, (self._ends_us - self._begins_us) / 3)
        if not self._ends_us or now_ns < self._due_ns or self._ends_us - now_us > least_us:
            return
        self._due_ns = now_ns + round(CERTIFICATE_S * 1e9)
        is_over = self._ends_us <= now_us
        text = (
            f"the certificate of node {self._node} of the cluster {'has ended' if is_over else 'ends'} on "
            f"{datetime.fromtimestamp(self._ends_us / 1e6, UTC):%Y-%m-%d %H:%M} UTC; no connection is made "
            f"with it {'any more' if is_over else 'after that'}. Where the authority is: sla cluster invite "
            f"{self._node} FILE; on {self._node}: sla cluster join --again FILE, then restart the node"
        )
        log.error("cluster-certificate-ends", node=self._node, until_us=self._ends_us)
        self._report("cluster-certificate-ends", "critical" if is_over else "warning", text)


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
