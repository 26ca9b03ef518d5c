"""Agents on three real nodes: parameters, the merged log, accounts and dead messages (C12-C15)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.cluster import (
    account_file,
    accounts,
    commands,
    dead_messages,
    documents,
    log_stream,
    parameters,
)
from sla_server.cluster.accounts import Account
from sla_server.cluster.admin import Admin
from sla_server.cluster.agent import NodeAgent, load_destinations, settings
from sla_server.cluster.errors import ClusterError, ClusterRefused
from sla_server.cluster.log_spool import LogSpool, append, encoded
from sla_server.cluster.log_stream import LogForwarder
from sla_server.cluster.membership import Membership
from sla_server.cluster.messages import Destination, MessageSession
from sla_server.cluster.messages.errors import AccessDenied
from sla_server.cluster.shared import NodeDocuments
from tests.support.cluster import READY_S, LocalCluster

Answer = TypeVar("Answer")
LIMIT_S: Final = 3 * READY_S
_nodes = itertools.count(500)


class Agents:
    """One a node of the cluster, in threads of this process; the engines are the cluster's."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.member = Membership("test", cluster.secrets, None)
        self._running: dict[int, NodeAgent] = {}
        for index in range(len(cluster.nodes)):
            self.start(index)

    def start(self, index: int) -> None:
        """As the process of a node does: what others have is taken before its engine starts."""
        node = self.cluster.nodes[index]
        held = NodeDocuments(node.directory)
        if not node.child.is_running:
            asyncio.run(documents.fetch(node.config, self.member, held))
            node.write_conf(settings(held, load_destinations(node.directory).values(), self.member))
            node.start()
        agent = NodeAgent(node.config, self.member, node, held)
        spool = LogSpool(node.directory, node.config.node)
        forwarder = LogForwarder(spool, node.config.node, 3, lambda: parameters.values({}))
        agent.add_task(forwarder.run)
        agent.start()
        self._running[index] = agent

    def stop(self, index: int) -> None:
        self._running.pop(index).close()

    def ask(self, question: Callable[[Admin], Awaitable[Answer]], index: int = 0) -> Answer:
        """What a node answers once the cluster can say."""

        async def asked() -> Answer:
            async with Admin(self.cluster.nodes[index].config, self.member) as admin:
                return await question(admin)

        deadline = Deadline(LIMIT_S)
        while True:
            try:
                return asyncio.run(asked())
            except ClusterRefused:
                if deadline.passed:
                    raise

    def ask_all(self, command: str = "ping") -> commands.Answers:
        """Until every node has answered."""

        async def asked(admin: Admin) -> commands.Answers:
            return await commands.ask(await admin.client(), command, {})

        deadline = Deadline(LIMIT_S)
        while len((answers := self.ask(asked)).rows) < len(self.cluster.nodes) or not answers.is_done:
            assert not deadline.passed, answers
        return answers

    def close(self) -> None:
        for agent in self._running.values():
            agent.close()


@pytest.fixture(scope="module")
def agents_of_module(cluster_of_session: LocalCluster) -> Iterator[Agents]:
    agents = Agents(cluster_of_session)
    yield agents
    agents.close()


@pytest.fixture
def agents(cluster: LocalCluster, agents_of_module: Agents) -> Agents:
    assert agents_of_module.cluster is cluster
    return agents_of_module


def _home(agents: Agents, index: int) -> Path:
    return agents.cluster.nodes[index].directory


def _set(agents: Agents, **values: parameters.Value) -> int:
    async def change(admin: Admin) -> int:
        document, _ = await documents.change(
            await admin.client(), parameters.DOCUMENT, lambda body: {**body, **values}, 3
        )
        return document.revision

    return agents.ask(change)


def _wait_for(agents: Agents, name: str, revision: int) -> None:
    """Until all nodes have it in force."""
    deadline = Deadline(LIMIT_S)
    while any(row.result["revisions"][name] < revision for row in agents.ask_all().rows):
        assert not deadline.passed


def test_every_node_answers_and_says_how_many_there_are(agents: Agents) -> None:
    answers = agents.ask_all()
    assert [row.node for row in answers.rows] == ["n1", "n2", "n3"]
    assert len({row.result["digest"] for row in answers.rows}) == 1

    async def some(admin: Admin) -> commands.Answers:
        return await commands.ask(await admin.client(), "ping", {}, nodes=["n2", "n9"], limit_s=LIMIT_S)

    found = agents.ask(some)
    assert found.expected == 2
    assert [(row.node, bool(row.problem)) for row in found.rows] == [("n2", False), ("n9", True)]


def test_a_parameter_changes_everywhere_and_a_node_that_was_away_takes_it_as_it_starts(
    agents: Agents,
) -> None:
    _wait_for(agents, parameters.DOCUMENT, _set(agents, max_connections=500))
    for index in range(3):
        assert "max_connections: 500\n" in (_home(agents, index) / "engine.conf").read_text()
    agents.stop(2)
    agents.cluster.kill(2)
    revision = _set(agents, max_connections=600)
    assert NodeDocuments(_home(agents, 2)).get(parameters.DOCUMENT).revision < revision
    agents.start(2)
    for index in range(3):  # and from there after a restart of all
        document = NodeDocuments(_home(agents, index)).get(parameters.DOCUMENT)
        assert (document.revision, document.body["max_connections"]) == (revision, 600)
    assert "max_connections: 600\n" in (_home(agents, 2) / "engine.conf").read_text()
    agents.ask_all()


def _log_lines(agents: Agents, begin_us: int, prefix: str) -> list[str]:
    async def read(admin: Admin) -> list[str]:
        client = await admin.client()
        found = log_stream.read(client, begin_us, now_us=SystemClock().unix_us)
        return [f"{row.node} {row.line}" async for row, is_late in found if row.line.startswith(prefix)]

    return agents.ask(read)


