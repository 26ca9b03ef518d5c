"""Structured replies of an upstream while they pass through: cut-through, each chunk checked. Sans-IO.

A chunk is passed on as it comes, unless it is wrong:

    type      data, hole    of a read; at most one in all if the client asked for DF
              block status  of a block status, once; one extent if the client asked for REQ_ONE; the first one
                            not empty, or a client that goes on behind it would never come further
              none          only as the last chunk
              error         of any request, then and later; its number not 0, its lengths consistent
    length    as the type says; of an error's text at most the protocol's limit on strings
    range     within the request; what a read's chunks cover may not overlap, and is the whole of it if the
              last chunk ends it without an error
    flags     only the one of the last chunk

Two numbers are replaced, in place: the upstream's one of base:allocation by ours, and errors that the
protocol does not know by EIO. What is not a read or a block status may be answered by a simple reply, and so
may the error of a block status.

A request is complete when its last chunk is; until then it stays in flight. It has failed when one of its
chunks is an error.
"""

from __future__ import annotations

import bisect
import struct
from typing import Final

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import FAILED_BIT
from gateway_agent.nbd.buffers import COMMAND, LENGTH, OFFSET, Finished, InFlight
from gateway_agent.nbd.replies import AskedRequests, ReplyProgress, put_back

MOST_EXTENTS: Final = 1 << 20  # of a block status; nbdkit's limit, above that of qemu-nbd
MOST_SCATTERED: Final = 4_096  # pieces of one read out of order: servers send them in order
_ERROR_BYTES: Final = 6  # error number and length of the text
_PLACE_BYTES: Final = 8
MOST_ERROR_BYTES: Final = _ERROR_BYTES + p.MAX_NAME_BYTES + _PLACE_BYTES
MOST_HEAD_BYTES: Final = p.CHUNK_BYTES + MOST_ERROR_BYTES
"""The longest piece that must be here whole to be understood: an error."""
_OFFSET: Final = struct.Struct(">Q")
_HOLE: Final = struct.Struct(">QI")
_NUMBER: Final = struct.Struct(">I")
_ERROR: Final = struct.Struct(">IH")
MORE: Final = -1  # the head is not here whole


