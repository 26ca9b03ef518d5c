"""Gateways on the move: the pair's side of shards (P12).

The parent owns the map of shards and says so in ``map`` messages. A pair acts on it in three places:

* *HELLO of a gateway whose shard is another's.* Nothing has been answered yet: the socket goes to the owner
  with the bytes read so far, HELLO among them, and the owner reads them as its own.
* *A shard is taken away.* Each of its sessions goes, ``MOVES_A_STEP`` a round: what is batched is posted, the
  socket leaves with partial input, unsent output, unanswered polls, positions, streams and the newest caps.
  The new owner rewinds the positions (it cannot know when the last post of the old one is taken; dbmanager
  drops what it has) and announces the gateway, so that ``services`` addresses it there from now on.
* *A message for a gateway that has left* is passed on to the owner through the parent, once. A message that
  has been passed on and finds no owner here is dropped and counted; its sender repeats it (caps under their
  lease, watermarks with the next notice).

A session that cannot be moved (TLS: its state is in this process' memory) is told BYE and dials again;
while it stays, it is served here as a guest. So that it arrives at the owner, an agent names its gateway in
the server name of its ClientHello, which is looked at without taking it (``wire.sni``): a TLS connection is
passed on before its handshake begins. The race of an order with a move: the outbound thread writes
the book, then looks at the map; this thread writes the map, then reads the book. One of the two sees the
other.

Thread: the inbound thread, except ``Ownership``, which is read by all.

Source: P12; DESIGN.md 3 ("whole shards move").
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.poller.balance import SHARDS, Map, shard_of
from pmdaemon.poller.channel import Channel, Parcel, state_file
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Gateway
from pmdaemon.poller.packing import pack_gateway, unpack_gateway
from pmdaemon.poller.registry import Registry
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import frame, parcel
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import SessionState
from pmdaemon.wire.sni import gateway_named

MOVES_A_STEP: Final = (
    16  # some 60 us each: a move of many delays the other gateways by a millisecond at a time
)
REASON_CHARACTERS: Final = 300
MAX_ID_CHARACTERS: Final = 64  # of a UUID in any of its forms; what is longer is refused here
MOST_HOPS: Final = 3  # a connection that has been passed on so often is served where it is
log = structlog.get_logger("moving")


class Ownership:
    """Which shards are this pair's. Written by the inbound thread, one attribute at once; read by any."""

    def __init__(self, pair: int) -> None:
        self.pair = pair
        self.owners: Map = (pair,) * SHARDS

    @property
    def is_shared(self) -> bool:
        """Whether other pairs have shards."""
        return self.owners.count(self.pair) < SHARDS

    def is_mine(self, gateway_id: str) -> bool:
        """Whether a gateway belongs here."""
        return self.owners[shard_of(gateway_id)] == self.pair


class Inherited(NamedTuple):
    """For the outbound thread: a gateway has moved here; poll it, with these caps in force (or none)."""

    gateway_id: str
    caps: tuple[int, bytes] | None


class PassedOn(NamedTuple):
    """For the outbound thread: a message of the mailbox that another pair has passed on."""

    sender: str
    payload: bytes


class Forward(NamedTuple):
    """Hint of the outbound thread: pass this message on to the owner of the shard."""

    shard: int
    sender: str
    payload: bytes


ToOutbound = str | Inherited | PassedOn


class MigrationHost(Protocol):
    """What is needed of the inbound thread's loop."""

    def adopt(self, sock: socket.socket, address: str, *, is_known: bool = False) -> AgentConnection | None:
        """Serve a new socket; ``is_known``: a registered gateway's."""

    def release(self, conn: AgentConnection) -> None:
        """Serve it no more; its descriptor is still open."""

    def read_pending(self, conn: AgentConnection) -> None:
        """Act on the frames among bytes that came with a connection, and flush its output."""


