"""The parent's pair processes: start, restart with backoff, stop.

A pair is exec'ed (never forked with threads), holds the parent's pipe and one end of a control socket. The
death of a pair shows as end-of-file on that socket. It is started again after ``BACKOFF_S``, doubled each
time up to ``BACKOFF_MAX_S``, and from the beginning again once a pair has lived ``HEALTHY_S``. Its agents'
connections died with it; they dial in again and land on a living pair.

State of a child: running (``process`` and ``control`` set) or waiting (``start_at_ns`` set).

Thread: belongs to the parent's main thread.

Source: P12; DESIGN.md 3.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import PeerGone
from pmdaemon.poller import channel
from pmdaemon.poller.balance import HangDetector
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import ParentPipe

BACKOFF_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
HEALTHY_S: Final = 10.0
START_LOOKS: Final = 30  # it may wait 10 s for the segment, and a loaded machine is slow to start Python
STOP_S: Final = 5.0  # a pair needs its mailbox posts and a BYE an agent: milliseconds
log = structlog.get_logger("children")


def next_backoff_s(backoff_s: float, lived_s: float) -> float:
    """How long to wait before the next start of a pair that lived ``lived_s``."""
    return BACKOFF_S if lived_s >= HEALTHY_S else min(max(backoff_s * 2, BACKOFF_S), BACKOFF_MAX_S)


class PairChild:
    """One pair process and what the parent knows of it.

    Attributes:
        offered: connections given to it since its last report, which does not count them yet.
        restarts: how often it was started again.
    """

    def __init__(self, index: int, config_path: Path | None, pipe: ParentPipe, clock: Clock) -> None:
        self.index = index
        self.control: channel.Channel | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at_ns = clock.monotonic_ns()
        self.last = channel.PairReport()
        self.offered = 0
        self.has_reported = False
        self.is_retiring = False
        self.restarts = -1
        self._watch = HangDetector()
        self._silent_looks = 0
        self._ended = ""
        self._hung = ""
        self._config_path = config_path
        self._pipe = pipe
        self._clock = clock
        self._backoff_s = 0.0
        self._started_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether connections can be offered to it."""
        return self.control is not None

    @property
    def load(self) -> int:
        """Connections it has, or is about to have."""
        return self.last.connections + self.offered

    def start(self) -> channel.Channel:
        """Exec the pair process; returns the parent's end of its channel."""
        parent_end, child_end = channel.make()
        with child_end:
            command = [sys.executable, "-m", "pmdaemon", "pair", "--index", str(self.index)]
            command += ["--control-fd", str(child_end.fileno())]
            command += ["--restarts", str(self.restarts + 1), "--reason", self._ended]
            if self._config_path is not None:
                command += ["--config", str(self._config_path)]
            self.process = subprocess.Popen(
                command,
                pass_fds=(child_end.fileno(), self._pipe.child_fd),
                env={**os.environ, **self._pipe.child_env()},
                stdin=subprocess.DEVNULL,
            )
        self.control = channel.Channel(parent_end)
        self.restarts += 1
        self.offered = 0
        self.last = channel.PairReport()
        self.has_reported = False
        self._watch = HangDetector()
        self._silent_looks = 0
        self._started_ns = self._clock.monotonic_ns()
        log.info("pair-started", pair=self.index, pid=self.process.pid, restarts=self.restarts)
        return self.control

    def offer(self, sock: socket.socket, address: str, is_dialled: bool) -> bool:
        """Give it a connection; False if it cannot take it now."""
        header = {"op": "new", "address": address, "dialled": is_dialled}
        if self.control is None or not self.control.offer(header, sock):
            return False
        self.offered += 1
        return True

    def take(self) -> list[channel.ChannelMessage] | None:
        """What it has sent, without its reports, which are noted; None if it has died."""
        if self.control is None:
            return None
        try:
            parcels = self.control.take()
        except PeerGone:
            return None
        for parcel in parcels:
            if parcel.op == "report":
                values = {key: value for key, value in parcel.header.items() if key != "op"}
                self.last = channel.PairReport(**values)
                self.offered = 0
                self.has_reported = True
        return [parcel for parcel in parcels if parcel.op != "report"]

    def hangs(self) -> str:
        """Why it must be killed: no report after its start, or no step for ten looks; call once a second."""
        if not self.is_running:
            return ""
        if self.has_reported:
            return self._watch.check(self.last.steps)
        self._silent_looks += 1
        return f"it has not reported within {START_LOOKS} s" if self._silent_looks >= START_LOOKS else ""

    def kill(self, reason: str) -> None:
        """End it at once; its channel's end of file starts the next."""
        if self.process is not None:
            self._hung = reason
            log.error("pair-hangs", pair=self.index, pid=self.process.pid, reason=reason)
            self.process.kill()

    def bury(self) -> None:
        """It has died or hangs without its control socket: reap it and plan its restart."""
        status = self._reap(limit_s=0.5)
        if self.control is not None:
            self.control.close()
            self.control = None
        self.last = channel.PairReport()
        now_ns = self._clock.monotonic_ns()
        self._backoff_s = next_backoff_s(self._backoff_s, (now_ns - self._started_ns) / 1e9)
        self.start_at_ns = now_ns + round(self._backoff_s * 1e9)
        self._ended = self._hung or f"ended with status {status}"
        self._hung = ""
        log.warning("pair-died", pair=self.index, status=status, restart_in_s=round(self._backoff_s, 1))

    def stop(self) -> None:
        """Ask it to end and wait, then end it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self._reap(limit_s=STOP_S)
        if self.control is not None:
            self.control.close()
            self.control = None

    def _reap(self, limit_s: float) -> int | None:
        if self.process is None:
            return None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            log.warning("pair-killed", pair=self.index, pid=self.process.pid)
            self.process.kill()
            return self.process.wait()
