"""The dbmanager process: three threads between the mailboxes, the database and the Parquet files.

    db-intake   mailboxes -> dedupe -> ingest queue, one sync -> DURABLE, RECORDED   (ingest.receiver)
    db-writer   ingest queue -> SQL about once a second, Parquet about once a minute (ingest.writer)
    db-files    merges, moves and gives up Parquet files, once a minute              (archive.upkeep)

and two that the writer starts for a moment and waits for: db-commit, a transaction (``BackgroundCommit``);
db-encode, a row group (``FileWriter``).

Start: lock of the data directory; schema (migrated if older); cursors and watermarks from SQL; what the
queue holds beyond; orphans swept; threads. A database that is away at the start is waited for: without the
watermarks no cut can be judged new. Stop: intake drains the mailboxes, then the writer writes everything
and closes its file. If a thread dies, the process ends with status 1 and the supervisor starts it again:
all state is on disk. Its problems are reported to ``services`` and ``appserver`` every other second
(PRESSURE), also while it waits at the start, and once more when a thread has died.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from sqlalchemy import Engine

from pmdaemon.errors import ConfigError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.poller.metrics import BackpressureReporter
from pmdaemon.reserve import initialized
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.files import make_directory
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.wire.messages.server import DAMAGED, Problem
from sla_server.db import migrate
from sla_server.db.archive.store import FileStore, open_files
from sla_server.db.archive.upkeep import ArchiveUpkeep, storage_lock
from sla_server.db.archive.writer import CutFileWriter
from sla_server.db.engine import make_engine, prepare_files, where
from sla_server.db.errors import DatabaseDamaged, DatabaseUnavailable, DbError, FilesUnavailable, StorageBusy
from sla_server.db.fence import Fence, OthersWatch, check_alone, take_alone
from sla_server.db.gateway_list import REFRESH_S, GatewayListFile
from sla_server.db.ingest.intake import HighWater, IngestIntake
from sla_server.db.ingest.outage import DatabaseOutage, OutageMark
from sla_server.db.ingest.queue import STEP_BYTES, IngestQueue, IngestRecord
from sla_server.db.ingest.receiver import IngestMailbox, IngestReceiver
from sla_server.db.ingest.records import event_row
from sla_server.db.ingest.transaction import IngestStore, mark_alive
from sla_server.db.ingest.writer import STEP_S, IngestWriter
from sla_server.db.partitions import FIRST_S, Retention
from sla_server.db.queries.reader import SqlReader
from sla_server.lease_file import FENCE, LeaseFile
from sla_server.rows import Row

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

log = structlog.get_logger("dbmanager")
NAME: Final = "dbmanager"
REPORT_S: Final = 2.0
LISTING_S: Final = 600.0  # one statement of SQL; SQLite knows no limit for it
JOIN_S: Final = 20.0  # a last transaction and a last Parquet file


@dataclass(frozen=True, slots=True)
class DatabaseManager:
    """Everything between queue and database, ready to run.

    Attributes:
        intake: with the high waters recovered.
        queue: open.
        writer: started behind the committed cursors.
        upkeep: looks after the Parquet files.
        engine: of the same database.
        others: looks for servers that act beside this one; None: it is one of several itself.
    """

    intake: IngestIntake
    queue: IngestQueue
    writer: IngestWriter
    upkeep: ArchiveUpkeep
    engine: Engine
    others: OthersWatch | None = None

    def problems(self) -> list[Problem]:
        """What its threads report, but the receiver's."""
        found = self.others.problem if self.others is not None else None
        return [*self.writer.problems(), *([found] if found else [])]


