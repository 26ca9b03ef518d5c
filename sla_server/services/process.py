"""The services process: mailboxes and threads around ``core.Services``.

Threads: the main loop (takes from and posts to both mailboxes, owns everything in ``core``) and
``sv-sql`` (reads SQL). Either dies: the process stops with status 1 and the supervisor starts it again;
caps in force stay in force on their leases meanwhile.

Mailboxes: ``services`` in ``main.mbx`` (from pairs and dbmanager) and in ``app.mbx`` (from appserver).
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from pmdaemon.errors import SlaError
from pmdaemon.mailbox import Mailbox, attach, wait_any
from pmdaemon.mailbox.errors import MessageDamaged, SegmentMissing
from pmdaemon.mailbox.sender import MailboxSender
from pmdaemon.reserve import initialized, raise_event
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.gc_tuning import GcTuning
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.term import Term
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.space.watcher import SpaceWatcher
from sla_server.events.recipients.config import NotifyDirectories
from sla_server.events.routing import RoutingFile
from sla_server.services.control.controller import Controller
from sla_server.services.core import Services
from sla_server.services.documents import DocumentReader
from sla_server.services.record_sender import RecordSender
from sla_server.services.sql_worker import LOOK_LIMIT_S, SqlWorker
from sla_server.services.startup import Start, marker_event, read_start
from sla_server.services.store import SqlReads, open_store
from sla_server.storage_resources.failed_sources import FILE as FAILED_SOURCES
from sla_server.storage_resources.failed_sources import FailedSources
from sla_server.storage_resources.manager import StorageManager
from sla_server.storage_resources.sources import found_of, server_watcher
from sla_server.storage_resources.worker import STEP_LIMIT_S, StorageWorker

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

log = structlog.get_logger("services")
TICK_S: Final = 0.25
ATTACH_LIMIT_S: Final = 10.0
READ_AGAIN_S: Final = 0.1
SCHEMA_GRACE_S: Final = 5.0
"""Until then dbmanager, started with us, may still be making the schema: that is no trouble."""
STOP_LIMIT_S: Final = 5.0
MAX_BATCHES: Final = 16  # of each mailbox between two ticks: 4 MB of cuts, some 100 ms of work
TURN_S: Final = 0.0002
"""How long a thread that computes may keep the interpreter from one that waits for it. The main loop gives it
up with every large array operation, hundreds of times a second; with Python's 5 ms it got it back so late,
while slices were judged, that its mailbox overflowed."""


def run(config: ResolvedConfig, stop: Stop) -> int:
    """Run until ``stop``; the exit status.

    Raises:
        SlaError: the mailboxes cannot be attached.
    """
    clock = server_clock()
    main = _attach(config.runtime_dir / "main.mbx", stop)
    app = _attach(config.runtime_dir / "app.mbx", stop)
    store = open_store(config.database, config.data_dir)
    failed: list[str] = []

    def on_failure(name: str, error: BaseException) -> None:
        failed.append(name)
        stop.set(f"thread {name} died: {error}")

    threads = ThreadGroup(on_failure)
    sql_worker = SqlWorker(store, config.services, clock, config.volume_ownership)
    documents = DocumentReader(NotifyDirectories.of(config.notify, config.data_dir))
    watcher: SpaceWatcher | None = None
    is_done = False  # else what was taken and not processed is left to our successor
    try:
        tag = uuid.uuid4().hex[:12]
        limit_bytes = config.services.outbox_limit_bytes
        record_sender = RecordSender(main, tag, limit_bytes, raise_event=raise_event)
        with GcTuning.held():
            start = recover_state(store, record_sender, tag, config.services.mode, clock, stop)
            if start is None:
                return 0
            outbox = MailboxSender({"*": main, "appserver": app}, config.services.outbox_limit_bytes)
            controller = Controller(config.services.control)
            if config.cluster is not None and config.cluster.takeover.enabled:
                controller.log.server = config.cluster.node
            watcher = server_watcher(config.space, config.storage.array, clock, on_failure)
            worker = StorageWorker(store, clock, stop)
            storage = StorageManager(
                config.storage,
                start.pools,
                lambda: found_of(worker, watcher),
                worker.order,
                FailedSources(config.data_dir / FAILED_SOURCES),
                watcher.names,
            )
            services = Services(
                config.services,
                controller,
                sql_worker,
                documents,
                outbox,
                record_sender,
                start,
                clock,
                config.volume_ownership,
                config.first_sight_volumes,
                RoutingFile(config.data_dir),
                storage,
                config.notify.external_url or config.api.external_url,
            )
        threads.start("sv-sql", lambda: sql_worker.run(stop), LOOK_LIMIT_S)
        threads.start("sv-documents", lambda: documents.run(stop))
        threads.start("sv-space", worker.run, STEP_LIMIT_S)
        if config.space.source or config.storage.array:
            watcher.start()
        initialized()
        log.info("ready", agreements=len(start.catalog.items), mode=start.mode, policy=start.policy_version)
        _loop(services, sql_worker, main, app, clock, stop, Term.of_environment(config.runtime_dir))
        services.flush(clock.monotonic_ns())
        log.info("stopped", reason=stop.reason, unrecorded=record_sender.waiting())
        is_done = True
    finally:
        stop.set("the main loop ended")
        sql_worker.wake()
        if watcher is not None:
            watcher.stop()
        threads.join(STOP_LIMIT_S)
        store.close()
        app.close(release=is_done)
        main.close(release=is_done)
    return 1 if failed else 0


def _attach(path: Path, stop: Stop) -> Mailbox:
    """Attach; the supervisor may still be creating the segment."""
    deadline = Deadline(ATTACH_LIMIT_S)
    while True:
        try:
            return attach(path, "services")
        except SegmentMissing:
            if deadline.passed or stop.wait(READ_AGAIN_S):
                raise


def recover_state(
    store: SqlReads, record_sender: RecordSender, tag: str, mode: str, clock: Clock, stop: Stop
) -> Start | None:
    """Wait until our own marker is in SQL, then read what our predecessor left; None if we must stop."""
    table, marker = marker_event(tag, clock)
    record_sender.append([(table, marker)])
    began_ns: int | None = clock.monotonic_ns()
    while not stop.is_set():
        record_sender.flush(clock.monotonic_ns())
        try:
            if store.has_event(marker["event_id"], marker["at_us"]):
                return read_start(store, mode, clock.unix_us())
        except SlaError as exc:
            if not exc.retryable:
                raise
            waited_s = 0.0 if began_ns is None else (clock.monotonic_ns() - began_ns) / 1e9
            if waited_s >= SCHEMA_GRACE_S:
                began_ns = None  # said once
                log.warning("waiting-for-database", error=str(exc), waited_s=round(waited_s))
        stop.wait(READ_AGAIN_S)
    return None


def _loop(
    services: Services,
    sql_worker: SqlWorker,
    main: Mailbox,
    app: Mailbox,
    clock: Clock,
    stop: Stop,
    term: Term,
) -> None:
    boxes = (app, main)  # people first: a request is one small message
    with GcTuning.in_charge(), short_turns():
        due_ns = 0
        collector = GcTuning()
        while not stop.is_set():
            watchdog.beat()
            if (
                not term.is_on()
            ):  # the machine stood still, and all gateways seem lost: another server has them
                stop.wait(TICK_S)
                continue
            busy = [_drain(services, box, clock) for box in boxes]
            sql_worker.yield_to_main_loop(to_mail=any(busy))
            now_ns = clock.monotonic_ns()
            if now_ns >= due_ns:
                services.tick(now_ns, clock.unix_us())
                sql_worker.live_us = services.controller.last_cut_us
                collector.tick(now_ns)
                due_ns = now_ns + round(TICK_S * 1e9)
            else:
                services.flush(now_ns)
            if not any(busy):
                wait_any(boxes, (due_ns - clock.monotonic_ns()) / 1e9, [stop])


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads of this process take turns every ``TURN_S``."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _drain(services: Services, box: Mailbox, clock: Clock) -> bool:
    """Take up to MAX_BATCHES batches; True if there may be more."""
    for _ in range(MAX_BATCHES):
        try:
            messages = box.take()
        except MessageDamaged as exc:
            log.error("message-discarded", error=str(exc))
            continue
        for message in messages:
            services.on_message(message.sender, message.payload, clock.monotonic_ns(), clock.unix_us())
        if not messages:
            return False
    return True
