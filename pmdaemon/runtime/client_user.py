"""The user behind one TCP connection of this machine: one question to the kernel, whatever else is connected.

``/proc/net/tcp`` would list every socket, also those of thousands of connections that have just ended. The
kernel's socket diagnosis (``sock_diag(7)``, ``linux/inet_diag.h``) is asked for the client's end alone. Where
it is not there, the table is read. A client's end without an open descriptor (an inode) belongs to nobody:
such a row says user 0, whoever made the socket.
"""

from __future__ import annotations

import errno
import ipaddress
import pwd
import socket
import struct
from typing import Final

from pmdaemon.runtime.sockets import client_rows, listener_uids, shortest

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLMSG_ERROR: Final = 2
NLM_F_REQUEST: Final = 1
ANY_STATE: Final = 0xFFFFFFFF
ANY_COOKIE: Final = 0xFFFFFFFF
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST: Final = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_ENDS: Final = struct.Struct("!HH16s16s")  # ports and addresses: of the socket itself, of its other end
_PLACE: Final = struct.Struct("=III")  # interface, cookie
_USER: Final = struct.Struct("=II")  # uid, inode
_USER_AT: Final = _HEADER.size + 4 + _ENDS.size + _PLACE.size + 12
ANSWER_BYTES: Final = 4096
LIMIT_S: Final = 5.0


def client_uid(connection: socket.socket) -> int | None:
    """The user that has the other end of a connection open; None: nobody on this machine, or nobody yet."""
    try:
        peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:  # it is gone already
        return None
    try:
        return _asked(peer, own)
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            return None
    rows = client_rows(own[1])
    row = rows.get((str(shortest(ipaddress.ip_address(peer[0]))), peer[1]))
    return row.uid if row is not None and row.inode else None


def server_uids(connection: socket.socket) -> set[int]:
    """Users at the other end of a connection that was dialled, or who may accept it; empty: none known.

    The listener is asked first. Had it been closed since, the connection would have been reset: so one that
    is not accepted yet waits for the very listener that was found.
    """
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it is gone already
        return set()
    listening = listener_uids(host, port)
    uid = client_uid(connection)
    return listening if uid is None else {uid}


def user_name(uid: int) -> str:
    """The user's name, or number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _asked(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """As ``client_uid``.

    Raises:
        OSError: ENOENT: there is no such socket; else the kernel cannot be asked.
    """
    addresses = [shortest(ipaddress.ip_address(host)) for host in (peer[0], own[0])]
    family = socket.AF_INET if addresses[0].version == 4 else socket.AF_INET6
    ends = _ENDS.pack(peer[1], own[1], *(address.packed.ljust(16, b"\0") for address in addresses))
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ANY_STATE) + ends
    body += _PLACE.pack(0, ANY_COOKIE, ANY_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(LIMIT_S)
        netlink.sendto(header + body, (0, 0))
        answer = netlink.recv(ANSWER_BYTES)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise OSError(-code, "the kernel does not know that socket")
    uid, inode = _USER.unpack_from(answer, _USER_AT)
    return int(uid) if inode else None
