"""Extended headers: lengths of 64 bits, where client and upstream both have them. Sans-IO.

    request             EXTENDED_REQUEST_MAGIC u32 | flags u16 | command u16 | cookie u64 | offset u64 |
                        length u64 | [data, with the flag PAYLOAD_LEN]
    chunk               CHUNK_MAGIC u32 | flags u16 | type u16 | cookie u64 | offset of the request u64 |
                        length u64 | payload
      block status      context id u32 | number of extents u32 | (length u64 | state u64) of each extent

So one request zeroes or trims more than 4 GiB, and one block status speaks of as much. All replies are
chunks; what they may be, and how each is checked, is as in ``chunks``.

Source: the extension EXTENDED_HEADERS of the NBD protocol document (branch extension-ext-header).
"""

from __future__ import annotations

import struct
from typing import Final

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.buffers import COMMAND, COOKIE, LENGTH, OFFSET, Finished, InFlight, Request
from gateway_agent.nbd.chunks import MOST_HEAD_BYTES, ChunkReader
from gateway_agent.nbd.ledger import ChangeLedger
from gateway_agent.nbd.replies import (
    AskedRequests,
    Replies,
    ReplyProgress,
    ReplyReader,
    SimpleReplyTranslator,
)
from gateway_agent.nbd.upstream_handshake import Agreed

CHUNK_MAGIC: Final = 0x6E8A278C
CHUNK: Final = struct.Struct(">IHHQQQ")
BLOCK_STATUS: Final = 6
MOST_EXTENDED_HEAD_BYTES: Final = MOST_HEAD_BYTES - p.CHUNK_BYTES + CHUNK.size
_DATA_CHUNK: Final = struct.Struct(">IHHQQQQ")
_STATUS_HEAD: Final = struct.Struct(">II")
_EXTENT: Final = struct.Struct(">QQ")
_MOST_PAYLOAD_BYTES: Final = 0xFFFF_FFFF  # the protocol's own: a length above it is a mistake


def error_chunk(cookie: int, begin: int, error: int, text: str, place: int | None = None) -> bytes:
    """The only chunk of a request that begins at ``begin``; see ``protocol.error_chunk``."""
    return _with_offset(p.error_chunk(cookie, error, text, place), begin)


def status_chunk(cookie: int, begin: int, context_id: int, extents: list[tuple[int, int]]) -> bytes:
    """Block status of a request that begins at ``begin``; extents as in ``protocol.status_chunk``."""
    payload = _STATUS_HEAD.pack(context_id, len(extents)) + b"".join(_EXTENT.pack(*each) for each in extents)
    return CHUNK.pack(CHUNK_MAGIC, p.CHUNK_DONE, BLOCK_STATUS, cookie, begin, len(payload)) + payload


def _with_offset(chunk: bytes, begin: int) -> bytes:
    """A chunk whose payload is the same in both forms."""
    _, flags, kind, cookie, length = p.CHUNK.unpack_from(chunk)
    return CHUNK.pack(CHUNK_MAGIC, flags, kind, cookie, begin, length) + chunk[p.CHUNK_BYTES :]


def all_is_data(request: Request, mode: p.ReplyMode) -> bytes:
    """A block status in the place of an upstream that has none."""
    cookie, extents = request[COOKIE], [(request[LENGTH], 0)]
    if mode.extended:
        return status_chunk(cookie, request[OFFSET], p.ALLOCATION_ID, extents)
    return p.status_chunk(cookie, p.ALLOCATION_ID, extents, True)


def most_head_bytes(agreed: Agreed) -> int:
    """The longest piece of a reply that must be here whole to be understood."""
    if agreed.extended:
        return MOST_EXTENDED_HEAD_BYTES
    return MOST_HEAD_BYTES if agreed.structured else p.SIMPLE_REPLY_BYTES


def reader_of(
    peer: str, asked: AskedRequests | None, mode: p.ReplyMode, agreed: Agreed, failures: ChangeLedger
) -> Replies:
    """What reads the replies of an upstream for a client.

    Args:
        peer: for error texts.
        asked: the requests under way; there are some if the client has structured replies.
        mode: how the client wants its replies.
        agreed: how the upstream replies.
        failures: where flushes that fail are counted.
    """
    if asked is None or not mode.structured:
        return ReplyReader(peer, asked, failures)
    if agreed.extended:
        return ExtendedChunkReader(peer, asked, agreed.context_id)
    if agreed.structured:
        return ChunkReader(peer, asked, agreed.context_id)
    return SimpleReplyTranslator(peer, asked)


class ExtendedChunkReader(ChunkReader):
    """See the module docstring, ``ChunkReader`` and ``replies.Replies``."""

    _least_bytes = _head_bytes = CHUNK.size
    _status_bytes = _STATUS_HEAD.size + _EXTENT.size

    def _on_reply(self, view: memoryview) -> tuple[int, int | None]:
        magic, flags, kind, cookie, begin, length = CHUNK.unpack_from(view)
        if magic != CHUNK_MAGIC:
            raise self._wrong(f"reply with magic {magic:#x}")
        if length > _MOST_PAYLOAD_BYTES:
            raise self._wrong(f"a chunk of {length} bytes")
        if (asked := self._asked.get(cookie)) is not None and asked[OFFSET] != begin:
            raise self._wrong(f"a chunk for offset {begin} of a request at {asked[OFFSET]}")
        if kind == p.Chunk.BLOCK_STATUS:
            raise self._wrong("a block status without its extended form")
        kind = p.Chunk.BLOCK_STATUS if kind == BLOCK_STATUS else kind
        return self._on_chunk(view, flags, kind, cookie, length)

    def _whole_reads(
        self,
        view: memoryview,
        offset: int,
        paused_ns: int,
        inflight: InFlight,
        now_ns: int,
        finished: Finished,
    ) -> int:
        size, asked, begun, unpack = len(view), self._asked, self._asked.begun, _DATA_CHUNK.unpack_from
        while size - offset >= _DATA_CHUNK.size:
            magic, flags, kind, cookie, begin, length, place = unpack(view, offset)
            found = asked.get(cookie)
            end = offset + CHUNK.size + length
            if magic != 0x6E8A278C or kind != 1 or flags != 1 or found is None or end > size:
                break
            if found[COMMAND] or not found[OFFSET] == begin == place or found[LENGTH] + 8 != length:
                break
            if length == 8 or (begun and cookie in begun):
                break
            del asked[cookie]
            arrived_ns, sent_ns, word, _ = inflight.pop(cookie)
            finished += (paused_ns, word, arrived_ns, sent_ns, now_ns)
            offset = end
        return offset

    def _on_status(self, asked: ReplyProgress, view: memoryview, length: int) -> None:
        extents, rest = divmod(length - _STATUS_HEAD.size, _EXTENT.size)
        context_id, said = _STATUS_HEAD.unpack_from(view)
        if rest or said != extents or not extents:
            raise self._wrong(f"a block status of {length} bytes with {said} extents")
        self._check_status(asked, context_id, extents)
        self._check_first(_EXTENT.unpack_from(view, _STATUS_HEAD.size)[0])
        _STATUS_HEAD.pack_into(view, 0, p.ALLOCATION_ID, said)
