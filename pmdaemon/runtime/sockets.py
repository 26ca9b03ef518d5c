"""Sockets of this machine: opening a listener, accepting, dialling, and the user behind a local connection.

Without descriptors or memory ``accept`` fails, and the connection stays in the backlog: the listener remains
readable, and a loop that goes on without a pause spins. Every accept loop calls ``accept`` here, which makes
it pause.

TCP on the loopback interface says nothing about its other end; the kernel's tables ``/proc/net/tcp`` and
``/proc/net/tcp6`` do: each socket of this machine is listed with its two addresses, its state and the number
of the user that made it. Linux only.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.excerpt import printable

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

log = structlog.get_logger("sockets")

BACKLOG: Final = 1024
"""Connections between the start and the first accept wait here; a fleet dials in at once."""
ACCEPT_PAUSE_NS: Final = 10**9
"""Descriptors come back when connections end, which takes seconds; a try a second costs nothing."""
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
PROCESSES: Final = Path("/proc")
UNKNOWN: Final = "?"
MOST_COMMAND: Final = 80
"""Characters of a command line shown: its program, and its first arguments."""
_LISTEN: Final = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def open_listener(setting: str, host: str, port: int) -> socket.socket:
    """Bind and listen; blocking.

    Args:
        setting: the key the address comes from, for the error.
        host: an IP address.
        port: 0 takes any free one.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            setting,
            f"cannot listen on {host}:{port}: {why_not(exc, host, port)}",
            f"Stop what uses the port ('ss -ltnp sport = :{port}' names it; it may be the SLA server of "
            f"another data directory), or choose another port for {setting}; 0 takes a free one",
        ) from exc
    return listener


def accept(
    listener: socket.socket, pause: Callable[[int], None]
) -> tuple[socket.socket, tuple[str, int]] | None:
    """Accept one connection of a non-blocking listener; None if none waits, or accepting failed.

    Args:
        listener: of IPv4 or IPv6; of a Unix socket, the address that is returned means nothing.
        pause: called with ``ACCEPT_PAUSE_NS`` after a failure that will recur: its loop must not watch the
            listener for so long.
    """
    try:
        sock, peer = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # the peer is gone already
        return None
    except OSError as exc:  # out of descriptors, or of memory
        log.warning("accept-failed", error=exc.strerror or str(exc), again_in_s=ACCEPT_PAUSE_NS // 10**9)
        pause(ACCEPT_PAUSE_NS)
        return None
    return sock, peer


def wait_readable(sources: Iterable[FileDescriptorLike], limit_s: float | None = None) -> bool:
    """Whether one of them can be read, or has ended, within the limit.

    Of any descriptor: ``select.select`` raises ValueError for those above 1023.
    """
    waiting = select.poll()
    for source in sources:
        waiting.register(source, select.POLLIN)
    return bool(waiting.poll(None if limit_s is None else math.ceil(limit_s * 1000)))


def dial_error(sock: socket.socket) -> int:
    """Errno of a dial that has been answered (the socket has become writable); 0: it is connected.

    A dial to a port of the ephemeral range that no process listens on may connect to itself: that is refused.
    """
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return code
    try:
        is_own_echo = sock.getsockname() == sock.getpeername() != ""
    except OSError:  # it was reset since: there is no other end any more
        return errno.ECONNRESET
    return errno.ECONNREFUSED if is_own_echo else 0


class Socket(NamedTuple):
    """One row: both addresses in their shortest form (IPv4 also where the socket is of IPv6)."""

    local: tuple[str, int]
    remote: tuple[str, int]
    is_listening: bool
    uid: int
    inode: int = 0


def sockets(*, only_listening: bool = False) -> Iterator[Socket]:
    """TCP sockets of this network namespace, all or those that listen; an unreadable table has none."""
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if only_listening and fields[3] != _LISTEN:
                continue
            ends = _address(fields[1]), _address(fields[2])
            yield Socket(*ends, fields[3] == _LISTEN, int(fields[7]), int(fields[9]))


def _address(text: str) -> tuple[str, int]:
    """``0100007F:20DB`` -> (127.0.0.1, 8411): 32-bit words in the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[index : index + 8], 16) for index in range(0, len(digits), 8)]
    return str(shortest(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))), int(port, 16)


def shortest(address: Address) -> Address:
    """An address of IPv4 also where it was written as one of IPv6."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def listener_uids(host: str, port: int) -> set[int]:
    """Users that listen where a connection to ``host`` and ``port`` ends; empty: no process listens.

    The kernel prefers the listener of the address itself to one of every address, and one of IPv4 to one of
    IPv6. A listener of ``::`` beside one of IPv4 is another user's for IPv6 alone: the kernel refuses both
    for the same connections.
    """
    address = shortest(ipaddress.ip_address(host))
    places = [str(address), "0.0.0.0", "::"] if address.version == 4 else [str(address), "::"]  # noqa: S104
    listening = [row for row in sockets(only_listening=True) if row.local[1] == port]
    found = ({row.uid for row in listening if row.local[0] == place} for place in places)
    return next((uids for uids in found if uids), set())


class Listener(NamedTuple):
    """A process that listens somewhere.

    Attributes:
        pid: 0 if this user may not look into it.
        command: its command line, "" with pid 0.
        uid: the user that made the socket, -1 if nothing is known of it.
    """

    pid: int
    command: str
    uid: int

    def __str__(self) -> str:
        """For people."""
        if self.uid < 0:
            return "another process"
        if not self.pid:
            return f"a process of user {self.uid}, which root can name (ss -ltnp)"
        return f"process {self.pid} ({printable(self.command, MOST_COMMAND)})"


def listener_at(host: str, port: int) -> Listener | None:
    """What keeps others from listening at a port of an address; None if nothing does.

    A listener of every address keeps them from each single one, and the other way round.
    """
    address = str(shortest(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)))
    everywhere = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
    users = {
        row.inode: row.uid
        for row in sockets(only_listening=True)
        if row.local[1] == port
        if row.local[0] == address or not everywhere.isdisjoint((row.local[0], address))
    }
    if not users:
        return None
    for process in PROCESSES.glob("[0-9]*"):
        if (inode := next((each for each in _sockets_of(process) if each in users), None)) is not None:
            return Listener(int(process.name), command_of(int(process.name)), users[inode])
    return Listener(0, "", next(iter(users.values())))


