"""The usual answers, taken in one step: one cut of a gateway and the REPLY behind it, in one read.

Nearly every read of a healthy fleet is one CUT that follows the last one, and its REPLY; while dbmanager has
no room, it is the newest CUT as LIVE, and its REPLY. For these two frames this module does what
``wire.session`` and ``poller.frame_handlers`` would do, with the same effect on the same objects, but
recognises them by their ``wire.frame_template`` instead of decoding them, and accounts for both in one go.
It checks before it touches: whatever is different (a frame split over two reads, an earlier cut, several
epochs, a rewind under way, a stalled gateway, anything malformed) is left as it is for the long way, which
alone decides what is wrong with it. What the long way has accepted teaches the templates.

Measured, CPU of the inbound thread a read of one answer, reading included: 27 us this way, 67 us and more
the long way (cuts of 1 and of 16 streams; two cores, when it was written). ``make bench-poll`` measures the
pair with it.

Thread: belongs to the inbound thread.

Source: P10.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.gateway import GatewayState
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import cut
from pmdaemon.wire.frame import FLAG_LIVE, FLAGS_AT
from pmdaemon.wire.frame_template import FrameTemplates
from pmdaemon.wire.session import SessionState

FRAMES: Final = 2  # of a usual answer
LEARN_EVERY: Final = 64  # one answer in 64 of unknown shape is learned from: some 50 us each
_UP: Final = GatewayState.UP
_POLLING: Final = SessionState.POLLING


class FastPath:
    """Takes usual answers.

    Args:
        counters: as those of ``FrameHandlers``.

    Attributes:
        should_learn: whether the read last given to ``take``, which begins with a frame, should be given to
            ``learn`` if the long way accepts it as a whole.
    """

    def __init__(
        self, publisher: CutPublisher, clock: Clock, interval_us: int, counters: Counter[str]
    ) -> None:
        self._publisher = publisher
        self._add_placed = publisher.batch.add_placed
        self._clock = clock
        self._unix_ahead_us = 0  # of the monotonic clock
        self._fitting: tuple[int, int, int, int] | None = None
        self._interval_ns = interval_us * 1000
        self._counters = counters
        self._templates = FrameTemplates()
        self._unknown = 0
        self._taken = 0  # not in the counters yet
        self._late = 0
        self.should_learn = False

    def begin(self) -> None:
        """Read the wall clock, once for the answers that are taken in the next few milliseconds."""
        self._unix_ahead_us = self._clock.unix_us() - self._clock.monotonic_ns() // 1000

    def take(self, conn: AgentConnection, data: memoryview, size: int, *, is_placed: bool) -> bool:
        """Take what one read brought, if it is a usual answer; else nothing is changed.

        Args:
            conn: whose read it was.
            data: what was read, and perhaps more behind it.
            size: bytes that were read.
            is_placed: it was read into the publisher's ``batch.room``.
        """
        self.should_learn = False
        gateway, session = conn.gateway, conn.session
        if gateway is None or gateway.condition is not _UP:
            return False
        if session.state is not _POLLING or not session.is_whole:
            return False
        match = self._templates.match(data, size)
        if match is None:
            self._unknown += 1
            self.should_learn = self._unknown % LEARN_EVERY == 1
            return False
        cut_bytes, blob_bytes, values = match
        id_bytes, epoch, seq, rows, hists, misses, poll, wall_us, dropped = values
        if id_bytes != gateway.id_bytes:
            return False
        counts = rows, hists, misses, blob_bytes
        if counts != self._fitting:  # else they are those of the last answer, as those of most are
            if not cut.fits(*counts):
                return False
            self._fitting = counts
        now_ns = conn.last_received_ns
        live = data[FLAGS_AT] == FLAG_LIVE  # no other flag was learned
        with gateway.lock:
            if live:
                sent_ns = gateway.record.answered_live(poll, epoch, seq)
            else:
                sent_ns = gateway.record.answered_in_order(poll, epoch, seq, now_ns)
            if sent_ns is None:
                return False
            gateway.awaiting_since_ns = None
        unix_us, offset = now_ns // 1000 + self._unix_ahead_us, gateway.offset
        add_placed = self._add_placed
        gateway_id, offset_us = gateway.gateway_id, offset.offset_us
        if not (
            is_placed and add_placed(cut_bytes, gateway_id, epoch, seq, unix_us, offset_us, live, now_ns)
        ):
            cut_frame = data[:cut_bytes]
            self._publisher.cut(
                cut_frame, gateway_id, epoch, seq, unix_us, offset_us, now_ns, keep=not live, live=live
            )
        waited_ns = now_ns - sent_ns
        offset.add(wall_us, unix_us, waited_ns // 1000)
        self._taken += 1
        if waited_ns > self._interval_ns:
            self._late += 1
        gateway.dropped = dropped
        return True

    def account(self) -> None:
        """Bring the counters up to date, once for many answers."""
        if self._taken:
            self._counters["cuts"] += self._taken
            self._counters["replies"] += self._taken
            self._taken = 0
        if self._late:
            self._counters["late_replies"] += self._late
            self._late = 0

    def learn(self, data: memoryview) -> None:
        """Learn from a read of unknown shape that the long way has accepted: ``FRAMES`` whole frames."""
        self.should_learn = False
        self._templates.learn(data)
