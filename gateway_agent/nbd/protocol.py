r"""NBD on the wire: constants and pure parsers of fixed newstyle negotiation and simple transmission.

No state and no I/O; every structure is big-endian. Used by the gateway's two sides and by load generators.

    server greeting     NBDMAGIC u64 | IHAVEOPT u64 | handshake flags u16
    client flags        u32
    option              IHAVEOPT u64 | option u32 | length u32 | data
    option reply        REPLY_MAGIC u64 | option u32 | type u32 | length u32 | data
    request             REQUEST_MAGIC u32 | flags u16 | command u16 | cookie u64 | offset u64 |
                        length u32 | [data of a write]
    simple reply        SIMPLE_MAGIC u32 | error u32 | cookie u64 | [data of a read without error]
    chunk               CHUNK_MAGIC u32 | flags u16 | type u16 | cookie u64 | length u32 | payload
      data              offset u64 | bytes of the volume
      hole              offset u64 | length u32
      block status      context id u32 | (length u32 | state u32) of each extent
      error             error u32 | length of the text u16 | text | [offset u64]

Source: the NBD protocol document of the NetworkBlockDevice project (doc/proto.md), sections "Newstyle
negotiation", "Request message", "Simple reply message", "Structured reply chunk message", "Structured reply
types", "Metadata querying".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Literal

NBDMAGIC: Final = 0x4E42444D41474943
IHAVEOPT: Final = 0x49484156454F5054
OPTION_REPLY_MAGIC: Final = 0x3E889045565A9
REQUEST_MAGIC: Final = 0x25609513
EXTENDED_REQUEST_MAGIC: Final = 0x21E41C71
SIMPLE_REPLY_MAGIC: Final = 0x67446698
CHUNK_MAGIC: Final = 0x668E33EF

GREETING: Final = struct.Struct(">QQH")
CLIENT_FLAGS: Final = struct.Struct(">I")
OPTION: Final = struct.Struct(">QII")
OPTION_REPLY: Final = struct.Struct(">QIII")
REQUEST: Final = struct.Struct(">IHHQQI")
EXTENDED_REQUEST: Final = struct.Struct(">IHHQQQ")
SIMPLE_REPLY: Final = struct.Struct(">IIQ")
CHUNK: Final = struct.Struct(">IHHQI")
DATA_CHUNK: Final = struct.Struct(">IHHQIQ")
HOLE_CHUNK: Final = struct.Struct(">IHHQIQI")
STATUS_CHUNK: Final = struct.Struct(">IHHQII")
ERROR_CHUNK: Final = struct.Struct(">IHHQIIH")
EXTENT: Final = struct.Struct(">II")
EXPORT_INFO: Final = struct.Struct(">HQH")
EXPORT_NAME_REPLY: Final = struct.Struct(">QH")
BLOCK_SIZE_INFO: Final = struct.Struct(">HIII")

SIMPLE_REPLY_BYTES: Final = SIMPLE_REPLY.size
CHUNK_BYTES: Final = CHUNK.size
DATA_HEAD_BYTES: Final = DATA_CHUNK.size

FLAG_FIXED_NEWSTYLE: Final = 1
FLAG_NO_ZEROES: Final = 2

TlsMode = Literal["off", "offer", "require"]
"""What a client may or must ask for with STARTTLS."""


class Opt(IntEnum):
    """Options a client may send."""

    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    STARTTLS = 5
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10
    EXTENDED_HEADERS = 11


class Rep(IntEnum):
    """Types of option reply; the error bit is 2**31."""

    ACK = 1
    SERVER = 2
    INFO = 3
    META_CONTEXT = 4
    ERR_UNSUP = 0x80000001
    ERR_POLICY = 0x80000002
    ERR_INVALID = 0x80000003
    ERR_TLS_REQD = 0x80000005
    ERR_UNKNOWN = 0x80000006
    ERR_SHUTDOWN = 0x80000007
    ERR_BLOCK_SIZE_REQD = 0x80000008
    ERR_TOO_BIG = 0x80000009
    ERR_EXT_HEADER_REQD = 0x8000000A


REP_ERROR_BIT: Final = 1 << 31


class Info(IntEnum):
    """Kinds of information in INFO replies."""

    EXPORT = 0
    NAME = 1
    DESCRIPTION = 2
    BLOCK_SIZE = 3


class Cmd(IntEnum):
    """Commands of the transmission phase."""

    READ = 0
    WRITE = 1
    DISC = 2
    FLUSH = 3
    TRIM = 4
    CACHE = 5
    WRITE_ZEROES = 6
    BLOCK_STATUS = 7


CMD_FLAG_FUA: Final = 1
CMD_FLAG_NO_HOLE: Final = 2
CMD_FLAG_DF: Final = 4
CMD_FLAG_REQ_ONE: Final = 8
CMD_FLAG_FAST_ZERO: Final = 16
CMD_FLAG_PAYLOAD_LEN: Final = 32


class Chunk(IntEnum):
    """Types of structured reply chunk."""

    NONE = 0
    OFFSET_DATA = 1
    OFFSET_HOLE = 2
    BLOCK_STATUS = 5
    ERROR = 0x8001
    ERROR_OFFSET = 0x8002


CHUNK_DONE: Final = 1 << 0
CHUNK_ERROR_BIT: Final = 1 << 15

STATE_HOLE: Final = 1 << 0
STATE_ZERO: Final = 1 << 1
ALLOCATION: Final = "base:allocation"
ALLOCATION_ID: Final = 1
"""Context id of ``ALLOCATION`` for our clients, whatever an upstream calls it."""

TX_HAS_FLAGS: Final = 1 << 0
TX_READ_ONLY: Final = 1 << 1
TX_SEND_FLUSH: Final = 1 << 2
TX_SEND_FUA: Final = 1 << 3
TX_ROTATIONAL: Final = 1 << 4
TX_SEND_TRIM: Final = 1 << 5
TX_SEND_WRITE_ZEROES: Final = 1 << 6
TX_SEND_DF: Final = 1 << 7
TX_CAN_MULTI_CONN: Final = 1 << 8
TX_SEND_CACHE: Final = 1 << 10
TX_SEND_FAST_ZERO: Final = 1 << 11
TX_CHANGES: Final = TX_SEND_TRIM | TX_SEND_WRITE_ZEROES | TX_SEND_FAST_ZERO
"""What a volume that may be changed can offer beside writes."""
TX_PASSED_ON: Final = (
    TX_HAS_FLAGS
    | TX_READ_ONLY
    | TX_SEND_FLUSH
    | TX_SEND_FUA
    | TX_ROTATIONAL
    | TX_SEND_TRIM
    | TX_SEND_WRITE_ZEROES
    | TX_SEND_DF
    | TX_CAN_MULTI_CONN
    | TX_SEND_CACHE
    | TX_SEND_FAST_ZERO
)
"""Transmission flags of an upstream that the gateway can offer too; SEND_DF only with structured replies."""

EPERM: Final = 1
EIO: Final = 5
ENOMEM: Final = 12
EINVAL: Final = 22
ENOSPC: Final = 28
EOVERFLOW: Final = 75
ENOTSUP: Final = 95
ESHUTDOWN: Final = 108
WIRE_ERRORS: Final = frozenset((EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN))
"""The error numbers the protocol knows; anything else travels as EIO."""
_MEANS: Final = {27: ENOSPC, 122: ENOSPC, 30: EPERM}
"""EFBIG and EDQUOT, as the protocol wants; EROFS, as nbdkit and QEMU."""

MAX_OPTION_BYTES: Final = 65_536  # GO with an export name of 4,096 and every information request is far below
MAX_NAME_BYTES: Final = 4_096  # the protocol's own limit on strings
MAX_PAYLOAD_BYTES: Final = (
    32 << 20
)  # what the protocol says a server must expect when nothing else was agreed
MAX_MINIMUM_BLOCK_BYTES: Final = 65_536  # the protocol's own limit
NAME_PADDING: Final = bytes(124)


class BadOption(ValueError):
    """An option's data does not have the form the protocol prescribes; answered with ERR_INVALID."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """What requests of an export must keep to, bytes; the defaults hold when nothing was agreed.

    Attributes:
        minimum: a power of two; every offset and length is a multiple of it.
        preferred: a power of two; requests below it may be slow.
        maximum: of a read's or write's data; never above ``MAX_PAYLOAD_BYTES``.
    """

    minimum: int = 1
    preferred: int = 4_096
    maximum: int = MAX_PAYLOAD_BYTES

    @property
    def is_strict(self) -> bool:
        """Whether they refuse what a client that knows none may send."""
        return self.minimum > 1 or self.maximum < MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class ReplyMode:
    """How a client wants its replies.

    Attributes:
        structured: in chunks (STRUCTURED_REPLY).
        allocation: it selected the context ``base:allocation``, and so may ask for block status.
        extended: with extended headers (``extended``), as its requests are; then ``structured``, too.
    """

    structured: bool = False
    allocation: bool = False
    extended: bool = False


SIMPLE_REPLIES: Final = ReplyMode()
"""What holds for a client that asks for nothing."""


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What negotiation says about an export: its size, its transmission flags and its block sizes."""

    size_bytes: int
    flags: int
    blocks: BlockSizes = BlockSizes()

    def for_client(self, mode: ReplyMode) -> ExportFacts:
        """What a client is shown: SEND_DF only with structured replies."""
        return self if mode.structured else replace(self, flags=self.flags & ~TX_SEND_DF)


