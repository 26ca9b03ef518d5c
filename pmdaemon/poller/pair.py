"""The pair process: one outbound and one inbound thread around one mailbox (P10).

    main thread      starts the two, reports to the parent each second, logs a summary line each minute
    pm-out-<index>   outbound: takes from the mailbox, polls, sends
    pm-in-<index>    inbound: selects, receives, posts to the mailbox
    pm-ca-<index>    net.clerk: hands out certificates; with TLS only
    pm-core-<index>  instead of pm-out, with ``pairs = "unified"``: net.unified

What they share: the registry (its locks), the book of orders, the map of shards, two handovers, and
counters. Each counter key is written by one thread only; the main thread merely reads them, so no lock is
needed for a summary that is right to a unit.

If either thread dies, the process ends with status 70 and the parent starts another: its state is in the
agents' spools and in dbmanager, nothing is lost with it.
"""

from __future__ import annotations

import os
import resource
import socket
import time
import uuid
from collections import Counter
from typing import Final

import structlog

from pmdaemon.errors import MailboxError, SlaError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox.errors import ParticipantBusy, SegmentMissing
from pmdaemon.poller import channel
from pmdaemon.poller.backpressure import BackpressureReporter
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.certificates import open_clerk
from pmdaemon.poller.config import PmFile
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.inbound import Inbound
from pmdaemon.poller.inbound_messages import Hint
from pmdaemon.poller.migration import Ownership, ShardMigrator, ToOutbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.poller.pinning import pin
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.registry import Registry
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.poller.timeouts import TimeoutPolicy
from pmdaemon.poller.unified import UnifiedCore
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.thread_inbox import ThreadInbox
from pmdaemon.runtime.threads import ThreadGroup
from pmdaemon.wire.messages.server import RecordRows

ATTACH_S: Final = (
    10.0  # the supervisor makes the segment before it starts us; alone, the order is the operator's
)
SUMMARY_S: Final = 60
EX_SOFTWARE: Final = 70
log = structlog.get_logger("pair")


def attach_patiently(config: PmFile, name: str, stop: Stop, limit_s: float = ATTACH_S) -> Mailbox:
    """Join the main segment, waiting for it to appear and for a predecessor of this name to be gone.

    Raises:
        SegmentMissing, ParticipantBusy: still so after ``limit_s``.
        MailboxError: the segment cannot be used.
    """
    deadline = Deadline(limit_s)
    while True:
        try:
            return attach(config.segment_path, name)
        except (SegmentMissing, ParticipantBusy):
            if deadline.passed or stop.is_set():
                raise
            stop.wait(0.1)