def run(config: ResolvedConfig, stop: Stop) -> int:
    """Run until ``stop``; returns 0, or 1 if a thread died.

    Raises:
        DbError: a second dbmanager on this data directory.
        SchemaTooNew, ConfigError: the database does not fit this release or configuration.
        OldQueueFiles, DiskQueueError: the ingest queue cannot be opened.
        MailboxError: the segments do not exist or do not fit.
    """
    with ExitStack() as stack:
        stack.enter_context(directory_lock(config.data_dir))
        mailboxes = [
            stack.enter_context(attach(config.runtime_dir / name, NAME)) for name in ("main.mbx", "app.mbx")
        ]
        manager = open_manager(config, stop, stack, lambda problem: _report(mailboxes, problem))
        if manager is None:
            return 0  # stopped before the database was there
        reporter = BackpressureReporter(
            mailboxes[0],
            server_clock(),
            lambda: {"ingest-queue": manager.queue.fullness_ratio},
            lambda: {"queue_full_pauses": receiver.pauses},
            lambda: [*manager.problems(), *receiver.problems(), *_slow_threads()],
            [(mailboxes[1], "appserver")],
        )
        receiver = make_receiver(config, mailboxes, manager, reporter.tick)
        failed = _run_threads(receiver, manager, stop, GatewayListFile(manager.engine, config.runtime_dir))
        if failed is not None:
            name, error = failed
            text = f"its thread {name} died: {error}. It is started again"
            _report(mailboxes, Problem(NAME, server_clock().unix_us(), text))
            for mailbox in mailboxes:
                # What it has taken may not be in the queue: the process that follows takes it.
                mailbox.close(release=False)
        log.info("stopped", reason=stop.reason, queue_bytes=manager.queue.waiting_bytes)
        return 0 if failed is None else 1


def make_receiver(
    config: ResolvedConfig,
    mailboxes: Sequence[IngestMailbox],
    manager: DatabaseManager,
    tick: Callable[[], None],
) -> IngestReceiver:
    """The receiver of this server: one of several confirms what is in SQL, one alone what is in the queue."""
    stored_seq = (lambda: manager.writer.sql_seq) if is_one_of_several(config) else None
    wake = manager.writer.wake
    return IngestReceiver(mailboxes, manager.intake, manager.queue, wake, tick=tick, stored_seq=stored_seq)


def _slow_threads() -> list[Problem]:
    now_us = server_clock().unix_us()
    return [Problem(name, now_us - round(watchdog.SLOW_S * 1e6), text) for name, text in watchdog.slow()]


def _report(mailboxes: Sequence[Mailbox], problem: Problem) -> None:
    """PRESSURE at once, from the main thread: only while there is no intake thread."""
    BackpressureReporter(
        mailboxes[0], server_clock(), dict, dict, lambda: [problem], [(mailboxes[1], "appserver")]
    ).report()


def _run_threads(
    receiver: IngestReceiver, manager: DatabaseManager, stop: Stop, listing: GatewayListFile
) -> tuple[str, BaseException] | None:
    """Run both threads, and publish the list of gateways meanwhile; returns the thread that died, and why."""

    def on_failure(name: str, error: BaseException) -> None:
        stop.set(f"thread {name} died: {error}")

    intake_threads, writer_threads = ThreadGroup(on_failure), ThreadGroup(on_failure)
    writer_threads.start("db-writer", manager.writer.run, STEP_S)
    writer_threads.start("db-files", manager.upkeep.run)
    intake_threads.start("db-intake", lambda: receiver.run(stop))
    log.info("running", queue_bytes=manager.queue.waiting_bytes)
    while True:
        watchdog.beat(LISTING_S)
        listing.refresh()
        with suppress(DbError):  # away: the writer reports that
            mark_alive(manager.engine, server_clock().unix_us())
        if manager.others is not None:
            manager.others.check(server_clock().unix_us())
        if stop.wait(REFRESH_S):
            break
    try:
        intake_threads.join(JOIN_S)
    finally:
        manager.upkeep.finish()
        manager.writer.finish()
        writer_threads.join(JOIN_S)
    return intake_threads.failed or writer_threads.failed


