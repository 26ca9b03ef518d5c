"""The parent's pair processes: what a child of ``runtime.children`` has besides, when it is a pair.

A pair holds one end of a control socket; its death shows as end-of-file there. Its agents' connections die
with it; the agents dial in again and reach a pair that runs.

State of a child: running (``process`` and ``control`` set) or waiting (``due_ns`` says until when).

Thread: belongs to the parent's main thread.

Source: P12; DESIGN.md 3.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import PeerGone
from pmdaemon.poller import channel
from pmdaemon.poller.balance import HangDetector
from pmdaemon.poller.channel_messages import NewConnection, PairReport
from pmdaemon.runtime.children import Child, ChildKind, stop_together
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import ParentPipe
from pmdaemon.runtime.template import Template

RETURN_NS: Final = 30 * 10**9  # each move of a shard ends sessions: a pair that dies again must not cause two
START_S: Final = 30  # it may wait 10 s for the segment, and a loaded machine is slow to start Python
PAIRS: Final = ChildKind("pair", stop_s=5.0, has_session=False)
"""A pair needs its mailbox posts and a BYE an agent to stop: milliseconds."""
REAP_S: Final = 0.5  # from the end-of-file of a pair to its end
log = structlog.get_logger("children")


class PairChild(Child):
    """One pair process and what the parent knows of it.

    Attributes:
        control: the parent's end of its channel, while it runs.
        last: its newest report.
        offered: connections given to it since its last report, which does not count them yet.
    """

    def __init__(
        self,
        index: int,
        config_path: Path | None,
        pipe: ParentPipe,
        clock: Clock,
        template: Template | None = None,
    ) -> None:
        super().__init__(PAIRS, str(index), (), pipe, clock, template=template)
        self.index = index
        self.control: channel.Channel | None = None
        self.last = PairReport()
        self.offered = 0
        self.has_reported = False
        self.is_retiring = False
        self._watch = HangDetector()
        self._silent_s = 0
        self._hangs_because = ""
        self._config_path = config_path

    @property
    def load(self) -> int:
        """Connections it has, or is about to have."""
        return self.last.connections + self.offered

    @property
    def takes_shards(self) -> bool:
        """Whether shards may be given to it: it has reported, and if it died before, it has lasted since."""
        return self.is_running and self.has_reported and (not self.restarts or self.age_ns >= RETURN_NS)

    @property
    def keeps_shards(self) -> bool:
        """Whether those it has may stay: it runs, or is about to."""
        return self.is_running or self.is_due

    def start(self) -> bool:
        """Start the pair process, with a new channel; False if the host cannot just now."""
        if not super().start():
            return False
        self.offered = 0
        self.last = PairReport()
        self.has_reported = False
        self._watch = HangDetector()
        self._silent_s = 0
        return True

    def _launch(self) -> None:
        parent_end, child_end = channel.make()
        with child_end:
            self.command = [sys.executable, "-m", "pmdaemon", "pair", "--index", str(self.index)]
            self.command += ["--control-fd", str(child_end.fileno())]
            if self._config_path is not None:
                self.command += ["--config", str(self._config_path)]
            self.descriptors = (child_end.fileno(),)
            try:
                super()._launch()
            except OSError:
                parent_end.close()
                raise
        self.control = channel.Channel(parent_end)

    def offer(self, sock: socket.socket, address: str, is_dialled: bool) -> bool:
        """Give it a connection; False if it cannot take it now."""
        if self.control is None or not self.control.offer(NewConnection(address, is_dialled), sock):
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
            if isinstance(parcel.body, PairReport):
                self.last = parcel.body
                self.offered = 0
                self.has_reported = True
        return [parcel for parcel in parcels if not isinstance(parcel.body, PairReport)]

    def hangs(self) -> str:
        """Why it must be killed: no report after its start, or no step for ten checks; call once a second."""
        if not self.is_running:
            return ""
        if self.has_reported:
            return self._watch.check(self.last.steps)
        self._silent_s += 1
        return f"it has not reported within {START_S} s" if self._silent_s >= START_S else ""

    def kill(self, reason: str) -> None:
        """End it at once; its channel's end of file starts the next."""
        if self.is_running:
            self._hangs_because = reason
            log.error("pair-hangs", pair=self.name, pid=self.pid, reason=reason)
            self.signal(signal.SIGKILL)

    def reap(self) -> None:
        """It has died or hangs without its control socket: reap it and plan its restart."""
        status = self.end(REAP_S)
        self._close_control()
        self.last = PairReport()
        self.died(self._hangs_because or f"ended with status {status}", status)
        self._hangs_because = ""

    def stop(self) -> None:
        """Ask it to end and wait, then end it."""
        stop_together([self], self._clock)
        self._close_control()

    def _close_control(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None
