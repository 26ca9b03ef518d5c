"""Migration of shards from one pair to another: the pair's side (P12).

The parent owns the map of shards and sends it in ``map`` messages. A pair acts on it in three places:

* *HELLO of a gateway whose shard is another pair's.* Nothing has been answered yet: the new connection goes
  to the owner with the bytes read so far, HELLO among them, and the owner reads them as its own. An agent
  that speaks TLS names its gateway in the server name of its ClientHello, which is read without taking
  it (``wire.sni``), so its connection is passed on before its handshake begins.
* *A shard is taken away.* Its sessions end by an orderly reconnect, ``ENDS_A_STEP`` a round: what is batched
  is posted; the caps in force and the durable positions go ahead to the new owner; the agent is sent BYE,
  dials again and lands at the new owner (ADR 19). Until its turn comes, a session is served here as a guest.
  The new owner asks for everything behind the durable; dbmanager and ``services`` drop what they have.
* *A message for a gateway that has left* is passed on to the owner through the parent, once. A message that
  has been passed on and finds no owner here is dropped and counted; its sender repeats it (caps under their
  lease, watermarks with the next notice).

The race of an order with a migration: the outbound thread writes the standing caps, then reads the map;
this thread writes the map, then reads the standing caps. One of the two sees the other.

Thread: the inbound thread, except ``Ownership``, which is read by all.

Source: P12; DESIGN.md 3 ("whole shards move").
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.poller.balance import SHARDS, Map, shard_of
from pmdaemon.poller.channel import Channel, ChannelMessage, memory_file
from pmdaemon.poller.channel_messages import (
    GatewayRegistered,
    Mail,
    MovedConnection,
    NewConnection,
    Refused,
    RegisteredElsewhere,
    ShardMap,
    Unreadable,
)
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Gateway, Registry
from pmdaemon.poller.publisher import DBMANAGER, SERVICES
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Hello
from pmdaemon.wire.messages.ends import Bye
from pmdaemon.wire.messages.orders import CapsOrder
from pmdaemon.wire.messages.server import DurableNotice
from pmdaemon.wire.sni import gateway_named

if TYPE_CHECKING:
    from pmdaemon.poller.inbound import Inbound

# Some 60 us each: the end of many delays the other gateways by a millisecond at a time.
ENDS_A_STEP: Final = 16
REASON_CHARACTERS: Final = 300
MOST_HOPS: Final = 3  # a connection that has been passed on so often is served where it is
ROWS_A_NOTICE: Final = 900  # watermarks of one DURABLE, some 53 bytes each; a frame header has 64 KiB
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


class PassedOn(NamedTuple):
    """For the outbound thread: a message of the mailbox that another pair has passed on."""

    sender: str
    payload: bytes


class Forward(NamedTuple):
    """From the outbound thread: pass this message on to the owner of the shard."""

    shard: int
    sender: str
    payload: bytes


ToOutbound = str | PassedOn


class ShardMigrator:
    """Takes connections from the parent and gives them to it; ends the sessions of shards that have left."""

    def __init__(
        self,
        channel: Channel,
        ownership: Ownership,
        registry: Registry,
        handlers: FrameHandlers,
        post_cuts: Callable[[], object],
        standing_caps: StandingCaps,
        to_outbound: ThreadInbox[ToOutbound],
        counters: Counter[str],
    ) -> None:
        self.channel = channel
        self.ownership = ownership
        self._registry = registry
        self._handlers = handlers
        self._post_cuts = post_cuts
        self._standing_caps = standing_caps
        self._to_outbound = to_outbound
        self._counters = counters
        self._leaving: deque[str] = deque()
        self._hops: dict[AgentConnection, int] = {}

    def fileno(self) -> int:
        """Readable when something has arrived."""
        return self.channel.fileno()

    @property
    def has_work(self) -> bool:
        """Whether sessions wait to be ended."""
        return bool(self._leaving)

    # -- from the parent

    def take(self, inbound: Inbound) -> None:
        """Act on what the parent has sent.

        Raises:
            PeerGone: the parent has closed its end; this process must stop.
        """
        for item in self.channel.take():
            try:
                self._act(item, inbound)
            except MailboxError:
                raise
            except Exception as exc:  # noqa: BLE001 - logged below
                # A defect of ours, or descriptors lost for want of room (RLIMIT_NOFILE): agents dial again.
                self._counters["bad_parcels"] += 1
                log.error("bad-parcel", op=item.op, error=f"{type(exc).__name__}: {exc}")
                if isinstance(item.body, NewConnection | MovedConnection) and item.body.dialled:
                    # The parent's duplicate would keep it open for ever.
                    reason = "its descriptor was lost: open_files"
                    self.channel.send(Refused(item.body.address, reason, is_over=True))
            finally:
                item.close()

    def _act(self, item: ChannelMessage, inbound: Inbound) -> None:
        match item.body:
            case NewConnection(address, dialled):
                conn = inbound.adopt(item.take_socket(), address)
                if conn is not None:
                    conn.is_dialled = dialled
            case ShardMap(owners):
                self._set_map(tuple(owners))
            case MovedConnection() as moved:
                self._take_connection(item, moved, inbound)
            case Mail(sender=sender):
                self._to_outbound.put(PassedOn(sender, item.take_bytes()))
            case RegisteredElsewhere(gateway_id, address):
                gateway = self._registry.get(gateway_id)
                if gateway is not None:
                    self._handlers.registered_elsewhere(gateway, address)
            case Unreadable(problem=problem):
                raise ValueError(problem)

    def _take_connection(self, item: ChannelMessage, moved: MovedConnection, inbound: Inbound) -> None:
        """Go on with a new connection from which another pair has read HELLO, or nothing."""
        received = item.take_bytes()
        conn = inbound.adopt(item.take_socket(), moved.address)
        if conn is None:
            return
        conn.opened_ns, conn.is_dialled = moved.opened_ns, moved.dialled
        self._counters["moved_in"] += 1
        self._hops[conn] = moved.hops
        conn.resume(received)
        inbound.read_pending(conn)
        if conn.gateway is not None or conn.closed:
            self._hops.pop(conn, None)

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
                self._report_up(gateway)

    # -- new connections

    def foreign_gateway(self, conn: AgentConnection, hello: frame.Frame) -> str | None:
        """The gateway of this HELLO if another pair must serve it."""
        if not self.ownership.is_shared or not conn.is_movable:
            return None
        gateway_id = Hello.gateway_of(hello.header)
        is_foreign = gateway_id is not None and self._is_of_another_pair(conn, gateway_id)
        return gateway_id if is_foreign else None

    def _is_of_another_pair(self, conn: AgentConnection, gateway_id: str) -> bool:
        return self._hops.get(conn, 0) < MOST_HOPS and not self.ownership.is_mine(gateway_id)

    def passes_on_before_tls(self, conn: AgentConnection, inbound: Inbound) -> bool:
        """Pass on a connection whose handshake is about to begin, if it belongs to another pair.

        A TLS session is state of one process: once it has begun, its connection stays.
        """
        if not self.ownership.is_shared or not conn.is_movable:
            return False
        gateway_id = gateway_named(conn.peek())
        if gateway_id is None or not self._is_of_another_pair(conn, gateway_id):
            return False
        self.pass_on(conn, gateway_id, inbound)
        return True

    def pass_on(self, conn: AgentConnection, gateway_id: str, inbound: Inbound) -> None:
        """Send a connection on which nothing was answered to the owner of its gateway's shard.

        Without a descriptor for what it has sent, it is closed and counted: its agent dials again.
        """
        inbound.release(conn)
        hops = self._hops.pop(conn, 0) + 1
        descriptor, received = conn.detach()
        try:
            file = memory_file(received)
        except OSError as exc:
            os.close(descriptor)
            self._counters["mail_not_passed_on"] += 1
            log.warning("connection-forward-failed", address=conn.address, problem=exc.strerror)
            return
        self._counters["moved_out"] += 1
        moved = MovedConnection(
            shard_of(gateway_id), gateway_id, hops, conn.address, conn.is_dialled, conn.opened_ns
        )
        self.channel.send(moved, [descriptor, file])

    def forget(self, conn: AgentConnection) -> None:
        """A connection has ended."""
        self._hops.pop(conn, None)

    def report_refusal(self, conn: AgentConnection, reason: str) -> None:
        """Report to the parent, which has dialled it, why this connection ends; the end itself it sees."""
        self.channel.send_or_drop(Refused(conn.address, reason[:REASON_CHARACTERS], is_over=False))

    # -- sessions

    def registered(self, gateway_id: str) -> None:
        """Report a new session to outbound and the parent; end it if its shard has left meanwhile."""
        self._to_outbound.put(gateway_id)
        if not self.ownership.is_shared:
            return
        gateway = self._registry.get(gateway_id)
        if gateway is not None:
            self._report_up(gateway)
            if self.ownership.owners[gateway.shard] != self.ownership.pair:
                self._leaving.append(gateway_id)

    def _report_up(self, gateway: Gateway) -> None:
        self.channel.send(GatewayRegistered(gateway.gateway_id, gateway.address))

    def end_leaving(self, now_ns: int) -> None:
        """End some of the sessions whose shards have left."""
        for _ in range(min(len(self._leaving), ENDS_A_STEP)):
            gateway = self._registry.get(self._leaving.popleft())
            if gateway is None or self.ownership.owners[gateway.shard] == self.ownership.pair:
                continue
            conn = gateway.conn
            if isinstance(conn, AgentConnection) and not conn.closed and conn.drain_until_ns is None:
                self._end_session(gateway, conn, now_ns)

    def _end_session(self, gateway: Gateway, conn: AgentConnection, now_ns: int) -> None:
        self._counters["moves_by_reconnect"] += 1
        self._post_cuts()  # nothing of it may be posted after the new owner's first post
        self._send_ahead(gateway)
        bye = Bye("its shard has moved to another pair: connect again").encode()
        conn.finish(Kind.BYE, bye, "its shard has moved to another pair", now_ns)
        self._handlers.lost(conn, conn.end_reason, by_us=True)

    def _send_ahead(self, gateway: Gateway) -> None:
        """Forget a gateway; what is known of it goes to the new owner, as the messages it came with.

        They reach the new owner before the agent does: the parent keeps their order.
        """
        incarnation, durable = self._registry.forget(gateway.gateway_id)
        if incarnation is not None:  # else dbmanager has named nothing yet
            for first in range(0, len(durable), ROWS_A_NOTICE):
                rows = durable[first : first + ROWS_A_NOTICE]
                self.forward(Forward(gateway.shard, DBMANAGER, DurableNotice(incarnation, rows).encode()))
        if (caps := self._standing_caps.caps_of(gateway.gateway_id)) is not None:
            order = CapsOrder.of_frame(gateway.gateway_id, caps[1])
            self.forward(Forward(gateway.shard, SERVICES, order.encode()))

    def forward(self, message: Forward) -> None:
        """Pass a message on to the owner of its shard.

        Without a descriptor for it, it is dropped and counted: services repeats caps, dbmanager names what is
        durable again, and the pair with all its other sessions lives on.
        """
        try:
            file = memory_file(message.payload)
        except OSError as exc:
            self._counters["mail_not_passed_on"] += 1
            log.warning(
                "mail-forward-failed", shard=message.shard, sender=message.sender, problem=exc.strerror
            )
            return
        self._counters["mail_passed_on"] += 1
        self.channel.send(Mail(message.shard, message.sender), [file])
