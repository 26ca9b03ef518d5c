"""The pair process: one outbound and one inbound thread around one mailbox (P10).

    main thread      starts the two, reports to the parent each second, logs a summary line each minute
    pm-out-<index>   outbound: takes from the mailbox, polls, sends
    pm-in-<index>    inbound: selects, receives, posts to the mailbox
    pm-ca-<index>    poller.certificates: hands out certificates; with TLS only
    pm-core-<index>  instead of pm-out, with ``pairs = "unified"``: poller.unified

What they share: the registry (its locks), the standing caps, the map of shards, two thread inboxes, and
counters. Each counter key is written by one thread only; the main thread merely reads them, so no lock is
needed for a summary that is right to a unit.

If either thread dies, the process ends with status 70 and the parent starts another: its state is in the
agents' spools and in dbmanager, nothing is lost with it.

*Processors.* A pair's threads share one interpreter lock, so a pair uses one processor; bound to one, it
does not wander and its caches stay warm. But a bound process cannot step aside when something else runs
there, so ``auto`` binds only where there is room for both: several pairs, and ``ROOMY_CPUS`` processors or
more. Only what this process is allowed counts: a container's cpuset, ``taskset``, systemd's
``CPUAffinity``.

Source: P10-P12; DESIGN.md 3 ("Pinning is a setting: auto, from 4 CPUs").
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Collection
from typing import Final, Literal

import structlog

from pmdaemon.errors import MailboxError, SlaError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox.errors import ParticipantBusy, SegmentMissing
from pmdaemon.pki.authority import Authority
from pmdaemon.poller import channel
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.channel_messages import PairReport
from pmdaemon.poller.config import PmFile
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.inbound import Inbound, ToInbound
from pmdaemon.poller.metrics import BackpressureReporter
from pmdaemon.poller.migration import Ownership, ShardMigrator, ToOutbound
from pmdaemon.poller.outbound import Outbound
from pmdaemon.poller.publisher import DBMANAGER, CutPublisher
from pmdaemon.poller.schedule import Schedule
from pmdaemon.poller.standing_caps import StandingCaps
from pmdaemon.poller.timeouts import TimeoutPolicy
from pmdaemon.poller.unified import UnifiedCore
from pmdaemon.reserve import attach_reserves, event_row, initialized, raise_event
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.term import Term
from pmdaemon.runtime.threads import ThreadGroup, ThreadInbox
from pmdaemon.wire.messages.server import RecordRows

# The supervisor makes the segment before it starts us; alone, the order is the operator's.
ATTACH_S: Final = 10.0
SUMMARY_S: Final = 60
EX_SOFTWARE: Final = 70
log = structlog.get_logger("pair")


ROOMY_CPUS: Final = 4
Pinning = Literal["auto", "on", "off"]


def cpu_for(pair: int, pairs: int, setting: Pinning, allowed: Collection[int]) -> int | None:
    """The processor of a pair, or None to let it run on any.

    Args:
        pair: its number.
        pairs: how many there may be.
        setting: of the configuration.
        allowed: processors this process may use.
    """
    if setting == "off" or not allowed:
        return None
    if setting == "auto" and (pairs < 2 or len(allowed) < ROOMY_CPUS):
        return None
    return sorted(allowed)[pair % len(allowed)]


def pin(pair: int, pairs: int, setting: Pinning) -> int | None:
    """Bind this process, before it starts threads; returns the processor, or None if it is not bound."""
    cpu = cpu_for(pair, pairs, setting, os.sched_getaffinity(0))
    if cpu is None:
        return None
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as exc:  # forbidden here (seccomp), or the cpuset has changed since it was read
        log.warning("not-pinned", pair=pair, cpu=cpu, error=exc.strerror)
        return None
    log.info("pinned", pair=pair, cpu=cpu)
    return cpu


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
    """CPU time of this process by wall time between two reports."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_ns, self._cpu_ns = clock.monotonic_ns(), time.process_time_ns()

    def ratio(self) -> float:
        """Since the last report; above 1.0 when more than one CPU was used."""
        at_ns, cpu_ns = self._clock.monotonic_ns(), time.process_time_ns()
        ratio = (cpu_ns - self._cpu_ns) / max(at_ns - self._at_ns, 1)
        self._at_ns, self._cpu_ns = at_ns, cpu_ns
        return ratio