class ShardMigrator:
    """Takes from and gives to the parent. An ``Arrivals`` for the inbound thread."""

    def __init__(
        self,
        channel: Channel,
        ownership: Ownership,
        registry: Registry,
        reception: FrameHandlers,
        post_cuts: Callable[[], None],
        book: StandingCaps,
        to_outbound: ThreadInbox[ToOutbound],
        counters: Counter[str],
    ) -> None:
        self.channel = channel
        self.ownership = ownership
        self._registry = registry
        self._reception = reception
        self._post_cuts = post_cuts
        self._book = book
        self._to_outbound = to_outbound
        self._counters = counters
        self._leaving: deque[str] = deque()
        self._hops: dict[AgentConnection, int] = {}

    def fileno(self) -> int:
        """Readable when something has arrived."""
        return self.channel.fileno()

    @property
    def has_work(self) -> bool:
        """Whether sessions wait to leave."""
        return bool(self._leaving)

    # -- from the parent

    def take(self, host: MigrationHost) -> None:
        """Act on what the parent has sent.

        Raises:
            PeerGone: the parent has closed its end; this process must stop.
        """
        for item in self.channel.take():
            try:
                self._act(item, host)
            except MailboxError:
                raise
            except Exception as exc:  # noqa: BLE001 - logged below
                # A defect of ours, or descriptors lost for want of room (RLIMIT_NOFILE): agents dial again.
                self._counters["bad_parcels"] += 1
                log.error("bad-parcel", op=item.header.get("op"), error=f"{type(exc).__name__}: {exc}")
                if item.header.get("dialled"):  # the parent's duplicate would keep it open for ever
                    told = {
                        "address": item.header["address"],
                        "reason": "its descriptor was lost: open_files",
                    }
                    self.channel.send({"op": "refused", **told, "is_over": True})
            finally:
                item.close()

    def _act(self, item: Parcel, host: MigrationHost) -> None:
        header = item.header
        if item.op == "new":
            conn = host.adopt(item.take_socket(), header["address"])
            if conn is not None:
                conn.is_dialled = header["dialled"]
        elif item.op == "map":
            self._set_map(tuple(header["owners"]))
        elif item.op == "moved":
            state = parcel.unpack(item.take_state())
            self._arrive(item.take_socket(), header, state, host)
        elif item.op == "mail":
            self._to_outbound.put(PassedOn(header["sender"], item.take_state()))
        elif item.op == "elsewhere":
            gateway = self._registry.get(header["gw"])
            if gateway is not None:
                self._reception.registered_elsewhere(gateway, header["address"])

    def _set_map(self, owners: Map) -> None:
        if len(owners) != SHARDS:
            raise ValueError(f"a map of {len(owners)} shards")
        was_shared = self.ownership.is_shared
        self.ownership.owners = owners
        for gateway in self._registry.all():
            if gateway.conn is None:
                continue
            if owners[gateway.shard] != self.ownership.pair:
                self._leaving.append(gateway.gateway_id)
            elif not was_shared and self.ownership.is_shared:
                self._tell_up(gateway)

    # -- leaving

    def registered(self, gateway_id: str) -> None:
        """A session has begun: tell outbound and the parent; it leaves if its shard has left meanwhile."""
        self._to_outbound.put(gateway_id)
        if not self.ownership.is_shared:
            return
        gateway = self._registry.get(gateway_id)
        if gateway is not None:
            self._tell_up(gateway)
            if self.ownership.owners[gateway.shard] != self.ownership.pair:
                self._leaving.append(gateway_id)

    def _tell_up(self, gateway: Gateway) -> None:
        self.channel.send({"op": "up", "gw": gateway.gateway_id, "address": gateway.address})

    def is_foreign(self, conn: AgentConnection, hello: frame.Frame) -> bool:
        """Whether the sender of this HELLO must be served by another pair."""
        gateway_id = hello.header.get("gw")
        return (
            self.ownership.is_shared
            and conn.is_movable
            and isinstance(gateway_id, str)
            and len(gateway_id) <= MAX_ID_CHARACTERS  # it travels in a header to the parent
            and self.is_others(conn, gateway_id)
        )

    def is_others(self, conn: AgentConnection, gateway_id: str) -> bool:
        """Whether this gateway belongs to another pair, to which the connection can still be passed on."""
        return self._hops.get(conn, 0) < MOST_HOPS and not self.ownership.is_mine(gateway_id)

    def send_stranger(self, conn: AgentConnection, gateway_id: str, host: MigrationHost) -> None:
        """A connection whose HELLO was read and not answered goes to the owner of its shard."""
        self._send(conn, gateway_id, {}, host)

    def takes_before_tls(self, conn: AgentConnection, host: MigrationHost) -> bool:
        """Send on a connection whose handshake is about to begin, if it belongs to another pair.

        TLS cannot move once it has begun.
        """
        if not self.ownership.is_shared or not conn.is_movable:
            return False
        gateway_id = gateway_named(conn.peek())
        if gateway_id is None or not self.is_others(conn, gateway_id):
            return False
        self.send_stranger(conn, gateway_id, host)
        return True

    def work(self, host: MigrationHost) -> None:
        """Let some of the leaving sessions go."""
        for _ in range(min(len(self._leaving), MOVES_A_STEP)):
            gateway = self._registry.get(self._leaving.popleft())
            if gateway is None or self.ownership.owners[gateway.shard] == self.ownership.pair:
                continue
            conn = gateway.conn
            if isinstance(conn, AgentConnection) and not conn.closed and conn.drain_until_ns is None:
                self._leave(gateway, conn, host)

    def _leave(self, gateway: Gateway, conn: AgentConnection, host: MigrationHost) -> None:
        if not conn.is_movable:
            self._counters["moves_by_reconnect"] += 1
            bye = frame.encode(Kind.BYE, {"reason": "its shard has moved to another pair: connect again"})
            conn.finish(Kind.BYE, bye, "its shard has moved to another pair")
            return
        self._post_cuts()  # nothing of it may be posted after the new owner's first post
        incarnation, notice = self._registry.give_away(gateway.gateway_id)
        state = {
            "gateway": pack_gateway(gateway),
            "caps": self._book.caps_of(gateway.gateway_id),
            "inc": incarnation,
            "hw": [list(row) for row in notice],
        }
        self._send(conn, gateway.gateway_id, state, host)

    def _send(
        self, conn: AgentConnection, gateway_id: str, state: dict[str, Any], host: MigrationHost
    ) -> None:
        host.release(conn)
        luggage = conn.pack_up()
        hops = self._hops.pop(conn, 0) + 1
        if luggage is None:  # it was ending: the peer dials again
            conn.close()
            return
        state |= {"state": luggage.state.value, "pending": luggage.pending, "out": luggage.out}
        state["opened_ns"], state["received_ns"] = conn.opened_ns, conn.last_received_ns
        header = {"op": "moved", "shard": shard_of(gateway_id), "gw": gateway_id, "hops": hops}
        header["address"], header["dialled"] = conn.address, conn.is_dialled
        self._counters["moved_out"] += 1
        self.channel.send(header, [luggage.descriptor, state_file(parcel.pack(state))])

    def tell_refusal(self, conn: AgentConnection, reason: str) -> None:
        """Tell the parent, which has dialled it, why this connection ends; the end itself it sees."""
        told = {"address": conn.address, "reason": reason[:REASON_CHARACTERS]}
        self.channel.tell({"op": "refused", **told, "is_over": False})

    def forward(self, hint: Forward) -> None:
        """Pass a message on to the owner of its shard."""
        self._counters["mail_passed_on"] += 1
        header = {"op": "mail", "shard": hint.shard, "sender": hint.sender}
        self.channel.send(header, [state_file(hint.payload)])

    # -- arriving

    def _arrive(
        self, sock: socket.socket, header: dict[str, Any], state: dict[str, Any], host: MigrationHost
    ) -> None:
        conn = host.adopt(sock, header["address"], is_known="gateway" in state)
        if conn is None:
            return
        conn.unpack(SessionState(state["state"]), state["pending"], state["out"])
        conn.opened_ns, conn.last_received_ns = state["opened_ns"], state["received_ns"]
        conn.is_dialled = header["dialled"]
        self._counters["moved_in"] += 1
        self._hops[conn] = header["hops"]
        if "gateway" in state:
            self._settle(conn, state)
        host.read_pending(conn)
        if conn.gateway is not None or conn.closed:
            self._hops.pop(conn, None)

    def _settle(self, conn: AgentConnection, state: dict[str, Any]) -> None:
        older = self._registry.get(state["gateway"]["id"])
        if older is not None:
            self._reception.registered_elsewhere(older, conn.address)
        gateway = unpack_gateway(state["gateway"], conn)
        notice = [(gateway_id, epoch, seq) for gateway_id, epoch, seq in state["hw"]]
        self._registry.take_in(gateway, state["inc"], notice)
        self._reception.announce_session(gateway)
        caps = state["caps"]
        self._to_outbound.put(Inherited(gateway.gateway_id, None if caps is None else (caps[0], caps[1])))
        if self.ownership.owners[gateway.shard] != self.ownership.pair:
            self._leaving.append(gateway.gateway_id)

    def forget(self, conn: AgentConnection) -> None:
        """A connection has ended."""
        self._hops.pop(conn, None)