class ChunkReader:
    """See the module docstring, and ``replies.Replies``.

    Args:
        peer: for error texts.
        asked: the requests under way.
        context_id: what the upstream calls base:allocation; None: it answers no block status.
    """

    _least_bytes = p.SIMPLE_REPLY_BYTES  # without which no reply can be understood
    _head_bytes = p.CHUNK_BYTES  # before the payload of a chunk
    _status_bytes = _NUMBER.size + p.EXTENT.size  # of a block status with one extent

    def __init__(self, peer: str, asked: AskedRequests, context_id: int | None) -> None:
        self._peer = peer
        self._asked = asked
        self._context_id = context_id
        self.payload_left = 0
        self.boundary: int | None = None
        self._ending: int | None = None  # the request that ends with the payload in progress

    @property
    def in_progress(self) -> tuple[int, int, int] | None:
        """See ``Replies``: here a request is in flight until its last chunk is complete."""
        return None

    def paused(self, paused_ns: int) -> None:
        """See ``Replies``."""

    def passed(self, view: memoryview, usable: int) -> memoryview | bytes:
        """See ``Replies``."""
        return view[:usable]

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
            if self._ending is not None:
                finished += self._end(self._ending, inflight, paused_ns, now_ns)
        self.boundary = offset
        try:
            while size - offset >= self._least_bytes:
                begin, offset = offset, self._whole_reads(view, offset, paused_ns, inflight, now_ns, finished)
                if offset > begin:
                    self.boundary = offset
                    continue
                reply_bytes, ending = self._on_reply(view[offset:])
                if reply_bytes == MORE:
                    break
                offset += reply_bytes
                if offset > size:
                    self.payload_left, self._ending = offset - size, ending
                    return size, finished
                if ending is not None:
                    finished += self._end(ending, inflight, paused_ns, now_ns)
                self.boundary = offset
        except NbdProtocolError:
            put_back(inflight, finished, 0, None)
            raise
        return offset, finished

    def _wrong(self, problem: str) -> NbdProtocolError:
        return NbdProtocolError(self._peer, problem)

    def _end(self, cookie: int, inflight: InFlight, paused_ns: int, now_ns: int) -> tuple[int, ...]:
        has_failed = self._asked.begun[cookie].has_failed
        self._asked.answered(cookie, has_failed=has_failed)
        arrived_ns, sent_ns, word, _ = inflight.pop(cookie)
        if has_failed:
            word |= FAILED_BIT
        return paused_ns, word, arrived_ns, sent_ns, now_ns

    def _found(self, cookie: int) -> ReplyProgress:
        asked = self._asked.progress(cookie)
        if asked is None:
            raise self._wrong(f"reply with unknown cookie {cookie:#x}")
        return asked

    def _on_reply(self, view: memoryview) -> tuple[int, int | None]:
        """The reply or chunk at the beginning of ``view``; returns as ``_on_chunk``."""
        magic, error, cookie = p.SIMPLE_REPLY.unpack_from(view)
        if magic == p.SIMPLE_REPLY_MAGIC:
            self._on_simple(view, error, cookie)
            return p.SIMPLE_REPLY_BYTES, cookie
        if magic != p.CHUNK_MAGIC:
            raise self._wrong(f"reply with magic {magic:#x}")
        if len(view) < p.CHUNK_BYTES:
            return MORE, None
        return self._on_chunk(view, *p.CHUNK.unpack_from(view)[1:])

    def _on_simple(self, view: memoryview, error: int, cookie: int) -> None:
        asked = self._found(cookie)
        is_without = asked.command in (p.Cmd.READ, p.Cmd.BLOCK_STATUS)
        if asked.chunks or asked.has_failed or (is_without and (asked.command == p.Cmd.READ or not error)):
            raise self._wrong(f"a simple reply to command {asked.command}, cookie {cookie:#x}")
        if error:
            asked.has_failed = True
            if error not in p.WIRE_ERRORS:
                p.SIMPLE_REPLY.pack_into(view, 0, p.SIMPLE_REPLY_MAGIC, p.EIO, cookie)

    def _whole_reads(
        self,
        view: memoryview,
        offset: int,
        paused_ns: int,
        inflight: InFlight,
        now_ns: int,
        finished: Finished,
    ) -> int:
        """Chunks that are all of a read and here whole, as most are: the short way through ``_on_chunk``.

        Returns:
            Offset of the first one that is none.
        """
        size, asked, begun, unpack = len(view), self._asked, self._asked.begun, p.DATA_CHUNK.unpack_from
        while size - offset >= p.DATA_HEAD_BYTES:
            magic, flags, kind, cookie, length, begin = unpack(view, offset)
            request = asked.get(cookie)
            end = offset + p.CHUNK_BYTES + length
            if magic != 0x668E33EF or kind != 1 or flags != 1 or request is None or end > size:
                break
            if request[COMMAND] or request[OFFSET] != begin or request[LENGTH] + 8 != length or length == 8:
                break
            if begun and cookie in begun:
                break
            del asked[cookie]  # a read is nothing to the ledger
            arrived_ns, sent_ns, word, _ = inflight.pop(cookie)
            finished += (paused_ns, word, arrived_ns, sent_ns, now_ns)
            offset = end
        return offset

    def _on_chunk(
        self, view: memoryview, flags: int, kind: int, cookie: int, length: int
    ) -> tuple[int, int | None]:
        """The chunk at the beginning of ``view``, whose header says the rest.

        Returns:
            Bytes of the chunk, or ``MORE``; and the request that ends with it.
        """
        here, head = len(view), self._head_bytes
        asked = self._found(cookie)
        if flags & ~p.CHUNK_DONE:
            raise self._wrong(f"a chunk with flags {flags:#x}")
        if kind == p.Chunk.OFFSET_DATA:
            if length <= _OFFSET.size:
                raise self._wrong(f"a chunk of data of {length} bytes")
            if here < head + _OFFSET.size:
                return MORE, None
            self._on_content(asked, _OFFSET.unpack_from(view, head)[0], length - _OFFSET.size)
        elif kind == p.Chunk.OFFSET_HOLE:
            if length != _HOLE.size:
                raise self._wrong(f"a hole of {length} bytes, not {_HOLE.size}")
            if here < head + length:
                return MORE, None
            self._on_content(asked, *_HOLE.unpack_from(view, head))
        elif kind == p.Chunk.BLOCK_STATUS:
            if length < self._status_bytes:
                raise self._wrong(f"a block status of {length} bytes")
            if here < head + self._status_bytes:
                return MORE, None
            self._on_status(asked, view[head:], length)
        elif kind & p.CHUNK_ERROR_BIT:
            if length < _ERROR_BYTES or length > MOST_ERROR_BYTES:
                raise self._wrong(f"an error of {length} bytes; at most {MOST_ERROR_BYTES} are possible")
            if here < head + length:
                return MORE, None
            self._on_error(asked, kind, view[head : head + length])
        elif kind != p.Chunk.NONE or length or not flags:
            raise self._wrong(f"a chunk of type {kind}, flags {flags:#x}, {length} bytes")
        if not flags:
            return head + length, None
        self._check_whole(asked)
        return head + length, cookie

    def _on_content(self, asked: ReplyProgress, begin: int, length: int) -> None:
        """A piece of a read: data or a hole."""
        end = begin + length
        if asked.command != p.Cmd.READ or length <= 0 or begin < asked.position:
            raise self._wrong(f"{length} bytes at {begin} for command {asked.command} at {asked.position}")
        if end > asked.offset + asked.length:
            raise self._wrong(f"{length} bytes at {begin}, beyond a read up to {asked.offset + asked.length}")
        asked.chunks += 1
        if asked.chunks > 1 and asked.flags & p.CMD_FLAG_DF:
            raise self._wrong("a read that was not to be divided arrives in pieces")
        spans = asked.scattered
        if begin == asked.position and not spans:
            asked.position = end
            return
        index = bisect.bisect(spans, (begin, end))
        is_again = (index and spans[index - 1][1] > begin) or (index < len(spans) and spans[index][0] < end)
        if is_again or len(spans) == MOST_SCATTERED:
            raise self._wrong("a read arrives twice in part, or in too many pieces out of order")
        spans.insert(index, (begin, end))
        while spans and spans[0][0] == asked.position:
            asked.position = spans.pop(0)[1]

    def _on_status(self, asked: ReplyProgress, view: memoryview, length: int) -> None:
        extents, rest = divmod(length - _NUMBER.size, p.EXTENT.size)
        if extents <= 0 or rest:
            raise self._wrong(f"a block status of {length} bytes")
        self._check_status(asked, _NUMBER.unpack_from(view)[0], extents)
        self._check_first(_NUMBER.unpack_from(view, _NUMBER.size)[0])
        _NUMBER.pack_into(view, 0, p.ALLOCATION_ID)

    def _check_status(self, asked: ReplyProgress, context_id: int, extents: int) -> None:
        if asked.command != p.Cmd.BLOCK_STATUS:
            raise self._wrong(f"a block status for command {asked.command}")
        if extents > MOST_EXTENTS or (asked.flags & p.CMD_FLAG_REQ_ONE and extents != 1):
            raise self._wrong(f"a block status with {extents} extents")
        if context_id != self._context_id or asked.chunks:
            raise self._wrong(f"a block status of context {context_id}, not once of {self._context_id}")
        asked.chunks = 1

    def _check_first(self, length: int) -> None:
        if not length:
            raise self._wrong("a block status whose first extent is empty")

    def _on_error(self, asked: ReplyProgress, kind: int, view: memoryview) -> None:
        error, text_bytes = _ERROR.unpack_from(view)
        rest = len(view) - _ERROR_BYTES - text_bytes
        sizes = {int(p.Chunk.ERROR): 0, int(p.Chunk.ERROR_OFFSET): _PLACE_BYTES}
        if not error or rest < 0 or rest != sizes.get(kind, rest):
            raise self._wrong(f"an error with number {error}, {text_bytes} of {len(view)} bytes as text")
        if kind == p.Chunk.ERROR_OFFSET:
            (place,) = _OFFSET.unpack_from(view, _ERROR_BYTES + text_bytes)
            if not asked.offset <= place < asked.offset + max(asked.length, 1):
                raise self._wrong(f"an error at {place}, outside its request")
        asked.has_failed = True
        if error not in p.WIRE_ERRORS:
            _NUMBER.pack_into(view, 0, p.EIO)

    def _check_whole(self, asked: ReplyProgress) -> None:
        """The last chunk is here: whether the reply says all that was asked for."""
        if asked.has_failed:
            return
        if asked.command == p.Cmd.BLOCK_STATUS and not asked.chunks:
            raise self._wrong("a block status without a status")
        if asked.command != p.Cmd.READ:
            return
        if asked.position != asked.offset + asked.length:
            raise self._wrong(f"a read ends without its bytes from {asked.position} on")
