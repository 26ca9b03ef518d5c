"""One client's connection in the transmission phase: what proxy and file mode have in common.

    client ──recv──► RequestBuffer ──queue──► Volume (rates) ──admit──► in flight ──► storage
    client ◄──send── ReplyBuffer ◄───────────────── replies ◄──────────────────────────┘

A subclass moves admitted requests on (``push``) and hands replies to ``_reply``. The session owns its client
socket and counts for one stream. Refused requests (read-only, out of range, unknown) are answered here, in
their place: only when everything admitted before has gone (``blocked`` until then).

An I/O is complete when its answer is, ready to be sent. A client that does not take its answers keeps its
own I/O waiting: the plane begins no read for it (file mode), or takes no more answers from the upstream.
That time (``client_pause``) is no latency, and the I/O that waits grows no older in it. What the throttle
holds does. Likewise a write has arrived when its payload has, if it was its sender that took so long.

Everything runs in the loop's thread.
"""

from __future__ import annotations

import contextlib
import math
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

import structlog

from gateway_agent.config import ExportConfig
from gateway_agent.nbd import extended
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.access import ClientIdentity
from gateway_agent.nbd.accounting import FAILED_BIT, REFUSED_BIT, StreamAccount, word_of
from gateway_agent.nbd.buffers import FINISHED_INTS, Finished, InFlight, ReplyBuffer, Request, RequestBuffer
from gateway_agent.nbd.client_pause import ClientPause
from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE, KIND_ZEROING, Pending
from gateway_agent.nbd.loop import GONE, IN, OUT
from gateway_agent.nbd.payload_pipe import PayloadPipe
from gateway_agent.nbd.refusals import Refusal, refusal
from gateway_agent.nbd.sockets import Connection
from gateway_agent.nbd.volume import PlaneContext, Volume
from pmdaemon.wire.rates import Allowance, io_cost

log = structlog.get_logger("session")

LINGER_NS: Final = 10 * 10**9  # for a client to take its last answers after its storage has gone
DRAIN_NS: Final = 5 * 10**9  # for what is under way when its volume is taken out of the configuration
MAX_UNSENT_BYTES: Final = 4 << 20  # a client that sends requests but reads no replies is read no further
MOST_HEADS: Final = 256  # requests of a turn that are none of the plain ones: each may be a send of its own
_HEAD_INTS: Final = 2 * FINISHED_INTS  # so much of what is complete counts as one of them
STORAGE_GONE: Final = "the storage behind this export is gone"
_KINDS: Final[dict[int, int]] = {
    p.Cmd.READ: KIND_READ,
    p.Cmd.WRITE: KIND_WRITE,
    p.Cmd.TRIM: KIND_ZEROING,
    p.Cmd.WRITE_ZEROES: KIND_ZEROING,
    p.Cmd.FLUSH: KIND_FLUSH,
    p.Cmd.CACHE: KIND_FLUSH,
    p.Cmd.BLOCK_STATUS: KIND_FLUSH,
}


def charged_bytes(command: int, length: int, export: ExportConfig) -> int:
    """Bytes that the throttle charges for a request.

    Zeroes are charged like data, because a storage that cannot make them otherwise writes them. A trim moves
    none, but without a charge it is a way round the caps: a sixteenth, so that 10 GB/s count like writes at
    600 MB/s; an export may say other shares. CACHE is one of the storage's reads, the largest one at most.
    """
    if command in (p.Cmd.FLUSH, p.Cmd.BLOCK_STATUS):
        return 0
    if command == p.Cmd.CACHE:
        return min(length, p.MAX_PAYLOAD_BYTES)
    if command == p.Cmd.TRIM:
        return int(length * export.cost_trim)
    return int(length * export.cost_zeroes) if command == p.Cmd.WRITE_ZEROES else length


