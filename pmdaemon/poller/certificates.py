"""The pair's thread ``pm-ca-N``: makes certificates, rereads revocations, renews the server's own.

These touch files and sync them, which may take milliseconds: the two threads that serve gateways never do.
They ask here (``enrol``, ``renew``) and go on; the answer comes as a message to the inbound thread, which
announces it (``Enrolments``).

Each second the thread checks whether the directory of revocations, or the server's certificate, has
changed. A revocation therefore ends a live session within about a second, on every pair, without a message.

Bounded: a connection may have one question under way (``asking``), and connections are bounded.

State: ``revoked`` is replaced as a whole, so any thread may read it. Everything else of
``CertificateWorker`` belongs to its thread, everything of ``Enrolments`` to the inbound thread.

Source: P3, P10; DESIGN.md 5 "Credentials".
"""

from __future__ import annotations

import select
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from pmdaemon.errors import PeerRefused, WireError
from pmdaemon.pki import contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.pki.certificates import Credential, credential_of_der
from pmdaemon.pki.errors import CredentialRefused, PkiError
from pmdaemon.pki.store import CA_CERTIFICATE, ISSUED, REVOKED, SERVER
from pmdaemon.poller import announcements
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.publisher import DBMANAGER, CutPublisher
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.wire.messages.certificates import Certificate, Enrol
from pmdaemon.wire.session import error_code

REREAD_MS: Final = 1000
MAX_NEWEST_SERIALS: Final = 65_536
REFUSAL_EVENT_NS: Final = 60 * 10**9  # a peer that guesses tokens must not fill the table of events
log = structlog.get_logger("certificates")


class Answered(NamedTuple):
    """For the inbound thread: the certificate this connection asked for; ``credential`` is what it says."""

    conn: AgentConnection
    credential: Credential
    encoded: bytes


class CertificateRefused(NamedTuple):
    """For the inbound thread: what this connection asked for is refused; it is sent the reason and closed."""

    conn: AgentConnection
    error: WireError


class Revoked(NamedTuple):
    """For the inbound thread: the list of revoked certificates has changed."""


CertificateNews = Answered | CertificateRefused | Revoked


class Used(NamedTuple):
    """A gateway has shown this certificate and was let in."""

    credential: Credential


class Question(NamedTuple):
    """What a connection asks for, as a call that may take its time; returns a certificate (DER)."""

    conn: AgentConnection
    who: str
    ask: Callable[[], bytes]


def _unusable() -> PeerRefused:
    text = "the server cannot make certificates now; its log says why. Try again later"
    return PeerRefused("authority-unusable", text)


