"""Administration: what the nodes of a cluster say of themselves, and what they are asked to do (C13).

Two connections, each made when it is first needed. The one of the system account asks all nodes at once;
every answer says how many nodes there are (``running_nodes``), so the asker knows how many answers to expect
and waits no longer. The one of the product's account asks for streams and moves their leaders.

Planned failover is a *stepdown*: the leader of a stream hands over to a copy that has everything, within
milliseconds, and nothing acknowledged is lost. Without a request to a certain node the engine chooses.

Errors of the client library end here, as ``ClusterError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamManager
from nats.js.api import ConsumerInfo, StreamInfo
from nats.js.errors import ServiceUnavailableError

from pmdaemon.pki import contexts
from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.cluster import essentials
from sla_server.cluster.access import PRODUCT_USER
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import ClusterRefused, ClusterUnreachable
from sla_server.cluster.membership import Membership
from sla_server.cluster.messages import mirror_streams, mirrors
from sla_server.cluster.messages.link import BorrowedLink
from sla_server.cluster.messages.mirrors import MirrorRow
from sla_server.cluster.server_conf import SYSTEM_USER
from sla_server.cluster.server_facts import NOTHING_SAID, ServerFacts

Answer = TypeVar("Answer")
CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0
"""For all answers of nodes that live; those of one that hangs are not waited for longer."""
HAND_OVER_S: Final = 30.0
ELECTION_S: Final = 15.0
LEFT_OVER_S: Final = 40.0
"""For the engine that a killed process of this node has left to end; to stop it takes 30 s at most."""
MOST_STREAMS: Final = 256  # in one answer of the engine, or as many consumers
PING: Final = "$SYS.REQ.SERVER.PING"
META_STEPDOWN: Final = "$JS.API.META.LEADER.STEPDOWN"
STREAM_LIST: Final = "$JS.API.STREAM.LIST"
STREAM_STEPDOWN: Final = "$JS.API.STREAM.LEADER.STEPDOWN"
CONSUMER_STEPDOWN: Final = "$JS.API.CONSUMER.LEADER.STEPDOWN"
REMOVE: Final = "$JS.API.SERVER.REMOVE"
NO_LEADER: Final = (
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    ServiceUnavailableError,
)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What one node says of itself.

    Attributes:
        expected: nodes that it knows to run, itself included.
        leader: the node that leads the cluster, as far as this one knows; "" while there is none. One
            without peers leads itself.
        members: nodes that the leader knows, with those that do not run; only the leader has them.
        stored_bytes: by the streams of this node.
        is_storing: False when its engine has turned storage off: its disk is full, or fails.
        server: what the server around it says of itself.
    """

    name: str
    site: str
    version: str
    connections: int
    expected: int
    leader: str
    members: tuple[tuple[str, bool], ...]
    stored_bytes: int
    memory_bytes: int
    parameters: dict[str, str]
    is_storing: bool = True
    server: ServerFacts = NOTHING_SAID

    @property
    def digest(self) -> str:
        """Of its essential parameters."""
        return essentials.digest(self.parameters)


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream and its copies.

    Attributes:
        leader: "" while it has none.
        current: other nodes whose copies have everything.
        behind: other nodes whose copies have not, or that do not run.
    """

    name: str
    subjects: tuple[str, ...]
    replicas: int
    leader: str
    current: tuple[str, ...]
    behind: tuple[str, ...]
    messages: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is known of a cluster at one moment."""

    nodes: tuple[NodeRow, ...]
    streams: tuple[StreamRow, ...]
    trouble: str = ""
    mirrors: tuple[MirrorRow, ...] = ()
    """Asynchronous copies; those that the engine keeps together are with their streams."""

    @property
    def leader(self) -> str:
        """The node that leads the cluster; "" while there is none."""
        return next((node.leader for node in self.nodes if node.leader), "")

    @property
    def missing(self) -> tuple[str, ...]:
        """Members that do not run."""
        answered = {node.name for node in self.nodes}
        known = (name for node in self.nodes for name, _ in node.members)
        return tuple(dict.fromkeys(name for name in known if name not in answered))

    @property
    def is_well(self) -> bool:
        """Every member answers, there is a leader, all copies have everything, parameters are the same."""
        if self.trouble or self.missing or self.not_storing or self.mixed or not self.leader:
            return False
        return all(stream.leader and not stream.behind for stream in self.streams)

    @property
    def not_storing(self) -> tuple[str, ...]:
        """Nodes that run and have turned their storage off."""
        return tuple(node.name for node in self.nodes if not node.is_storing)

    @property
    def mixed(self) -> bool:
        """Whether essential parameters differ between nodes."""
        return len({node.digest for node in self.nodes}) > 1