class BusyMeter:
    """CPU time of this process by wall time between two looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_ns, self._cpu_ns = clock.monotonic_ns(), time.process_time_ns()

    def ratio(self) -> float:
        """Since the last look; above 1.0 when more than one CPU was used."""
        at_ns, cpu_ns = self._clock.monotonic_ns(), time.process_time_ns()
        ratio = (cpu_ns - self._cpu_ns) / max(at_ns - self._at_ns, 1)
        self._at_ns, self._cpu_ns = at_ns, cpu_ns
        return ratio


class Pair:
    """Wires the parts of one pair together.

    Args:
        control: the pair's end of the control socket to the parent.

    Raises:
        PkiError: TLS is configured and the certificate authority cannot be used.
    """

    def __init__(self, config: PmFile, index: int, mailbox: Mailbox, control: socket.socket) -> None:
        clock = server_clock()
        settings = config.pmdaemon
        self.index = index
        self._is_unified = settings.pairs == "unified"
        self._channel = channel.Channel(control)
        self._mailbox = mailbox
        self.registry = Registry(CatchUp(settings.catch_up_bytes_per_s, settings.interval_ns))
        self.in_counters: Counter[str] = Counter()
        self.out_counters: Counter[str] = Counter()
        self._hints: ThreadInbox[Hint] = ThreadInbox()
        self.ca_counters: Counter[str] = Counter()
        tls = settings.tls
        self._clerk = (
            open_clerk(config.ca_dir, tls.lifetime_s, self._hints, self.ca_counters) if tls.enabled else None
        )
        self._registered: ThreadInbox[ToOutbound] = ThreadInbox()
        self.ownership = Ownership(index)
        self._busy = BusyMeter(clock)
        self._last_look = (0.0, 0)  # CPU seconds and polls at the last report
        book = StandingCaps()
        self._courier = CutPublisher(mailbox, index, self.registry.refused)
        self._schedule = Schedule(settings.interval_ns)
        reception = FrameHandlers(
            self.registry,
            self._courier,
            clock,
            interval_us=settings.interval_ns // 1000,
            on_registered=lambda gateway_id: mover.registered(gateway_id),  # noqa: PLW0108  # made below
            counters=self.in_counters,
            desk=self._clerk,
        )
        mover = ShardMigrator(
            self._channel,
            self.ownership,
            self.registry,
            reception,
            self._courier.post_cuts,
            book,
            self._registered,
            self.in_counters,
        )
        teller = BackpressureReporter(mailbox, clock, dict, self._refused)
        self.inbound = Inbound(
            self.registry,
            reception,
            self._courier,
            clock,
            TimeoutPolicy.for_interval(settings.interval_ns),
            hints=self._hints,
            mover=mover,
            counters=self.in_counters,
            clerk=self._clerk,
            on_sweep=teller.tick,
        )
        self.outbound = Outbound(
            self.registry,
            mailbox,
            clock,
            self._schedule,
            hints=self._hints,
            registered=self._registered,
            counters=self.out_counters,
            book=book,
            ownership=self.ownership,
        )

    def run(self, stop: Stop) -> int:
        """Serve until the stop; returns the exit status."""
        threads = ThreadGroup(on_failure=lambda name, exc: stop.set(f"thread {name} died: {exc}"))
        core = UnifiedCore(self.inbound, self.outbound) if self._is_unified else None
        by_parent = watchdog.AT_REST  # their steps are in each report: the parent is stricter with them
        if core is not None:
            threads.start(f"pm-core-{self.index}", lambda: core.run(stop), by_parent)
            threads.start(f"pm-in-{self.index}", lambda: core.run_inbound(stop), by_parent)
        else:
            threads.start(f"pm-out-{self.index}", lambda: self.outbound.run(stop), by_parent)
            threads.start(f"pm-in-{self.index}", lambda: self.inbound.run(stop), by_parent)
        if (clerk := self._clerk) is not None:
            threads.start(f"pm-ca-{self.index}", lambda: clerk.run(stop))
        seconds = 0
        while not stop.wait(1.0):
            seconds += 1
            self._report()
            if seconds % SUMMARY_S == 0:
                log.info("summary", **self.summary())
        threads.join()
        log.info("stopped", reason=stop.reason, **self.summary())
        if core is not None:
            core.close()
        self._hints.close()
        self._registered.close()
        if self._clerk is not None:
            self._clerk.close()
        return EX_SOFTWARE if threads.failed else 0

    def _report(self) -> None:
        shards = Counter(gateway.shard for gateway in self.registry.all() if gateway.conn is not None)
        report = channel.PairReport(
            connections=self.inbound.connections,
            gateways=shards.total(),
            t_ptmax_us=self.inbound.t_ptmax.value_us,
            busy_ratio=self._busy.ratio(),
            shards=sorted(shards.items()),
            steps={"inbound thread": self.inbound.steps, "outbound thread": self.outbound.steps},
            metrics=self.metrics(),
        )
        self._channel.tell({"op": "report", **report._asdict()})

    def metrics(self) -> dict[str, float]:
        """What ``pmdaemon.poller.metrics`` declares of this process; asked once a second by ``_report``."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        figures = self._mailbox.stats()
        conditions = Counter(gateway.condition.value for gateway in self.registry.all())
        cpu_s, polls = usage.ru_utime + usage.ru_stime, self.out_counters["polls"]
        (cpu_before_s, polls_before), self._last_look = self._last_look, (cpu_s, polls)
        return {
            **{name: float(value) for name, value in self.summary().items() if isinstance(value, int)},
            **{f"gateways_{name}": float(count) for name, count in conditions.items()},
            "received_bytes": float(self.inbound.received_bytes),
            "cpu_seconds": cpu_s,
            "cpu_us_a_poll": 1e6 * (cpu_s - cpu_before_s) / max(polls - polls_before, 1),
            "resident_bytes": float(usage.ru_maxrss * 1024),
            "shards": float(self.ownership.owners.count(self.index)),
            "mailbox_posts": float(figures["posts"]),
            "mailbox_full": float(figures["full"]),
            "mailbox_takes": float(figures["takes"]),
            "mailbox_fill_ratio": max(figures["ring_fill_ratio"].values(), default=0.0),
        }

    def _refused(self) -> dict[str, int]:
        """What found no room, since the start."""
        courier = self._courier
        return {
            "batches_to_keep": courier.refused_keeping,
            "live_cuts": courier.dropped_live_cuts,
            "news": courier.dropped_news,
        }

    def summary(self) -> dict[str, object]:
        """Counters since the start, and gauges."""
        courier = self._courier
        records = [gateway.record for gateway in self.registry.all()]
        return {
            **self.ca_counters,
            "connections_open": self.inbound.connections,
            "t_ptmax_us": round(self.inbound.t_ptmax.value_us),
            "missed_ticks": self._schedule.missed_ticks,
            "rewinds": sum(record.rewinds for record in records),
            "skipped_cuts": sum(record.skipped_cuts for record in records),
            "repeated_cuts": sum(record.repeated_cuts for record in records),
            "not_kept_cuts": sum(record.not_kept_cuts for record in records),
            "posted_cuts": courier.posted_cuts,
            "posted_bytes": courier.posted_bytes,
            "refused_keeping": courier.refused_keeping,
            "dropped_live_cuts": courier.dropped_live_cuts,
            "dropped_news": courier.dropped_news,
            **dict(self.in_counters),
            **dict(self.out_counters),
        }