class NbdSession(ABC):
    """See the module docstring.

    Attributes:
        only_reads_pause: whether other requests are served while the client does not take its answers.
        identity: its client.

    Args:
        context: what the plane's connections share.
        sock: the client's socket or TLS connection, non-blocking, not watched yet.
        volume: what it uses.
        stream: where it is counted.
        facts: size and flags as sent to the client.
        mode: how it wants its replies.
    """

    only_reads_pause = False
    identity: ClientIdentity | None = None

    def __init__(
        self,
        context: PlaneContext,
        sock: Connection,
        volume: Volume,
        stream: StreamAccount,
        facts: p.ExportFacts,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> None:
        self.peer = f"client {stream.client} of {volume.export.volume}"
        self.requests = RequestBuffer(self.peer, extended=mode.extended)
        self.inflight: InFlight = {}
        self.admitted: deque[Request] | None = None
        self.is_closed = False
        self._context = context
        self._sock = sock
        self._fd = sock.fileno()
        self._volume = volume
        self._stream = stream
        self._facts = facts
        self._mode = mode
        self._out = ReplyBuffer(sock, context.pipes)
        self._pause = ClientPause()
        self._cut_ns = context.clock.monotonic_ns()  # the last cut, or the beginning
        self._blocked = False
        self._heads_left = MOST_HEADS  # of this turn
        self._rests = False  # until the next turn: too many came at once
        self._drain_ns: int | None = None  # requests that arrive later are refused
        self._moves = False  # its client goes to another process: what has not begun is left to that one
        self._ending = False
        context.loop.watch(self._fd, IN, self._on_client, self.failed)
        stream.sessions.append(self)
        volume.sessions.add(self)

    def start(self, left_over: bytes) -> None:
        """Take what the client sent behind its negotiation."""
        while left_over and not self.is_closed:
            room = self.requests.room()[: len(left_over)]
            room[:] = left_over[: len(room)]
            left_over = left_over[len(room) :]
            self._received(len(room))

    @property
    def client(self) -> str:
        """See ``volume.ThrottledSession``."""
        return self._stream.client

    @property
    def export(self) -> ExportConfig:
        """See ``accounting.CountedSession``."""
        return self._volume.export

    def gauges(self) -> tuple[int, int]:
        """See ``accounting.CountedSession``."""
        requests, inflight = self.requests, self.inflight
        held, sent = len(requests.queue), len(inflight)
        if self._pause.is_on:
            others = sum(1 for entry in inflight.values() if entry[2] & 3 != KIND_READ)
            sent = others if self.only_reads_pause else 0
        if not requests.awaits_payload:
            return sent, held
        if requests.is_last_held:
            return sent, held - 1
        return max(sent - (requests.last_cookie in inflight), 0), held

    def outstanding(self, now_ns: int) -> list[Pending]:
        """See ``accounting.CountedSession``: held, or sent to the storage."""
        self._await_payload(now_ns)
        reads_ns, others_ns = self._paused_ns(now_ns)
        found = [(request[0], _KINDS.get(request[2], KIND_FLUSH), 0) for request in self.requests.queue]
        for entry in self.inflight.values():
            kind = entry[2] & 3
            paused_ns = others_ns if kind else reads_ns
            found.append((entry[0] + paused_ns, kind, paused_ns))
        return found

    def _await_payload(self, now_ns: int) -> None:
        """The last request has not arrived yet if it waits for its sender."""
        requests = self.requests
        if not requests.awaits_payload:
            return
        if requests.is_last_held:
            requests.queue[-1] = (now_ns, *requests.queue[-1][1:])
        elif (entry := self.inflight.get(requests.last_cookie)) is not None:
            arrived_ns = now_ns - self._paused_ns(now_ns)[1]
            self.inflight[requests.last_cookie] = (arrived_ns, arrived_ns, *entry[2:])

    def cut_ended(self, now_ns: int) -> None:
        """See ``accounting.CountedSession``."""
        reads_ns, others_ns = self._paused_ns(now_ns)
        self._pause.cut_ended(now_ns)
        self._cut_ns = now_ns
        if not reads_ns:
            return
        for cookie, (arrived_ns, sent_ns, word, payload_bytes) in self.inflight.items():
            paused_ns = others_ns if word & 3 else reads_ns
            self.inflight[cookie] = (arrived_ns + paused_ns, sent_ns + paused_ns, word, payload_bytes)

    def _paused_ns(self, now_ns: int) -> tuple[int, int]:
        """For how long since the last cut reads, and other requests, have waited for their client."""
        paused_ns = self._pause.total_ns(now_ns)
        return paused_ns, 0 if self.only_reads_pause else paused_ns

    # -- from the client ------------------------------------------------------------------------------------

    def _on_client(self, events: int) -> None:
        if events & OUT:
            self._on_writable()
        if self._ending and not self.is_closed:
            self._discard()
            return
        room = self.requests.room() if events & IN and not self._ending and not self.is_closed else None
        if room:
            self._receive(room)
        elif events & GONE:
            self.close("the client is gone")

    def _receive(self, room: memoryview) -> None:
        try:
            count = self._sock.recv_into(room)
        except BlockingIOError:
            return
        except OSError as exc:
            self.close(f"the client is gone: {exc.strerror}")
            return
        if not count:
            self.close("the client closed the connection")
            return
        self._received(count)

    def _discard(self) -> None:
        """Take what the client still sends, until it closes: see ``_watch_or_end``."""
        try:
            count = self._sock.recv_into(self._context.scratch)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close("ended")

    def _received(self, count: int) -> None:
        now_ns, requests, stream = self._context.clock.monotonic_ns(), self.requests, self._stream
        if not self._rests:
            self._heads_left = MOST_HEADS
        if requests.parse_pos > requests.end_pos:
            self._await_payload(now_ns)
        stream.arrived += requests.received(count, now_ns)
        stream.sequential += requests.sequential
        self._volume.serve(self, now_ns)

    def _on_writable(self) -> None:
        try:
            is_out = self._out.flush()
        except OSError as exc:
            self.close(f"the client is gone: {exc.strerror}")
            return
        if is_out:
            self._pause.end(self._context.clock.monotonic_ns())
            self._serve_on()
        else:
            self._watch_or_end()

    def _serve_on(self) -> None:
        """Something that was full has room again."""
        now_ns = self._context.clock.monotonic_ns()
        self.push(now_ns)
        if self.unblock():
            self._volume.serve(self, now_ns)

    # -- admission (called by the volume) -------------------------------------------------------------------

    def head_arrived_ns(self) -> int | None:
        """See ``volume.ThrottledSession``."""
        queue = self.requests.queue
        return queue[0][0] if queue and not self._blocked and not self.is_closed else None

    def head_charge(self) -> tuple[int, float] | None:
        """See ``volume.ThrottledSession``."""
        request = self.requests.queue[0]
        command, length, export = request[2], request[3], self._volume.export
        if request[1] in self.inflight or self._refusal(request):
            return None
        base = export.cost_read if command == p.Cmd.READ else export.cost_write
        charged = charged_bytes(command, length, export)
        return charged, io_cost(base, charged, export.cost_bytes)

    def _refusal(self, request: Request) -> Refusal | None:
        """Why a request is not passed on; None if it is."""
        if self._drain_ns is not None and (self._moves or request[0] > self._drain_ns):
            return p.ESHUTDOWN, "this volume is not exported any more"
        return refusal(request, self._facts, self._mode)

    def admit_head(self, now_ns: int) -> None:
        """See ``volume.ThrottledSession``."""
        request = self.requests.queue[0]
        _, cookie, command, length, _, _, end_pos = request
        if cookie in self.inflight:
            self._blocked = True  # answers differ by their cookies only: wait for the first one
            return
        why = self._refusal(request)
        if why is not None:
            self._refuse(request, why, now_ns)
            return
        self.requests.queue.popleft()
        charged = charged_bytes(command, length, self._volume.export)
        word = word_of(_KINDS[command], charged, failed=False)
        reads_ns, others_ns = self._paused_ns(now_ns)
        paused_ns, arrived_ns = others_ns if command else reads_ns, request[0]
        if paused_ns and arrived_ns - paused_ns < self._cut_ns:
            self._stream.let_through(word & 3, arrived_ns, paused_ns)
        self.inflight[cookie] = (arrived_ns - paused_ns, now_ns - paused_ns, word, 0 if command else length)
        self.requests.admit_pos = end_pos
        if self.admitted is not None:
            self.admitted.append(request)

    def admit_all(self, now_ns: int) -> None:
        """See ``volume.ThrottledSession``."""
        queue = self.requests.queue
        while queue and not self._blocked and not self.is_closed:
            self._admit_plain(now_ns, None)
            if queue and not self._blocked:
                if not self._heads_left:
                    self._rest(now_ns)
                    return
                left = self._heads_left - 1
                self.admit_head(now_ns)
                self._heads_left = min(self._heads_left, left)

    def _rest(self, now_ns: int) -> None:
        """The next turn goes on: the other clients of the plane have theirs first."""
        self._rests = True
        self._context.loop.at((self, "heads"), now_ns, self._end_rest, self.failed)

    def _end_rest(self, now_ns: int) -> None:
        self._heads_left, self._rests = MOST_HEADS, False
        self.unblock()
        self._volume.serve(self, now_ns)

    def admit_within(self, now_ns: int, allowance: Allowance) -> None:
        """See ``volume.ThrottledSession``."""
        if not self._blocked and not self.is_closed:
            self._admit_plain(now_ns, allowance)

    def _admit_plain(self, now_ns: int, allowance: Allowance | None) -> None:
        """Admit ordinary reads and writes from the head on: the same as ``admit_head``, at less cost.

        This is the hot path of proxy mode. It ends at the first request that is refused, or blocked.
        """
        requests, inflight, admitted = self.requests, self.inflight, self.admitted
        facts, queue = self._facts, requests.queue
        size_bytes, limit, fraction = facts.size_bytes, facts.blocks.maximum, facts.blocks.minimum - 1
        last_plain = 0 if facts.flags & p.TX_READ_ONLY else 1
        if self._drain_ns is not None:
            last_plain = -1  # all of them are looked at
        last_flag = 1 if facts.flags & p.TX_SEND_FUA else 0
        reads_ns, others_ns = self._paused_ns(now_ns)
        if allowance is not None:
            limit = min(limit, allowance.largest_bytes)
            oldest_ns, (most_ops, most_bytes, most_cost) = allowance.oldest_ns, allowance.most
            ops, size, cost = allowance.passed
            export = self._volume.export if most_cost < math.inf else None
        while queue:
            request = queue[0]
            arrived_ns, cookie, command, length, offset, flags, end_pos = request
            if (
                command > last_plain
                or flags > last_flag
                or offset + length > size_bytes
                or length > limit
                or (offset | length) & fraction
            ):
                break
            if cookie in inflight:
                self._blocked = True
                break
            if allowance is not None:
                if ops > most_ops or size > most_bytes or cost > most_cost or arrived_ns <= oldest_ns:
                    break
                ops += 1
                size += length
                if export is not None:
                    base = export.cost_write if command else export.cost_read
                    cost += io_cost(base, length, export.cost_bytes)
            queue.popleft()
            paused_ns = others_ns if command else reads_ns
            if paused_ns and arrived_ns - paused_ns < self._cut_ns:
                self._stream.let_through(command, arrived_ns, paused_ns)
            word, payload_bytes = length << 4 | command, 0 if command else length
            inflight[cookie] = (arrived_ns - paused_ns, now_ns - paused_ns, word, payload_bytes)
            requests.admit_pos = end_pos
            if admitted is not None:
                admitted.append(request)
        if allowance is not None:
            allowance.passed = ops, size, cost

    def _refuse(self, request: Request, why: Refusal, now_ns: int) -> None:
        if not self.requests.is_drained:
            self._blocked = True
            return
        if not self._heads_left and not self._moves:  # also where rates hold others: this is free of charge
            self._blocked = True
            self._rest(now_ns)
            return
        self._heads_left = max(self._heads_left - 1, 0)
        self.requests.queue.popleft()
        self.requests.skip(request)
        if self._moves and why[0] == p.ESHUTDOWN:
            self._leave_unanswered(request)
            return
        arrived_ns, cookie, command, length, begin, _, _ = request
        kind = _KINDS.get(command, KIND_FLUSH)
        word = word_of(kind, length, failed=True) | REFUSED_BIT
        self._record([0, word, arrived_ns, now_ns, now_ns])
        self._reply_error(self._error_reply(cookie, *why, begin=begin))

    def _error_reply(
        self, cookie: int, error: int, text: str, place: int | None = None, begin: int = 0
    ) -> bytes:
        """An error in the form that the client wants.

        Args:
            cookie: of the request.
            error: for the wire.
            text: for people, where replies are structured.
            place: where it occurred, the same.
            begin: the request's offset, for extended headers.
        """
        if self._mode.extended:
            return extended.error_chunk(cookie, begin, error, text, place)
        if self._mode.structured:
            return p.error_chunk(cookie, error, text, place)
        return p.simple_reply(cookie, error)

    def _begin_of(self, cookie: int) -> int:
        """Offset of a request under way, for extended headers."""
        return 0

    def unblock(self) -> bool:
        """See ``volume.ThrottledSession``."""
        if not self._blocked or self._rests or self.is_closed or not self.requests.is_drained:
            return False
        if self.requests.queue[0][1] in self.inflight:
            return False
        self._blocked = False
        return True

    # -- towards the storage, and back ----------------------------------------------------------------------

    @abstractmethod
    def push(self, now_ns: int) -> None:
        """See ``volume.ThrottledSession``; ends with ``_watch_or_end``."""

    @abstractmethod
    def _reply_error(self, reply: bytes) -> None:
        """Send an answer of our own, at the next boundary between replies."""

    @abstractmethod
    def _release_storage(self) -> None:
        """Let go of the storage side; the session is closed."""

    def _reply(self, data: memoryview | bytes | PayloadPipe) -> None:
        """Send replies, or keep them for the client to take; what they answer is counted already."""
        try:
            is_out = self._out.send_from(data) if isinstance(data, PayloadPipe) else self._out.send(data)
        except OSError as exc:
            self.close(f"the client is gone: {exc.strerror}")
            return
        if not is_out and not self._pause.is_on:
            self._pause.begin(self._context.clock.monotonic_ns())

    def _record(self, finished: Finished) -> None:
        """Count requests whose answers are complete now."""
        if finished:
            if len(finished) >= _HEAD_INTS:
                self._heads_left = max(self._heads_left - len(finished) // _HEAD_INTS, 0)
            self._stream.record(finished, self._context.clock.monotonic_ns())

    def _watch_or_end(self) -> None:
        """Watch for what is wanted now; end the session when its client said DISC and all is answered.

        Without storage the connection is shut down behind the last answer, and the client closes. Closing
        here with bytes unread would reset the connection, and the reset overtakes the answers.
        """
        if self.is_closed:
            return
        out_is_empty, requests = self._out.is_empty, self.requests
        may_end = requests.disconnecting or self._drain_ns is not None  # most of the time not
        if may_end and out_is_empty and not self._ending and self._is_finished():
            if requests.disconnecting:
                self.close("disconnected")
                return
            # What the client sent before it could know is read before the next turn of the timers.
            self._context.loop.at((self, "quiet"), self._drain_ns or 0, self._end_if_quiet, self.failed)
        mask = 0 if out_is_empty else OUT
        if self._ending:
            mask |= IN
            if out_is_empty:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
        elif self._may_receive and requests.wants_input:
            mask |= IN
        self._context.loop.want(self._fd, mask)

    @property
    def _may_receive(self) -> bool:
        """Whether the replies that the client has not taken leave room for more requests."""
        return self._out.unsent_bytes < MAX_UNSENT_BYTES

    def _is_finished(self) -> bool:
        requests = self.requests
        may_end = requests.disconnecting or (self._drain_ns is not None and requests.is_whole)
        return may_end and not requests.queue and not self.inflight and requests.is_drained

    def _fail_all(self, error: int, *, can_reply: bool) -> None:
        """The storage is gone: answer (or at least count) everything under way with an error, then end."""
        now_ns = self._context.clock.monotonic_ns()
        reads_ns, others_ns = self._paused_ns(now_ns)
        unanswered = [(cookie, self._begin_of(cookie)) for cookie in self.inflight]
        finished: Finished = []
        for arrived_ns, sent_ns, word, _ in self.inflight.values():
            paused_ns = others_ns if word & 3 else reads_ns
            finished += (paused_ns, word | FAILED_BIT, arrived_ns, sent_ns, now_ns)
        for request in self.requests.queue:
            if request[2] in _KINDS:
                unanswered.append((request[1], request[4]))
                word = word_of(_KINDS[request[2]], request[3], failed=True)
                finished += (0, word, request[0], now_ns, now_ns)
        self.inflight.clear()
        self.requests.queue.clear()
        self._begin_end()
        self._record(finished)
        if can_reply and unanswered:
            replies = (self._error_reply(cookie, error, STORAGE_GONE, begin=at) for cookie, at in unanswered)
            self._reply(b"".join(replies))
        self._watch_or_end()

    # -- end ------------------------------------------------------------------------------------------------

    def _begin_end(self) -> None:
        """Take no request any more: the client closes when it has the last answer, or is closed."""
        self._ending = True
        due_ns = self._context.clock.monotonic_ns() + LINGER_NS
        self._context.loop.at(self, due_ns, lambda _now: self.close("it does not end"))

    def drain(self, *, moves: bool = False) -> None:
        """See ``volume.ThrottledSession``: what arrives from now on is refused, what has arrived completes.

        It ends when all is answered, at the latest after ``DRAIN_NS``. A client that moves repeats at the
        next process what has no answer. So what was not begun is dropped, also what the throttle holds; and
        as long as the storage owes a change, the connection stays: done later, it would undo what the client
        writes there meanwhile.
        """
        if self.is_closed or self._ending or self._drain_ns is not None:
            return
        self._drain_ns = now_ns = self._context.clock.monotonic_ns()
        self._moves = moves
        self._context.loop.at(self, now_ns + DRAIN_NS, self._drained_long_enough, self.failed)
        if moves:
            self._volume.pump(now_ns)
        self._watch_or_end()

    def _leave_unanswered(self, request: Request) -> None:
        """As if it had not been received."""
        if request[2] in (p.Cmd.READ, p.Cmd.WRITE):
            self._stream.arrived_elsewhere()

    def _drained_long_enough(self, now_ns: int) -> None:
        changes = (KIND_WRITE, KIND_ZEROING)
        owed = {cookie for cookie, entry in self.inflight.items() if entry[2] & 3 in changes}
        if not self.requests.is_whole:
            owed.discard(self.requests.last_cookie)  # its own client owes the rest of it
        if self._moves and owed:
            log.warning("storage-owes-changes", peer=self.peer, requests=len(owed))
            self._context.loop.at(self, now_ns + DRAIN_NS, self._drained_long_enough, self.failed)
        else:
            self.close("its client moves" if self._moves else "its volume has gone")

    def _end_if_quiet(self, _now_ns: int) -> None:
        if not self.is_closed and not self._ending and self._out.is_empty and self._is_finished():
            self._begin_end()
            self._watch_or_end()

    def failed(self, exc: Exception) -> None:
        """See ``volume.ThrottledSession``."""
        self.close(str(exc))

    def close(self, reason: str) -> None:
        """Close the connection at once; requests under way are forgotten. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        log.debug("session-closed", peer=self.peer, reason=reason)
        self._stream.leave(self, self._context.clock.monotonic_ns())
        self._volume.forget(self)
        self._context.loop.cancel(self)
        self._context.loop.cancel((self, "quiet"))
        self._context.loop.cancel((self, "heads"))
        self._context.loop.forget(self._fd)
        self._out.close()
        with contextlib.suppress(OSError):
            self._sock.close()
        self._release_storage()
