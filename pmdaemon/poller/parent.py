"""The parent process of the PMDaemon: listens, hands connections to pairs, keeps the pairs alive.

It reads no byte of any agent and posts nothing to gateways: it survives whatever a peer sends. One thread,
one selector: the listener, the dialler, one channel a pair, the stop.

``Daemon`` is the process; ``PairManager`` what it does for its pairs. State of the latter: the children in
order of their numbers, the map of shards, and which pair has which registered gateway (only while there is
more than one pair). Each second ``review`` asks ``balance.decide`` and carries the answer out: it starts
pairs, sends the map, and retires the last pair: its shards move away, and when it serves no gateway any
more, or after ``RETIRE_NS``, it is stopped. A pair that hangs is killed; a pair that has died loses its
shards to the others at once, if there are others. The map is sent *before* anything is passed on under it,
on the same channel, so a pair's map is never older than what reaches it. Descriptors and memory files are
passed on unopened.

*A storm of connections.* When the channels of all pairs are full, the connection just accepted waits here and
the others in the backlog of the listener, in their order: closed, they would dial again, and of thousands
that do so for minutes some never meet the moment in which there is room.

*Room.* The main segment is laid out for every pair there may be, but the room of a pair (its slots and
rings, some 50 MiB) is taken from the tmpfs only before the pair is started. Where it does not fit, the pair
is not started; the log and an event say so, and the pairs that run go on.

On disk: ``<runtime_dir>/pmdaemon.port`` holds the port and a newline, written aside and renamed, so a
reader sees all of it or nothing; it is removed at a clean stop.

Thread: the parent's main thread.

Source: P9, P11, P12, P14; DESIGN.md 3, 5.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import selectors
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import attach, reserve_room
from pmdaemon.mailbox.errors import SegmentMissing
from pmdaemon.pki.authority import Authority
from pmdaemon.poller import metrics
from pmdaemon.poller.balance import (
    SHARDS,
    T_PTMAX_US,
    Balance,
    Map,
    PairLoad,
    decide,
    evacuate,
    pairs_by_formula,
    pairs_needed,
    shard_weights,
)
from pmdaemon.poller.channel import Channel, ChannelMessage
from pmdaemon.poller.channel_messages import (
    GatewayRegistered,
    Mail,
    MovedConnection,
    Refused,
    RegisteredElsewhere,
    ShardMap,
)
from pmdaemon.poller.children import PairChild
from pmdaemon.poller.config import PmConfig, PmFile
from pmdaemon.poller.dialler import DialledFile, Dialler, GatewayList
from pmdaemon.reserve import event_row, initialized, raise_event
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.client_user import client_uid
from pmdaemon.runtime.clock import Clock, server_clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.sockets import accept, open_listener
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.template import Template
from pmdaemon.runtime.term import Term
from pmdaemon.wire.messages.server import RecordRows

REVIEW_NS: Final = 10**9
ACCEPTS_A_ROUND: Final = 64  # a storm of reconnects must not keep the parent from noticing a dead pair
FULL_PAUSE_NS: Final = 20_000_000  # while no pair has room for one more: those in the backlog keep their turn
RETIRE_NS: Final = 30 * 10**9
NO_ROOM_NS: Final = 60 * 10**9  # until the next try: an operator has to make room first
TEMPLATE_S: Final = 10.0  # a fork of this process: it has nothing to import; without it pairs are exec'ed
MOST_UNPOSTED: Final = 64  # announcements; each of them is an event, too
log = structlog.get_logger("pmdaemon")


class PairRooms:
    """Room for the mailboxes of pairs in the main segment, and who has to know that there is none.

    A pair without room is announced once, and again after it had some. An announcement that dbmanager has no
    room for is posted again each second.

    Args:
        segment: path of the main segment.
    """

    def __init__(self, segment: Path, clock: Clock) -> None:
        self._segment = segment
        self._clock = clock
        self._without: set[int] = set()
        self._unposted: deque[bytes] = deque(maxlen=MOST_UNPOSTED)

    def reserve(self, index: int) -> bool:
        """Reserve the room of a pair; False if there is none, which has been announced."""
        name = f"pair-{index}"
        try:
            reserve_room(self._segment, name)
        except SegmentMissing:
            return True  # not made yet: the pair waits for it, and its next start reserves
        except MailboxError as exc:
            log.error("no-room-for-pair", pair=index, error=str(exc))
            if index not in self._without:
                self._without.add(index)
                self._announce(name, str(exc))
            return False
        self._without.discard(index)
        return True

    def post(self) -> None:
        """Post what dbmanager has not taken yet."""
        if not self._unposted:
            return
        try:
            with attach(self._segment, "pmdaemon") as mailbox:
                while self._unposted:
                    mailbox.post("dbmanager", self._unposted[0])
                    self._unposted.popleft()
        except MailboxError as exc:
            log.warning("not-announced", waiting=len(self._unposted), error=str(exc))

    def _announce(self, name: str, problem: str) -> None:
        text = f"{name} is not started: {problem}. The pairs that run serve its gateways, too"
        event = event_row("no-room-for-pair", "warning", "pmdaemon", name, text, self._clock.unix_us())
        raise_event(event)
        self._unposted.append(RecordRows([["events", event]], None, "pmdaemon").encode())
        self.post()


class PairManager:
    """See the module.

    Attributes:
        children: by number.
        moves: shards that have changed their pair.
        passed_on: new connections and messages passed from pair to pair.
        lost: connections and messages for which no pair was running; agents dial again.
    """

    def __init__(
        self,
        settings: PmConfig,
        config_path: Path | None,
        pipe: ParentPipe,
        clock: Clock,
        cpus: int,
        has_room: Callable[[int], bool] = lambda _index: True,
        template: Template | None = None,
    ) -> None:
        self.children: list[PairChild] = []
        self.owners: Map = (0,) * SHARDS
        self.moves = 0
        self.passed_on = 0
        self.lost = 0
        self.t_ptmax_us = T_PTMAX_US
        self.needed = 0
        self._settings = settings
        self._config_path = config_path
        self._pipe = pipe
        self._clock = clock
        self._cpus = cpus
        self._balance = Balance()
        self._where: dict[str, int] = {}
        self._retire_until_ns = 0
        self._has_room = has_room
        self._template = template
        self._grow_again_ns = 0

    # -- once a second

    def review(self) -> None:
        """Decide on the number of pairs and on the map."""
        now_ns = self._clock.monotonic_ns()
        for child in self.children:
            if reason := child.hangs():
                child.kill(reason)
        if self._retire(now_ns):
            return
        wanted = self._wanted()
        if not self.children or self._settings.fixed_pairs is not None:
            is_first = not self.children
            self._grow(wanted)  # a fixed number needs no hysteresis, and the first pair no reason
            if is_first:  # all at once, or the first to report would get all and gateways move twice
                self.owners = tuple(shard % len(self.children) for shard in range(SHARDS))
        loads = [
            PairLoad(child.index, child.last.busy_ratio, {row[0]: row[1] for row in child.last.shards})
            for child in self.children
            if child.takes_shards or (child.keeps_shards and child.index in self.owners)
        ]
        running = len(self.children)
        self._balance, decision = decide(self._balance, self.owners, running, wanted, loads, now_ns)
        self._grow(decision.pairs)
        if decision.pairs < running:
            self.children[-1].is_retiring = True
            self._retire_until_ns = now_ns + RETIRE_NS
            log.info("pair-retires", pair=self.children[-1].index)
        if decision.moves:
            self._set_map(decision.owners, decision.moves)

    def _wanted(self) -> int:
        settings = self._settings
        gateways = sum(child.last.gateways for child in self.children)
        self.t_ptmax_us = max((child.last.t_ptmax_us for child in self.children), default=0.0) or T_PTMAX_US
        needed = pairs_needed(
            gateways, settings.thread_quantum_ms, self.t_ptmax_us, self._cpus, settings.fixed_pairs
        )
        wanted = min(needed, settings.most_pairs)
        if needed != self.needed:
            self.needed = needed
            formula = pairs_by_formula(gateways, settings.thread_quantum_ms, self.t_ptmax_us)
            log.info(
                "sizing",
                gateways=gateways,
                t_ptmax_us=round(self.t_ptmax_us),
                formula=formula,
                needed=needed,
                pairs=max(wanted, len(self.children)),
            )
        return wanted

    def _grow(self, pairs: int) -> None:
        """Add pairs, as far as there is room for their mailboxes."""
        if len(self.children) < pairs and self._clock.monotonic_ns() < self._grow_again_ns:
            return
        while len(self.children) < pairs:
            index = len(self.children)
            if not self._has_room(index) and index:  # without any pair there is nothing: it may wait for room
                self._grow_again_ns = self._clock.monotonic_ns() + NO_ROOM_NS
                return
            child = PairChild(index, self._config_path, self._pipe, self._clock, self._template)
            self.children.append(child)

    def _retire(self, now_ns: int) -> bool:
        """Stop a retiring pair when it serves no gateway; True while one is on its way out."""
        child = self.children[-1] if self.children else None
        if child is None or not child.is_retiring:
            return False
        if child.is_running and child.last.connections and now_ns < self._retire_until_ns:
            return True
        self.children.pop()
        child.stop()
        log.info("pair-retired", pair=child.index)
        return False

    def _set_map(self, owners: Map, moves: int) -> None:
        self.owners = owners
        self.moves += moves
        counts = ",".join(str(owners.count(child.index)) for child in self.children)
        log.info("shards-moved", moves=moves, shards_by_pair=counts)
        for child in self.children:
            self.send_map(child)

    def send_map(self, child: PairChild) -> None:
        """Send the map to a pair."""
        if child.control is not None:
            child.control.send(ShardMap(self.owners))

    # -- starts and deaths

    def started(self, child: PairChild) -> None:
        """It runs: send it the map, unless it has all shards, which it assumes."""
        if len(self.children) > 1 or self.owners.count(child.index) < SHARDS:
            self.send_map(child)

    def died(self, child: PairChild) -> None:
        """Its shards go to those that run; its gateways dial again."""
        self._where = {gateway_id: pair for gateway_id, pair in self._where.items() if pair != child.index}
        living = [item.index for item in self.children if item.is_running and not item.is_retiring]
        if living and child.index in self.owners:
            following = evacuate(self.owners, living, shard_weights([], {}))
            moves = sum(a != b for a, b in zip(self.owners, following, strict=True))
            self._set_map(following, moves)

    # -- passing on

    @property
    def any_takes(self) -> bool:
        """Whether a pair runs that takes connections, as soon as there is room in its channel."""
        return any(child.is_running and not child.is_retiring for child in self.children)

    def new(self, sock: socket.socket, address: str, *, is_dialled: bool = False) -> PairChild | None:
        """Give a new connection to the pair with the fewest; None if none can take it."""
        running = [child for child in self.children if child.is_running and not child.is_retiring]
        ordered = sorted(running, key=lambda child: child.load)
        return next((child for child in ordered if child.offer(sock, address, is_dialled)), None)

    def pass_on(self, sender: PairChild, messages: list[ChannelMessage]) -> None:
        """What a pair has sent for others."""
        for message in messages:
            match message.body:
                case GatewayRegistered(gateway_id, address):
                    self._record_registration(sender.index, gateway_id, address)
                case MovedConnection() | Mail() as body:
                    self._to_owner(message, body)
                case _:
                    log.error("bad-parcel", pair=sender.index, op=message.op)
            message.close()

    def _record_registration(self, pair: int, gateway_id: str, address: str) -> None:
        """A gateway has registered; if another pair serves it too, that session is the older one."""
        older = self._where.get(gateway_id)
        self._where[gateway_id] = pair
        if older is not None and older != pair and older < len(self.children):
            control = self.children[older].control
            if control is not None:
                control.send(RegisteredElsewhere(gateway_id, address))

    def _to_owner(self, message: ChannelMessage, body: MovedConnection | Mail) -> None:
        owner = self.owners[body.shard]
        control = self.children[owner].control if owner < len(self.children) else None
        if control is None:
            self.lost += 1
            log.warning("forward-failed", op=message.op, shard=body.shard, pair=owner)
            return
        self.passed_on += 1
        control.send(body, message.descriptors)
        message.descriptors = []  # the channel closes them when they are sent


def listen(value: str, key: str = "pmdaemon.listen") -> socket.socket:
    """A listening socket; that the address may be listened on was checked with the configuration.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    sock = open_listener(key, *parse_address(value))
    sock.setblocking(False)
    return sock


