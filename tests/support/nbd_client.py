"""A second, independent implementation of the little NBD that a demonstration needs.

It shares no code with ``gateway_agent.nbd`` on purpose: a mistake there must not be cancelled by the same
mistake in the load generator. Fixed newstyle, EXPORT_NAME only on the client side; simple replies.

Source: the NBD protocol document (fixed newstyle negotiation, transmission phase).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

NBDMAGIC: Final = 0x4E42444D41474943
IHAVEOPT: Final = 0x49484156454F5054
REPLY_MAGIC: Final = 0x3E889045565A9
REQUEST: Final = struct.Struct(">IHHQQI")
REQUEST_MAGIC: Final = 0x25609513
SIMPLE: Final = struct.Struct(">IIQ")
SIMPLE_MAGIC: Final = 0x67446698
READ, WRITE, DISC, FLUSH, TRIM, _CACHE, ZEROES = range(7)
OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST, OPT_INFO, OPT_GO = 1, 2, 3, 6, 7
REP_ACK, REP_SERVER, REP_INFO = 1, 2, 3
REP_ERR_UNSUP = (1 << 31) + 1
TRANSMISSION_FLAGS: Final = 0b0010_0101  # has flags, flush, trim


async def server_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size_bytes: int
) -> str | None:
    """Negotiate as a server where any export name exists; the chosen name, None if the client gave up."""
    writer.write(struct.pack(">QQH", NBDMAGIC, IHAVEOPT, 3))
    flags = struct.unpack(">I", await reader.readexactly(4))[0]
    while True:
        _magic, option, length = struct.unpack(">QII", await reader.readexactly(16))
        data = await reader.readexactly(length)
        if option == OPT_EXPORT_NAME:
            writer.write(
                struct.pack(">QH", size_bytes, TRANSMISSION_FLAGS) + (b"" if flags & 2 else bytes(124))
            )
            return data.decode()
        if option in (OPT_GO, OPT_INFO):
            info = struct.pack(">HQH", 0, size_bytes, TRANSMISSION_FLAGS)
            writer.write(_reply(option, REP_INFO, info) + _reply(option, REP_ACK, b""))
            if option == OPT_GO:
                return data[4 : 4 + struct.unpack_from(">I", data)[0]].decode()
        elif option == OPT_LIST:
            writer.write(_reply(option, REP_SERVER, struct.pack(">I", 0)) + _reply(option, REP_ACK, b""))
        elif option == OPT_ABORT:
            writer.write(_reply(option, REP_ACK, b""))
            return None
        else:
            writer.write(_reply(option, REP_ERR_UNSUP, b""))


def _reply(option: int, kind: int, data: bytes) -> bytes:
    return struct.pack(">QIII", REPLY_MAGIC, option, kind, len(data)) + data


async def client_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, export: str) -> int:
    """Negotiate as a client; returns the export's size in bytes.

    Raises:
        ConnectionError: the server closed the connection, which is how it refuses an export.
    """
    magic, opts, _flags = struct.unpack(">QQH", await reader.readexactly(18))
    if (magic, opts) != (NBDMAGIC, IHAVEOPT):
        raise ConnectionError("the peer does not speak NBD")
    name = export.encode()
    writer.write(struct.pack(">I", 3) + struct.pack(">QII", IHAVEOPT, OPT_EXPORT_NAME, len(name)) + name)
    try:
        size, _flags = struct.unpack(">QH", await reader.readexactly(10))
    except asyncio.IncompleteReadError as exc:
        raise ConnectionError(f"the server refused export {export!r}") from exc
    return int(size)
