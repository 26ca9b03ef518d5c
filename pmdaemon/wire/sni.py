"""Which gateway a TLS connection is of, before its handshake begins. Pure.

A TLS session cannot be handed from one pair process to another, so it must begin in the right one. An agent
therefore names its gateway as the server name of its ClientHello: ``GATEWAY_ID.gateway.invalid``. The pair
peeks at the first bytes, which stay in the kernel, and hands the untouched socket to the owner of the
gateway's shard. The name is a hint for routing and proves nothing; the certificate does.

``ClientHello`` (RFC 8446 4.1.2) within one record, as far as needed; bytes:

    1 type 22 | 2 version | 2 length                                    record
    1 type 1  | 3 length  | 2 version | 32 random                       handshake
    1+n session id | 2+n cipher suites | 1+n compression methods
    2 length | extensions: 2 type | 2 length | content             type 0: 2 list length, 1 type 0, 2+n name

What is not that, or has not arrived whole, yields None: the connection is then served where it is.
"""

from __future__ import annotations

import uuid
from typing import Final

SUFFIX: Final = ".gateway.invalid"
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_FIXED: Final = 5 + 4 + 2 + 32


def name_of(gateway_id: str) -> str:
    """The server name by which an agent asks for the pair that has its gateway."""
    return gateway_id + SUFFIX


def gateway_named(data: bytes) -> str | None:
    """The gateway_id in a ClientHello, or None."""
    name = _server_name(data)
    if name is None or not name.endswith(SUFFIX):
        return None
    try:
        return str(uuid.UUID(name.removesuffix(SUFFIX)))
    except ValueError:
        return None


def _server_name(data: bytes) -> str | None:
    if len(data) <= _FIXED or data[0] != _HANDSHAKE or data[5] != _CLIENT_HELLO:
        return None
    try:
        at = _FIXED + 1 + data[_FIXED]
        at += 2 + _u16(data, at)
        at += 1 + data[at]
        end = at + 2 + _u16(data, at)
        at += 2
        while at < end:
            kind, size = _u16(data, at), _u16(data, at + 2)
            at += 4
            if kind == 0:
                length = _u16(data, at + 3)
                name = data[at + 5 : at + 5 + length]
                return name.decode("ascii") if data[at + 2] == 0 and len(name) == length else None
            at += size
    except (IndexError, UnicodeDecodeError):
        return None
    return None


def _u16(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]