class Admin:
    """See the module; ``async with``.

    Args:
        config: of this node.
        member: its secrets.
        addresses: which nodes to ask; default: this one and its peers.
    """

    def __init__(
        self, config: ClusterConfig, member: Membership, addresses: Sequence[str] | None = None
    ) -> None:
        self._config = config
        self._member = member
        self._addresses = (
            list(addresses) if addresses is not None else [config.listen, *(p.listen for p in config.peers)]
        )
        self._alone = "" if config.peers else config.node
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                await client.close()

    async def state(self) -> ClusterState:
        """Nodes, and streams if the cluster has a majority.

        Raises:
            ClusterUnreachable: no node answers.
        """
        nodes = await self.nodes()
        try:
            streams, silent = await self.streams(), await self.silent_streams()
            trouble = f"no node answers for {', '.join(silent)}: its copies do not run" if silent else ""
            has_mirrors = any(
                mirror_streams.parts_of(name) for name in (*(row.name for row in streams), *silent)
            )
            found = await self.mirrors() if has_mirrors else ()
            return ClusterState(
                nodes, tuple(row for row in streams if not mirror_streams.parts_of(row.name)), trouble, found
            )
        except ClusterRefused as exc:
            return ClusterState(nodes, (), str(exc))

    async def nodes(self, limit_s: float = ANSWER_S) -> tuple[NodeRow, ...]:
        """All nodes that answer within ``limit_s``, by name.

        Raises:
            ClusterUnreachable: no node answers.
        """
        client = await self.client(SYSTEM_USER)
        with _translated("asking the nodes"):
            inbox = await client.subscribe(client.new_inbox())
            await client.publish(PING, b"", reply=inbox.subject)
            rows: dict[str, NodeRow] = {}
            deadline = Deadline(limit_s)
            while len(rows) < max((row.expected for row in rows.values()), default=1):
                try:
                    answer = await inbox.next_msg(timeout=max(0.001, deadline.left_s()))
                except (TimeoutError, nats.errors.TimeoutError):
                    break
                row = node_row(json.loads(answer.data))
                rows[row.name] = row
            await inbox.unsubscribe()
        if not rows:
            raise ClusterUnreachable(", ".join(self._addresses), "it accepts connections and says nothing")
        return tuple(rows[name] for name in sorted(rows))

    async def streams(self) -> tuple[StreamRow, ...]:
        """All streams of the product, by name.

        Raises:
            ClusterUnreachable: no node answers.
            ClusterRefused: there is no majority.
        """
        manager = (await self.client(PRODUCT_USER)).jetstream(timeout=ANSWER_S)
        found: list[StreamInfo] = []
        with _translated("listing the streams"):
            while True:
                more = await manager.streams_info(offset=len(found))
                found += more
                if len(more) < MOST_STREAMS:
                    break
        return tuple(sorted((stream_row(info, self._alone) for info in found), key=lambda row: row.name))

    async def silent_streams(self) -> list[str]:
        """Streams that exist and that no running node leads: their copies do not run, or elect.

        Raises:
            ClusterUnreachable: no node answers.
            ClusterRefused: there is no majority.
        """
        found = await self._request(STREAM_LIST, PRODUCT_USER, {})
        return sorted(str(name) for name in found.get("missing") or ())

    async def mirrors(self) -> tuple[MirrorRow, ...]:
        """Asynchronous mirrors of destinations, by name.

        Raises:
            ClusterUnreachable: no node answers.
            ClusterRefused: there is no majority.
        """
        link = BorrowedLink(await self.client(PRODUCT_USER), f"sla-{self._config.node}")
        with _translated("listing the mirrors"):
            return await mirrors.rows(link, SystemClock())

    async def only_on(self, node: str) -> list[str]:
        """Streams of a single copy that this node has: they cannot be handed over.

        A mirror is no copy of its stream here, and none that something is lost with.
        """
        return [
            row.name
            for row in await self.streams()
            if row.replicas < 2 and row.leader == node and not mirror_streams.parts_of(row.name)
        ]

    async def stepdown(self, stream: str, to: str = "") -> StreamRow:
        """Have the leader of a stream hand over; returns when another one leads.

        Args:
            stream: its name.
            to: the node that should lead it; "": the engine chooses.

        Raises:
            ClusterRefused: no such stream, a single copy, or the engine cannot do it now.
        """
        before = await self._stream(stream)
        if before.replicas < 2:
            raise ClusterRefused(
                f"stream {stream} has a single copy, on {before.leader}: no other can lead it"
            )
        if to and to == before.leader:
            return before
        if to and to not in before.current:
            raise ClusterRefused(
                f"{to} has no complete copy of stream {stream}; these have: "
                f"{', '.join(before.current) or 'none'}"
            )
        await self._step_down(f"{STREAM_STEPDOWN}.{stream}", PRODUCT_USER, to)
        deadline = Deadline(HAND_OVER_S)
        while True:
            # It may have no leader for a moment.
            after = await until_answered(lambda: self._stream(stream), deadline)
            if after.leader and after.leader != before.leader and (not to or after.leader == to):
                return after
            if deadline.passed:
                raise ClusterRefused(
                    f"stream {stream} is led by {after.leader or 'no node'} after {HAND_OVER_S:g} s, not by "
                    f"{to or 'another node'}"
                )
            await asyncio.sleep(0.05)

    async def drain(self, node: str) -> list[str]:
        """Have a node hand over everything that it leads, before it is stopped; returns what it led.

        Raises:
            ClusterRefused: it still leads something after ``HAND_OVER_S``.
        """
        moved: list[str] = []
        deadline = Deadline(HAND_OVER_S)
        # A stepdown of ours leaves a moment without a leader, in which the nodes do not say who leads what.
        while led := await until_answered(lambda: self._led_by(node), deadline):
            if deadline.passed:
                raise ClusterRefused(
                    f"{node} still leads {', '.join(led[:5])}. Copies elsewhere may be behind, or there is "
                    "none"
                )
            for subject in led:
                user = SYSTEM_USER if subject == META_STEPDOWN else PRODUCT_USER
                with contextlib.suppress(ClusterRefused):  # it has just changed, or a copy is behind: again
                    await self._step_down(subject, user, "")
                    moved.append(subject)
            await asyncio.sleep(0.1)
        return list(dict.fromkeys(moved))

    async def forget(self, node: str, *, lose: bool = False) -> None:
        """Have the cluster forget a node that does not run: it no longer counts for the majority.

        Args:
            node: its name.
            lose: also if it may have the only copy of a stream.

        Raises:
            ClusterRefused: it still runs, is not known, there is no majority, or a stream has no copy that
                runs.
        """
        if any(row.name == node for row in await self.nodes()):
            raise ClusterRefused(f"{node} still runs. Stop it first; 'sla cluster drain {node}' before that")
        deadline = Deadline(0 if lose else ELECTION_S)
        while (silent := await self._silent_primaries()) and not deadline.passed:
            await asyncio.sleep(0.5)  # the node may have led them until a moment ago
        if silent and not lose:
            raise ClusterRefused(
                f"no node that runs leads {', '.join(silent)}: {node} may have the only copy, which would be "
                f"lost. Start {node} and copy what it has; or give that up with --lose"
            )
        await self._request(REMOVE, SYSTEM_USER, {"peer": node})

    async def _silent_primaries(self) -> list[str]:
        """Without mirrors: what is only in those is lost already."""
        return [name for name in await self.silent_streams() if not mirror_streams.parts_of(name)]

    async def _led_by(self, node: str) -> list[str]:
        """Subjects of the stepdowns that take from a node what it leads."""
        led: list[str] = []
        manager = (await self.client(PRODUCT_USER)).jetstream(timeout=ANSWER_S)
        for stream in await self.streams():
            if stream.replicas < 2:
                continue
            if stream.leader == node:
                led.append(f"{STREAM_STEPDOWN}.{stream.name}")
            with _translated(f"listing consumers of {stream.name}"):
                consumers = await all_consumers(manager, stream.name)
            led += [
                f"{CONSUMER_STEPDOWN}.{stream.name}.{consumer.name}"
                for consumer in consumers
                if consumer.cluster is not None
                and consumer.cluster.leader == node
                and consumer.cluster.replicas
            ]
        rows = await self.nodes()
        if len(rows) > 1 and ClusterState(rows, ()).leader == node:
            led.append(META_STEPDOWN)
        return led

    async def _stream(self, name: str) -> StreamRow:
        manager = (await self.client(PRODUCT_USER)).jetstream(timeout=ANSWER_S)
        with _translated(f"asking for stream {name}"):
            return stream_row(await manager.stream_info(name), self._alone)

    async def _step_down(self, subject: str, user: str, to: str) -> None:
        await self._request(subject, user, {"placement": {"preferred": to}} if to else {})

    async def _request(self, subject: str, user: str, body: dict[str, Any]) -> dict[str, Any]:
        client = await self.client(user)
        with _translated(subject):
            answer = await client.request(
                subject, json.dumps(body).encode() if body else b"", timeout=ANSWER_S
            )
            found = json.loads(answer.data)
        if error := found.get("error"):
            raise ClusterRefused(f"the cluster refuses {subject}: {error.get('description', error)}")
        assert isinstance(found, dict)
        return found

    async def client(self, user: str = PRODUCT_USER) -> Client:
        """The connection of a user, made when it is first needed; ends with this.

        Raises:
            ClusterUnreachable: no node answers.
        """
        if user not in self._clients:
            self._clients[user] = await connect(self._config, self._member, self._addresses, user)
        return self._clients[user]