class Pair:
    """Wires the parts of one pair together.

    Args:
        control: the pair's end of the control socket to the parent.

    Attributes:
        publisher: posts for the inbound thread, and before it starts for the main thread.

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
        self._to_inbound: ThreadInbox[ToInbound] = ThreadInbox()
        self.ca_counters: Counter[str] = Counter()
        tls = settings.tls
        self._certificate_worker = (
            CertificateWorker(
                Authority(config.ca_dir, tls.lifetime_s), self._to_inbound.put, self.ca_counters
            )
            if tls.enabled
            else None
        )
        self._to_outbound: ThreadInbox[ToOutbound] = ThreadInbox()
        self.ownership = Ownership(index)
        self._busy = BusyMeter(clock)
        self._last_report = (0.0, 0)  # CPU seconds and polls at the last report
        standing_caps = StandingCaps()
        self.publisher = CutPublisher(mailbox, index, self.registry.refused)
        self._schedule = Schedule(settings.interval_ns)
        handlers = FrameHandlers(
            self.registry,
            self.publisher,
            clock,
            interval_us=settings.interval_ns // 1000,
            on_registered=lambda gateway_id: migrator.registered(gateway_id),  # noqa: PLW0108  # made below
            counters=self.in_counters,
            certificate_worker=self._certificate_worker,
            takes_labels=settings.agent_labels,
        )
        migrator = ShardMigrator(
            self._channel,
            self.ownership,
            self.registry,
            handlers,
            self.publisher.post_cuts,
            standing_caps,
            self._to_outbound,
            self.in_counters,
        )
        reporter = BackpressureReporter(mailbox, clock, dict, self._refused)
        self.inbound = Inbound(
            self.registry,
            handlers,
            self.publisher,
            clock,
            TimeoutPolicy.for_interval(settings.interval_ns, round(settings.durable_lag_s * 1e9)),
            to_inbound=self._to_inbound,
            migrator=migrator,
            counters=self.in_counters,
            certificate_worker=self._certificate_worker,
            on_sweep=reporter.tick,
        )
        self.outbound = Outbound(
            self.registry,
            mailbox,
            clock,
            self._schedule,
            to_inbound=self._to_inbound,
            to_outbound=self._to_outbound,
            counters=self.out_counters,
            standing_caps=standing_caps,
            ownership=self.ownership,
            unread=self.publisher.unread,
            term=Term.of_environment(config.runtime_dir),
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
        if (certificate_worker := self._certificate_worker) is not None:
            threads.start(f"pm-ca-{self.index}", lambda: certificate_worker.run(stop))
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
        self._to_inbound.close()
        self._to_outbound.close()
        if self._certificate_worker is not None:
            self._certificate_worker.close()
        return EX_SOFTWARE if threads.failed else 0

    def _report(self) -> None:
        shards = Counter(gateway.shard for gateway in self.registry.all() if gateway.conn is not None)
        report = PairReport(
            connections=self.inbound.connections,
            gateways=shards.total(),
            t_ptmax_us=self.inbound.t_ptmax.value_us,
            busy_ratio=self._busy.ratio(),
            shards=sorted(shards.items()),
            steps={"inbound thread": self.inbound.steps, "outbound thread": self.outbound.steps},
            metrics=self.metrics(),
        )
        self._channel.send_or_drop(report)

    def metrics(self) -> dict[str, float]:
        """What ``pmdaemon.poller.metrics`` declares of this process; asked once a second by ``_report``."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        figures = self._mailbox.stats()
        conditions = Counter(gateway.condition.value for gateway in self.registry.all())
        cpu_s, polls = usage.ru_utime + usage.ru_stime, self.out_counters["polls"]
        (cpu_before_s, polls_before), self._last_report = self._last_report, (cpu_s, polls)
        return {
            **{name: float(value) for name, value in self.summary().items() if isinstance(value, int)},
            **{f"gateways_{name}": float(count) for name, count in conditions.items()},
            "received_bytes": float(self.inbound.received_bytes),
            "cpu_seconds": cpu_s,
            "cpu_seconds_a_poll": (cpu_s - cpu_before_s) / max(polls - polls_before, 1),
            "t_ptmax_seconds": self.inbound.t_ptmax.value_us / 1e6,
            "resident_bytes": float(usage.ru_maxrss * 1024),
            "shards": float(self.ownership.owners.count(self.index)),
            "mailbox_posts": float(figures["posts"]),
            "mailbox_full": float(figures["full"]),
            "mailbox_takes": float(figures["takes"]),
            "mailbox_fill_ratio": max(figures["ring_fill_ratio"].values(), default=0.0),
        }

    def _refused(self) -> dict[str, int]:
        """Counts of what found no room, since the start."""
        publisher = self.publisher
        return {
            "batches_to_keep": publisher.refused_keeping,
            "live_cuts": publisher.dropped_live_cuts,
            "news": publisher.dropped_news,
        }

    def summary(self) -> dict[str, object]:
        """Counters since the start, and gauges."""
        publisher = self.publisher
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
            "posted_cuts": publisher.posted_cuts,
            "posted_bytes": publisher.posted_bytes,
            "refused_keeping": publisher.refused_keeping,
            "dropped_live_cuts": publisher.dropped_live_cuts,
            "dropped_news": publisher.dropped_news,
            **dict(self.in_counters),
            **dict(self.out_counters),
        }


def announcement(index: int, restarts: int, reason: str) -> bytes:
    """RECORD with the row of this process, and with an event, which is raised, if it was restarted."""
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
        text = f"{name} was restarted: {reason}; restart {restarts}"
        details = {"restarts": restarts}
        event = event_row("process-restarted", "warning", "pmdaemon", name, text, at_us, details)
        raise_event(event)
        rows.append(["events", event])
    return RecordRows(rows, None, name).encode()


def announce(publisher: CutPublisher, message: bytes) -> None:
    """Post the announcement of this process; the publisher keeps it while dbmanager has no room.

    Thread: the main thread, before the threads start (one poster a mailbox).
    """
    try:
        publisher.news(message, DBMANAGER)
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
        attach_reserves(f"pair-{index}")
        message = announcement(index, restarts, reason)
        initialized()
        pin(index, config.pmdaemon.most_pairs, config.pmdaemon.pinning)
        status = EX_SOFTWARE
        try:
            pair = Pair(config, index, mailbox, control)
            announce(pair.publisher, message)
            status = pair.run(stop)
        finally:
            # After a failure, what it has taken and not carried out is its successor's.
            mailbox.close(release=status == 0)
        return status