class CertificateWorker:
    """See the module.

    Args:
        answer: takes answers to the inbound thread.
        counters: its own; no other thread writes to them.

    Attributes:
        authority_der: the CA's certificate.
        revoked: serials that are not accepted any more.

    Raises:
        PkiError: the authority cannot be used.
    """

    def __init__(
        self,
        authority: Authority,
        answer: Callable[[CertificateNews], None],
        counters: Counter[str],
        clock: Clock | None = None,
    ) -> None:
        self._authority = authority
        self._clock = clock or SystemClock()
        self._answer_with = answer
        self._counters = counters
        self._questions: ThreadInbox[Question | Used] = ThreadInbox()
        self._holders: tuple[int, Counter[str]] = (-1, Counter())
        self._newest_serials: set[str] = set()  # serials whose older ones have ended
        self.authority_der = authority.certificate_der()
        self.context: ssl.SSLContext = contexts.server(
            authority.store.path(CA_CERTIFICATE), authority.ensure_server()
        )
        self._seen = self._versions()
        self.revoked = authority.revoked()
        self._server_due_us = authority.server_due_us()

    # -- asked by the inbound thread

    def enrol(self, conn: AgentConnection, enrolment: Enrol) -> None:
        """Ask for a first certificate; the answer goes to the connection, later."""
        self._ask(
            conn,
            f"gateway {enrolment.gateway_id}",
            lambda: self._authority.enrol(enrolment.token, enrolment.request, enrolment.gateway_id),
        )

    def renew(self, conn: AgentConnection, credential: Credential, request: bytes) -> None:
        """Ask for the next one."""
        self._ask(conn, f"gateway {credential.name}", lambda: self._authority.renew(credential, request))

    def used(self, credential: Credential) -> None:
        """A gateway has shown this certificate and was let in: older ones of it end."""
        if credential.serial not in self._newest_serials:
            self._questions.put(Used(credential))

    def _ask(self, conn: AgentConnection, who: str, ask: Callable[[], bytes]) -> None:
        assert isinstance(conn, AgentConnection)  # there are no others; the protocol breaks an import cycle
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
            if not sleeper.poll(REREAD_MS):
                self.reread()
            self.serve()

    def serve(self) -> None:
        """Answer everything asked so far."""
        for question in self._questions.drain():
            watchdog.beat()
            if isinstance(question, Used):
                self._end_older(question.credential)
            else:
                self._answer_with(self._answer(question))

    def _end_older(self, credential: Credential) -> None:
        """End the older certificates of a gateway, if it has any; only then its files are read."""
        try:
            version = self._authority.store.version(ISSUED)
            if version != self._holders[0]:
                self._holders = version, self._authority.holders()
            older = (
                self._authority.supersede(credential) if self._holders[1][credential.gateway_id] > 1 else []
            )
        except PkiError as exc:
            log.error("older-certificates-not-ended", gateway=credential.name, error=str(exc))
            return
        if len(self._newest_serials) >= MAX_NEWEST_SERIALS:
            self._newest_serials.clear()
        self._newest_serials.add(credential.serial)
        for entry in older:
            log.info(
                "certificate-superseded", gateway=credential.name, serial=entry.serial, by=credential.serial
            )

    def _answer(self, question: Question) -> Answered | CertificateRefused:
        try:
            made = question.ask()
            credential = credential_of_der(made)
            encoded = Certificate(made, self.authority_der).encode()
        except CredentialRefused as exc:
            return CertificateRefused(question.conn, PeerRefused(exc.code, str(exc)))
        except PkiError as exc:
            # The peer learns only that it is the server's fault; the log says what.
            log.error("certificate-failed", asked_by=question.who, error=str(exc))
            return CertificateRefused(question.conn, _unusable())
        except BaseException:  # the request is a peer's bytes, and a panic in Rust code is no Exception
            self._counters["authority_faults"] += 1
            log.exception("certificate-failed", asked_by=question.who)
            return CertificateRefused(question.conn, _unusable())
        self._counters["certificates_issued"] += 1
        log.info("certificate-issued", to=question.who, address=question.conn.address)
        return Answered(question.conn, credential, encoded)

    def reread(self) -> None:
        """Take in what has changed on disk."""
        try:
            if self._clock.unix_us() >= self._server_due_us:
                self._authority.ensure_server()
                self._server_due_us = self._authority.server_due_us()
            seen = self._versions()
            if seen == self._seen:
                return
            revoked = self._authority.revoked()
            contexts.load_certificate(self.context, self._authority.store.path(SERVER))
        except PkiError as exc:
            self._counters["authority_errors"] += 1
            if self._counters["authority_errors"] == 1:
                log.error("authority-unusable", error=str(exc))
            return
        self._seen = seen
        if revoked != self.revoked:
            self.revoked = revoked
            log.info("revocations", serials=len(revoked))
            self._answer_with(Revoked())

    def _versions(self) -> tuple[int, int]:
        # Read before the files: a change between the two is then seen by the next call.
        return self._authority.store.version(REVOKED), self._authority.store.version(SERVER)

    def close(self) -> None:
        """Give the descriptor back; call when the threads are joined."""
        self._questions.close()


class Enrolments:
    """Announces certificates made and refused."""

    def __init__(self, publisher: CutPublisher, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock
        self._next_event_ns: dict[str, int] = {}

    def made(self, conn: AgentConnection, credential: Credential) -> None:
        """A certificate was made. A renewed one counts from now on; a first one is an event."""
        if conn.credential is not None:
            conn.credential = credential
            return
        text = f"gateway {credential.name} was enrolled from {conn.address}"
        details = {"gateway_id": credential.gateway_id, "serial": credential.serial}
        row = announcements.event(
            "gateway-enrolled", "info", credential.name, text, self._clock.unix_us(), **details
        )
        self._publisher.news(row, DBMANAGER)

    def refused(self, conn: AgentConnection, error: WireError) -> None:
        """A request was refused; an event, at most one in ``REFUSAL_EVENT_NS`` for each code."""
        now_ns, code = self._clock.monotonic_ns(), error_code(error)
        if now_ns < self._next_event_ns.get(code, 0):
            return
        self._next_event_ns[code] = now_ns + REFUSAL_EVENT_NS
        who = conn.credential.name if conn.credential is not None else conn.address
        text = f"no certificate for {who} ({code}): {error}"
        row = announcements.event("enrolment-refused", "warning", who, text, self._clock.unix_us(), code=code)
        self._publisher.news(row, DBMANAGER)
