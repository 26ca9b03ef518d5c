"""TLS without descriptors and threads: the far side of a connection, and an engine that computes at once."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from gateway_agent.nbd.listeners import ListenerGuard, ListenerSecurity
from gateway_agent.nbd.tls import TlsEngine, TlsOpening
from tests.support.nbd import FakeSocket
from tests.support.nbd_certificates import NbdAuthority


def client_context(authority: NbdAuthority, folder: Path | None = None) -> ssl.SSLContext:
    """As a client that trusts ``authority``, with the certificate in ``folder``."""
    context = ssl.create_default_context(cafile=str(authority.file))
    context.check_hostname = False
    if folder is not None:
        context.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
    return context


def security(authority: NbdAuthority, server: Path, **more: object) -> ListenerSecurity:
    """TLS is required, with this server's certificate, unless ``more`` says otherwise."""
    values: dict[str, object] = {
        "tls": "require",
        "tls_certificate": f"{server}/server-cert.pem",
        "tls_key": f"{server}/server-key.pem",
        "client_ca": str(authority.file),
    }
    return ListenerSecurity.model_validate(values | more)


class InlineEngine(TlsEngine):
    """Computes in the next turn of the loop instead of in a thread."""

    def submit(self, opening: TlsOpening) -> None:
        def step(_now_ns: int) -> None:
            opening.compute()
            opening.computed()

        self.loop.at((opening, "step"), 0, step)


def inline(guard: ListenerGuard) -> ListenerGuard:
    """The same guard without a thread."""
    guard._engine = InlineEngine(guard._loop)  # a thread would have to be waited for
    return guard


class TlsPeer:
    """The far side of a ``FakeSocket``."""

    def __init__(self, sock: FakeSocket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self._taken = 0
        self.received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.received, self._sealed)

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
