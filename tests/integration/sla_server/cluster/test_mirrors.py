"""Asynchronous mirrors on three nodes of the product: made, seen, read, promoted by its commands (C2, C3)."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server import config as configuration
from sla_server.cluster import essentials, membership
from sla_server.cluster.messages import Consumer, Destination, DestinationKind, MessageSession
from sla_server.cluster.messages.errors import MirrorRefused, NotConfirmed
from sla_server.cluster.messages.mirror_records import record
from sla_server.cluster.messages.mirror_streams import delete_stream, promoted_last
from sla_server.cluster.messages.mirrors import trim
from sla_server.cluster.messages.transaction import MOST_LIMIT_S
from sla_server.cluster.messages.transaction_records import STREAM as TRANSACTIONS
from tests.support.cluster import READY_S, configurations
from tests.support.node_processes import Nodes, done, make_members, sla, status

LIMIT_S: Final = 3 * READY_S  # of a stream that elects a leader again beside other load: a try takes a minute
OpenSession = Callable[[], MessageSession]
_numbers = itertools.count(700)


@pytest.fixture(scope="module")
def nodes_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    paths = configurations(tmp_path_factory.mktemp("mirrors"))
    make_members(paths)
    nodes = Nodes(paths)
    for path in paths:
        nodes.start(path.parent.name)
    nodes.wait_well()
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(nodes_of_module: Nodes) -> Iterator[Nodes]:
    """All three run; a test may kill some."""
    yield nodes_of_module
    for path in nodes_of_module.paths:
        if path.parent.name not in nodes_of_module.processes:
            nodes_of_module.start(path.parent.name)
    nodes_of_module.wait_well()


@pytest.fixture
def open_session(nodes: Nodes, tmp_path: Path) -> Iterator[OpenSession]:
    sessions: list[MessageSession] = []

    def make() -> MessageSession:
        config = configuration.load(nodes.paths[0])
        assert config.cluster is not None
        member = membership.load(config.cluster, config.cluster.directory(config.data_dir))
        addresses = [config.cluster.listen, *(peer.listen for peer in config.cluster.peers)]
        urls = [f"nats://sla:{member.secrets.product}@{address}" for address in addresses]
        number = next(_numbers)
        sessions.append(MessageSession(urls, "test", node=number, directory=tmp_path / str(number)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def _path(nodes: Nodes, *without: str) -> Path:
    """The file of a node that runs, of none of these."""
    return next(path for path in nodes.paths if path.parent.name in nodes.processes.keys() - set(without))


def _leader(nodes: Nodes, stream: str) -> str:
    deadline = Deadline(LIMIT_S)
    while True:
        for row in status(_path(nodes)).get("streams", ()):
            if row["name"] == stream and row["leader"]:
                return str(row["leader"])
        assert not deadline.passed, stream


def _wait_complete(nodes: Nodes, stream: str) -> None:
    """Each node has it: one that has nothing of it yet makes no majority with another (design/cluster.md)."""
    deadline = Deadline(LIMIT_S)
    while True:
        rows = status(_path(nodes)).get("streams", ())
        if any(row["name"] == stream and len(row["current"]) == len(nodes.paths) - 1 for row in rows):
            return
        assert not deadline.passed, rows


def _mirror(nodes: Nodes, name: str, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What ``status`` says of a mirror, once ``ready`` likes it."""
    deadline = Deadline(LIMIT_S)
    while True:
        state = status(_path(nodes))
        for row in state.get("mirrors", ()):
            if row["name"] == name and ready(row):
                return dict(row)
        assert not deadline.passed, state.get("mirrors")


def _add(nodes: Nodes, destination: Destination) -> tuple[str, str, str]:
    """Nodes of primary and mirror, and the mirror's stream."""
    primary = _leader(nodes, destination.stream)
    said = done(_path(nodes), "mirror", "add", destination.name)
    name = said.split()[0]
    node = name.rpartition("_m")[2]
    assert said == f"{name} is an asynchronous copy of {destination.name} on {node}; it is no backup\n"
    assert node != primary
    return primary, node, name


