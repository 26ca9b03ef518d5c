"""The parent process of the PMDaemon: listens, hands connections to pairs, keeps the pairs alive.

It reads no byte of any agent and posts nothing to gateways: it survives whatever a peer sends. One thread,
one selector: the listener, one channel a pair, the stop. Each second ``traffic`` decides how many pairs there
are and which of them has which shard.

On disk: ``<runtime_dir>/pmdaemon.port`` holds the port and a newline, written aside and renamed, so a reader
sees all of it or nothing; it is removed at a clean stop.

Source: P9, P11, P12; DESIGN.md 3, 5.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import selectors
import socket
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.pki.authority import Authority
from pmdaemon.poller import metrics
from pmdaemon.poller.channel import Channel
from pmdaemon.poller.children import PairChild
from pmdaemon.poller.config import PmFile
from pmdaemon.poller.dialler import Dialler
from pmdaemon.poller.gateway_list import DialledFile, GatewayList
from pmdaemon.poller.mailbox_rooms import reserve_pair
from pmdaemon.poller.pair_manager import NO_ROOM_NS, PairManager
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, server_clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.sockets import open_listener
from pmdaemon.runtime.stop import ParentPipe, Stop

LOOK_NS: Final = 10**9
ACCEPTS_A_ROUND: Final = 64  # a storm of reconnects must not keep the parent from noticing a dead pair
ACCEPT_PAUSE_NS: Final = 10**9  # without descriptors: connections wait in the backlog, no loop spins
NOFILE_MIN: Final = 256
log = structlog.get_logger("pmdaemon")


def raise_open_files(wanted: int) -> int:
    """Raise RLIMIT_NOFILE to ``wanted`` or as far as the hard limit allows; returns the limit in force.

    Raises:
        ConfigError: the hard limit is too low to serve anybody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < NOFILE_MIN:
        raise ConfigError(
            "RLIMIT_NOFILE",
            f"the hard limit is {hard} open files, at least {NOFILE_MIN} are needed",
            "Raise it with `ulimit -Hn`, in limits.conf, or by LimitNOFILE= of the systemd unit",
        )
    target = max(soft, wanted if unlimited else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    if target < wanted:
        log.warning("open-files-limited", limit=target, wanted=wanted, gateways_at_most=target - 50)
    return target


def listen(value: str) -> socket.socket:
    """A listening socket; that the address may be listened on was checked with the configuration.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    sock = open_listener("pmdaemon.listen", *parse_address(value))
    sock.setblocking(False)
    return sock


def write_port(path: Path, port: int) -> None:
    """Replace the port file, whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, f"{port}\n")