def test_the_log_has_records_of_all_nodes_in_order_also_of_hours_without_the_cluster(agents: Agents) -> None:
    begin_us = SystemClock().unix_us()
    expected: list[str] = []

    def write(count: int) -> None:
        for _ in range(count):
            number = len(expected)
            home = _home(agents, number % 3)
            append(home / "log", [encoded(begin_us + number, "info", f"line-{number:03}")])
            expected.append(f"n{number % 3 + 1} line-{number:03}")

    write(30)
    agents.cluster.kill(1)
    agents.cluster.kill(2)
    write(30)  # no majority: in files alone
    agents.cluster.restore()
    write(30)
    deadline = Deadline(LIMIT_S)
    while len(found := _log_lines(agents, begin_us, "line-")) < len(expected):
        assert not deadline.passed, found
    assert found == expected

    async def follow(admin: Admin) -> list[str]:
        client, seen = await admin.client(), list[str]()
        async for row, is_late in log_stream.read(
            client, begin_us, follow=True, node="n2", now_us=SystemClock().unix_us
        ):
            assert not is_late
            seen += [f"n2 {row.line}"] if row.line.startswith(("line-", "last")) else []
            if len(seen) == len(expected) // 3:
                append(_home(agents, 1) / "log", [encoded(SystemClock().unix_us(), "info", "last")])
            if row.line == "last":
                return seen
        return seen

    assert agents.ask(follow) == [*expected[1::3], "n2 last"]


@pytest.fixture
def open_session(agents: Agents, tmp_path: Path) -> Iterator[Callable[..., MessageSession]]:
    sessions: list[MessageSession] = []

    def make(urls: list[str], name: str) -> MessageSession:
        node = next(_nodes)
        sessions.append(MessageSession(urls, name, node=node, directory=tmp_path / str(node)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def _sent(session: MessageSession, destination: str) -> str:
    """ "" if it was stored, else the error's text."""
    try:
        session.producer(destination).send(b"x")
    except ClusterError as exc:
        return str(exc)
    return ""


def _give(agents: Agents, name: str, *roles: str, secret: str) -> None:
    sealed = accounts.seal(secret, agents.member.secrets)

    async def change(admin: Admin) -> int:
        made = accounts.entry_of(Account(name, roles, sealed))
        document, _ = await documents.change(
            await admin.client(), accounts.DOCUMENT, lambda body: {**body, name: made}, 3
        )
        return document.revision

    _wait_for(agents, accounts.DOCUMENT, agents.ask(change))


def test_an_account_does_what_its_roles_say_and_a_new_role_counts_at_once(
    agents: Agents, open_session: Callable[..., MessageSession], tmp_path: Path
) -> None:
    own = open_session(agents.cluster.urls, "own")
    for name in ("goods.in", "goods.out"):
        own.create(Destination(name, max_bytes=1 << 20))
    secret, path = accounts.new_secret(), tmp_path / "shop.json"
    path.write_text(account_file.text(agents.cluster.nodes[0].config, "shop", secret, Authority(tmp_path)))
    path.chmod(0o600)
    _give(agents, "shop", "producer:goods.in", secret=secret)
    connection = account_file.connection(path)
    shop = open_session(list(connection.urls), "shop")
    deadline = Deadline(LIMIT_S)
    while problem := _sent(shop, "goods.in"):  # the destination reaches the permissions within seconds
        assert not deadline.passed, problem
    assert _sent(shop, "goods.out").startswith(
        "destination goods.out refuses the account shop: it lacks the role producer:goods.out"
    )
    with pytest.raises(AccessDenied, match="destination _ADMIN"):
        shop.link.run(
            shop.link.store(commands.ALL, b"{}", {}, stream="none", what="a command", limit_s=LIMIT_S)
        )
    _give(agents, "shop", "producer:goods.*", secret=secret)
    while problem := _sent(shop, "goods.out"):
        assert not deadline.passed, problem
    received = own.consumer("goods.out", "reader").receive(LIMIT_S)
    assert received is not None


def test_a_dead_message_goes_to_its_origin_again_or_is_dropped(
    agents: Agents, open_session: Callable[..., MessageSession]
) -> None:
    session = open_session(agents.cluster.urls, "dead")
    session.create(Destination("parcels", max_bytes=1 << 20))
    session.producer("parcels").send(b"broken", headers={"Colour": "red"})
    consumer = session.consumer("parcels", "reader")

    def reject() -> None:
        received = consumer.receive(LIMIT_S)
        assert received is not None
        assert (received.data, received.headers["Colour"]) == (b"broken", "red")
        received.reject("no address")

    async def found(admin: Admin) -> list[dead_messages.DeadMessage]:
        client = await admin.client()
        return [message async for message in dead_messages.find(client, origin="parcels")]

    reject()
    [message] = agents.ask(found)
    assert (message.origin, message.reason) == ("parcels", "no address")

    async def requeue(admin: Admin) -> None:
        await dead_messages.requeue(await admin.client(), message.sequence)

    agents.ask(requeue)
    assert agents.ask(found) == []
    reject()
    [again] = agents.ask(found)
    assert again.sequence > message.sequence

    async def drop(admin: Admin) -> str:
        await dead_messages.drop(await admin.client(), again.sequence)
        try:
            await dead_messages.drop(await admin.client(), again.sequence)
        except ClusterRefused as exc:
            return str(exc)
        return ""

    assert f"_DMQ has no message {again.sequence}" in agents.ask(drop)
    assert agents.ask(found) == []