def _take(consumer: Consumer, count: int) -> list[bytes]:
    """So many, all of them acknowledged; what comes twice is recognised by its identity, as users do."""
    found: dict[str, bytes] = {}
    unconfirmed = set[str]()
    while len(found) < count or unconfirmed:
        received = consumer.receive(LIMIT_S)
        assert received is not None, (found, unconfirmed)
        found.setdefault(received.identity, received.data)
        try:
            received.acknowledge()
            unconfirmed.discard(received.identity)
        except NotConfirmed:  # held since before a promotion: it comes again
            unconfirmed.add(received.identity)
    return list(found.values())


def _send(session: MessageSession, name: str, numbers: range) -> list[bytes]:
    sent = [b"%d" % number for number in numbers]
    for data in sent:
        session.producer(name).send(data, limit_s=LIMIT_S)
    return sent


def test_a_mirror_has_what_the_primary_has_and_says_that_it_is_asynchronous(
    nodes: Nodes, open_session: OpenSession
) -> None:
    session, queue = open_session(), Destination("orders", replicas=1, max_bytes=16 << 20)
    session.create(queue)
    primary, node, name = _add(nodes, queue)
    sent = _send(session, "orders", range(30))
    consumer = session.consumer("orders", "reader", credit=5)
    assert _take(consumer, 10) == sent[:10]
    row = _mirror(nodes, name, lambda row: row["messages"] == 20 and not row["behind_messages"])
    assert (row["kind"], row["primary"], row["node"]) == ("asynchronous copy", "SLA_orders", node)
    text = sla(_path(nodes), "status").output
    assert "asynchronous copy, 0 messages / 0 s behind" in " ".join(text.split())
    [listed] = json.loads(done(_path(nodes), "mirror", "list", "-o", "json"))["mirrors"]
    assert listed["name"] == name

    # Counted nowhere as a copy of the destination.
    state = nodes.wait_well()
    assert [row for row in state["streams"] if row["name"] == name] == []
    [stream] = [row for row in state["streams"] if row["name"] == "SLA_orders"]
    assert (stream["replicas"], stream["current"], stream["behind"]) == (1, [], [])
    assert "the only copy of SLA_orders" in done(_path(nodes), "drain", primary)
    assert "leads nothing" in done(_path(nodes), "drain", node)

    # Read on purpose, and nothing is taken away by that.
    assert [message.data for message in session.read_mirror("orders", node)] == sent[10:]
    [mirror] = session.mirrors_of("orders")
    assert (mirror.name, mirror.text) == (name, "asynchronous copy, 0 messages / 0 s behind")
    assert _take(consumer, 20) == sent[10:]
    session.remove_mirror("orders", node)
    assert session.mirrors_of("orders") == []


def test_what_cannot_be_is_refused_with_what_to_do(nodes: Nodes, open_session: OpenSession) -> None:
    session, queue = open_session(), Destination("bills", replicas=1, max_bytes=1 << 20)
    session.create(queue)
    primary, node, name = _add(nodes, queue)
    path = _path(nodes)
    beside = sla(path, "mirror", "add", "bills", "--node", primary)
    assert beside.exit_code == 1
    assert f"{primary} has the primary or a backup of bills" in beside.output
    nested = sla(path, "mirror", "add", name)
    assert nested.exit_code == 1
    assert f"{name} is a mirror itself, of SLA_bills" in nested.output
    with pytest.raises(MirrorRefused, match="Make one of the destination"):
        session.add_mirror(name, primary)
    assert "No such option '--colour'" in sla(path, "mirror", "add", "bills", "--colour", "red").output
    assert "not both" in sla(path, "mirror", "add", "bills", "--node", "n1", "--site", "site-n1").output
    assert "no destination 'none'" in sla(path, "mirror", "add", "none", "--node", "n1").output
    assert "no node n9" in sla(path, "mirror", "add", "bills", "--node", "n9").output
    alive = sla(path, "mirror", "promote", "bills", "--node", node, "--yes")
    assert f"the primary of bills is not lost: {primary} leads stream SLA_bills" in alive.output
    assert alive.exit_code == 1
    # A destination on all nodes has no place for one.
    session.create(Destination("everywhere", replicas=3, max_bytes=1 << 20))
    assert "no node is without a copy of everywhere" in sla(path, "mirror", "add", "everywhere").output
    assert done(path, "mirror", "remove", "bills", "--node", node) == f"{name} was removed\n"
    gone = sla(path, "mirror", "remove", "bills", "--node", node)
    assert f"there is no mirror of bills on {node}" in gone.output