def announce(mailbox: Mailbox, index: int, restarts: int, reason: str) -> None:
    """Let people see this process: its row, and an event if it is not the first of its name.

    Thread: the main thread, before the threads start (one poster a mailbox).
    """
    at_us, name = server_clock().unix_us(), f"pair-{index}"
    row = {
        "name": name,
        "state": "running",
        "pid": os.getpid(),
        "restarts": restarts,
        "since_us": at_us,
        "reason": reason,
    }
    rows: list[list[object]] = [["processes", row]]
    if restarts:
        event = {
            "event_id": str(uuid.uuid4()),
            "at_us": at_us,
            "kind": "process-restarted",
            "severity": "warning",
            "element": "pmdaemon",
            "subject": name,
            "text": f"{name} was restarted: {reason}; restart {restarts}",
            "details": {"restarts": restarts},
        }
        rows.append(["events", event])
    try:
        mailbox.post("dbmanager", RecordRows(rows, None, name).encode())
    except MailboxError as exc:
        log.warning("not-announced", error=str(exc))


def run(config: PmFile, index: int, control_fd: int, stop: Stop, restarts: int = 0, reason: str = "") -> int:
    """The process: attach, say so, serve, detach."""
    with socket.socket(fileno=control_fd) as control:
        control.setblocking(False)
        control.set_inheritable(False)
        try:
            mailbox = attach_patiently(config, f"pair-{index}", stop)
        except SlaError as exc:
            log.error("no-mailbox", error=str(exc))
            return exc.exit_status
        announce(mailbox, index, restarts, reason)
        pin(index, config.pmdaemon.most_pairs, config.pmdaemon.pinning)
        status = EX_SOFTWARE
        try:
            status = Pair(config, index, mailbox, control).run(stop)
        finally:
            mailbox.close(release=status == 0)  # else what it has taken and not obeyed is its successor's
        return status
