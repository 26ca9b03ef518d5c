"""Upstream mode: cut-through, upstream connections of each client's own, no rewriting of cookies.

Requests leave in the bytes in which they came; replies pass through a reader that finds where each ends
(``replies``), and come back in the same bytes, or translated for a client that wants chunks from an upstream
that has none. Large payloads of reads pass without a copy (``payload_pipe``). A batch is whatever one receive
brings: tens of requests go out in one send, and their replies come back in one. A block status of an upstream
that knows none is answered here: all of it is data.

Ways this ends:
    the client says DISC, everything is answered   DISC to the upstream, which closes (``farewell``)
    the client goes away                           requests under way are forgotten; when the upstream has
                                                   answered them: DISC to it
    the upstream goes away                         between replies: each request under way or held is answered
                                                   EIO, then the connection is ended; within a reply: ended at
                                                   once (its rest would be garbage). Counted as errors;
                                                   the next connection finds it back, or is refused

With ``reconnect_s`` the upstream may go away between replies and come back in that time: what it has not
answered is asked again on another connection, the rest waits. Only if that can lose or repeat nothing
(``upstream_return``), and its size, flags and block sizes are as the client was shown.

A session has one upstream connection, or several (``upstream_runs``). Of several, replies are passed on as
they come, too: while one of a connection has come in part, the others' wait in their sockets. One that ends
with nothing to answer is opened again later, unless a flush has failed; with the end of any other the
upstream has gone, as above.
"""

from __future__ import annotations

import socket
from collections import deque
from functools import partial
from typing import Final

from gateway_agent.errors import GatewayError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, StreamAccount, word_of
from gateway_agent.nbd.buffers import (
    ARRIVED,
    COMMAND,
    COOKIE,
    END,
    OFFSET,
    Finished,
    InFlight,
    Request,
)
from gateway_agent.nbd.extended import all_is_data, most_head_bytes, reader_of
from gateway_agent.nbd.farewell import OwedAnswers, begin_farewell
from gateway_agent.nbd.limits import KIND_FLUSH, Pending
from gateway_agent.nbd.loop import GONE, IN, OUT
from gateway_agent.nbd.payload_pipe import LARGE_BYTES, PayloadPipe
from gateway_agent.nbd.replies import AskedRequests, ends_large, header_of
from gateway_agent.nbd.session import STORAGE_GONE, NbdSession
from gateway_agent.nbd.sockets import Connection
from gateway_agent.nbd.upstream import Upstream
from gateway_agent.nbd.upstream_further import FurtherConnections
from gateway_agent.nbd.upstream_handshake import disconnection
from gateway_agent.nbd.upstream_return import ReturnRule, UpstreamReturn, is_torn
from gateway_agent.nbd.upstream_runs import RequestRuns, UsedUpstream, next_in_turn
from gateway_agent.nbd.volume import PlaneContext, Volume

_NO_COOKIE: Final = -1  # cookies are unsigned
_MOST_LARGE: Final = 8  # receives of one turn from an upstream with large replies
_LARGE_HEAD: Final = 64  # received where a large payload is expected: any head of data is here with it
_NOTHING: Final = memoryview(b"")
MOST_IN_FLIGHT: Final = 16_384
"""Requests; who has more is read no further. Sockets to a storage that hangs take 100,000 of 28 bytes."""