def _sockets_of(process: Path) -> Iterator[int]:
    """Numbers of the sockets that a process has open; none if this user may not see them."""
    try:
        names = os.listdir(process / "fd")
    except OSError:
        return
    for name in names:
        try:
            kind, _, number = os.readlink(process / "fd" / name).partition(":")
        except OSError:  # closed meanwhile
            continue
        if kind == "socket":
            yield int(number.strip("[]"))


def command_of(pid: int) -> str:
    """The command line of a process; ``UNKNOWN`` if it is gone, or hidden from this user."""
    try:
        words = (PROCESSES / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
    except OSError:
        return UNKNOWN
    return words.replace("\0", " ") or UNKNOWN


def holder(error: OSError, host: str, port: int) -> Listener | None:
    """The process that has a port which could not be bound; None if that failed for another reason."""
    if error.errno != errno.EADDRINUSE:
        return None
    try:
        found = listener_at(host, port)
    except ValueError:  # a name instead of an address
        found = None
    return found or Listener(0, "", -1)


def why_not(error: OSError, host: str, port: int) -> str:
    """Why a port cannot be listened on: the error, and the process that has the port."""
    found = holder(error, host, port)
    return f"{error.strerror or error}" + (f" by {found}" if found is not None else "")


def client_rows(port: int) -> dict[tuple[str, int], Socket]:
    """Address of each local client of our port -> its row; clients of other machines are not in it."""
    return {row.local: row for row in sockets() if row.remote[1] == port and not row.is_listening}


def client_uids(port: int) -> dict[tuple[str, int], int]:
    """Address of each local client of our port -> its user; of one connection: ``client_user``."""
    return {place: row.uid for place, row in client_rows(port).items()}


def unix_peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end of a connected Unix socket (the one that called listen)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", packed)
    return int(uid)
