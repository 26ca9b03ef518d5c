"""The process ``delivery``: brings events from the reserves of all processes to the recipients.

Threads: the main loop (distribution and confirmation: ``engine``), ``ev-intake`` (reserves to queue), and
``ev-NAME`` for each recipient (sends); with a partner, ``ev-pair`` (``pair``). The supervisor starts this
process first and stops it last: what the others raise in their last moments is delivered, or kept for the
next start. A disk that fails ends the process; the supervisor starts it again, and it goes on behind what was
synced. At SIGHUP recipients that write files let go of them: another program has renamed them.

Files in DATA_DIR/events: ``reserve/`` (one writer each), ``initial``, ``main`` and ``later`` (disk queues),
``state.json`` and ``state-sent.json`` (``lane``), ``routing-read.json`` (the last documents that could be
read), those of a partner (``pair``); beside them ``routing.json``, which services write (``routing``). In the
runtime directory ``metrics/delivery.json``: state and figures (``delivery_state``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.reserve import attach_reserves, event_row, initialized, raise_event
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.sockets import wait_readable
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup, ThreadInbox
from sla_server.events import metrics
from sla_server.events.config import EventsConfig
from sla_server.events.delivery_state import write_delivery_state
from sla_server.events.engine import DeliveryEngine, EngineParts
from sla_server.events.first_reading import FirstReading
from sla_server.events.intake import EventIntake
from sla_server.events.lane import Lane, LaneSettings
from sla_server.events.later import LATER_BYTES, LaterQueue
from sla_server.events.outlets import Outlets, RecordingRouter
from sla_server.events.pair import PairRetry, open_pair
from sla_server.events.queue import EventQueue
from sla_server.events.receiver.service import EventReceiver
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.events.recipients.config import NotifyConfig, NotifyDirectories
from sla_server.events.recipients.inbox import InboxStore
from sla_server.events.routing import RoutingReader
from sla_server.events.sql_link import MOST_NOTICES, NAME, TIMEOUT_S, EventRecords, SqlLink
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.stages.send import SentBatch, ThreadSender
from sla_server.events.undelivered import rows_of

log = structlog.get_logger("delivery")
DIRECTORY: Final = "events"
RESERVES: Final = "reserve"
ROUTING_READ: Final = "routing-read.json"
INITIAL_BYTES: Final = 4 << 20
LONGEST_S: Final = 1.0
SQL_STEP_S: Final = 0.02  # while rows wait for an answer
LAST_S: Final = 3.0
"""At the stop: for what the other processes raised while they ended."""
JOIN_S: Final = 2.0
STUCK_NS: Final = 30_000_000_000
"""Without a pass over the reserves for so long, delivery stands still: a pass takes milliseconds."""


class DeliveryProcessConfig(Protocol):
    """What this process needs of the server's configuration."""

    @property
    def runtime_dir(self) -> Path:
        """Mailbox segments and the status file."""

    @property
    def data_dir(self) -> Path:
        """Durable state."""

    @property
    def notify(self) -> NotifyConfig:
        """Table ``[notify]``."""

    @property
    def events(self) -> EventsConfig:
        """Table ``[events]``."""

    @property
    def runbook_url(self) -> str:
        """Page with an entry for each kind of event."""


def run(config: DeliveryProcessConfig, stop: Stop) -> int:
    """Run until ``stop``; returns 0, or 1 if a thread died.

    Raises:
        DiskQueueError, OSError: a queue cannot be opened, or its disk fails.
        MailboxCorrupt: the segment is damaged.
    """
    directory = config.data_dir / DIRECTORY
    make_directory(directory / RESERVES, 0o700)
    attach_reserves("delivery", directory / RESERVES)
    threads = ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}"))
    takers = ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}"))
    hangup = Hangup()
    delivery = Delivery(config, directory, threads, takers, server_clock())
    try:
        delivery.start(stop)
        hangup.install()
        initialized()
        log.info("ready", waiting=delivery.waiting())
        with receiving(config, delivery, stop):
            delivery.loop(stop, hangup)
        delivery.finish()
        log.info("stopped", reason=stop.reason, waiting=delivery.waiting())
    finally:
        stop.set("the main loop ended")
        delivery.close()
    return 1 if threads.failed or takers.failed else 0