def test_a_mirror_takes_nothing_from_queues_without_consumers_also_those_created_later(
    nodes: Nodes, open_session: OpenSession
) -> None:
    session = open_session()
    early = Destination("goods.early", domain="goods", replicas=1, max_bytes=1 << 20)
    session.create(early)
    sent = _send(session, "goods.early", range(5))
    _, node, name = _add(nodes, early)
    session.create(Destination("goods.late", domain="goods", replicas=1, max_bytes=1 << 20))
    more = _send(session, "goods.late", range(5, 10))
    _mirror(nodes, name, lambda row: row["messages"] == 10)
    _wait_copier(session, early.stream, 10)
    assert _take(session.consumer("goods.early", "reader"), 5) == sent
    assert _take(session.consumer("goods.late", "reader"), 5) == more
    session.remove_mirror("goods.late", node)


def test_a_mirror_of_a_queue_is_promoted_when_the_primary_is_lost_for_good(
    nodes: Nodes, open_session: OpenSession
) -> None:
    session, queue = open_session(), Destination("parcels", replicas=1, max_bytes=16 << 20)
    session.create(queue)
    primary, node, name = _add(nodes, queue)
    sent = _send(session, "parcels", range(40))
    consumer = session.consumer("parcels", "reader", credit=5)
    assert _take(consumer, 15) == sent[:15]
    _mirror(nodes, name, lambda row: row["messages"] == 25 and not row["behind_messages"])
    nodes.end(primary, signal.SIGKILL)
    path = _path(nodes)
    row = _mirror(nodes, name, lambda row: not row["hears_primary"] and row["is_running"])
    assert "its primary does not answer: 0 messages behind" in row["text"]
    refused = sla(path, "mirror", "promote", "parcels", "--node", node, answer="n\n")
    assert refused.exit_code == 1
    assert "Is the primary of parcels lost for good?" in refused.output
    assert _mirror(nodes, name, lambda row: True)["is_promoted"] is False
    said = done(path, "mirror", "promote", "parcels", "--node", node, "--yes")
    assert "has 25 messages, up to 40" in said
    assert "missing: of those 0 at most, and all that it stored after that moment" in said
    info = session.link.run(session.link.ask(f"STREAM.INFO.{queue.stream}", {}))
    assert promoted_last(info) == info["state"]["last_seq"] > 40

    # The same sessions go on; what they held, and what is new, comes once.
    found = _take(consumer, 25)
    assert sorted(found, key=int) == sent[15:]
    more = _send(session, "parcels", range(40, 45))
    assert _take(consumer, 5) == more
    assert consumer.receive(2.0) is None

    # The lost node comes back with what it had: it has no part in it.
    nodes.start(primary)
    nodes.wait_well()
    again = _send(session, "parcels", range(45, 50))
    assert _take(consumer, 5) == again
    assert consumer.receive(2.0) is None
    assert session.mirrors_of("parcels") == []


def test_what_a_transaction_has_acknowledged_comes_from_no_promoted_mirror_again(
    nodes: Nodes, open_session: OpenSession
) -> None:
    """The mirror's node does not run meanwhile, so the mirror still has it."""
    session, queue = open_session(), Destination("tolls", replicas=1, max_bytes=1 << 20)
    session.create(queue)
    primary, node, name = _add(nodes, queue)
    sent = _send(session, "tolls", range(10))
    assert not session.outcome("none", LIMIT_S)  # makes the register
    _wait_complete(nodes, TRANSACTIONS)
    _mirror(nodes, name, lambda row: row["messages"] == 10 and not row["behind_messages"])
    consumer = session.consumer("tolls", "reader")
    nodes.end(node, signal.SIGKILL)
    with session.transaction(limit_s=MOST_LIMIT_S) as transaction:
        for _ in range(3):
            received = consumer.receive(LIMIT_S)
            assert received is not None
            transaction.acknowledge(received)
    consumer.close()
    nodes.end(primary, signal.SIGKILL)
    nodes.start(node)
    row = _mirror(nodes, name, lambda row: row["is_running"] and not row["hears_primary"])
    assert row["messages"] == 10
    done(_path(nodes), "mirror", "promote", "tolls", "--node", node, "--yes")
    consumer = open_session().consumer("tolls", "reader")
    assert sorted(_take(consumer, 7), key=int) == sent[3:]
    assert consumer.receive(2.0) is None