class Daemon:
    """The parent: ``run`` until the stop."""

    def __init__(
        self, config: PmFile, config_path: Path | None, stop: Stop, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._stop = stop
        self._clock = clock or server_clock()
        self._pipe = ParentPipe()
        cpus = len(os.sched_getaffinity(0))
        self._has_room = functools.partial(reserve_pair, config.segment_path, self._clock)
        self.traffic = PairManager(
            config.pmdaemon, config_path, self._pipe, self._clock, cpus, self._has_room
        )
        self._selector = selectors.DefaultSelector()
        if config.pmdaemon.tls.enabled:
            Authority(config.ca_dir, config.pmdaemon.tls.lifetime_s).ensure_server()  # or say what is missing
        self._listener = listen(config.pmdaemon.listen)
        self._list = GatewayList(config)
        offer = functools.partial(self.traffic.new, is_dialled=True)
        self._dialler = Dialler(offer, self._clock, random.Random())  # noqa: S311 - guards nothing
        self._told = DialledFile(config.dialled_path)
        self._look_at_ns = 0
        self._accept_at_ns: int | None = None  # until then nothing is accepted; None: it is
        self._refusals = LimitedLog("pmdaemon")
        self.refused_connections = 0

    @property
    def port(self) -> int:
        """The port agents dial."""
        return int(self._listener.getsockname()[1])

    def run(self) -> int:
        """Serve until the stop; returns the exit status."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._selector.register(self._dialler, selectors.EVENT_READ)
        write_port(self._config.port_path, self.port)
        settings = self._config.pmdaemon
        log.info("listening", address=settings.listen, port=self.port, tls=settings.tls.enabled)
        try:
            while not self._stop.is_set():
                watchdog.beat()
                self._look()
                self._start_due()
                self._accept_again()
                self._dialler.step()
                self._ask_for_room()
                for key, events in self._selector.select(self._timeout_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, PairChild) and isinstance(key.fileobj, Channel):
                        self._serve(key.data, key.fileobj, events)
        finally:
            self._shut()
        return 0

    def _shut(self) -> None:
        log.info("stopping", reason=self._stop.reason)
        self._listener.close()
        self._dialler.close()
        for child in self.traffic.children:
            child.stop()
        self._pipe.close()
        self._selector.close()
        for path in (self._config.port_path, self._config.metrics_path, self._config.dialled_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def _timeout_s(self) -> float:
        waiting = [child.due_ns for child in self.traffic.children if not child.is_running]
        if (due_ns := self._dialler.due_ns()) is not None:
            waiting.append(due_ns)
        if self._accept_at_ns is not None:
            waiting.append(self._accept_at_ns)
        until_ns = min([self._look_at_ns, *waiting])
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _accept_again(self) -> None:
        """End the pause after a failed accept when it is time."""
        if self._accept_at_ns is not None and self._clock.monotonic_ns() >= self._accept_at_ns:
            self._accept_at_ns = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_ROUND):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # the peer is gone already
                continue
            except OSError as exc:  # out of descriptors, or of memory
                now_ns = self._clock.monotonic_ns()
                self._refusals.warning(now_ns, "accept-failed", error=exc.strerror, again_in_s=1)
                self._selector.unregister(self._listener)
                self._accept_at_ns = now_ns + ACCEPT_PAUSE_NS
                return
            with sock:
                address = f"{peer[0]}:{peer[1]}"
                if self.traffic.new(sock, address) is None:
                    # Closed: the agent dials again after its backoff.
                    self.refused_connections += 1
                    self._refusals.warning(
                        self._clock.monotonic_ns(), "no-pair-for-connection", address=address
                    )

    def _serve(self, child: PairChild, channel: Channel, events: int) -> None:
        """What a pair has sent, or the end of it."""
        if child.control is not channel:
            return  # stopped in an earlier event of this round
        if events & selectors.EVENT_WRITE:
            channel.flush()
        if not events & selectors.EVENT_READ:
            return
        parcels = child.take()
        if parcels is None:
            self._selector.unregister(channel)
            child.reap()
            self.traffic.died(child)
            self._dialler.forget_pair(child)
        else:
            for parcel in parcels:
                if parcel.op == "refused":
                    header = parcel.header
                    self._dialler.refused(header["address"], header["reason"], is_over=header["is_over"])
            self.traffic.pass_on(child, [parcel for parcel in parcels if parcel.op != "refused"])

    def _look(self) -> None:
        """Once a second: how many pairs, and which has which shard."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._look_at_ns:
            return
        self._look_at_ns = now_ns + LOOK_NS
        if (listed := self._list.changed()) is not None:
            self._dialler.replace(listed)
        before = {child: child.control for child in self.traffic.children}
        self.traffic.look()
        for child, channel in before.items():
            if channel is not None and child not in self.traffic.children:
                self._forget(channel)
        self._publish()

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)  # closed already: the selector finds it by identity

    def _publish(self) -> None:
        rows = self._dialler.states() + self._list.not_dialled
        text = metrics.text(
            self.traffic, self.refused_connections, listed=len(rows), dialled=self._dialler.connected
        )
        try:
            metrics.write(self._config.metrics_path, text)
            self._told.write(rows)
        except OSError as exc:  # no room on the tmpfs: polling goes on, the figures stay old
            log.warning("metrics-not-written", error=exc.strerror)

    def _start_due(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for child in self.traffic.children:
            if child.is_due:
                if not self._has_room(child.index):  # the segment may have been made anew since
                    child.due_ns = now_ns + NO_ROOM_NS
                elif child.start() and child.control is not None:
                    self._selector.register(child.control, selectors.EVENT_READ, child)
                    self.traffic.started(child)

    def _ask_for_room(self) -> None:
        """Write readiness of the channels on which something waits."""
        for child in self.traffic.children:
            if child.control is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.control.waiting else 0)
                if self._selector.get_key(child.control).events != events:
                    self._selector.modify(child.control, events, child)