def write_port(path: Path, port: int) -> None:
    """Replace the port file, whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, f"{port}\n")


class Daemon:
    """The parent: ``run`` until the stop.

    Args:
        template: forks the pairs; else they are exec'ed. Whoever made it closes it.
    """

    def __init__(
        self,
        config: PmFile,
        config_path: Path | None,
        stop: Stop,
        clock: Clock | None = None,
        template: Template | None = None,
    ) -> None:
        self._config = config
        self._stop = stop
        self._clock = clock or server_clock()
        self._pipe = ParentPipe()
        cpus = len(os.sched_getaffinity(0))
        self._rooms = PairRooms(config.segment_path, self._clock)
        self.pair_manager = PairManager(
            config.pmdaemon, config_path, self._pipe, self._clock, cpus, self._rooms.reserve, template
        )
        self._template = template
        self._selector = selectors.DefaultSelector()
        if config.pmdaemon.tls.enabled:
            Authority(config.ca_dir, config.pmdaemon.tls.lifetime_s).ensure_server()  # or say what is missing
        self._listener = listen(config.pmdaemon.listen)
        forwarded = config.pmdaemon.forwarded
        self._for_others = [listen(forwarded, "pmdaemon.forwarded")] if forwarded else []
        self._list = GatewayList(config)
        offer = functools.partial(self.pair_manager.new, is_dialled=True)
        term = Term.of_environment(config.runtime_dir)
        chance = random.Random()  # noqa: S311 - guards nothing
        self._agent_uids = config.pmdaemon.agent_uids()
        self._dialler = Dialler(offer, self._clock, chance, term, self._agent_uids)
        self._dialled_file = DialledFile(config.dialled_path)
        self._review_at_ns = 0
        self._accept_at_ns: int | None = None  # until then nothing is accepted; None: it is
        self._held: tuple[socket.socket, str] | None = None  # accepted; waits until a pair has room
        self._refusals = LimitedLog("pmdaemon")
        self.refused_connections = 0

    @property
    def port(self) -> int:
        """The port agents dial."""
        return int(self._listener.getsockname()[1])

    def run(self) -> int:
        """Serve until the stop; returns the exit status."""
        self._watch_listeners()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._selector.register(self._dialler, selectors.EVENT_READ)
        write_port(self._config.port_path, self.port)
        settings = self._config.pmdaemon
        if self._template is not None:
            self._template.wait_ready(TEMPLATE_S, self._stop.fileno())
        initialized()
        log.info("listening", address=settings.listen, port=self.port, tls=settings.tls.enabled)
        try:
            while not self._stop.is_set():
                watchdog.beat()
                self._review()
                self._start_due()
                self._accept_again()
                self._dialler.step()
                self._ask_for_room()
                for key, events in self._selector.select(self._timeout_s()):
                    if isinstance(key.fileobj, socket.socket):
                        self._accept(key.fileobj)
                    elif isinstance(key.data, PairChild) and isinstance(key.fileobj, Channel):
                        self._serve(key.data, key.fileobj, events)
        finally:
            self._shut()
        return 0

    def _shut(self) -> None:
        log.info("stopping", reason=self._stop.reason)
        for listener in (self._listener, *self._for_others):
            listener.close()
        if self._held is not None:
            self._held[0].close()
        self._dialler.close()
        for child in self.pair_manager.children:
            child.stop()
        self._pipe.close()
        self._selector.close()
        for path in (self._config.port_path, self._config.metrics_path, self._config.dialled_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _timeout_s(self) -> float:
        waiting = [child.due_ns for child in self.pair_manager.children if not child.is_running]
        if (due_ns := self._dialler.due_ns()) is not None:
            waiting.append(due_ns)
        if self._accept_at_ns is not None:
            waiting.append(self._accept_at_ns)
        until_ns = min([self._review_at_ns, *waiting])
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _accept_again(self) -> None:
        """End the pause in accepting when it is time."""
        if self._accept_at_ns is not None and self._clock.monotonic_ns() >= self._accept_at_ns:
            self._accept_at_ns = None
            self._watch_listeners()
            if self._held is not None:
                (sock, address), self._held = self._held, None
                self._give(sock, address)

    def _watch_listeners(self) -> None:
        for listener in (self._listener, *self._for_others):
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause_accepting(self, for_ns: int) -> None:
        for listener in (self._listener, *self._for_others):
            self._selector.unregister(listener)
        self._accept_at_ns = self._clock.monotonic_ns() + for_ns

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_A_ROUND if self._accept_at_ns is None else 0):
            accepted = accept(listener, self._pause_accepting)
            if accepted is None:
                return
            sock, peer = accepted
            if self._agent_uids is not None:
                uid = client_uid(sock)
                if uid not in self._agent_uids:
                    self._refuse_user(sock, (str(peer[0]), int(peer[1])), uid)
                    continue
            if not self._give(sock, f"{peer[0]}:{peer[1]}"):
                return

    def _refuse_user(self, sock: socket.socket, place: tuple[str, int], uid: int | None) -> None:
        """Close a connection of a user of this machine whose agents are not served."""
        self.refused_connections += 1
        fix = "let the agent run as the server's user, name its user in pmdaemon.agent_users, or enable TLS"
        values = {"address": f"{place[0]}:{place[1]}", "uid": uid, "fix": fix}
        self._refusals.warning(self._clock.monotonic_ns(), "agent-of-another-user", **values)
        sock.close()

    def _give(self, sock: socket.socket, address: str) -> bool:
        """Give a connection to a pair; False if it has to wait for room, and with it all that come."""
        if self.pair_manager.new(sock, address) is None:
            if self.pair_manager.any_takes:
                self._held = sock, address
                self._pause_accepting(FULL_PAUSE_NS)
                return False
            # Closed: the agent dials again after its backoff.
            self.refused_connections += 1
            self._refusals.warning(self._clock.monotonic_ns(), "no-pair-for-connection", address=address)
        sock.close()
        return True

    def _serve(self, child: PairChild, channel: Channel, events: int) -> None:
        """What a pair has sent, or the end of it."""
        if child.control is not channel:
            return  # stopped in an earlier event of this round
        if events & selectors.EVENT_WRITE:
            channel.flush()
        if not events & selectors.EVENT_READ:
            return
        messages = child.take()
        if messages is None:
            self._selector.unregister(channel)
            child.reap()
            self.pair_manager.died(child)
            self._dialler.forget_pair(child)
        else:
            for message in messages:
                if isinstance(message.body, Refused):
                    refused = message.body
                    self._dialler.refused(refused.address, refused.reason, is_over=refused.is_over)
            others = [message for message in messages if not isinstance(message.body, Refused)]
            self.pair_manager.pass_on(child, others)

    def _review(self) -> None:
        """Once a second: how many pairs, and which has which shard."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._review_at_ns:
            return
        self._review_at_ns = now_ns + REVIEW_NS
        if self._template is not None:
            self._template.check()  # which logs what was wrong with it
        if (listed := self._list.changed()) is not None:
            self._dialler.replace(listed)
        before = {child: child.control for child in self.pair_manager.children}
        self.pair_manager.review()
        self._rooms.post()
        for child, channel in before.items():
            if channel is not None and child not in self.pair_manager.children:
                self._forget(channel)
        self._publish()

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)  # closed already: the selector finds it by identity

    def _publish(self) -> None:
        rows = self._dialler.states() + self._list.not_dialled
        text = metrics.text(
            self.pair_manager, self.refused_connections, listed=len(rows), dialled=self._dialler.connected
        )
        try:
            metrics.write(self._config.metrics_path, text)
            self._dialled_file.write(rows)
        except OSError as exc:  # no room on the tmpfs: polling goes on, the figures stay old
            log.warning("metrics-not-written", error=exc.strerror)

    def _start_due(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for child in self.pair_manager.children:
            if child.is_due:
                if not self._rooms.reserve(child.index):  # the segment may have been made again since
                    child.due_ns = now_ns + NO_ROOM_NS
                elif child.start() and child.control is not None:
                    self._selector.register(child.control, selectors.EVENT_READ, child)
                    self.pair_manager.started(child)

    def _ask_for_room(self) -> None:
        """Write readiness of the channels on which something waits."""
        for child in self.pair_manager.children:
            if child.control is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.control.waiting else 0)
                if self._selector.get_key(child.control).events != events:
                    self._selector.modify(child.control, events, child)