class ProxySession(NbdSession):
    """See the module docstring.

    Args:
        upstream: owned from now on.
        mode: how the client wants its replies.
    """

    def __init__(
        self,
        context: PlaneContext,
        sock: Connection,
        volume: Volume,
        stream: StreamAccount,
        facts: p.ExportFacts,
        upstream: Upstream,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
    ) -> None:
        super().__init__(context, sock, volume, stream, facts, mode)
        is_writer = not facts.flags & p.TX_READ_ONLY
        # Without CAN_MULTI_CONN a flush speaks for one connection only, and that is the one that was lost.
        may_return = not is_writer or bool(facts.flags & p.TX_CAN_MULTI_CONN)
        self._reconnect_ns = round(volume.export.reconnect_s * 1e9) if may_return else 0
        ledger = self._ledger = volume.ledger_of(upstream.plan.uri)
        is_counted = bool(self._reconnect_ns) and is_writer
        self._rule = ReturnRule(ledger if is_writer else None, context.other, is_counted=is_counted)
        is_multi = bool(facts.flags & p.TX_CAN_MULTI_CONN)
        self._most_upstreams = volume.export.upstream_connections if is_multi else 1
        self._asked: AskedRequests | None = None
        if mode.structured or self._reconnect_ns or self._most_upstreams > 1:
            header_bytes = p.EXTENDED_REQUEST.size if mode.extended else p.REQUEST.size
            self._asked = AskedRequests(self._rule.counted, header_bytes, ledger)
            self.admitted = deque()
        self._local: list[bytes] = []  # our own replies, waiting for a boundary
        self._return: UpstreamReturn | None = None
        self._further: FurtherConnections | None = None
        self._is_away = False  # the upstream has gone and may come back
        self._is_lost = False  # it has gone, or cannot be trusted
        self._can_pipe = isinstance(sock, socket.socket) and isinstance(upstream.sock, socket.socket)
        self._use(upstream)

    def _use(self, upstream: Upstream) -> None:
        """Go on with this connection, and none beside it."""
        self._upstream = upstream
        self._is_lost = False
        first = self._sending = self._used_of(upstream)
        self._used = [first]
        self._replying: UsedUpstream | None = None  # of which a reply has come in part
        self._head_room = most_head_bytes(upstream.agreed)
        self._again = _NOTHING  # requests that are asked again, to go before any others
        self._runs: RequestRuns | None = None
        if self._most_upstreams > 1 and self._asked is not None:
            self._runs = RequestRuns(first, self.requests.sent_pos)
            loop, missing = self._context.loop, self._most_upstreams - 1
            refused = partial(self._warn, "upstream-connection-refused", may_return=False)
            checks = self._is_within, self._rule.may_open
            self._further = FurtherConnections(
                loop, upstream, missing, self._asked, *checks, self._on_further, refused
            )
        self._watch(first, IN)

    def _used_of(self, upstream: Upstream) -> UsedUpstream:
        peer = f"upstream of {self._volume.export.volume}"
        return UsedUpstream(upstream, reader_of(peer, self._asked, self._mode, upstream.agreed, self._ledger))

    # -- towards the upstream -------------------------------------------------------------------------------

    def push(self, now_ns: int) -> None:
        """Send admitted bytes upstream, as many as it takes."""
        if self.is_closed or self._ending:
            return self._watch_or_end()
        if self._asked is not None:
            self._remember(self._asked)
        if self._is_away:
            return self._watch_or_end()
        others = len(self._used) - 1  # which may take what this one does not
        while waiting := self._outgoing():
            if self._runs is not None:
                waiting = self._of_run(waiting, self._runs)
            sending, is_again = self._sending, bool(self._again)
            try:
                sent = sending.upstream.sock.send(waiting)
            except BlockingIOError:
                sent = 0
            except OSError as exc:
                return self._connection_gone(sending, exc.strerror or "send failed")
            if is_again:
                self._again = self._again[sent:]
            else:
                self.requests.sent(sent)
            if sent < len(waiting):
                if not sent and others and self._leave_run():
                    others -= 1
                    continue
                self._watch_upstreams(is_stuck=True)
                return self._watch_or_end()
            if self._runs is None and not is_again:
                break
        # Replies wait in the upstream's socket while our client does not take those we have.
        self._watch_upstreams(is_stuck=False)
        self._watch_or_end()

    def _outgoing(self) -> memoryview:
        return self._again or self.requests.outgoing()

    def _remember(self, asked: AskedRequests) -> None:
        """Requests that were admitted since the last time."""
        admitted, runs = self.admitted, self._runs
        if runs is None and admitted:
            asked.all_admitted(admitted)
        while admitted:
            request = admitted.popleft()
            asked.admitted(request)
            if runs is not None:
                runs.admitted(request)

    def _of_run(self, waiting: memoryview, runs: RequestRuns) -> memoryview:
        """What of the waiting bytes the sending connection gets; the next one is the sending one then."""
        if self._again:
            return waiting
        sent_pos = self.requests.sent_pos
        if sent_pos >= runs.end_pos:
            assert self._asked is not None  # as there are runs
            self._sending = self._next_used()
            runs.begin(self._sending, sent_pos, self._asked)
        return waiting[: runs.end_pos - sent_pos]

    def _next_used(self) -> UsedUpstream:
        return next_in_turn(self._used, self._sending, self._context.clock.monotonic_ns())

    def _leave_run(self) -> bool:
        """The run of which nothing was sent is the next connection's; whether there is such a run."""
        sent_pos = self.requests.sent_pos
        if self._runs is None or self._again or not self._runs.is_untouched(sent_pos):
            return False
        self._sending = self._next_used()
        self._runs.give(self._sending, sent_pos)
        return True

    def _watch_upstreams(self, *, is_stuck: bool) -> None:
        """Watch each connection for what is wanted now; ``is_stuck``: bytes wait for the sending one."""
        is_out, replying = self._out.is_empty, self._replying
        if self._runs is None:
            mask = IN if is_out else 0
            self._watch(self._sending, mask | OUT if is_stuck else mask)
            return
        for used in self._used:
            if replying is None:
                used.waits = False
            mask = IN if is_out and not used.waits else 0
            self._watch(used, mask | OUT if is_stuck and used is self._sending else mask)

    def _watch(self, used: UsedUpstream, mask: int) -> None:
        if mask != used.mask:
            used.watch(self._context.loop, mask, partial(self._on_upstream, used), self.failed)

    # -- several connections --------------------------------------------------------------------------------

    def _on_further(self, upstream: Upstream) -> None:
        used = self._used_of(upstream)
        self._watch(used, IN if self._out.is_empty else 0)
        self._used.append(used)  # last: one that is not watched would never answer

    def _connection_gone(self, used: UsedUpstream, problem: str) -> None:
        """One has ended: alone, if nothing was asked on it that has no answer; else the upstream has gone."""
        asked, is_owing = self._asked, used is self._replying or bool(self._owed_by(used))
        if asked is not None and used is self._sending:
            is_owing = is_owing or is_torn(asked, self.requests)
        if len(self._used) == 1 or is_owing:
            self._upstream_gone(problem)
            return
        assert self._runs is not None  # as there are several
        assert self._further is not None
        self._warn("upstream-connection-gone", UpstreamError(used.upstream.plan.uri, problem), False)
        self._watch(used, 0)
        used.upstream.close()
        self._used.remove(used)
        if used is self._sending:  # it owes nothing, so it was at the beginning of a request
            self._sending = self._used[0]
            self._runs.give(self._sending, self.requests.sent_pos)
        self._further.lost()
        self._serve_on()

    @property
    def _may_receive(self) -> bool:
        return len(self.inflight) < MOST_IN_FLIGHT and super()._may_receive

    def _owed_by(self, used: UsedUpstream) -> InFlight:
        """What one connection has to answer."""
        if self._runs is None:
            return self.inflight
        runs = self._runs
        sent = [request[COOKIE] for request in self._sent() if runs.user_of(request) is used]
        return {cookie: self.inflight[cookie] for cookie in sent if cookie in self.inflight}

    # -- block status of an upstream that knows none --------------------------------------------------------

    def _is_answered_here(self, request: Request) -> bool:
        return (
            request[COMMAND] == p.Cmd.BLOCK_STATUS
            and self._upstream.agreed.context_id is None
            and request[COOKIE] not in self.inflight
            and not self._refusal(request)
        )

    def head_charge(self) -> tuple[int, float] | None:
        """See ``volume.ThrottledSession``; what must wait before it can be answered here is charged then."""
        must_wait = self._is_answered_here(self.requests.queue[0]) and not self.requests.is_drained
        return None if must_wait else super().head_charge()

    def admit_head(self, now_ns: int) -> None:
        """See ``volume.ThrottledSession``."""
        request = self.requests.queue[0]
        if not self._is_answered_here(request):
            super().admit_head(now_ns)
            return
        if not self.requests.is_drained:
            self._blocked = True
            return
        self.requests.queue.popleft()
        self.requests.skip(request)
        word = word_of(KIND_FLUSH, 0, failed=False)
        self._record([0, word, request[ARRIVED], now_ns, now_ns])
        self._reply_error(all_is_data(request, self._mode))

    # -- from the upstream ----------------------------------------------------------------------------------

    def _on_upstream(self, used: UsedUpstream, events: int) -> None:
        if events & OUT:
            self._serve_on()
        if self.is_closed or self._ending or self._is_away or not self._out.is_empty:
            return
        if not events & (IN | GONE) or not used.mask:
            return
        if self._replying is not None and self._replying is not used:
            used.waits = True
            self._watch(used, OUT if used is self._sending and self._outgoing() else 0)
            return
        for _ in range(_MOST_LARGE):
            more = self._take_replies(used) and used.is_large
            if not more or not used.mask & IN or self.is_closed or self._ending:
                return

    def _take_replies(self, used: UsedUpstream) -> bool:
        """Receive, and pass on; whether something has come."""
        if used.is_large and used.reader.payload_left:
            return self._pass_payload(used, b"")
        room = self._head_room
        start = room - len(used.partial_header)
        scratch, end = self._context.scratch, room + _LARGE_HEAD if used.is_large else None
        try:
            count = used.upstream.sock.recv_into(scratch[room:end])
        except BlockingIOError:
            return False
        except OSError as exc:
            self._connection_gone(used, exc.strerror or "receive failed")
            return False
        if not count:
            self._connection_gone(used, "it closed the connection")
            return False
        scratch[start:room] = used.partial_header
        self._on_replies(used, scratch[start : room + count])
        return True

    def _pass_payload(self, used: UsedUpstream, head: memoryview | bytes) -> bool:
        """Let what has come of a large payload pass by a pipe, behind ``head``; False if nothing passes."""
        pipe = self._context.pipes.take()
        if pipe is None:
            used.is_large = False
            return False
        try:
            taken = pipe.fill(head, used.upstream.sock.fileno(), used.reader.payload_left)
        except OSError as exc:
            self._context.pipes.put_back(pipe)
            self._connection_gone(used, exc.strerror or "receive failed")
            return True
        if taken:
            self._on_replies(used, self._context.scratch[:taken], pipe)  # whose bytes nothing looks at
        else:
            self._reply(pipe)
        return bool(taken or head)

    def _on_replies(self, used: UsedUpstream, view: memoryview, pipe: PayloadPipe | None = None) -> None:
        """Bytes of an upstream, or so many of a payload, which are in a pipe."""
        now_ns, reader = self._context.clock.monotonic_ns(), used.reader
        usable, finished = reader.feed(view, self._pause.total_ns(now_ns), self.inflight, now_ns)
        self._record(finished)
        if self._further is not None:
            self._further.answered(used, finished)
        was_replying, self._replying = self._replying, used if reader.payload_left else None
        if self._can_pipe and (finished or reader.payload_left >= LARGE_BYTES):
            used.is_large = reader.payload_left >= LARGE_BYTES or ends_large(finished)
        elif usable and pipe is None and reader.payload_left <= LARGE_BYTES - _LARGE_HEAD:
            used.is_large = False  # a large read that comes in small chunks
        if pipe is not None:
            self._reply(pipe)
            if self._local and reader.boundary is not None and not self.is_closed:
                self._reply(b"".join(self._take_local()))
        else:
            used.partial_header = bytes(view[usable:])
            self._pass_on(used, view, usable)
        if self.is_closed or self._ending:  # what passed by a pipe has ended it
            return
        if was_replying is not None or not self._out.is_empty:
            self._watch_upstreams(is_stuck=bool(self._outgoing()))
        if self._blocked:
            self._serve_on()  # a cookie may be free again
        else:
            self._watch_or_end()

    def _pass_on(self, used: UsedUpstream, view: memoryview, usable: int) -> None:
        passed, boundary = used.reader.passed(view, usable), used.reader.boundary
        if self._local and boundary is not None:
            self._reply(b"".join((passed[:boundary], *self._take_local(), passed[boundary:])))
        elif passed:
            by_pipe = used.is_large and used.reader.payload_left and self._out.is_empty
            if not (by_pipe and len(passed) <= _LARGE_HEAD and self._pass_payload(used, passed)):
                self._reply(passed)

    def _take_local(self) -> list[bytes]:
        local, self._local = self._local, []
        return local

    def _reply_error(self, reply: bytes) -> None:
        self._local.append(reply)
        if self._replying is None:
            self._reply(b"".join(self._take_local()))

    def outstanding(self, now_ns: int) -> list[Pending]:
        """See ``accounting.CountedSession``; of a reply that has arrived in part, too."""
        found, within = super().outstanding(now_ns), self._within
        if within is not None:
            paused_ns = self._pause.total_ns(now_ns)
            found.append((within[0] + paused_ns, within[2] & 3, paused_ns))
        return found

    @property
    def _within(self) -> tuple[int, int, int] | None:
        """See ``Replies.in_progress``."""
        return self._replying.reader.in_progress if self._replying is not None else None

    def _is_within(self) -> bool:
        return self._within is not None

    def cut_ended(self, now_ns: int) -> None:
        """See ``accounting.CountedSession``."""
        if self._replying is not None:
            self._replying.reader.paused(self._pause.total_ns(now_ns))
        super().cut_ended(now_ns)

    # -- the upstream goes away -----------------------------------------------------------------------------

    def _upstream_gone(self, problem: str) -> None:
        if self._is_finished():
            self.close("disconnected")
            return
        may_return = self._may_return(is_back=False)
        self._warn("upstream-gone", UpstreamError(self._upstream.plan.uri, problem), may_return)
        self._let_go_of_upstream()
        self._is_lost = True
        self._close_upstream()
        if may_return:
            self._await_return()
        else:
            self._fail()

    def _warn(self, what: str, error: GatewayError, may_return: bool) -> None:
        self._volume.warnings.warning(
            self._context.clock.monotonic_ns(),
            what,
            peer=self.peer,
            inflight=len(self.inflight),
            error=str(error),
            again_within_s=self._reconnect_ns / 1e9 if may_return else 0,
        )

    def _fail(self) -> None:
        """Answer all with errors, and end."""
        is_torn, within = self._replying is not None, self._within
        if within is not None:
            self.inflight[_NO_COOKIE] = (*within, 0)  # to be counted; it cannot be answered any more
        if is_torn:
            self._replying = None
            self._local.clear()  # nor can what waits for its end
        self._fail_all(p.EIO, can_reply=not is_torn)

    def _sent(self) -> list[Request]:
        """Requests of which at least a part was sent and that are not answered."""
        return self._asked.sent(self.requests.sent_pos) if self._asked is not None else []

    def _may_return(self, *, is_back: bool) -> bool:
        """Whether this client may go on with another connection: see the module docstring."""
        is_torn_or_ends = self._replying is not None or self._drain_ns is not None
        if not self._reconnect_ns or is_torn_or_ends or self._asked is None:
            return False
        self._remember(self._asked)
        return self._rule.allows(self._asked, self.requests, is_back=is_back)

    def _await_return(self) -> None:
        self._is_away = True
        self._again = _NOTHING
        self._fail_begun()
        if self.is_closed:  # its client has gone, too
            return
        self._return = UpstreamReturn(
            self._context.loop,
            self._upstream.plan,
            self._reconnect_ns,
            self._on_back,
            partial(self._give_up, "it did not come back"),
            self.failed,
        )
        self._watch_or_end()

    def _fail_begun(self) -> None:
        """Of these the client has some chunks already: the rest cannot be asked for."""
        assert self._asked is not None  # else no upstream may return
        now_ns = self._context.clock.monotonic_ns()
        reads_ns, others_ns = self._paused_ns(now_ns)
        finished, replies = Finished(), list[bytes]()
        begun = self._asked.begun.items()
        for cookie in [cookie for cookie, each in begun if each.chunks or each.has_failed]:
            begin = self._asked.ended(cookie, has_failed=True)[OFFSET]
            arrived_ns, sent_ns, word, _ = self.inflight.pop(cookie)
            paused_ns = others_ns if word & 3 else reads_ns
            finished += (paused_ns, word | FAILED_BIT, arrived_ns, sent_ns, now_ns)
            replies.append(self._error_reply(cookie, p.EIO, STORAGE_GONE, begin=begin))
        self._record(finished)
        if replies:
            self._reply_error(b"".join(replies))

    def _on_back(self, upstream: Upstream) -> None:
        if not upstream.is_like(self._upstream):
            upstream.leave(self._context.loop)
            self._give_up("it came back with another size, other flags or other block sizes")
        elif not self._may_return(is_back=True):
            upstream.leave(self._context.loop)
            self._give_up("the volume was changed meanwhile, and no flush came behind that")
        else:
            self._go_on(upstream)

    def _go_on(self, upstream: Upstream) -> None:
        """Ask again what was sent, and then what was not."""
        sent = self._sent()
        self._stop_waiting()
        self._rule.has_returned()
        if sent:  # the last one may have gone in part
            self.requests.sent_pos = max(self.requests.sent_pos, sent[-1][END])
        self._use(upstream)
        self._again = memoryview(b"".join(header_of(request, self._mode) for request in sent))
        if self._runs is not None and self._asked is not None:
            for request in self._asked.unsent(self.requests.sent_pos):
                self._runs.admitted(request)
        self._serve_on()

    def _give_up(self, problem: str) -> None:
        self._warn("upstream-lost", UpstreamError(self._upstream.plan.uri, problem), False)
        self._fail()

    def _stop_waiting(self) -> None:
        self._is_away = False
        if self._return is not None:
            self._return.stop()
            self._return = None

    # -- end ------------------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        return super()._is_finished() and self._replying is None and not self._local

    def _begin_end(self) -> None:
        self._let_go_of_upstream()
        self._stop_waiting()
        self._forget_asked()
        super()._begin_end()

    def _begin_of(self, cookie: int) -> int:
        request = self._asked.get(cookie) if self._asked is not None else None
        return request[OFFSET] if request is not None else 0

    def _forget_asked(self) -> None:
        """No answer is waited for any more."""
        if self._asked is not None:
            self._remember(self._asked)
            self._asked.forget()

    def failed(self, exc: Exception) -> None:
        """A reply that was not asked for, or a bug: nothing that follows on this connection is trusted."""
        self._is_lost = True
        if not self.is_closed and not self._ending:
            self._fail_all(p.EIO, can_reply=False)
        self.close(str(exc))

    def _let_go_of_upstream(self) -> None:
        """Watch no connection of it any more, and open none beside them."""
        if self._further is not None:
            self._further.stop()
        for used in self._used:
            self._watch(used, 0)

    def _close_upstream(self) -> None:
        for used in self._used:
            used.upstream.close()

    def _release_storage(self) -> None:
        self._let_go_of_upstream()
        self._stop_waiting()
        if self._is_lost:
            self._close_upstream()
            self._forget_changes()
            return
        context, left = self._context, set(self._used)

        def ended(used: UsedUpstream) -> None:
            left.discard(used)
            if not left:
                self._forget_changes()

        for used in self._used:
            # Within a request DISC would become the end of a torn write's payload.
            is_whole = used is not self._sending or (self.requests.is_drained and not self._again)
            words = disconnection(used.upstream.agreed) if is_whole else b""
            owed = OwedAnswers(used.reader, self._owed_by(used), used.partial_header, partial(ended, used))
            begin_farewell(context.farewells, context.loop, used.upstream.sock, words, owed)

    def _forget_changes(self) -> None:
        """Of this session nothing is under way any more."""
        self._forget_asked()
        self._rule.ended()