@contextlib.contextmanager
def receiving(config: DeliveryProcessConfig, delivery: Delivery, stop: Stop) -> Iterator[None]:
    """Take posts of other servers meanwhile, if so configured; without them the rest goes on."""
    receive, receiver = config.events.receive, None
    if receive is not None:
        secrets_dir = config.data_dir / config.notify.secrets_dir
        try:
            receiver = EventReceiver(
                "events.receive.listen",
                receive,
                secrets_dir,
                config.data_dir,
                delivery.intake.accept,
                server_clock(),
            )
            receiver.start(stop)
        except (SlaError, OSError) as exc:
            delivery.report_trouble("event-receiver-failed", f"events of others are not taken: {exc}")
    try:
        yield
    finally:
        if receiver is not None:
            stop.set("the main loop ended")
            receiver.join()
            receiver.close()


class Delivery:
    """The parts of the process. Thread: the main one.

    Args:
        config: of the server.
        directory: of the queues.
        threads: of the recipients. takers: of the intake.
        clock: server time.

    Raises:
        DiskQueueError, OSError: a queue cannot be opened.
    """

    def __init__(
        self,
        config: DeliveryProcessConfig,
        directory: Path,
        threads: ThreadGroup,
        takers: ThreadGroup,
        clock: Clock,
        records: EventRecords | None = None,
    ) -> None:
        settings = config.events
        self._interval_s = settings.poll_interval_s
        self._threads = threads
        self._takers = takers
        self._clock = clock
        self._inbox: ThreadInbox[SentBatch | None] = ThreadInbox()
        self._initial = EventQueue(directory, "initial", INITIAL_BYTES)
        self._main = EventQueue(directory, "main", settings.queue_bytes)
        self._later = LaterQueue(EventQueue(directory, "later", LATER_BYTES))
        self._damaged = 0
        self._sql: EventRecords = records or SqlLink(config.runtime_dir / "main.mbx", clock)
        reading = FirstReading(self._main, self._later, self._sql.most_ids)
        self._intake = EventIntake(
            directory / RESERVES,
            self._initial,
            self._main,
            clock,
            functools.partial(self._inbox.put, None),
            known=self._sql.known,
            most_ids=self._sql.most_ids,
            queued=reading.identities,
            later=self._later.queue,
        )
        queues = (self._initial, self._main)
        wake = functools.partial(self._inbox.put, None)
        self._open_pair = functools.partial(
            open_pair, settings.pair, config.data_dir, directory, queues, self._later, clock, wake
        )
        self._pair = self._open_pair()
        self._pair_retry = PairRetry(clock) if settings.pair.enabled else None
        parts = EngineParts(
            queues,
            self._later,
            directory / "state.json",
            {queue.name: queue.queue_id for queue in queues},
            reading,
        )
        rules = RetryRules(settings.retry_first_s, settings.retry_max_s, settings.give_up_h * 3600)
        self._routing = RoutingReader(config.data_dir, directory / ROUTING_READ)
        router = RecordingRouter(self._routing.router)
        self._engine = DeliveryEngine(
            parts, router, rules, clock, self._raise, self._report, runbook_url=config.runbook_url
        )
        if self._pair is not None:
            self._engine.set_partner(self._pair.decide)
        self._outlets = Outlets(builder(config, self._sql), threads, self._inbox.put, clock)
        sender = ThreadSender(NAME, self._sql.recipient, self._inbox.put, threads)
        self._record_lane = LaneSettings(NAME, sender, MOST_NOTICES, TIMEOUT_S)
        self._engine.set_recipients([self._record_lane], from_start=[NAME], unknown=None)
        self._status_dir = config.runtime_dir / "metrics"

    @property
    def intake(self) -> EventIntake:
        """What listeners hand events to."""
        return self._intake

    @property
    def queues(self) -> tuple[EventQueue, LaterQueue]:
        """The queue of events, and that of what comes later."""
        return self._main, self._later

    def is_known(self, condition: tuple[str, ...]) -> bool:
        """Whether a recipient believes that a condition (``catalogue.condition_key``) has not ended."""
        return any(condition in lane.firing for lane in self._engine.lanes.values())

    def start(self, stop: Stop) -> None:
        """First what the last run left in the reserves, then new events."""
        self._report_damage()
        if self._pair is not None:
            self._pair.start()
        self._poll_routing()
        self._intake.step()
        self._takers.start("ev-intake", lambda: self._intake.run(stop, self._interval_s))

    def waiting(self) -> dict[str, int]:
        """Notices and events that each lane has not passed."""
        newest = {queue.name: queue.newest_seq for queue in (self._initial, self._main)}
        return {
            name: sum(newest[queue] - seq for queue, seq in lane.cursors.items())
            for name, lane in self._engine.lanes.items()
        }

    def loop(self, stop: Stop, hangup: Hangup) -> None:
        """Until the stop."""
        second = Deadline(0)
        while not stop.is_set():
            watchdog.beat()
            wait_s = self._step()
            if second.passed:
                second = Deadline(LONGEST_S)
                self._report_damage()
                self._mend_pair()
                self._write_status()
            if hangup.take():
                self._outlets.reopen()
            wait_s = min(wait_s, self._outlets.beat(is_well=self._is_well()))
            wait_readable((self._inbox, stop, hangup), min(wait_s, LONGEST_S))

    def finish(self) -> None:
        """After the stop: the reserves once more, then some time for what is still under way.

        Raises:
            ThreadDidNotStop: the disk of the queue does not answer.
        """
        self._takers.join(LAST_S)  # it reads the reserves once more, and never hangs for longer than a sync
        deadline = Deadline(LAST_S)
        while not deadline.passed:
            if not any(count for name, count in self.waiting().items() if name != NAME):
                break  # dbmanager has ended before: its rows wait for the next start
            watchdog.beat()
            wait_s = min(self._step(), deadline.left_s())
            wait_readable((self._inbox,), wait_s)

    def close(self) -> None:
        """Keep the state, end the threads, let go of the files."""
        self._engine.close()
        self._outlets.close()
        if self._pair is not None:
            self._pair.publish(self._engine)
            self._pair.close()
        try:
            self._threads.join(JOIN_S)
        except ThreadDidNotStop as exc:
            log.warning("recipients-hang", problem=str(exc))
        self._intake.close()
        self._sql.close()
        for queue in (self._initial, self._main, self._later):
            queue.close()
        self._inbox.close()

    def _step(self) -> float:
        for queue in (self._initial, self._main):
            queue.show()  # before the look at the documents: a new recipient gets all that came after its own
        self._poll_routing()
        for sent in self._inbox.drain():
            if sent is not None and not self._outlets.answered(sent):
                self._engine.answered(sent)
        if self._pair is not None and self._pair.has_changed(self._engine.lanes):
            self._engine.set_router(RecordingRouter(self._routing.router))
        wait_s = self._engine.step()
        self._sql.step()
        if self._pair is not None:
            self._pair.publish(self._engine)
        if self._initial.has_more or self._main.has_more:
            return 0.0
        lane = self._engine.lanes[NAME]
        return min(wait_s, SQL_STEP_S) if lane.token else wait_s

    def _mend_pair(self) -> None:
        """Open the pair again when its disk or its thread had failed; lanes do not wait for the partner."""
        is_well = self._pair is not None and not self._pair.problem
        if self._pair_retry is None or not self._pair_retry.is_due(is_well=is_well):
            return
        if self._pair is not None and not self._pair.close():
            return  # opened by another thread still: later
        self._pair = self._open_pair()
        if self._pair is not None:
            self._engine.set_partner(self._pair.decide)
            self._pair.start(settle_s=0.0)
            log.info("pair-opened-again")

    def _report(self, rows: Iterable[dict[str, Any]]) -> None:
        """What became of notices: for people, and for the partner."""
        found = list(rows)
        self._sql.report(found)
        if self._pair is not None:
            self._pair.report(found)

    def _raise(self, kind: str, severity: str, name: str, text: str, details: dict[str, Any]) -> None:
        """An event about a recipient: into our own reserve, as of any process."""
        log.warning(kind, recipient=name, text=text)
        raise_event(event_row(kind, severity, "recipient", name, text, self._clock.unix_us(), details))

    def report_trouble(self, kind: str, text: str) -> None:
        """An event about the process itself."""
        self._raise(kind, "critical", "delivery", text, {})

    def _report_damage(self) -> None:
        """An event about records that were found to be unreadable since the last one."""
        found = self._initial.damaged + self._main.damaged + self._later.damaged
        if damaged := found - self._damaged:
            self._damaged = found
            text = f"{damaged} events that were on disk are gone: check the disk; the log names the places"
            self._raise("event-queue-damage", "critical", "delivery", text, {"events": damaged})

    def _poll_routing(self) -> None:
        """Take up documents that have changed."""
        if self._routing.poll():
            router = self._routing.router
            self._engine.set_router(RecordingRouter(router))
            lanes = [self._record_lane, *self._outlets.lanes(router.table.recipients)]
            self._engine.set_recipients(lanes, unknown=router.table.unreadable)
            log.info("routing-read", recipients=len(router.table.recipients), routes=len(router.table.routes))

    def _is_well(self) -> bool:
        return makes_progress(self._engine.lanes, self.waiting(), self._intake.silent_ns)

    def _write_status(self) -> None:
        """State and figures for people and metrics; none of it is needed to go on."""
        recipients, undelivered = rows_of(self._engine, self._later, self._outlets.kind_of, self._clock)
        recipients += self._outlets.pulse_rows()
        fullness = {queue.name: queue.fullness_ratio for queue in (self._initial, self._main)}
        pair = self._pair.status() if self._pair is not None else None
        with contextlib.suppress(OSError):
            self._status_dir.mkdir(mode=0o700, exist_ok=True)
            write_delivery_state(
                self._status_dir,
                recipients,
                undelivered,
                reserves=dict(self._intake.fills),
                queue_fullness=fullness,
                later=len(self._later),
                accepted=self._intake.accepted,
                repeated=self._intake.repeated,
                skipped={reason.value: count for reason, count in self._engine.skipped.items()},
                pair=pair,
            )
            taken = {
                "accepted": self._intake.accepted,
                "repeated": self._intake.repeated,
                "unreadable": self._intake.unreadable,
            }
            content = metrics.render(recipients, self._intake.fills, fullness, taken, pair)
            write_whole(self._status_dir / metrics.FILE, content)


def makes_progress(lanes: Mapping[str, Lane], waiting: Mapping[str, int], silent_ns: int) -> bool:
    """Whether events come out: what the reserves have is taken, and not every recipient fails or stays.

    Args:
        lanes: by recipient.
        waiting: what each has not passed.
        silent_ns: for how long nothing was taken from the reserves.
    """
    if silent_ns > STUCK_NS:
        return False
    busy = [lane for name, lane in lanes.items() if name != NAME and waiting[name]]
    return not busy or not all(lane.is_failing or lane.no_room for lane in busy)


def builder(config: DeliveryProcessConfig, store: InboxStore) -> RecipientBuilder:
    """Makes recipients of documents; relative directories are within the data directory."""
    found = NotifyDirectories.of(config.notify, config.data_dir)
    url = config.notify.external_url
    return RecipientBuilder(found.secrets, found.commands, found.files, store, url)