async def connect(
    config: ClusterConfig, member: Membership, addresses: Sequence[str], user: str = PRODUCT_USER
) -> Client:
    """A connection to one of these nodes; it goes on to others by itself when that one dies.

    Raises:
        ClusterUnreachable: none takes it.
    """
    scheme = "tls" if member.tls else "nats"
    context: ssl.SSLContext | None = None
    if member.tls:
        # nats keeps a half-closed connection open, which asyncio warns of at the end of each one with TLS.
        logging.getLogger("asyncio").addFilter(_is_no_eof_warning)
        context = contexts.node(member.tls.authority, member.tls.certificate)
    secret = member.secrets.system if user == SYSTEM_USER else member.secrets.product
    problems: list[str] = []

    async def keep(error: Exception) -> None:
        problems.append(str(error) or type(error).__name__)

    client = Client()
    try:
        await asyncio.wait_for(
            client.connect(
                servers=[f"{scheme}://{address}" for address in addresses],
                user=user,
                password=secret,
                tls=context,
                name=f"sla-{config.node}",
                error_cb=keep,
                connect_timeout=round(CONNECT_S),
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=5,
            ),
            CONNECT_S * (len(addresses) + 1),
        )
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        with contextlib.suppress(Exception):
            await client.close()
        problem = problems[-1] if problems else str(exc) or type(exc).__name__
        raise ClusterUnreachable(", ".join(addresses), problem) from exc
    return client


