"""Upstream mode: cut-through, one upstream connection per client connection, no rewriting of cookies.

Requests leave in the bytes in which they came, replies too; the gateway only reads headers. A batch is
whatever one receive brings: tens of requests go out in one send, and their replies come back in one.

Ways this ends:
    the client says DISC, everything is answered   DISC to the upstream, both closed
    the client goes away                           both closed; requests under way are forgotten
    the upstream goes away                         between replies: each request under way or held is answered
                                                   EIO, then the connection is ended; within a reply: ended at
                                                   once (its rest would be garbage). Counted as errors;
                                                   the next connection finds it back, or is refused
Nothing is retried here: a write that the dead upstream may have done is the client's to repeat.
"""

from __future__ import annotations

import contextlib
import socket

from gateway_agent.errors import UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.loop import GONE, IN, OUT
from gateway_agent.nbd.replies import Finished, ReplyReader
from gateway_agent.nbd.session import NbdSession
from gateway_agent.nbd.volume import Context, Volume

_HEADER_ROOM = p.SIMPLE_REPLY_BYTES  # kept free before received bytes for the start of a cut-off header
_NO_COOKIE = -1  # cookies are unsigned


class ProxySession(NbdSession):
    """See the module docstring.

    Args:
        upstream: socket of the upstream connection, in transmission, non-blocking, watched by nobody.
    """

    def __init__(
        self,
        context: Context,
        sock: socket.socket,
        volume: Volume,
        stream: StreamAccount,
        facts: p.ExportFacts,
        upstream: socket.socket,
    ) -> None:
        super().__init__(context, sock, volume, stream, facts)
        self._up = upstream
        self._up_fd = upstream.fileno()
        self._up_is_watched = False
        self._reader = ReplyReader(f"upstream of {volume.export.volume}")
        self._cut_off = b""  # first bytes of a reply header whose rest has not come
        self._local: list[tuple[bytes, Finished]] = []  # our own replies, waiting for a boundary
        self._want_upstream(IN)

    def push(self, now_ns: int) -> None:
        """Send admitted bytes upstream, as many as it takes."""
        if self.is_closed or self._ending:
            return self._settle()
        waiting = self.intake.outgoing()
        if waiting:
            try:
                sent = self._up.send(waiting)
            except BlockingIOError:
                sent = 0
            except OSError as exc:
                return self._upstream_gone(exc.strerror or "send failed")
            self.intake.sent(sent)
            if sent < len(waiting):
                self._want_upstream(OUT | (IN if self._out.is_empty else 0))
                return self._settle()
        # Replies wait in the upstream's socket while our client does not take those we have.
        self._want_upstream(IN if self._out.is_empty else 0)
        self._settle()

    def _want_upstream(self, mask: int) -> None:
        """Watch the upstream; with mask 0 not at all, or its hang-up would be reported again and again."""
        loop = self._context.loop
        if mask and self._up_is_watched:
            loop.want(self._up_fd, mask)
        elif mask:
            loop.watch(self._up_fd, mask, self._on_upstream, self._on_failure)
            self._up_is_watched = True
        elif self._up_is_watched:
            loop.forget(self._up_fd)
            self._up_is_watched = False

    def _on_upstream(self, events: int) -> None:
        if events & OUT:
            self._serve_on()
        if self.is_closed or self._ending or not events & (IN | GONE) or not self._out.is_empty:
            return
        start = _HEADER_ROOM - len(self._cut_off)
        scratch = self._context.scratch
        try:
            count = self._up.recv_into(scratch[_HEADER_ROOM:])
        except BlockingIOError:
            return
        except OSError as exc:
            self._upstream_gone(exc.strerror or "receive failed")
            return
        if not count:
            self._upstream_gone("it closed the connection")
            return
        scratch[start:_HEADER_ROOM] = self._cut_off
        self._on_replies(scratch[start : _HEADER_ROOM + count])

    def _on_replies(self, view: memoryview) -> None:
        now_ns = self._context.clock.monotonic_ns()
        usable, finished = self._reader.feed(view, self._out.queued_pos, self.inflight, now_ns)
        self._cut_off = bytes(view[usable:])
        boundary = self._reader.boundary
        if self._local and boundary is not None:
            local, shift = self._take_local(self._out.queued_pos + boundary)
            self._reply(b"".join((view[:boundary], local, view[boundary:usable])), finished + shift)
        elif usable:
            self._reply(view[:usable], finished)
        if not self.is_closed and not self._out.is_empty:
            self._want_upstream(OUT if self.intake.outgoing() else 0)
        if self._blocked and not self.is_closed:
            self._serve_on()  # a cookie may be free again
        else:
            self._settle()

    def _take_local(self, position: int) -> tuple[bytes, list[Finished]]:
        """Our own replies as bytes, and what they finish when they begin at ``position``."""
        data, finished = b"", []
        for reply, (_, word, arrived_ns, sent_ns, reply_ns) in self._local:
            data += reply
            finished.append((position + len(data), word, arrived_ns, sent_ns, reply_ns))
        self._local.clear()
        return data, finished

    def _reply_error(self, cookie: int, error: int, word: int, arrived_ns: int, now_ns: int) -> None:
        self._local.append((p.simple_reply(cookie, error), (0, word, arrived_ns, now_ns, now_ns)))
        if not self._reader.payload_left:
            self._reply(*self._take_local(self._out.queued_pos))

    def _upstream_gone(self, problem: str) -> None:
        if self._has_said_goodbye():
            self.close("disconnected")
            return
        error = UpstreamError(self._volume.export.upstream or "", problem)
        self._volume.warnings.warning(
            self._context.clock.monotonic_ns(),
            "upstream-gone",
            peer=self.peer,
            inflight=len(self.inflight),
            error=str(error),
        )
        self._want_upstream(0)
        self._up.close()
        within = self._reader.in_progress
        if within is not None:
            self.inflight[_NO_COOKIE] = (*within, 0)  # to be counted; it cannot be answered any more
            self._record(self._take_local(0)[1])  # nor can what waits for its end
        self._fail_all(p.EIO, can_reply=within is None)

    def _has_said_goodbye(self) -> bool:
        return super()._has_said_goodbye() and not self._reader.payload_left and not self._local

    def _on_failure(self, exc: Exception) -> None:
        # A reply that nobody asked for, or a bug: nothing that follows on this connection can be trusted.
        if not self.is_closed and not self._ending:
            self._fail_all(p.EIO, can_reply=False)
        self.close(str(exc))

    def _release_storage(self) -> None:
        self._want_upstream(0)
        if self.intake.is_drained:  # else DISC would become the end of a cut-off write's payload
            with contextlib.suppress(OSError):
                self._up.send(p.request(p.Cmd.DISC, 0, 0, 0))
        with contextlib.suppress(OSError):
            self._up.close()
