"""Replies of an upstream as they pass through: where each ends, what it answers, whether it is one. Sans-IO.

    client's replies   upstream's   reader
    simple             simple       ReplyReader: passed on unchanged
    in chunks          in chunks    ChunkReader (``chunks``): passed on, each chunk checked
    in chunks          simple       SimpleReplyTranslator: a read becomes one chunk of data

A simple reply does not say its own length: a read's payload has the length that was asked for, unless the
error field is set; so a reader looks each cookie up among the requests in flight. Two readers need more of a
request than that, and so does a session that may have to repeat it: ``AskedRequests``.

An error number that the protocol does not know becomes EIO. Whatever else is wrong ends the connection
(``NbdProtocolError``): nothing behind it can be trusted, and nothing of the same receive is passed on.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import Final, Protocol

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT, LENGTH_SHIFT
from gateway_agent.nbd.buffers import (
    COMMAND,
    COOKIE,
    END,
    FINISHED_INTS,
    FLAGS,
    LENGTH,
    OFFSET,
    Finished,
    InFlight,
    Request,
)
from gateway_agent.nbd.ledger import ChangeLedger, CountedConnection
from gateway_agent.nbd.limits import KIND_READ
from gateway_agent.nbd.payload_pipe import LARGE_BYTES

CHANGES: Final[frozenset[int]] = frozenset((p.Cmd.WRITE, p.Cmd.TRIM, p.Cmd.WRITE_ZEROES))
STORAGE_FAILED: Final = "the storage behind this export reports an error"
_NOTHING: Final = (0, 0, 0)
_COOKIE_OF: Final = itemgetter(COOKIE)


class ReplyProgress:
    """What has come of a reply that is not one whole chunk.

    Attributes:
        position: of a read: what is before it has arrived, from its offset on without a gap.
        scattered: begin and end of what arrived behind that, in order and apart.
        chunks: how many chunks with content there were.
        has_failed: whether there was an error.
    """

    __slots__ = ("chunks", "command", "flags", "has_failed", "length", "offset", "position", "scattered")

    def __init__(self, request: Request) -> None:
        self.command = request[COMMAND]
        self.offset = self.position = request[OFFSET]
        self.length = request[LENGTH]
        self.flags = request[FLAGS]
        self.scattered: list[tuple[int, int]] = []
        self.chunks = 0
        self.has_failed = False


class AskedRequests(dict[int, Request]):
    """What an upstream has to answer, by cookie, where ``InFlight`` does not say enough of it.

    Attributes:
        begun: what has come of replies in several chunks.

    Args:
        counted: where changes and flushes are counted; None: nowhere.
        header_bytes: of a request.
        failures: where flushes that fail are counted; None: nowhere.
    """

    def __init__(
        self,
        counted: CountedConnection | None = None,
        header_bytes: int = p.REQUEST.size,
        failures: ChangeLedger | None = None,
    ) -> None:
        super().__init__()
        self._failures = failures
        self._header_bytes = header_bytes
        self.begun: dict[int, ReplyProgress] = {}
        self._counted = counted
        self._marks: dict[int, int] = {}  # of flushes: which changes they cover

    def admitted(self, request: Request) -> None:
        """It is about to be sent."""
        self[request[COOKIE]] = request
        if self._counted is None:
            return
        if request[COMMAND] in CHANGES:
            self._counted.ledger.begun()
        elif request[COMMAND] == p.Cmd.FLUSH:
            self._marks[request[COOKIE]] = self._counted.mark()

    def all_admitted(self, requests: deque[Request]) -> None:
        """The same of several, at less cost where no ledger is kept; ``requests`` is empty then."""
        if self._counted is None:
            self.update(zip(map(_COOKIE_OF, requests), requests, strict=True))
        else:
            for request in requests:
                self.admitted(request)
        requests.clear()

    def progress(self, cookie: int) -> ReplyProgress | None:
        """Of the reply to a request under way; None: there is none."""
        found = self.begun.get(cookie)
        if found is None and (request := self.get(cookie)) is not None:
            found = self.begun[cookie] = ReplyProgress(request)
        return found

    def answered(self, cookie: int, *, has_failed: bool) -> Request:
        """It is complete; returns it."""
        if has_failed and self._failures is not None:
            request = self[cookie]
            is_fua = request[COMMAND] in CHANGES and request[FLAGS] & p.CMD_FLAG_FUA
            if is_fua or request[COMMAND] == p.Cmd.FLUSH:
                self._failures.failed_flushes += 1
        return self.ended(cookie, has_failed=has_failed)

    def ended(self, cookie: int, *, has_failed: bool) -> Request:
        """It is complete, or is waited for no more; returns it."""
        request = self.pop(cookie)
        if self.begun:
            self.begun.pop(cookie, None)
        if self._counted is None:
            return request
        if request[COMMAND] in CHANGES:
            is_stable = has_failed or request[FLAGS] & p.CMD_FLAG_FUA
            self._counted.ledger.ended(needs_flush=not is_stable)
        elif request[COMMAND] == p.Cmd.FLUSH:
            mark = self._marks.pop(cookie)
            if not has_failed:
                self._counted.flushed(mark)
        return request

    @property
    def changes(self) -> int:
        """How many of them change the volume."""
        return sum(request[COMMAND] in CHANGES for request in self.values())

    def sent(self, sent_pos: int) -> list[Request]:
        """Those of which at least a part is before ``sent_pos`` in what the client sent, in their order."""
        return [request for request in self.values() if self._begin_pos(request) < sent_pos]

    def unsent(self, sent_pos: int) -> list[Request]:
        """The others."""
        return [request for request in self.values() if self._begin_pos(request) >= sent_pos]

    def has_byte(self, position: int) -> bool:
        """Whether one of them has, or begins with, the byte at this position in what the client sent."""
        return any(self._begin_pos(each) <= position < each[END] for each in self.values())

    def _begin_pos(self, request: Request) -> int:
        payload_bytes = request[LENGTH] if request[COMMAND] == p.Cmd.WRITE else 0
        return request[END] - self._header_bytes - payload_bytes

    def forget(self) -> None:
        """No more answer is waited for."""
        for cookie in tuple(self):
            self.ended(cookie, has_failed=True)


def header_of(request: Request, mode: p.ReplyMode) -> bytes:
    """To ask again."""
    say = p.extended_request if mode.extended else p.request
    return say(request[COMMAND], request[COOKIE], request[OFFSET], request[LENGTH], request[FLAGS])


class Replies(Protocol):
    """What a session asks of a reader.

    Attributes:
        payload_left: bytes of the reply or chunk in progress that have not arrived; 0 between them.
        boundary: offset, in what the last ``feed`` lets pass, behind the last whole reply or chunk; None when
            all of it lies within one payload. Only there may bytes of our own be inserted.
    """

    payload_left: int
    boundary: int | None

    @property
    def in_progress(self) -> tuple[int, int, int] | None:
        """(arrived_ns, sent_ns, word) of a request not in flight any more whose reply has arrived in part."""

    def paused(self, paused_ns: int) -> None:
        """What has arrived in part is later by a pause of its client."""

    def feed(self, view: memoryview, paused_ns: int, inflight: InFlight, now_ns: int) -> tuple[int, Finished]:
        """Parse received bytes.

        Args:
            view: bytes that begin where the last call stopped; numbers in them may be replaced, in place.
            paused_ns: pauses of the client since the last cut, for ``Finished``.
            inflight: answered requests are taken out of it.
            now_ns: when these bytes were received.

        Returns:
            Number of bytes that are dealt with (the rest is part of a header and must be fed again), and the
            requests that they finish.

        Raises:
            NbdProtocolError: not a reply, or one that was not asked for.
        """

    def passed(self, view: memoryview, usable: int) -> memoryview | bytes:
        """What the client gets for the bytes that ``feed`` has dealt with."""


class ReplyReader:
    """Simple replies, passed on unchanged; see ``Replies``.

    Args:
        peer: for error texts.
        asked: what is known of requests under way beside ``inflight``; None: nothing.
        failures: where flushes that fail are counted if that is so: any error of what is no read may be one.
    """

    def __init__(
        self, peer: str, asked: AskedRequests | None = None, failures: ChangeLedger | None = None
    ) -> None:
        self._peer = peer
        self._asked = asked
        self._failures = failures if asked is None else None
        self.payload_left = 0
        self.boundary: int | None = None
        self._current = _NOTHING

    @property
    def in_progress(self) -> tuple[int, int, int] | None:
        """See ``Replies``."""
        word, arrived_ns, sent_ns = self._current
        return (arrived_ns, sent_ns, word) if self.payload_left else None

    def paused(self, paused_ns: int) -> None:
        """See ``Replies``."""
        word, arrived_ns, sent_ns = self._current
        self._current = word, arrived_ns + paused_ns, sent_ns + paused_ns

    def feed(self, view: memoryview, paused_ns: int, inflight: InFlight, now_ns: int) -> tuple[int, Finished]:
        """See ``Replies``."""
        finished: Finished = []
        size, offset = len(view), 0
        self.boundary = None
        if self.payload_left:
            offset = min(self.payload_left, size)
            self.payload_left -= offset
            if self.payload_left:
                return offset, finished
            finished += (paused_ns, *self._current, now_ns)
        self.boundary = offset
        unpack, pop, asked = p.SIMPLE_REPLY.unpack_from, inflight.pop, self._asked
        while size - offset >= 16:
            magic, error, cookie = unpack(view, offset)
            entry = pop(cookie, None)
            if magic != 0x67446698 or entry is None:
                put_back(inflight, finished, cookie, entry)
                raise NbdProtocolError(
                    self._peer, f"reply with magic {magic:#x} and unknown cookie {cookie:#x}"
                )
            arrived_ns, sent_ns, word, payload_bytes = entry
            offset += 16
            if asked is not None:
                asked.answered(cookie, has_failed=error != 0)
            if error:
                if self._failures is not None and word & 3 != KIND_READ:
                    self._failures.failed_flushes += 1
                word |= FAILED_BIT
                if error not in p.WIRE_ERRORS:
                    p.SIMPLE_REPLY.pack_into(view, offset - 16, magic, p.EIO, cookie)
            elif payload_bytes:
                offset += payload_bytes
                if offset > size:
                    self.payload_left = offset - size
                    self._current = word, arrived_ns, sent_ns
                    return size, finished
            finished += (paused_ns, word, arrived_ns, sent_ns, now_ns)
            self.boundary = offset
        return offset, finished

    def passed(self, view: memoryview, usable: int) -> memoryview | bytes:
        """See ``Replies``."""
        return view[:usable]


class SimpleReplyTranslator(ReplyReader):
    """Simple replies for a client that wants chunks; see ``Replies``.

    A read becomes one chunk of data, and each error a chunk with a text. The others stay simple replies, as
    the protocol allows.

    Args:
        peer: for error texts.
        asked: the requests under way.
    """

    def __init__(self, peer: str, asked: AskedRequests) -> None:
        super().__init__(peer)
        self._requests = asked
        self._pieces: list[memoryview | bytes] = []

    def feed(self, view: memoryview, paused_ns: int, inflight: InFlight, now_ns: int) -> tuple[int, Finished]:
        """See ``Replies``; ``boundary`` is an offset in what ``passed`` returns."""
        finished: Finished = []
        pieces = self._pieces = []
        size, offset = len(view), 0
        self.boundary = None
        if self.payload_left:
            offset = min(self.payload_left, size)
            self.payload_left -= offset
            pieces.append(view[:offset])
            if self.payload_left:
                return offset, finished
            finished += (paused_ns, *self._current, now_ns)
        passed_bytes = offset
        self.boundary = offset
        while size - offset >= p.SIMPLE_REPLY_BYTES:
            magic, error, cookie = p.SIMPLE_REPLY.unpack_from(view, offset)
            entry = inflight.pop(cookie, None)
            if magic != p.SIMPLE_REPLY_MAGIC or entry is None:
                put_back(inflight, finished, cookie, entry)
                raise NbdProtocolError(
                    self._peer, f"reply with magic {magic:#x} and unknown cookie {cookie:#x}"
                )
            arrived_ns, sent_ns, word, payload_bytes = entry
            request = self._requests.answered(cookie, has_failed=error != 0)
            offset += p.SIMPLE_REPLY_BYTES
            head = _translated(request, cookie, error)
            pieces.append(head)
            passed_bytes += len(head)
            if error:
                word |= FAILED_BIT
            elif payload_bytes:
                pieces.append(view[offset : offset + payload_bytes])
                offset += payload_bytes
                if offset > size:
                    self.payload_left = offset - size
                    self._current = word, arrived_ns, sent_ns
                    return size, finished
                passed_bytes += payload_bytes
            finished += (paused_ns, word, arrived_ns, sent_ns, now_ns)
            self.boundary = passed_bytes
        return offset, finished

    def passed(self, view: memoryview, usable: int) -> memoryview | bytes:
        """See ``Replies``."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def ends_large(finished: Finished) -> bool:
    """Whether the last request that is complete is a read whose payload is worth a pipe."""
    word = finished[-4] if finished else 0
    return not word & (FAILED_BIT | 3) and word >> LENGTH_SHIFT >= LARGE_BYTES


def _translated(request: Request, cookie: int, error: int) -> bytes:
    """What a simple reply's header becomes."""
    if error:
        return p.error_chunk(cookie, error if error in p.WIRE_ERRORS else p.EIO, STORAGE_FAILED)
    if request[COMMAND] != p.Cmd.READ:
        return p.simple_reply(cookie)
    if not request[LENGTH]:
        return p.none_chunk(cookie)
    return p.data_chunk_head(cookie, request[OFFSET], request[LENGTH], True)


def put_back(
    inflight: InFlight, finished: Finished, cookie: int, entry: tuple[int, int, int, int] | None
) -> None:
    """Requests whose replies cannot be passed on are under way again: nothing that arrived goes uncounted."""
    if entry is not None:
        inflight[cookie] = entry
    rows = zip(*[iter(finished)] * FINISHED_INTS, strict=True)
    for number, (_, word, arrived_ns, sent_ns, _) in enumerate(rows, 2):
        inflight[-number] = (arrived_ns, sent_ns, word, 0)
