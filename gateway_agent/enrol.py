"""``gateway-agent enrol``: a one-time token becomes a key and a certificate. Blocking, with one deadline.

    1. connect, TLS without checking; ask for the CA's certificate     nothing secret has been sent
    2. compare its SHA-256 with the fingerprint that the operator gave
    3. connect again, TLS checked against that CA; send token and signing request
    4. check that the certificate is for this key and this gateway_id; store CA, key and certificate

A host in between cannot pass step 2 with another CA, nor step 3 without a key that the CA has signed
for a server, so it never sees the token. The private key never leaves this machine.

Durability: all is on disk when ``enrol`` returns. If the process dies before, the token may be spent: make
another. A failure before step 4 leaves a former identity as it was.

Source: DESIGN.md 5 "Credentials"; docs/operations/security.md.
"""

from __future__ import annotations

import hmac
import re
import socket
import ssl
from pathlib import Path
from typing import Any, Final

from gateway_agent.errors import EnrolmentFailed
from gateway_agent.link import state_files
from gateway_agent.link.identity import CA, DIRECTORY, write_credential
from pmdaemon.errors import WireError
from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.certificates import Credential
from pmdaemon.pki.errors import PkiError
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.files import write_whole
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.ends import Error
from pmdaemon.wire.session import Session, Side

LIMIT_S: Final = 20.0
_NEW_CA: Final = f"{CA}.new"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")


def normal_fingerprint(text: str) -> str:
    """64 lower-case hexadecimal digits, from any way in which it is written.

    Raises:
        ValueError: it is none.
    """
    digits = re.sub(r"[\s:]", "", text.strip().lower()).removeprefix("sha256")
    if not _FINGERPRINT.fullmatch(digits):
        raise ValueError("a fingerprint has 64 hexadecimal digits; sla ca token prints it")
    return digits


def enrol(
    state_dir: Path, gateway_id: str, server: tuple[str, int], token: str, fingerprint: str
) -> Credential:
    """Obtain and store a certificate; returns what it says.

    Raises:
        EnrolmentFailed: the server cannot be reached, is another one, or refuses.
        StateFileBroken: state_dir cannot be used.
    """
    directory = state_dir / DIRECTORY
    state_files.make_private_directory(directory)
    deadline = Deadline(LIMIT_S)
    where = f"{server[0]}:{server[1]}"
    authority = _pinned(server, fingerprint, deadline)
    try:
        ca_pem = certificates.pem_of_der(authority)
        # Aside: until a certificate is here, the one we may have is good for the former CA only.
        write_whole(directory / _NEW_CA, ca_pem.decode(), synced=True)
        context = contexts.agent(directory / _NEW_CA, None)
    except (ValueError, OSError, PkiError) as exc:
        raise EnrolmentFailed(where, f"the CA certificate cannot be kept: {exc}") from exc
    key = certificates.make_key()
    body = {"token": token, "gw": gateway_id, "csr": certificates.make_request(key, gateway_id)}
    with _EnrolConnection(server, context, deadline) as talk:
        made = talk.ask(Kind.ENROL, body, Kind.CERTIFICATE).get("cert")
    try:
        if not isinstance(made, bytes):
            raise ValueError("it sent no certificate")
        credential = certificates.credential(certificates.issued(made, key, ca_pem))
        if credential.gateway_id != gateway_id:
            raise ValueError(f"the certificate is for gateway {credential.gateway_id}")
        (directory / _NEW_CA).replace(directory / CA)
        write_credential(directory, key, made)
    except (ValueError, OSError, PkiError) as exc:
        raise EnrolmentFailed(where, str(exc)) from exc
    return credential


def _pinned(server: tuple[str, int], fingerprint: str, deadline: Deadline) -> bytes:
    """The CA's certificate.

    Raises:
        EnrolmentFailed: it is not the one that the operator gave the fingerprint of.
    """
    where = f"{server[0]}:{server[1]}"
    with _EnrolConnection(server, contexts.unverified(), deadline) as talk:
        authority = talk.ask(Kind.CA_QUERY, {}, Kind.CA_CERT).get("ca")
    if not isinstance(authority, bytes):
        raise EnrolmentFailed(where, "it sent no CA certificate")
    seen = certificates.fingerprint(authority)
    if not hmac.compare_digest(seen, fingerprint):
        raise EnrolmentFailed(
            where,
            f"its CA has the fingerprint {seen}, expected {fingerprint}. Either the fingerprint is of "
            "another server, or someone else answers in between; the token was not sent",
        )
    return authority


class _EnrolConnection:
    """One short TLS connection: a question, an answer."""

    def __init__(self, server: tuple[str, int], context: ssl.SSLContext, deadline: Deadline) -> None:
        self._where = f"{server[0]}:{server[1]}"
        self._deadline = deadline
        self._session = Session(Side.AGENT)
        try:
            plain = socket.create_connection(server, self._deadline.left_s() or 0.001)
        except OSError as exc:
            raise EnrolmentFailed(self._where, f"cannot connect: {exc.strerror or exc}") from exc
        try:
            self._socket = context.wrap_socket(plain)
        except ssl.SSLCertVerificationError as exc:
            plain.close()
            raise EnrolmentFailed(
                self._where, f"its certificate is not accepted: {exc.verify_message}"
            ) from exc
        except OSError as exc:
            plain.close()
            raise EnrolmentFailed(self._where, f"no TLS: {exc.strerror or exc}") from exc
        names: Any = (self._socket.getpeercert() or {}).get("subjectAltName", ())
        if context.verify_mode is ssl.CERT_REQUIRED and ("URI", certificates.SERVER_URI) not in names:
            self._socket.close()
            raise EnrolmentFailed(self._where, "its certificate is not a server's")

    def __enter__(self) -> _EnrolConnection:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def ask(self, kind: Kind, header: dict[str, Any], answer: Kind) -> dict[str, Any]:
        """The header of the answer.

        Raises:
            EnrolmentFailed: another answer, or none; what an ERROR says is passed on.
        """
        try:
            self._session.sending(kind)
            self._socket.settimeout(self._deadline.left_s() or 0.001)
            self._socket.sendall(frame.encode(kind, header))
            while data := self._socket.recv(65536):
                for received in self._session.feed(data):
                    if received.kind == answer:
                        return received.header
                    error = Error.parse(received.header)
                    raise EnrolmentFailed(
                        self._where, f"{error.text or 'an unexpected answer'} ({error.code})"
                    )
        except (OSError, WireError) as exc:
            raise EnrolmentFailed(self._where, str(exc)) from exc
        raise EnrolmentFailed(self._where, "it closed the connection without an answer")