def open_manager(
    config: ResolvedConfig,
    stop: Stop,
    stack: ExitStack,
    report: Callable[[Problem], None] = lambda _problem: None,
    clock: Clock | None = None,
) -> DatabaseManager | None:
    """Schema, queue, recovery; waits for a database that is away. None if ``stop`` came first.

    ``report`` is called again and again while it waits.
    """
    clock = clock or server_clock()
    settings = config.database
    prepare_files(settings, config.data_dir)
    engine = make_engine(settings, config.data_dir)
    stack.callback(engine.dispose)
    queue_dir = settings.resolved_queue_dir(config.data_dir)
    queue = IngestQueue(queue_dir, settings.queue_bytes)
    stack.callback(queue.close)
    fence = own_fence(config)
    store = IngestStore(
        engine,
        queue.queue_id,
        settings.rollup_s,
        clock,
        ownership=config.volume_ownership,
        first_sight_volumes=config.first_sight_volumes,
        fence=fence.number if fence else 0,
    )
    files = open_files(settings, config.data_dir)
    archive = CutFileWriter(files, queue.queue_id, settings.file_max_bytes, settings.file_max_s, clock)
    upkeep = ArchiveUpkeep(engine, files, queue.queue_id, settings.files, clock)
    outage = DatabaseOutage(OutageMark(queue_dir))
    damage_event = _damage_event(queue, clock.unix_us())
    was_emptied = is_guarded = False
    if fence is not None:
        fence.limit(engine)
    while not stop.is_set():
        try:
            if fence is None:
                check_alone(engine)
            elif not is_guarded:
                fence.check(engine)
            was_emptied |= bool(queue.synced_seq) and migrate.is_empty(engine)
            migrate.upgrade(engine)
            if fence is None:
                former = take_alone(engine, queue.queue_id, queue.synced_seq)
                queue.refused, queue.former_seq = former.refused, former.newest_seq
            elif not is_guarded:
                former = fence.take(engine, queue.queue_id, queue.synced_seq, clock.unix_us())
                queue.refused, queue.former_seq = former.refused, former.newest_seq
                fence.guard(engine)
                is_guarded = True
            store.prepare()
            if damage_event is not None:
                store.report(damage_event)
            if was_emptied:
                store.report(_emptied_event(engine, queue, clock.unix_us()))
            cursors = store.cursors()
            reader = SqlReader(engine)
            dropped = {row["gateway_id"]: row["dropped_cuts"] for row in reader.gateways()}
            intake = IngestIntake(secrets.randbits(62) + 1, HighWater(reader.watermarks()), dropped)
            # Not of a queue that was damaged, brought back from an older copy, or one of several, now or
            # once: SQL may know more.
            is_alone = fence is None and not queue.former_seq
            is_complete = damage_event is None and queue.synced_seq >= store.newest_cursor and is_alone
            corrected = intake.recover(_queue_records(queue), cursors[0], is_complete=is_complete)
            store.correct_watermarks(corrected)
            _sweep(archive, files, reader, clock.unix_us())
        except (DatabaseUnavailable, FilesUnavailable) as exc:
            outage.failed(clock.unix_us(), str(exc))
            outage.announce(clock.unix_us())
            log.warning("waiting-for-database", error=str(exc), retry_s=outage.wait_s())
            what = "database" if isinstance(exc, DatabaseUnavailable) else "parquet"
            what = DAMAGED if isinstance(exc, DatabaseDamaged) else what
            _wait(outage.wait_s(), stop, report, Problem(what, outage.since_us, f"waits at its start: {exc}"))
            continue
        outage.started(clock.unix_us())
        queue.go_on_behind(store.newest_cursor)
        retention = Retention(engine, settings.retention, clock, FIRST_S)
        refused_dir = queue_dir / "refused"
        writer = IngestWriter(
            queue, store, archive, clock, settings.flush_interval_s, refused_dir, retention, outage=outage
        )
        writer.start(cursors)
        initialized()
        others = OthersWatch(engine) if fence is None else None
        return DatabaseManager(intake, queue, writer, upkeep, engine, others)
    return None


def make_queue(config: ResolvedConfig) -> None:
    """Make the ingest queue if there is none: its room is written once, which takes a slow disk seconds.

    A server does so while it stands by, and not when cuts wait for it. A process that is killed meanwhile
    leaves what the next one makes again.

    Raises:
        DbError: a database manager runs here, or there is no room.
        DiskQueueError, OSError: it cannot be made.
    """
    queue_dir = config.database.resolved_queue_dir(config.data_dir)
    if not (queue_dir / "ingest").exists():
        with directory_lock(config.data_dir):
            IngestQueue(queue_dir, config.database.queue_bytes).close()


