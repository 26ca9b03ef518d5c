"""Connections of which every step ends at one deadline: name resolution, each address, TLS, each read.

``socket.getaddrinfo`` cannot be interrupted, and with a dead name server it takes half a minute. So names are
looked up in threads of their own, at most one for each host and port: who asks again meanwhile waits for the
same lookup. A thread that is left behind ends when the system's resolver gives up.

A timeout of a socket is one of each read, so a server that answers byte by byte would never reach it.
``BoundedStream`` therefore takes what is left of the deadline before each operation; ``cut_off`` does the
same for libraries that own their socket, by shutting it down.

State: ``Resolver._lookups``, guarded by its lock. A recipient has its own backend, used by one thread.
"""

from __future__ import annotations

from sla_server import lean_httpx  # noqa: F401 - before httpx: see there

# isort: split
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import httpcore

from pmdaemon.runtime.clock import Deadline

Address = tuple[Any, ...]
"""What ``socket.connect`` takes, with family and type before it."""
LEAST_S: Final = 0.001
"""A timeout of 0 would make a socket non-blocking."""


def reason_of(error: BaseException) -> str:
    """An error of the system or of TLS, for people: no numbers, no addresses of memory."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return str(error) if error.args and not isinstance(error.args[0], int) else "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class _Lookup:
    """One call of the resolver; ``addresses`` or ``error`` is set before ``done``."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.addresses: list[Address] = []
        self.error: OSError | None = None


class Resolver:
    """Looks names up within a deadline. Any thread.

    Args:
        lookup: as ``socket.getaddrinfo``.
    """

    def __init__(self, lookup: Callable[..., Any] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._lock = threading.Lock()  # guards _lookups
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    def resolve(self, host: str, port: int, deadline: Deadline) -> list[Address]:
        """Addresses of a host, in the system's order of preference.

        Raises:
            TimeoutError: the name server has not answered by the deadline.
            OSError: the name is not known.
        """
        with self._lock:
            lookup = self._lookups.get((host, port))
            if is_first := lookup is None:
                lookup = self._lookups[host, port] = _Lookup()
        if is_first:
            self._start(host, port, lookup)
        if not lookup.done.wait(deadline.left_s()):
            raise TimeoutError(f"the name {host} was not resolved in time")
        if lookup.error is not None:
            raise lookup.error
        return lookup.addresses

    def _start(self, host: str, port: int, lookup: _Lookup) -> None:
        """Without the lock: one that dies of want of memory before it runs holds up its starter alone."""
        thread = threading.Thread(
            target=self._run, args=(host, port, lookup), name=f"dns-{host}"[:15], daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError) as exc:
            self._end(host, port, lookup, OSError(f"no thread to look {host} up: {exc or 'no memory'}"))

    @property
    def running(self) -> int:
        """Lookups that have not ended."""
        with self._lock:
            return len(self._lookups)

    def _run(self, host: str, port: int, lookup: _Lookup) -> None:
        error: OSError | None = None
        try:
            lookup.addresses = list(self._lookup(host, port, 0, socket.SOCK_STREAM))
        except OSError as exc:
            error = OSError(f"the name {host} is not known ({exc.strerror or exc})")
        except UnicodeError:
            error = OSError(f"{host} is no host name")
        finally:
            self._end(host, port, lookup, error)

    def _end(self, host: str, port: int, lookup: _Lookup, error: OSError | None) -> None:
        lookup.error = error
        with self._lock:
            del self._lookups[host, port]
        lookup.done.set()


def connect(host: str, port: int, deadline: Deadline, resolver: Resolver) -> socket.socket:
    """Connect to the first address that answers; each has its share of the time that is left.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the name is not known, or no address takes the connection.
    """
    addresses = resolver.resolve(host, port, deadline)
    problem: OSError = OSError(f"the name {host} has no address")
    for index, (family, kind, protocol, _name, address) in enumerate(addresses):
        if deadline.passed:
            raise TimeoutError(f"{host} port {port} did not take the connection in time")
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(LEAST_S, deadline.left_s() / (len(addresses) - index)))
            sock.connect(address)
            # A request is written in parts; else the second one waits 40 ms for the other side's delayed ACK.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:
            sock.close()
            problem = exc
        else:
            sock.settimeout(max(LEAST_S, deadline.left_s()))
            return sock
    if isinstance(problem, TimeoutError):
        raise TimeoutError(f"{host} port {port} did not take the connection in time")
    raise OSError(problem.errno or 0, f"{host} port {port}: {reason_of(problem)}") from problem