def wire_error(errno: int) -> int:
    """Error number for the wire of an operating-system error; 0 stays 0."""
    return errno if not errno or errno in WIRE_ERRORS else _MEANS.get(errno, EIO)


def greeting() -> bytes:
    """What a server says first."""
    return GREETING.pack(NBDMAGIC, IHAVEOPT, FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES)


def option(opt: int, data: bytes = b"") -> bytes:
    """One option as a client sends it."""
    return OPTION.pack(IHAVEOPT, opt, len(data)) + data


def option_reply(opt: int, kind: int, data: bytes = b"") -> bytes:
    """One reply to an option."""
    return OPTION_REPLY.pack(OPTION_REPLY_MAGIC, opt, kind, len(data)) + data


def go_data(name: str, infos: tuple[int, ...] = ()) -> bytes:
    """Data of GO and INFO."""
    raw = name.encode()
    return struct.pack(f">I{len(raw)}sH{len(infos)}H", len(raw), raw, len(infos), *infos)


def parse_go(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Export name and wanted information kinds of GO or INFO.

    Raises:
        BadOption: lengths that contradict each other, or a name that is not UTF-8.
    """
    if len(data) < 6:
        raise BadOption("data is too short")
    name_bytes = int.from_bytes(data[:4], "big")
    if name_bytes > MAX_NAME_BYTES or len(data) < 6 + name_bytes:
        raise BadOption("the export name is longer than the data")
    wanted = int.from_bytes(data[4 + name_bytes : 6 + name_bytes], "big")
    if len(data) != 6 + name_bytes + 2 * wanted:
        raise BadOption("the list of information requests does not fill the data")
    return decode_name(data[4 : 4 + name_bytes]), struct.unpack_from(f">{wanted}H", data, 6 + name_bytes)


def decode_name(raw: bytes, what: str = "export name") -> str:
    """An export name, or another string of that limit.

    Raises:
        BadOption: too long, or not UTF-8.
    """
    if len(raw) > MAX_NAME_BYTES:
        raise BadOption(f"the {what} of {len(raw)} bytes is above the limit of {MAX_NAME_BYTES}")
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise BadOption(f"the {what} is not UTF-8") from exc


def info_export(facts: ExportFacts) -> bytes:
    """Data of the INFO reply that every GO and INFO needs."""
    return EXPORT_INFO.pack(Info.EXPORT, facts.size_bytes, facts.flags)


def info_block_size(blocks: BlockSizes) -> bytes:
    """Data of the INFO reply about block sizes."""
    return BLOCK_SIZE_INFO.pack(Info.BLOCK_SIZE, blocks.minimum, blocks.preferred, blocks.maximum)


def parse_block_size(data: bytes) -> BlockSizes:
    """Block sizes in an INFO reply, the larger two brought down to what this side can carry.

    Raises:
        BadOption: not of the form or not in the relations that the protocol prescribes.
    """
    if len(data) != BLOCK_SIZE_INFO.size:
        raise BadOption(f"block sizes of {len(data)} bytes, not {BLOCK_SIZE_INFO.size}")
    _, minimum, preferred, maximum = BLOCK_SIZE_INFO.unpack(data)
    are_powers = all(size and not size & (size - 1) for size in (minimum, preferred))
    if not are_powers or minimum > min(preferred, maximum, MAX_MINIMUM_BLOCK_BYTES):
        raise BadOption(
            f"impossible block sizes: minimum {minimum}, preferred {preferred}, maximum {maximum}"
        )
    maximum = min(maximum, MAX_PAYLOAD_BYTES)
    return BlockSizes(minimum, min(preferred, MAX_PAYLOAD_BYTES), maximum - maximum % minimum)


def meta_context_data(name: str, queries: Sequence[str]) -> bytes:
    """Data of LIST_META_CONTEXT and SET_META_CONTEXT."""
    strings = [each.encode() for each in (name, *queries)]
    sized = [len(raw).to_bytes(4, "big") + raw for raw in strings]
    return b"".join((sized[0], len(queries).to_bytes(4, "big"), *sized[1:]))


def parse_meta_context(data: bytes) -> tuple[str, list[str]]:
    """Export name and queries of LIST_META_CONTEXT or SET_META_CONTEXT.

    Raises:
        BadOption: lengths that contradict each other, or a string that is too long or not UTF-8.
    """
    name, at = _sized_string(data, 0, "export name")
    count, at = int.from_bytes(data[at : at + 4], "big"), at + 4
    queries: list[str] = []
    while at < len(data) and len(queries) < count:
        query, at = _sized_string(data, at, "query")
        queries.append(query)
    if at != len(data) or len(queries) != count:
        raise BadOption(f"{count} queries do not fill the data")
    return name, queries


def _sized_string(data: bytes, at: int, what: str) -> tuple[str, int]:
    """A string behind its length, and where it ends."""
    size, begin = int.from_bytes(data[at : at + 4], "big"), at + 4
    if size > len(data) - begin:
        raise BadOption(f"the {what} is longer than the data")
    return decode_name(data[begin : begin + size], what), begin + size


def meta_context(context_id: int, name: str) -> bytes:
    """Data of a META_CONTEXT reply."""
    return context_id.to_bytes(4, "big") + name.encode()


def info_text(kind: Info, text: str) -> bytes:
    """Data of the INFO replies NAME and DESCRIPTION."""
    return kind.to_bytes(2, "big") + text.encode()[:MAX_NAME_BYTES]


def server_entry(name: str) -> bytes:
    """Data of one LIST reply."""
    raw = name.encode()
    return len(raw).to_bytes(4, "big") + raw


def request(command: int, cookie: int, offset: int, length: int, flags: int = 0) -> bytes:
    """One request header."""
    return REQUEST.pack(REQUEST_MAGIC, flags, command, cookie, offset, length)


def extended_request(command: int, cookie: int, offset: int, length: int, flags: int = 0) -> bytes:
    """The same with extended headers; a write has PAYLOAD_LEN."""
    flags |= CMD_FLAG_PAYLOAD_LEN if command == Cmd.WRITE else 0
    return EXTENDED_REQUEST.pack(EXTENDED_REQUEST_MAGIC, flags, command, cookie, offset, length)


def simple_reply(cookie: int, error: int = 0) -> bytes:
    """One simple reply header."""
    return SIMPLE_REPLY.pack(SIMPLE_REPLY_MAGIC, error, cookie)


def data_chunk_head(cookie: int, offset: int, length: int, last: bool) -> bytes:
    """Head of a chunk with ``length`` bytes of the volume, which follow it; ``length`` is above 0."""
    return DATA_CHUNK.pack(CHUNK_MAGIC, last, Chunk.OFFSET_DATA, cookie, length + 8, offset)


def hole_chunk(cookie: int, offset: int, length: int, last: bool) -> bytes:
    """A range that reads as zeroes; ``length`` is above 0."""
    return HOLE_CHUNK.pack(CHUNK_MAGIC, last, Chunk.OFFSET_HOLE, cookie, 12, offset, length)


def status_chunk(cookie: int, context_id: int, extents: Sequence[tuple[int, int]], last: bool) -> bytes:
    """Block status.

    Args:
        cookie: of the request.
        context_id: the client's.
        extents: (length in bytes, state) of consecutive ranges, the first at the request's offset; not empty.
        last: whether it ends the reply.
    """
    head = STATUS_CHUNK.pack(CHUNK_MAGIC, last, Chunk.BLOCK_STATUS, cookie, 4 + 8 * len(extents), context_id)
    return head + b"".join(EXTENT.pack(length, state) for length, state in extents)


def error_chunk(cookie: int, error: int, text: str, offset: int | None = None, last: bool = True) -> bytes:
    """An error, with a text for people.

    Args:
        cookie: of the request.
        error: one of ``WIRE_ERRORS``.
        text: cut at the protocol's limit.
        offset: where it occurred, within the request; None: it has no place.
        last: whether it ends the reply.
    """
    raw = text.encode()[:MAX_NAME_BYTES].decode(errors="ignore").encode()
    kind, place = (Chunk.ERROR, b"") if offset is None else (Chunk.ERROR_OFFSET, offset.to_bytes(8, "big"))
    size = 6 + len(raw) + len(place)
    return ERROR_CHUNK.pack(CHUNK_MAGIC, last, kind, cookie, size, error, len(raw)) + raw + place


def none_chunk(cookie: int) -> bytes:
    """The end of a reply."""
    return CHUNK.pack(CHUNK_MAGIC, CHUNK_DONE, Chunk.NONE, cookie, 0)
