"""Addresses and sockets of the data plane: listening, connecting, and clients' names by their addresses."""

from __future__ import annotations

import contextlib
import errno
import grp
import ipaddress
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from gateway_agent.errors import UpstreamError
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import split_address
from pmdaemon.runtime.sockets import Listener, command_of, dial_error, holder, why_not

NBD_PORT = 10809  # IANA
_BACKLOG = 4096  # a host that starts connects all its disks at once; the kernel may allow less
_BUFFER_BYTES = 1 << 20  # a batch of 64 replies of 4 KiB in one send; the kernel may allow less
_UCRED = struct.Struct("3i")
_NO_NAME = re.compile(r"[^A-Za-z0-9._:@-]")

_ALL_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class Connection(Protocol):
    """What negotiation and sessions use of a client's or an upstream's socket; it may be encrypted (``tls``).

    Non-blocking: ``recv``, ``recv_into`` and ``send`` raise BlockingIOError. Bytes that ``send`` did not take
    are given to it again, before any others.
    """

    def fileno(self) -> int:
        """Descriptor to be watched."""

    def recv(self, count: int, /) -> bytes:
        """Received bytes; none when the peer has ended."""

    def recv_into(self, view: memoryview, /) -> int:
        """The same into ``view``; returns how many."""

    def send(self, data: memoryview | bytes, /) -> int:
        """How many bytes of ``data`` were taken."""

    def shutdown(self, how: int, /) -> None:
        """End our direction (``SHUT_WR``)."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or connect: ``path`` for a Unix socket, else ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """The form used in configuration and logs."""
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_listen(text: str) -> Address:
    """``unix:PATH`` or ``tcp:HOST:PORT`` (port 0: any free one; IPv6 in brackets).

    Raises:
        ValueError: another form.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return Address(path=rest)
    found = split_address(rest)
    if scheme != "tcp" or found is None:
        raise ValueError(f"{text!r} is neither unix:PATH nor tcp:HOST:PORT, the port at most 65535")
    host, port = found
    check_host(host)
    return Address(host=host, port=port)


def collide(one: Address, other: Address) -> bool:
    """Whether two sockets cannot listen at both: the same path, or the same port of one or of all hosts."""
    if one.path or other.path:
        return bool(one.path and other.path) and os.path.abspath(one.path) == os.path.abspath(other.path)
    hosts = {_canonical(one.host), _canonical(other.host)}
    families = {":" in host for host in hosts}
    is_shared = len(hosts) == 1 or (len(families) == 1 and not hosts.isdisjoint(_ALL_HOSTS))
    return is_shared and one.port == other.port and bool(one.port)


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        return host


def check_host(host: str) -> None:
    """See that a host's name has a form that can be looked up; whether there is one is not asked.

    Raises:
        ValueError: a label is empty or longer than 63 characters, or has a character that no name has.
    """
    try:
        host.encode("idna")
    except UnicodeError as exc:
        raise ValueError(f"{host!r} is no name of a host: {exc}; write its IP address") from exc


def parse_upstream(uri: str) -> tuple[Address, str]:
    """Address and export name of ``nbd+unix:///NAME?socket=PATH`` or ``nbd[s]://HOST[:PORT]/NAME``.

    Raises:
        ValueError: another form, no socket, or a host name (looking it up would stall all I/O of the plane).
    """
    parts = urlsplit(uri)
    name = unquote(parts.path.removeprefix("/"))
    if parts.scheme == "nbd+unix":
        path = parse_qs(parts.query).get("socket", [""])[0]
        if not path or "\0" in path or parts.netloc:
            raise ValueError(f"{uri!r} must look like nbd+unix:///NAME?socket=PATH")
        return Address(path=path), name
    if parts.scheme in ("nbd", "nbds") and parts.hostname:
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
        try:
            ipaddress.ip_address(host)
        except ValueError as exc:
            raise ValueError(
                f"{uri!r}: give the host as an IP address; a look-up would stall all I/O"
            ) from exc
        return Address(host=host, port=parts.port or NBD_PORT), name
    raise ValueError(f"{uri!r} is neither nbd+unix:///NAME?socket=PATH nor nbd[s]://HOST:PORT/NAME")


def uses_tls(uri: str) -> bool:
    """Whether an upstream is spoken to by TLS."""
    return uri.startswith("nbds:")