def test_subscribers_of_a_topic_go_on_where_they_were(nodes: Nodes, open_session: OpenSession) -> None:
    session = open_session()
    topic = Destination("news", DestinationKind.TOPIC, replicas=1, max_bytes=16 << 20)
    session.create(topic)
    fast, slow = (session.consumer("news", name, credit=3) for name in ("fast", "slow"))
    assert fast.wait_ready(1, LIMIT_S)
    assert slow.wait_ready(1, LIMIT_S)
    primary, node, name = _add(nodes, topic)
    sent = _send(session, "news", range(20))
    assert _take(fast, 20) == sent
    assert _take(slow, 5) == sent[:5]
    _mirror(nodes, name, lambda row: row["messages"] == 15 and not row["behind_messages"])
    slow.close()
    fast.close()
    _wait_recorded(session, name, {"fast-news": 20, "slow-news": 5})
    nodes.end(primary, signal.SIGKILL)
    done(_path(nodes), "mirror", "promote", "news", "--node", node, "--yes")
    fast, slow = (session.consumer("news", name) for name in ("fast", "slow"))
    more = _send(session, "news", range(20, 23))
    assert sorted(_take(slow, 18), key=int) == [*sent[5:], *more]
    assert _take(fast, 3) == more
    assert fast.receive(2.0) is None


def test_what_a_primary_that_was_emptied_has_lost_stays_in_its_mirror(
    nodes: Nodes, open_session: OpenSession
) -> None:
    """Also when it has stored more than the mirror since."""
    session, queue = open_session(), Destination("coins", replicas=1, max_bytes=1 << 20)
    session.create(queue)
    primary, node, name = _add(nodes, queue)
    sent = _send(session, "coins", range(10))
    _mirror(nodes, name, lambda row: row["messages"] == 10 and not row["behind_messages"])
    _wait_recorded(session, name, {"queue-coins": 0})
    link = session.link
    config = link.run(link.ask(f"STREAM.INFO.{queue.stream}", {}))["config"]
    config["placement"] = {"tags": [essentials.node_tag(primary)]}  # where it was

    async def empty() -> None:
        await delete_stream(link, queue.stream)
        await link.retry(lambda: link.ask(f"STREAM.CREATE.{queue.stream}", config), "the stream", LIMIT_S)

    link.run(empty())
    row = _mirror(nodes, name, lambda row: row["is_ahead"] and row["hears_primary"])
    assert "its primary was lost or set back" in row["text"]
    deadline = Deadline(LIMIT_S)
    while (found := link.run(record(link, name))) is None or not found.is_set_back:
        assert not deadline.passed, found
    more = _send(session, "coins", range(10, 30))
    assert _take(session.consumer("coins", "reader"), 20) == more
    assert link.run(trim(link, name)) == 0
    row = _mirror(nodes, name, lambda row: row["hears_primary"])
    assert row["is_ahead"]
    again = sla(_path(nodes), "mirror", "add", "coins", "--node", node)
    assert again.exit_code == 1
    assert "was lost or set back since" in again.output
    nodes.end(node, signal.SIGKILL)
    nodes.start(node)
    nodes.wait_well()
    row = _mirror(nodes, name, lambda row: row["is_running"] and row["hears_primary"])
    assert row["is_ahead"]
    assert [message.data for message in session.read_mirror("coins", node)][:10] == sent
    session.remove_mirror("coins", node)


def _wait_recorded(session: MessageSession, name: str, floors: dict[str, int]) -> None:
    """Until the mirror's node has written down where the subscribers are."""
    deadline = Deadline(LIMIT_S)
    while True:
        found = session.link.run(record(session.link, name))
        seen = {consumer.name: consumer.floor for consumer in found.consumers} if found else {}
        if seen == floors:
            return
        assert not deadline.passed, seen


def _wait_copier(session: MessageSession, stream: str, sequence: int) -> None:
    """Until the engine's copier has acknowledged so far: then a message that nobody else wants is gone."""
    deadline = Deadline(LIMIT_S)
    while True:
        found = session.link.run(session.link.ask(f"CONSUMER.LIST.{stream}", {}))["consumers"]
        floors = [
            part["ack_floor"]["stream_seq"]
            for part in found
            if part["config"].get("ack_policy") != "explicit"
        ]
        if floors and min(floors) >= sequence:
            return
        assert not deadline.passed, found