def _is_no_eof_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("returning true from eof_received()")


def running_nodes(figures: Mapping[str, Any]) -> int:
    """How many nodes a node is connected to, itself included, from the ``statsz`` of its engine.

    It counts nodes that the engine has routes to, for every node has some to each other one. The engine's own
    count, ``active_servers``, keeps a node that was killed for three minutes, also beside the one that was
    started in its place.
    """
    return 1 + len({str(route.get("name", route.get("rid"))) for route in figures.get("routes") or ()})


def node_row(answer: dict[str, Any]) -> NodeRow:
    """From an answer to ``PING``."""
    server, figures = answer["server"], answer.get("statsz", {})
    # What the engine says of itself, ``server.jetstream``, stays true when it has turned that off.
    is_storing = figures.get("jetstream") is not None
    streams = figures.get("jetstream") or {}
    meta, stored = streams.get("meta") or {}, streams.get("stats") or {}
    tags = [str(tag) for tag in server.get("tags") or ()]
    members = [
        (str(peer.get("name", "?")), not peer.get("offline", False)) for peer in meta.get("replicas") or ()
    ]
    return NodeRow(
        name=str(server["name"]),
        site=essentials.site_of_tags(tags),
        version=str(server.get("ver", "?")),
        connections=int(figures.get("connections", 0)),
        expected=running_nodes(figures),
        leader=str(meta.get("leader", "")) if "meta" in streams or not is_storing else str(server["name"]),
        members=tuple(members),
        stored_bytes=int(stored.get("storage", 0)),
        memory_bytes=int(figures.get("mem", 0)),
        parameters=essentials.of_tags(tags),
        is_storing=is_storing,
        server=ServerFacts.of_tags(tags),
    )


