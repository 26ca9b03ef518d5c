"""TLS for tests: a far side without descriptors and threads, an engine that computes at once, a tunnel."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.listeners import ListenerGuard, ListenerSecurity
from gateway_agent.nbd.tls import TlsEngine, TlsOpening
from tests.support.nbd import FakeSocket
from tests.support.nbd_certificates import NbdAuthority, ProductAuthority

AnyAuthority = NbdAuthority | ProductAuthority


def client_context(authority: AnyAuthority, folder: Path | None = None) -> ssl.SSLContext:
    """As a client that trusts ``authority``, with the certificate in ``folder``."""
    context = ssl.create_default_context(cafile=str(authority.file))
    context.check_hostname = False
    if folder is not None:
        context.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
    return context


def tls_settings(authority: AnyAuthority, server: Path) -> dict[str, str]:
    """Keys of a ``[[plane]]`` that requires TLS, with this server's certificate."""
    return {
        "tls": "require",
        "tls_certificate": f"{server}/server-cert.pem",
        "tls_key": f"{server}/server-key.pem",
        "client_ca": str(authority.file),
    }


def security(authority: AnyAuthority, server: Path, **more: object) -> ListenerSecurity:
    """The same, unless ``more`` says otherwise."""
    return ListenerSecurity.model_validate(tls_settings(authority, server) | more)


class InlineEngine(TlsEngine):
    """Computes in the next turn of the loop instead of in a thread."""

    def submit(self, opening: TlsOpening) -> None:
        def step(_now_ns: int) -> None:
            opening.compute()
            opening.computed()

        self.loop.at((opening, "step"), 0, step)


def guard_of(
    settings: ListenerSecurity, loop: Any, on_lists: Callable[[], None] = lambda: None
) -> ListenerGuard:
    """A guard without a thread, which would have to be waited for."""
    return ListenerGuard("nbd-0", settings, loop, InlineEngine(loop), on_lists)


class TlsPeer:
    """The far side of a ``FakeSocket``."""

    def __init__(self, sock: FakeSocket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.sock = sock
        self._taken = 0
        self.received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.received, self._sealed, server_side)

    def pump(self) -> None:
        """Take what the near side sent; give it what we have to say."""
        self.received.write(bytes(self.sock.sent[self._taken :]))
        self._taken = len(self.sock.sent)
        if self._sealed.pending:
            self.sock.incoming.append(self._sealed.read())

    def skip(self) -> None:
        """What the near side sent until now was not encrypted."""
        self._taken = len(self.sock.sent)

    def shake(self) -> bool:
        """A step of the handshake; returns whether it has ended for us."""
        self.pump()
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.pump()
        return True

    def say(self, data: bytes) -> bytes:
        """The records of ``data``, also put into the socket."""
        self.tls.write(data)
        records = self._sealed.read()
        self.sock.incoming.append(records)
        return records

    def heard(self) -> bytes:
        """Everything decrypted since the last call."""
        self.pump()
        found = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self.tls.read(1 << 20):
                found += data
        return found

    def end(self) -> None:
        """Say farewell, as TLS has it."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self.pump()


def start_tls(sock: socket.socket, context: ssl.SSLContext) -> tuple[bytes, ssl.SSLSocket]:
    """The greeting of a server, and the connection behind STARTTLS and the handshake. The socket blocks."""
    greeting = _exactly(sock, p.GREETING.size)
    sock.sendall(p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES) + p.option(p.Opt.STARTTLS))
    answer = _exactly(sock, p.OPTION_REPLY.size)
    assert answer == p.option_reply(p.Opt.STARTTLS, p.Rep.ACK), answer
    return greeting, context.wrap_socket(sock)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"the end after {len(data)} of {count} bytes"
        data += piece
    return data


class TlsTunnel(threading.Thread):
    """Gives a client that knows no TLS the plain end (``near``) of a connection with it.

    The client negotiates as ever; its flags are dropped, as they were sent before TLS. What one side does not
    take, the tunnel does not take from the other. Thread: ends when one side does.
    """

    MOST_BYTES = 1 << 18

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(name="tls-tunnel", daemon=True)
        try:
            greeting, self._tls = start_tls(sock, context)
        except OSError:
            sock.close()
            raise
        self.near, self._plain = socket.socketpair()
        self._to_client, self._to_server = bytearray(greeting), bytearray()
        self._flags_left = p.CLIENT_FLAGS.size
        self._tls.setblocking(False)
        self._plain.setblocking(False)
        self.start()

    def run(self) -> None:
        """Move bytes until one side has ended, and what it said is delivered."""
        with self._tls, self._plain, contextlib.suppress(OSError):
            while self._step():
                pass

    def _step(self) -> bool:
        reads = [self._plain] if len(self._to_server) < self.MOST_BYTES else []
        may_take = len(self._to_client) < self.MOST_BYTES
        writes = [self._plain] if self._to_client else []
        select.select(
            [*reads, *([self._tls] if may_take else [])],
            [*writes, *([self._tls] if self._to_server else [])],
            [],
            0 if may_take and self._tls.pending() else 0.1,
        )
        return (
            self._take_plain(bool(reads))
            and self._take_tls(may_take)
            and self._give(self._plain, self._to_client)
            and self._give(self._tls, self._to_server)
        )

    def _take_plain(self, may_take: bool) -> bool:
        try:
            data = self._plain.recv(65_536) if may_take else None
        except BlockingIOError:
            return True
        if data:
            dropped, self._flags_left = data[self._flags_left :], max(self._flags_left - len(data), 0)
            self._to_server += dropped
        return data != b""

    def _take_tls(self, may_take: bool) -> bool:
        try:
            data = self._tls.recv(65_536) if may_take else None
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        self._to_client += data or b""
        if data == b"":
            self._plain.setblocking(True)
            self._plain.sendall(self._to_client)
        return data != b""

    @staticmethod
    def _give(sock: socket.socket, data: bytearray) -> bool:
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if data:
                del data[: sock.send(bytes(data))]
        return True