@contextlib.contextmanager
def cut_off(deadline: Deadline, current: Callable[[], socket.socket | None]) -> Iterator[None]:
    """Shut the socket down at the deadline, so that whatever waits for it ends.

    Args:
        deadline: when.
        current: the socket in use; TLS replaces it.
    """

    def shut() -> None:
        if (sock := current()) is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(deadline.left_s(), shut)
    timer.daemon = True
    timer.name = "cut-off"
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class BoundedBackend(httpcore.NetworkBackend):
    """Connections for httpcore under ``deadline``, which the caller sets before each request."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self.deadline = Deadline(0.0)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """See ``httpcore``; only the deadline limits it."""
        try:
            return BoundedStream(connect(host, port, self.deadline, self._resolver), self)
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout(str(exc)) from exc
        except OSError as exc:
            raise httpcore.ConnectError(reason_of(exc)) from exc

    def sleep(self, seconds: float) -> None:
        """Httpcore sleeps between tries of its own, and we have it try once."""
        raise AssertionError(f"asked to sleep for {seconds} s")


class BoundedStream(httpcore.NetworkStream):
    """A connection whose operations end at its backend's deadline."""

    def __init__(self, sock: socket.socket, backend: BoundedBackend) -> None:
        self._sock = sock
        self._backend = backend

    def _limit(self, error: type[Exception]) -> None:
        left_s = self._backend.deadline.left_s()
        if not left_s:
            raise error("no answer in time")
        self._sock.settimeout(max(LEAST_S, left_s))

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """See ``httpcore``."""
        self._limit(httpcore.ReadTimeout)
        try:
            return self._sock.recv(max_bytes)
        except TimeoutError as exc:
            raise httpcore.ReadTimeout("no answer in time") from exc
        except OSError as exc:
            raise httpcore.ReadError(reason_of(exc)) from exc

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """See ``httpcore``."""
        left = memoryview(buffer)
        while left:
            self._limit(httpcore.WriteTimeout)
            try:
                left = left[self._sock.send(left) :]
            except TimeoutError as exc:
                raise httpcore.WriteTimeout("it takes nothing more") from exc
            except OSError as exc:
                raise httpcore.WriteError(reason_of(exc)) from exc

    def close(self) -> None:
        """See ``httpcore``."""
        self._sock.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """See ``httpcore``; the plain socket is closed when TLS fails."""
        self._limit(httpcore.ConnectTimeout)
        try:
            sock = ssl_context.wrap_socket(self._sock, server_hostname=server_hostname)
        except TimeoutError as exc:
            self.close()
            raise httpcore.ConnectTimeout("no answer to the beginning of TLS in time") from exc
        except (OSError, ValueError) as exc:
            self.close()
            raise httpcore.ConnectError(reason_of(exc)) from exc
        return BoundedStream(sock, self._backend)

    def get_extra_info(self, info: str) -> Any:
        """See ``httpcore``."""
        if info == "ssl_object":
            return self._sock if isinstance(self._sock, ssl.SSLSocket) else None
        if info == "socket":
            return self._sock
        return _is_readable(self._sock) if info == "is_readable" else None


def _is_readable(sock: socket.socket) -> bool:
    if sock.fileno() < 0:
        return True  # closed: an idle connection like that is not used again
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
