"""The process ``cluster``: one node, from its checks to its orderly stop.

Order of a start: credentials; the engine, found and probed; essential parameters compared with those of the
nodes that run; then the engine is started, kept running, and watched (``watch``). A node that differs from
the others is refused before its engine knows of them; of nodes that start together, one that differs ends
soon after. What the nodes share is taken from those that run, and kept up to date by the ``agent``. At the
end the engine stops in order.

The engine's own lines go to this process's standard error. Thread: the main one, beside the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from pmdaemon.reserve import event_row, initialized, raise_event
from pmdaemon.runtime.children import describe_status, stop_together, wait_for_any
from pmdaemon.runtime.clock import Clock, Deadline, boot_ns, server_clock
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.runtime.watchdog import beat
from sla_server import directories
from sla_server.acting_file import ActingFile
from sla_server.cluster import accounts, admin, documents, engine, essentials, membership, parameters
from sla_server.cluster.admin import NodeRow
from sla_server.cluster.agent import NodeAgent, load_destinations, settings
from sla_server.cluster.config import ClusterConfig, page_address
from sla_server.cluster.giving_up import GivingUp
from sla_server.cluster.leases import ACTING, ClusterLease, LeaseKeeper, LeaseRecord, LeaseTask
from sla_server.cluster.log_spool import LogSpool, copied
from sla_server.cluster.log_stream import LogForwarder
from sla_server.cluster.mirror_keeper import MirrorKeeper
from sla_server.cluster.node import Node, check_store
from sla_server.cluster.offers import COULD_ACT, StandInOffers
from sla_server.cluster.own_copies import OwnCopies
from sla_server.cluster.server_facts import ServerFacts
from sla_server.cluster.shared import NodeDocuments
from sla_server.cluster.transaction_keeper import TransactionKeeper
from sla_server.cluster.watch import WATCH_S, CertificateWatch, NodeWatch
from sla_server.config import ResolvedConfig
from sla_server.lease_file import LeaseState
from sla_server.nodes_file import RunningNode, write_nodes

if TYPE_CHECKING:
    from sla_server.db.reach import DatabaseReach

log = structlog.get_logger("cluster")
STEP_S: Final = 1.0
REACH_S: Final = 5.0
REACHES: Final = 4
"""Checks of the database within the time after which the lease is given up, at least."""
START_LIMIT_S: Final = 180.0
"""Probing the engine, and asking peers whose hosts do not answer, before the first step."""


def run(config: ResolvedConfig, stop: Stop, *, is_alone: bool = False) -> int:
    """Run the node of this configuration until the stop.

    Args:
        config: of the server.
        stop: ends it.
        is_alone: there is no server around it, so it wants no lease.

    Raises:
        ClusterError: it has no credentials, there is no fit engine, essential parameters differ, or what it
            has stored alone would be removed.
        ServerRunning: another process has the node's directory.
    """
    assert config.cluster is not None  # the supervisor starts no such part without the table
    directory = config.cluster.directory(config.data_dir)
    runtime_dir = None if is_alone else config.runtime_dir
    facts, clock = ServerFacts.of(config, is_alone=is_alone), server_clock()
    reach = None
    if facts.takes_over:
        from sla_server.db.reach import reach_of  # of SQL, which a node without a server has no need of

        reach = reach_of(config, clock.monotonic_ns)
    return NodeProcess(config.cluster, directory, stop, clock, runtime_dir, facts, reach).run()


class NodeProcess:
    """See the module.

    Args:
        runtime_dir: of the server, where nodes and the lease of the acting server are published; None: there
            is no server.
        facts: what that server says of itself to the other nodes.
        reach: of the database, if that server is one of several.
    """

    def __init__(
        self,
        config: ClusterConfig,
        directory: Path,
        stop: Stop,
        clock: Clock,
        runtime_dir: Path | None = None,
        facts: ServerFacts | None = None,
        reach: DatabaseReach | None = None,
    ) -> None:
        self._config = config
        self._reach = reach
        self._threads = ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}"))
        self._facts = facts or ServerFacts()
        self._runtime_dir = runtime_dir
        self._directory = directory
        self._stop = stop
        self._clock = clock
        self._pipe = ParentPipe()

    def run(self) -> int:
        """See ``run``."""
        beat(START_LIMIT_S)
        lock = directories.lock_data_dir(self._directory)
        with contextlib.ExitStack() as ends:
            ends.callback(os.close, lock)
            ends.callback(self._pipe.close)
            ends.enter_context(copied(self._directory, self._clock))
            node, watch, agent, certificate = self._prepared()
            initialized()
            node.start()
            agent.start()
            self._start_reach()
            try:
                self._run(node, watch, certificate)
            finally:
                log.info("cluster-stopping", reason=self._stop.reason)
                try:
                    agent.close()
                finally:
                    stop_together([node.child], self._clock)
            return 0

    def _start_reach(self) -> None:
        """Its thread may hang with the database, and keeps nothing: it ends with the process."""
        if (reach := self._reach) is not None:
            limit_s = self._config.takeover.give_up_after_s or REACH_S
            interval_s = min(REACH_S, limit_s / REACHES)
            self._threads.start("node-sql", lambda: reach.run(self._stop, interval_s))

    def _run(self, node: Node, watch: NodeWatch, certificate: CertificateWatch) -> None:
        next_watch = Deadline(WATCH_S)
        while not wait_for_any(self._stop, [node.child], STEP_S):
            beat()
            self._keep_running(node)
            if next_watch.passed:
                next_watch = Deadline(WATCH_S)
                certificate.check()
                watch.check()

    def _prepared(self) -> tuple[Node, NodeWatch, NodeAgent, CertificateWatch]:
        config = self._config
        member = membership.load(config, self._directory)
        check_store(config, self._directory)
        found = engine.choose(config.engine, config.sync)
        log.info("cluster-engine", path=str(found.path), version=found.text, reduced=found.reduced or None)
        if found.reduced:
            log.warning("cluster-engine-reduced", version=found.text, problem=found.reduced)
            text = f"nats-server {found.text} of node {config.node}: {found.reduced}"
            self._raise("cluster-engine-reduced", "warning", text, {"version": found.text})
        compared = asyncio.run(admin.check_essentials(config, member))
        digest = essentials.digest(essentials.of(config))
        log.info("cluster-essentials", digest=digest, compared_with=compared)
        held = NodeDocuments(self._directory)
        asyncio.run(documents.fetch(config, member, held))
        node = Node(
            config,
            self._directory,
            found,
            member.secrets,
            self._pipe,
            self._clock,
            tls=member.tls,
            shared=settings(held, load_destinations(self._directory).values(), member),
            facts=self._facts,
        )
        agent = NodeAgent(config, member, node, held)
        forwarder = LogForwarder(
            LogSpool(self._directory, config.node),
            config.node,
            min(config.replicas, len(config.peers) + 1),
            lambda: parameters.values(held.get(parameters.DOCUMENT).body),
        )
        agent.add_task(forwarder.run)
        keeper = TransactionKeeper(
            config.node,
            min(config.replicas, len(config.peers) + 1),
            lambda: bool(held.get(accounts.DOCUMENT).body),
            self._clock,
        )
        agent.add_task(keeper.run)
        copies = min(config.replicas, len(config.peers) + 1)
        agent.add_task(MirrorKeeper(config.node, copies, self._clock).run)
        agent.add_task(OwnCopies(config.node, copies).run)
        if self._runtime_dir is not None and self._reach is not None:
            self._add_lease(agent, self._runtime_dir, member.identity, self._reach)
        certificate = CertificateWatch(config.node, member.tls, self._clock, self._raise)
        return node, NodeWatch(config, member, self._raise, self._publish_nodes), agent, certificate

    def _publish_nodes(self, rows: Sequence[NodeRow]) -> None:
        if self._runtime_dir is not None:
            nodes = [
                RunningNode(
                    row.name,
                    row.site,
                    row.version,
                    row.server.release,
                    row.server.takes_over,
                    row.server.page,
                )
                for row in rows
            ]
            write_nodes(self._runtime_dir, nodes, self._clock.unix_us())

    def _add_lease(self, agent: NodeAgent, runtime_dir: Path, identity: str, reach: DatabaseReach) -> None:
        config, giving_up = self._config, GivingUp(self._config.takeover.give_up_after_s)
        lease = ClusterLease(config.node, config.takeover.lease_s, self._facts.page, self._facts.links)

        def publish(lease: ClusterLease) -> None:
            found = lease.record
            known = found or LeaseRecord("", 0, 0)
            record = LeaseRecord("", 0, 0) if known.is_given_up else known
            ends = bool(giving_up.reason)
            LeaseState(
                config.node,
                record.holder,
                record.fence,
                0 if ends else lease.until_ns,
                record.lease_s,
                lease.heard_ns,
                page_address(record.page),
                identity,
                record.links,
                config.node if ends else known.gave_up,
                giving_up.reason if ends else known.why,
            ).write(runtime_dir)

        offers = StandInOffers(
            config.node,
            identity,
            lease,
            giving_up,
            reach,
            ActingFile(runtime_dir),
            publish,
            lambda text, details: self._raise("server-gave-up", "warning", text, details),
            boot_ns=boot_ns,
            now_ns=self._clock.monotonic_ns,
        )
        agent.table.register(COULD_ACT, offers.answer)
        agent.add_task(offers.run)
        keeper = LeaseKeeper(ACTING, lease, self._clock, publish, giving_up=giving_up)
        task = LeaseTask(keeper, lease, min(config.replicas, len(config.peers) + 1), config.takeover.lease_s)
        agent.add_task(task.run)
        agent.add_farewell(task.end)

    def _keep_running(self, node: Node) -> None:
        child = node.child
        if child.is_running:
            if (status := child.wait(0)) is not None:
                reason = describe_status(status)
                child.died(reason, status)
                text = f"the engine of node {node.config.node} has ended ({reason}) and is started again"
                self._raise("cluster-engine-died", "warning", text, {"restarts": child.restarts})
        elif child.is_due:
            node.start()

    def _raise(
        self, kind: str, severity: str, text: str, details: Mapping[str, str | int] = MappingProxyType({})
    ) -> None:
        at_us = self._clock.unix_us()
        raise_event(event_row(kind, severity, "cluster", self._config.node, text, at_us, dict(details)))
