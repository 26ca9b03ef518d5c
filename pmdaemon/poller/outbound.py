"""The outbound thread of a pair: the only one that takes from the mailbox and sends requests to gateways.

Driven by the mailbox and the poll schedule. One round: take the messages, keep what they order; find the
polls that are due; put all frames for one gateway together and send them as one write; sleep until the next
poll or the doorbell. It never waits for a gateway: a send that would block leaves its rest in the
connection's buffer and the inbound thread clears it.

No gateway is polled before dbmanager has sent its first WATERMARKS: without them no cut could be acknowledged
and an answer might repeat hours of backlog.

Where servers take over from each other, nothing is taken and nothing leaves once this server's term has ended
(``runtime.term``): after a standstill of the machine no poll of it prolongs a cap, and no cap of its services
reaches a gateway, though the processes go on for some moments more.

Owns: the schedule, the standing caps, the mailbox's taking side. Shares: the registry (its locks),
``to_inbound`` to the inbound thread, ``to_outbound`` from it.

Source: P7, P9, P10, P13, P16; DESIGN.md 3, 4.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from operator import attrgetter
from typing import Any, Final

import structlog

from pmdaemon.errors import WireError
from pmdaemon.mailbox import BACKSTOP_S, Mailbox, wait_any
from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.mailbox.mailbox import HasFileno
from pmdaemon.poller import announcements
from pmdaemon.poller.balance import interleave, shard_of
from pmdaemon.poller.connection import AgentConnection, Sent
from pmdaemon.poller.gateway import Gateway, Registry
from pmdaemon.poller.inbound import AnnounceAgain, PostAnnouncement, ToInbound
from pmdaemon.poller.migration import Forward, Ownership, PassedOn, ToOutbound
from pmdaemon.poller.publisher import DBMANAGER, SERVICES
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.term import ALWAYS, Term
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, WireMessage
from pmdaemon.wire.messages.orders import CapsOrder, CostsOrder, Lease, ThresholdsOrder
from pmdaemon.wire.messages.server import DurableNotice, WatermarksNotice

TOGETHER_NS: Final = 50_000_000  # polls may be late by that, but by no more than a twentieth of the interval
MANY_DUE: Final = 64  # polls of one go: about a millisecond
MAX_MESSAGES: Final = 256  # of one take; polls that fall due meanwhile wait for at most that many
_ORDERS: Final = (CapsOrder, ThresholdsOrder, CostsOrder)  # name the gateway they are for
_GONE: Final = Sent.GONE
_SHARD: Final = attrgetter("shard")
_NONE: Final[list[tuple[Kind, bytes]]] = []  # never changed: nothing to send besides the poll
log = structlog.get_logger("outbound")


class Outbound:
    """The outbound thread's work; ``run`` is the thread's target, ``step`` one round without the sleep."""

    def __init__(
        self,
        registry: Registry,
        mailbox: Mailbox,
        clock: Clock,
        schedule: Schedule,
        *,
        to_inbound: ThreadInbox[ToInbound],
        to_outbound: ThreadInbox[ToOutbound],
        counters: Counter[str],
        standing_caps: StandingCaps | None = None,
        ownership: Ownership | None = None,
        unread: Container[str] = (),
        term: Term = ALWAYS,
    ) -> None:
        self._registry = registry
        self._mailbox = mailbox
        self._clock = clock
        self._now_ns = clock.monotonic_ns
        self._term = term
        self._schedule = schedule
        self._to_inbound = to_inbound
        self._to_outbound = to_outbound
        self._services_incarnation: object = None
        self._counters = counters
        self._standing_caps = standing_caps or StandingCaps()
        self._ownership = ownership or Ownership(0)
        self._catch_up, self._unread = registry.catch_up, unread
        # Numbers of different pairs differ, so that a gateway that moves cannot confuse two polls.
        self._poll = self._ownership.pair << 40
        self.steps = 0
        self._orders: dict[str, list[tuple[Kind, bytes]]] = {}
        self._caps_leaving: dict[str, int] = {}

    def run(self, stop: Stop) -> None:
        """Work until the stop."""
        while not stop.is_set():
            self.step()
            self.sleep(stop)

    def sleep(self, *others: HasFileno | int) -> None:
        """Until the next poll, the doorbell, a message of the inbound thread, or one of ``others``."""
        if not self._term.is_on():  # what waits in the mailbox is not taken: do not spin on it
            wait_any((), BACKSTOP_S, others)
            return
        wait_any((self._mailbox,), self._sleep_s(), (self._to_outbound, *others))

    def step(self) -> None:
        """One round: mailbox, registrations, due polls, sends."""
        self.steps += 1
        if not self._term.is_on():
            return
        self._take_mail()
        for item in self._to_outbound.drain():
            self._act_on(item)
        now_ns, leave_ns = self._now_ns(), self._leave_ns()
        if leave_ns is not None and now_ns >= leave_ns:
            self._send_polls(self._schedule.take_due(now_ns))
        for gateway_id in tuple(self._orders):
            self._send(gateway_id, polled=False)

    def _send_polls(self, due: list[str]) -> None:
        """Poll all these: a few in the order of their times; many, after a pause, shard by shard."""
        gateways = [gateway for gateway in map(self._registry.get, due) if gateway is not None]
        if len(gateways) < len(due):  # some have moved to another pair
            for gateway_id in due:
                if self._registry.get(gateway_id) is None:
                    self._schedule.remove(gateway_id)
        if len(gateways) <= MANY_DUE:
            self._poll_group(gateways)
            return
        ordered = interleave(gateways, _SHARD)
        for first in range(0, len(ordered), MANY_DUE):
            self._poll_group(ordered[first : first + MANY_DUE])
            self._take_mail()  # caps do not wait for thousands of polls

    def _poll_group(self, gateways: list[Gateway]) -> None:
        """Poll these. All polls are made before the first one leaves.

        Two loops stay in the processor's caches where one would not (measured); a round trip counts the part
        of a millisecond that a poll waits for the others.
        """
        now_ns, number, orders = self._now_ns, self._poll, self._orders
        catch_up, unread = self._catch_up, self._without_room()
        lease = self._standing_caps.lease_is_fresh(now_ns())
        asked: list[tuple[Gateway, int, tuple[AgentConnection, bytes]]] = []
        for gateway in gateways:
            if orders and gateway.gateway_id in orders:
                self._poll = number
                self._send(gateway.gateway_id, polled=True)
                number = self._poll
            elif (poll := gateway.ask(number + 1, now_ns(), lease, catch_up, unread)) is not None:
                number += 1
                asked.append((gateway, number, poll))
            else:
                self._count_unasked(gateway)
        self._poll = number
        self._send_asked(asked)

    def _without_room(self) -> Container[str]:
        """Gateways whose polls may be left out: none if caps would not outlast that, and a late poll."""
        return self._unread if self._standing_caps.outlast(3 * self._schedule.interval_ns) else ()

    def _count_unasked(self, gateway: Gateway) -> None:
        if gateway.conn is None:
            self._counters["polls_without_session"] += 1
        elif gateway.awaiting_since_ns is None:
            self._counters["polls_spared"] += 1
        else:
            self._counters["polls_skipped"] += 1

    def _send_asked(self, asked: list[tuple[Gateway, int, tuple[AgentConnection, bytes]]]) -> None:
        polls = sent_bytes = 0
        is_on = self._term.is_on
        for gateway, number, (conn, encoded) in asked:
            if not is_on() or conn.send_poll(encoded) is _GONE:
                gateway.unask(number)
            else:
                polls += 1
                sent_bytes += len(encoded)
        self._counters["polls"] += polls
        self._counters["writes"] += polls
        self._counters["sent_bytes"] += sent_bytes

    def _take_mail(self) -> None:
        try:
            messages = self._mailbox.take(MAX_MESSAGES)
        except MessageDamaged as exc:
            self._counters["mail_discarded"] += 1
            log.error("message-discarded", error=str(exc))
            return
        for message in messages:
            self._carry_out(message.sender, message.payload)

    def _act_on(self, item: ToOutbound) -> None:
        """Act on what the inbound thread has put into our inbox."""
        match item:
            case PassedOn(sender, payload):
                self._carry_out(sender, payload, passed_on=True)
            case str():
                self._begin(item)

    def _begin(self, gateway_id: str) -> None:
        self._schedule.add(gateway_id, self._now_ns())
        self._send_standing_orders(gateway_id)

    def _leave_ns(self) -> int | None:
        """When the next polls leave: a little after the first of them is due, so that many leave together.

        Their answers then come together too. Both threads are woken, and the caches filled with what they
        work with, once for hundreds of gateways and not for each.
        """
        due_ns = self._schedule.next_due_ns() if self._registry.has_watermarks else None
        return None if due_ns is None else due_ns + min(TOGETHER_NS, self._schedule.interval_ns // 20)

    def _sleep_s(self) -> float:
        leave_ns = self._leave_ns()
        return BACKSTOP_S if leave_ns is None else max(0.0, (leave_ns - self._now_ns()) / 1e9)

    # -- the mailbox

    def _carry_out(self, sender: str, payload: bytes | memoryview, passed_on: bool = False) -> None:
        """Carry out one message. A malformed one, a defect of the server, is logged and dropped."""
        try:
            received = frame.unfold(frame.decode_own(payload))
            known = self._actions.get(received.kind)
            if known is None:
                raise WireError(f"kind {received.kind} is not for a pair")
            parse, action = known
            message = parse(received.header)
            action(self, message)
            self._counters["orders"] += 1
            if self._ownership.is_shared:
                self._pass_on(sender, message, passed_on)
        except WireError as exc:
            self._counters["bad_orders"] += 1
            log.error("bad-message", sender=sender, error=str(exc))

    def _pass_on(self, sender: str, message: WireMessage, passed_on: bool) -> None:
        """Orders and notices for gateways that belong to other pairs go there, once."""
        away: dict[int, WireMessage] = {}
        if isinstance(message, _ORDERS):
            if not self._ownership.is_mine(message.gateway_id):
                away = {shard_of(message.gateway_id): message}
        elif isinstance(message, DurableNotice):
            rows: defaultdict[int, list[Sequence[Any]]] = defaultdict(list)
            for row in message.rows:
                if self._registry.get(row[0]) is None and not self._ownership.is_mine(row[0]):
                    rows[shard_of(row[0])].append(row)
            away = {shard: DurableNotice(message.incarnation, part) for shard, part in rows.items()}
        if passed_on:
            self._counters["mail_dropped"] += len(away)
            return
        for shard, part in away.items():
            self._to_inbound.put(Forward(shard, sender, frame.encode_folding(part.KIND, part.header())))

    def _watermarks(self, notice: WatermarksNotice) -> None:
        if self._registry.open(notice.incarnation, notice.rows, self._now_ns()):
            log.info("watermarks", incarnation=notice.incarnation, rows=len(notice.rows))
            self._to_inbound.put(AnnounceAgain((DBMANAGER, SERVICES)))

    def _durable(self, notice: DurableNotice) -> None:
        if not self._registry.advance(notice.incarnation, notice.rows, self._now_ns()):
            self._counters["stale_durable_notices"] += 1

    def _lease(self, lease: Lease) -> None:
        self._standing_caps.renew_lease(self._now_ns())
        if lease.incarnation != self._services_incarnation:
            # A new services process: every session has to be announced to it again.
            self._services_incarnation = lease.incarnation
            self._to_inbound.put(AnnounceAgain((SERVICES,)))

    def _set_caps(self, order: CapsOrder) -> None:
        self._order(order.gateway_id, Kind.CAPS, self._standing_caps.set_caps(order))
        self._caps_leaving[order.gateway_id] = order.gen

    def _set_thresholds(self, order: ThresholdsOrder) -> None:
        self._order(order.gateway_id, Kind.THRESHOLDS, order.thresholds_frame())

    def _set_costs(self, order: CostsOrder) -> None:
        self._order(order.gateway_id, Kind.COSTS, order.costs_frame())

    def _order(self, gateway_id: str, kind: Kind, encoded: bytes) -> None:
        """To be sent with the next write; a newer order of a kind takes the place of an older one."""
        kept = [item for item in self._orders.get(gateway_id, ()) if item[0] is not kind]
        self._orders[gateway_id] = [*kept, (kind, encoded)]

    _actions: Final[dict[int, tuple[Callable[[Header], WireMessage], Callable[[Outbound, Any], None]]]] = {
        Kind.WATERMARKS: (WatermarksNotice.parse, _watermarks),
        Kind.DURABLE: (DurableNotice.parse, _durable),
        Kind.LEASE: (Lease.parse, _lease),
        Kind.SET_CAPS: (CapsOrder.parse, _set_caps),
        Kind.SET_THRESHOLDS: (ThresholdsOrder.parse, _set_thresholds),
        Kind.SET_COSTS: (CostsOrder.parse, _set_costs),
    }

    # -- gateways

    def _send_standing_orders(self, gateway_id: str) -> None:
        """A gateway has registered: caps in force go with its first write."""
        if (caps := self._standing_caps.caps_of(gateway_id)) is not None:
            self._order(gateway_id, Kind.CAPS, caps[1])
            self._caps_leaving[gateway_id] = caps[0]

    def _send(self, gateway_id: str, *, polled: bool) -> None:
        """Everything for one gateway as one write: standing orders first, then the poll if one is due."""
        if not self._term.is_on():
            return
        orders = self._orders.pop(gateway_id, _NONE)
        gen = self._caps_leaving.pop(gateway_id, None)
        gateway = self._registry.get(gateway_id)
        if gateway is None:
            # It has not come yet (its caps are kept), or it has moved to another pair.
            self._schedule.remove(gateway_id)
            return
        now_ns = self._now_ns()
        lease = self._standing_caps.lease_is_fresh(now_ns)
        asked, unread = None, self._without_room()
        if polled:
            asked = gateway.ask(self._poll + 1, now_ns, lease, self._catch_up, unread)
        conn: AgentConnection | None
        if asked is not None:
            self._poll += 1
            conn, encoded = asked
            orders = [*orders, (Kind.POLL, encoded)] if orders else [(Kind.POLL, encoded)]
        else:
            with gateway.lock:
                conn = gateway.conn
            if polled:
                self._count_unasked(gateway)
        if conn is None or not orders:
            return
        sent = conn.send(*orders)
        if sent is Sent.GONE:
            if asked is not None:
                gateway.unask(self._poll)
        else:
            self._counters["writes"] += 1
            self._counters["sent_bytes"] += sum([len(data) for _, data in orders])
            self._counters["polls"] += asked is not None
            if gen is not None:
                message = announcements.caps_state(gateway_id, gen, "sent", "", self._clock.unix_us())
                self._to_inbound.put(PostAnnouncement(message, (SERVICES,)))