def _sweep(archive: CutFileWriter, files: FileStore, reader: SqlReader, now_us: int) -> None:
    """Remove what a crash has left of files, unless another process is looking after them.

    That may be `sla storage compact`, or a server that was stopped in the midst of its upkeep and has not
    died: it holds the lock for as long as it stands still. What is left over is removed at the next start.
    """
    try:
        with storage_lock(files.lock_dir):
            kept = {row["path"] for row in reader.manifest(in_use=False)}
            archive.sweep(kept, now_us)
    except StorageBusy as exc:
        log.warning("archive-not-swept", problem=str(exc))


def is_one_of_several(config: ResolvedConfig) -> bool:
    """Whether servers take over from each other on this database."""
    return config.cluster is not None and config.cluster.takeover.enabled


def own_fence(config: ResolvedConfig) -> Fence | None:
    """The fence of the term in which the supervisor has started this process; None: the database is its own.

    Raises:
        ConfigError: it was started by something else, which has no lease.
    """
    if config.cluster is None or not is_one_of_several(config):
        return None
    number = os.environ.get(FENCE, "")
    if not number.isdecimal():
        raise ConfigError(
            "cluster.takeover.enabled",
            f"is true, and the environment has no {FENCE}",
            "Start the server with 'sla-server start', which starts this process while it has the lease",
        )
    cluster = LeaseFile(config.runtime_dir).read().cluster
    return Fence(int(number), config.cluster.node, config.cluster.takeover.lease_s, cluster)


def _damage_event(queue: IngestQueue, now_us: int) -> Row | None:
    """An event about records that were durable and are gone; None if there are none.

    Its id follows from what is damaged: the next start, which may find the same, adds no second one.
    """
    places, size_bytes, records = queue.damage
    if not places:
        return None
    count = f"{records} record{'s' * (records > 1)}" if records else "an unknown number of records"
    text = (
        f"the ingest queue is damaged in {places} places ({size_bytes} bytes): {count} of cuts that were not "
        "yet in SQL and Parquet are lost, and their time is no-data. Check the disk; the log names the places"
    )
    details = {"places": places, "bytes": size_bytes, "records": records}
    identity = (queue.queue_id, queue.synced_seq, places, size_bytes)
    return event_row(
        identity,
        now_us,
        "queue-damage",
        "critical",
        element="server",
        subject="ingest-queue",
        text=text,
        details=details,
    )


def _emptied_event(engine: Engine, queue: IngestQueue, now_us: int) -> Row:
    """What was in the database before is gone; to all else an empty one is as good as a new one."""
    text = (
        f"the database {where(engine)} was empty, though this server has stored in one before: agreements, "
        "accounts and history are not in it, and no promise is watched. If it was lost: stop the server, "
        "move the new database away, and bring back the newest backup with sla storage restore"
    )
    return event_row(
        (queue.queue_id, queue.synced_seq, "emptied"),
        now_us,
        "database-emptied",
        "critical",
        element="server",
        subject="database",
        text=text,
        details={},
    )


def _wait(limit_s: float, stop: Stop, report: Callable[[Problem], None], problem: Problem) -> None:
    """Sleep; report now and every other second, so that no process takes this one for dead."""
    deadline = Deadline(limit_s)
    while True:
        report(problem)
        if deadline.passed or stop.wait(min(deadline.left_s(), REPORT_S)):
            return


def _queue_records(queue: IngestQueue) -> Iterator[IngestRecord]:
    """All records of this server's last terms, also those that are in SQL and not deleted yet.

    None of terms after which another server has written: some of those were refused, and of the others SQL
    knows what was stored.
    """
    reader = queue.reader(queue.former_seq)
    try:
        while records := reader.read(STEP_BYTES):
            yield from records
    finally:
        reader.close()


@contextmanager
def directory_lock(data_dir: Path) -> Iterator[None]:
    """Hold ``data_dir/dbmanager.lock``; the kernel drops it when the process dies, however it dies.

    Raises:
        DbError: held by a living process.
    """
    make_directory(data_dir, 0o700)
    fd = os.open(data_dir / "dbmanager.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(fd)
        raise DbError(
            f"another database manager uses {data_dir}. Stop it first (`sla-server status` names its "
            "process), or give this server a data directory of its own"
        ) from exc
    try:
        yield
    finally:
        os.close(fd)
