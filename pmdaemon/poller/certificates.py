"""The pair's thread ``pm-ca-N``: hands out certificates, rereads revocations, renews the server's own.

These touch files and sync them, which may take milliseconds: the two threads that serve gateways never do.
They ask here (``enrol``, ``renew``) and go on; the answer comes as a hint to the inbound thread.

Each second it looks whether the directory of revocations, or the server's certificate, is another than
before. A revocation therefore ends a live session within about a second, on every pair, without a message.

Bounded: a connection may have one question under way (``asking``), and connections are bounded.

State: ``revoked`` is replaced as a whole, so any thread may read it. Everything else belongs to this thread.

Source: DESIGN.md 5 "Credentials"; P10.
"""

from __future__ import annotations

import select
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from pmdaemon.errors import PeerRefused
from pmdaemon.pki import contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.pki.errors import CredentialRefused, PkiError
from pmdaemon.pki.identity import Credential, credential_of_der
from pmdaemon.pki.store import CA_CERTIFICATE, ISSUED, REVOKED, SERVER
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.inbound_messages import Answered, CertificateRefused, Hint, Revoked
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.thread_inbox import ThreadInbox
from pmdaemon.wire.messages.agent import Certificate, Enrol

LOOK_MS: Final = 1000
SETTLED: Final = 65_536
log = structlog.get_logger("certificates")


class Used(NamedTuple):
    """A gateway has shown this certificate and was let in."""

    held: Credential


class Question(NamedTuple):
    """What a connection asks for, as a call that may take its time; returns a certificate (DER)."""

    conn: AgentConnection
    who: str
    ask: Callable[[], bytes]


def _unusable() -> PeerRefused:
    text = "the server cannot make certificates now; its log says why. Try again later"
    return PeerRefused("authority-unusable", text)


class CertificateWorker:
    """See the module; a ``poller.credentials.Desk``.

    Args:
        hints: where answers go.
        counters: its own; nobody else writes to them.

    Raises:
        PkiError: the authority cannot be used.
    """

    def __init__(
        self,
        authority: Authority,
        hints: ThreadInbox[Hint],
        counters: Counter[str],
        clock: Clock | None = None,
    ) -> None:
        self._authority = authority
        self._clock = clock or SystemClock()
        self._hints = hints
        self._counters = counters
        self._questions: ThreadInbox[Question | Used] = ThreadInbox()
        self._holders: tuple[int, Counter[str]] = (-1, Counter())
        self._settled: set[str] = set()  # serials whose older ones have ended
        self.authority_der = authority.certificate_der()
        self.context: ssl.SSLContext = contexts.server(
            authority.store.path(CA_CERTIFICATE), authority.ensure_server()
        )
        self._seen = self._versions()
        self.revoked = authority.revoked()
        self._server_due_us = authority.server_due_us()

    # -- asked by the inbound thread

    def enrol(self, conn: AgentConnection, enrolment: Enrol) -> None:
        """See ``Desk``."""
        self._ask(
            conn,
            f"gateway {enrolment.gateway_id}",
            lambda: self._authority.enrol(enrolment.token, enrolment.request, enrolment.gateway_id),
        )

    def renew(self, conn: AgentConnection, held: Credential, request: bytes) -> None:
        """See ``Desk``."""
        self._ask(conn, f"gateway {held.name}", lambda: self._authority.renew(held, request))

    def used(self, held: Credential) -> None:
        """See ``Desk``."""
        if held.serial not in self._settled:
            self._questions.put(Used(held))

    def _ask(self, conn: AgentConnection, who: str, ask: Callable[[], bytes]) -> None:
        if conn.asking:
            raise PeerRefused("asked-twice", "it asks for a certificate while another is being made")
        conn.asking = True
        self._questions.put(Question(conn, who, ask))

    # -- the thread

    def run(self, stop: Stop) -> None:
        """Work until the stop."""
        sleeper = select.poll()
        for source in (stop, self._questions):
            sleeper.register(source.fileno(), select.POLLIN)
        while not stop.is_set():
            watchdog.beat()
            if not sleeper.poll(LOOK_MS):
                self.look()
            self.serve()

    def serve(self) -> None:
        """Answer everything asked so far."""
        for question in self._questions.drain():
            watchdog.beat()
            if isinstance(question, Used):
                self._settle(question.held)
            else:
                self._hints.put(self._answer(question))

    def _settle(self, held: Credential) -> None:
        """End the older certificates of a gateway, if it has any; only then its files are read."""
        try:
            version = self._authority.store.version(ISSUED)
            if version != self._holders[0]:
                self._holders = version, self._authority.holders()
            older = self._authority.supersede(held) if self._holders[1][held.gateway_id] > 1 else []
        except PkiError as exc:
            log.error("older-certificates-not-ended", gateway=held.name, error=str(exc))
            return
        if len(self._settled) >= SETTLED:
            self._settled.clear()
        self._settled.add(held.serial)
        for entry in older:
            log.info("certificate-superseded", gateway=held.name, serial=entry.serial, by=held.serial)

    def _answer(self, question: Question) -> Answered | CertificateRefused:
        try:
            made = question.ask()
            held = credential_of_der(made)
            encoded = Certificate(made, self.authority_der).encode()
        except CredentialRefused as exc:
            return CertificateRefused(question.conn, PeerRefused(exc.code, str(exc)))
        except PkiError as exc:
            # The peer learns only that it is the server's fault; the log says what.
            log.error("no-certificate", asked_by=question.who, error=str(exc))
            return CertificateRefused(question.conn, _unusable())
        except BaseException:  # a request is a stranger's bytes, and a panic in Rust code is no Exception
            self._counters["authority_faults"] += 1
            log.exception("no-certificate", asked_by=question.who)
            return CertificateRefused(question.conn, _unusable())
        self._counters["certificates_issued"] += 1
        log.info("certificate-issued", to=question.who, address=question.conn.address)
        return Answered(question.conn, held, encoded)

    def look(self) -> None:
        """Take in what has changed on disk."""
        try:
            if self._clock.unix_us() >= self._server_due_us:
                self._authority.ensure_server()
                self._server_due_us = self._authority.server_due_us()
            seen = self._versions()
            if seen == self._seen:
                return
            revoked = self._authority.revoked()
            contexts.load_own(self.context, self._authority.store.path(SERVER))
        except PkiError as exc:
            self._counters["authority_errors"] += 1
            if self._counters["authority_errors"] == 1:
                log.error("authority-unusable", error=str(exc))
            return
        self._seen = seen
        if revoked != self.revoked:
            self.revoked = revoked
            log.info("revocations", serials=len(revoked))
            self._hints.put(Revoked())

    def _versions(self) -> tuple[int, int]:
        # Read before the files: a change between the two is then seen at the next look.
        return self._authority.store.version(REVOKED), self._authority.store.version(SERVER)

    def close(self) -> None:
        """Give the descriptor back; call when the threads are joined."""
        self._questions.close()


def open_clerk(
    directory: Path, lifetime_s: float, hints: ThreadInbox[Hint], counters: Counter[str]
) -> CertificateWorker:
    """The clerk of a pair; raises as ``CertificateWorker``."""
    return CertificateWorker(Authority(directory, lifetime_s), hints, counters)
