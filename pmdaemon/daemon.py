"""The parent process of the PMDaemon: listens, hands connections to pairs, keeps the pairs alive.

It reads no byte of any agent and posts nothing to gateways: it survives whatever a peer sends. One thread,
one selector: the listener, one control socket a pair, the stop. Each second it asks the sizing formula how
many pairs the connected gateways need, and starts what is missing, up to ``max_pairs``; the formula's own
answer is logged when it changes. Pairs are never retired yet.

On disk: ``<runtime_dir>/pmdaemon.port`` holds the port and a newline, written aside and renamed, so a reader
sees all of it or nothing; it is removed at a clean stop.

Source: P9, P11, P12; DESIGN.md 3, 5.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.config import PmFile, parse_listen
from pmdaemon.errors import ConfigError
from pmdaemon.net.children import Child
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.listening import open_listener
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.sizing import T_PTMAX_US, pairs_by_formula, pairs_needed

SIZE_NS: Final = 10**9
ACCEPTS_A_ROUND: Final = 64  # a storm of reconnects must not keep the parent from noticing a dead pair
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
    """A listening socket on a loopback address.

    Raises:
        ConfigError: the address is not loopback, or is in use.
    """
    sock = open_listener("pmdaemon.listen", *parse_listen(value))
    sock.setblocking(False)
    return sock


def write_port(path: Path, port: int) -> None:
    """Write the port file aside and rename it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(f"{port}\n")
    aside.rename(path)


class Daemon:
    """The parent: ``run`` until the stop."""

    def __init__(
        self, config: PmFile, config_path: Path | None, stop: Stop, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._stop = stop
        self._clock = clock or SystemClock()
        self._pipe = ParentPipe()
        self._config_path = config_path
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listen(config.pmdaemon.listen)
        self._size_at_ns = 0
        self._last_needed = -1
        self.refused_connections = 0

    @property
    def port(self) -> int:
        """The port agents dial."""
        return int(self._listener.getsockname()[1])

    def run(self) -> int:
        """Serve until the stop; returns the exit status."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        write_port(self._config.port_path, self.port)
        log.info("listening", address=self._config.pmdaemon.listen, port=self.port)
        try:
            while not self._stop.is_set():
                self._size()
                self._start_due()
                for key, _ in self._selector.select(self._timeout_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, Child) and not key.data.take_reports():
                        self._selector.unregister(key.fileobj)
                        key.data.bury()
        finally:
            self._shut()
        return 0

    def _shut(self) -> None:
        log.info("stopping", reason=self._stop.reason)
        self._listener.close()
        for child in self._children:
            child.stop()
        self._pipe.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            self._config.port_path.unlink()

    def _timeout_s(self) -> float:
        waiting = [child.start_at_ns for child in self._children if not child.is_running]
        until_ns = min([self._size_at_ns, *waiting])
        return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_ROUND):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:  # out of descriptors, or the peer is gone already
                log.error("accept-failed", error=exc.strerror)
                return
            with sock:
                address = f"{peer[0]}:{peer[1]}"
                running = sorted(
                    (item for item in self._children if item.is_running), key=lambda item: item.load
                )
                if not any(child.offer(sock, address) for child in running):
                    # Closed: the agent dials again after its backoff.
                    self.refused_connections += 1
                    log.warning("no-pair-for-connection", address=address)

    def _size(self) -> None:
        """How many pairs are needed now; start what is missing."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._size_at_ns:
            return
        self._size_at_ns = now_ns + SIZE_NS
        settings = self._config.pmdaemon
        gateways = sum(child.last.gateways for child in self._children)
        t_ptmax_us = max((child.last.t_ptmax_us for child in self._children), default=0.0) or T_PTMAX_US
        cpus = len(os.sched_getaffinity(0))
        needed = pairs_needed(gateways, settings.thread_quantum_ms, t_ptmax_us, cpus, settings.pairs)
        wanted = min(needed, settings.max_pairs)
        if needed != self._last_needed:
            formula = pairs_by_formula(gateways, settings.thread_quantum_ms, t_ptmax_us)
            log.info(
                "sizing",
                gateways=gateways,
                t_ptmax_us=round(t_ptmax_us),
                formula=formula,
                needed=needed,
                pairs=max(wanted, len(self._children)),
            )
            self._last_needed = needed
        while len(self._children) < wanted:
            self._children.append(Child(len(self._children), self._config_path, self._pipe, self._clock))

    def _start_due(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for child in self._children:
            if not child.is_running and now_ns >= child.start_at_ns:
                self._selector.register(child.start(), selectors.EVENT_READ, child)