def is_own_host(host: str) -> bool:
    """Whether this is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_network(text: str) -> IpNetwork:
    """A network (``10.0.0.0/8``), or one address as such.

    Raises:
        ValueError: another form, or bits behind the prefix.
    """
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise ValueError(
            f"{text!r} is no network ({exc}); write 10.0.0.0/8, or 10.0.0.7 for one host"
        ) from exc


def group_id(name: str, setting: str) -> int:
    """Number of a group of this host to which this process may give its files; -1 without a name.

    It is looked up where the host has its groups, which may take long if that is another host.

    Raises:
        ConfigError: there is no such group, or this process may not.
    """
    if not name:
        return -1
    try:
        found = grp.getgrnam(name).gr_gid
    except (KeyError, ValueError) as exc:
        fix = "Write one that `getent group` lists, or make it with groupadd"
        raise ConfigError(setting, f"this host has no group {name!r}", fix) from exc
    if os.geteuid() and found not in (os.getegid(), *os.getgroups()):
        fix = f"Make its user a member: SupplementaryGroups={name} in its unit, or usermod -aG"
        raise ConfigError(setting, f"this process is not in group {name}, so it may give it nothing", fix)
    return found


def listen_at(address: Address, mode: int, setting: str = "", gid: int = -1) -> socket.socket:
    """A non-blocking listening socket. A stale Unix socket file (no process listens behind it) is replaced.

    Args:
        address: where.
        mode: permissions of a Unix socket.
        setting: that the address comes from, for the error.
        gid: group of a Unix socket; -1: that of any file that this process makes there.

    Raises:
        ConfigError: the address is in use (the error says by which process), or cannot be used.
    """
    try:
        if not address.path:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            sock = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
        else:
            sock = _listen_unix(address.path, mode, gid)
    except OSError as exc:
        why = exc.strerror or str(exc) if address.path else why_not(exc, address.host, address.port)
        fix = "Stop that process, or choose another address" if exc.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"{setting} {address}".strip(), f"cannot listen: {why}", fix or "Choose another address"
        ) from exc
    sock.setblocking(False)
    return sock


def _listen_unix(path: str, mode: int, gid: int) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o777 & ~mode)  # from its first moment the socket has its final permissions
    try:
        sock.bind(path)
        if gid >= 0:
            os.chown(path, -1, gid)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(previous)
    return sock


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(path, "exists and is not a socket", "Remove it, or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(path, "another process is listening there", "Stop it, or choose another path")


def taken_by(address: Address) -> Listener | None:
    """The process that keeps this one from listening there; None if nothing does, as far as that is known."""
    if address.path:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)  # its queue of connections may be full
            try:
                probe.connect(address.path)
            except OSError:
                return None
            pid, uid, _gid = _UCRED.unpack(
                probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
        return Listener(pid, command_of(pid), uid)
    is_ipv6 = ":" in address.host
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as exc:
            return holder(exc, address.host, address.port)
    return None


def unlink_own(address: Address) -> None:
    """Remove the file of a Unix socket that this process listened on."""
    if address.path:
        with contextlib.suppress(OSError):
            os.unlink(address.path)


def bound_address(sock: socket.socket) -> Address:
    """Where a socket listens, with its real port."""
    name = sock.getsockname()
    return Address(path=name) if sock.family == socket.AF_UNIX else Address(host=name[0], port=name[1])


def prepare(sock: socket.socket) -> None:
    """Non-blocking, large buffers, no delay."""
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def begin_connect(address: Address) -> socket.socket:
    """A socket that is connecting or connected; it is writable when that is decided.

    Raises:
        UpstreamError: refused at once.
    """
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family)
    except OSError as exc:  # out of descriptors, most likely
        raise UpstreamError(str(address), exc.strerror or "no socket") from exc
    try:
        prepare(sock)
        sock.connect(address.path or (address.host, address.port))
    except BlockingIOError as exc:
        if address.path:  # a Unix socket does not connect later: its queue of connections is full
            sock.close()
            raise UpstreamError(str(address), "its queue of new connections is full") from exc
    except OSError as exc:
        sock.close()
        raise UpstreamError(str(address), exc.strerror or "cannot connect") from exc
    return sock


def connect_error(sock: socket.socket) -> str:
    """Why a connection that has become writable failed; empty if it did not."""
    code = dial_error(sock)
    return os.strerror(code) if code else ""


def client_name(sock: socket.socket) -> str:
    """``uid-N`` for a Unix socket, else the peer's address in a form that may name a client.

    Raises:
        OSError: the peer is already gone.
    """
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return f"uid-{_UCRED.unpack(raw)[1]}"
    host = str(sock.getpeername()[0]).removeprefix("::ffff:")
    return as_name(host, "ip")  # no name begins with a colon, as ::1 does


def as_name(text: str, prefix: str) -> str:
    """``text`` in a form that may name a client; ``prefix`` if it does not begin with a letter or digit."""
    name = _NO_NAME.sub("-", text)
    return (name if name[:1].isalnum() else prefix + name)[:128]


def peer_address(sock: socket.socket) -> IpAddress | None:
    """The peer's IP address, IPv4 also where it was mapped to IPv6; None for a Unix socket.

    Raises:
        OSError: the peer is already gone.
    """
    if sock.family == socket.AF_UNIX:
        return None
    host = str(sock.getpeername()[0]).partition("%")[0]
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