async def all_consumers(manager: JetStreamManager, stream: str) -> list[ConsumerInfo]:
    """Of a stream, however many answers of the engine that takes."""
    found: list[ConsumerInfo] = []
    while True:
        more = await manager.consumers_info(stream, offset=len(found))
        found += more
        if len(more) < MOST_STREAMS:
            return found


def stream_row(info: StreamInfo, alone: str = "") -> StreamRow:
    """From what the engine says of a stream.

    ``alone`` is the node whose engine is none of a cluster, and says nothing of leaders; "": it is of one.
    """
    cluster = info.cluster
    peers = (cluster.replicas if cluster else None) or []
    return StreamRow(
        name=str(info.config.name),
        subjects=tuple(info.config.subjects or ()),
        replicas=info.config.num_replicas or 1,
        leader=str((cluster.leader if cluster else alone) or ""),
        current=tuple(sorted(str(peer.name) for peer in peers if peer.current and not peer.offline)),
        behind=tuple(sorted(str(peer.name) for peer in peers if not peer.current or peer.offline)),
        messages=info.state.messages,
        stored_bytes=info.state.bytes,
    )


async def check_essentials(config: ClusterConfig, member: Membership) -> list[str]:
    """Compare essential parameters with every running node that can be reached; returns their names.

    The first peer that can be reached is asked: all nodes that it knows answer through it.

    Raises:
        EssentialsDiffer: a node has others; names the parameters.
        ClusterRefused: another machine runs as this node. The engines of both would go on connecting to the
            others, many times a second, and be sent away.
    """
    own, deadline = essentials.of(config), Deadline(LEFT_OVER_S)
    while config.node in (seen := await _running(config, member)):
        if deadline.passed:
            raise ClusterRefused(
                f"a node {config.node} runs already, and each has a name of its own. If this machine is a "
                "copy of that one, give it another name in [cluster] node, and remove the copied directory "
                "of the cluster before it joins with an invitation of its own"
            )
        await asyncio.sleep(0.5)
    for name, row in sorted(seen.items()):
        essentials.compare(own, row.parameters, name)
    return sorted(seen)


async def _running(config: ClusterConfig, member: Membership) -> dict[str, NodeRow]:
    """Nodes that the first peer that can be reached knows to run."""
    for peer in config.peers:
        with contextlib.suppress(ClusterUnreachable, ClusterRefused):  # the next one knows as much
            async with Admin(config, member, [peer.listen]) as admin:
                return {row.name: row for row in await admin.nodes()}
    return {}


async def until_answered(ask: Callable[[], Awaitable[Answer]], deadline: Deadline) -> Answer:
    """What ``ask`` answers once it is not refused any more; at the deadline its refusal."""
    while True:
        try:
            return await ask()
        except ClusterRefused:
            if deadline.passed:
                raise
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Errors of the client library become ours; ``what`` begins the text."""
    try:
        yield
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        problem = str(exc) or type(exc).__name__
        if isinstance(exc, NO_LEADER):
            problem = "no node leads; a majority of the nodes may be missing"
        raise ClusterRefused(f"{what}: {problem}") from exc
