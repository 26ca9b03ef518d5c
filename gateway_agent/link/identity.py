"""This gateway's key and certificate: kept in ``state_dir/tls``, used for the next dial, renewed in time.

    state_dir/tls/ca.crt         the authority, pinned by its fingerprint at enrolment
    state_dir/tls/gateway.pem    key and certificate as one file, so that they are replaced together

Renewal. From two thirds of the certificate's life on, the link asks within a session (RENEW, with a new
key; the request proves that we hold it) and stores what comes (CERTIFICATE) after checking that it is for
that key, for this gateway and from the pinned authority. The session goes on; the next dial uses the new one.
An attempt that is not answered, or answered with something else, is repeated after ``RETRY_S``, and an alert
says so once the certificate has less than a tenth of its life left. The new key is in memory only until then:
if the process dies, the old certificate is still good.

Thread: the link's loop only (and ``enrol`` in its own process).
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import structlog

from gateway_agent.errors import NotEnrolled, StateFileBroken
from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.certificates import Credential
from pmdaemon.pki.errors import PkiError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import write_whole

log = structlog.get_logger("identity")

DIRECTORY: Final = "tls"
CA: Final = "ca.crt"
CREDENTIAL: Final = "gateway.pem"
RETRY_S: Final = 60.0


class Identity:
    """See the module docstring.

    Raises:
        NotEnrolled: there is no certificate yet.
        StateFileBroken: a file is not what we wrote.
    """

    def __init__(self, state_dir: Path, gateway_id: str, name: str, clock: Clock) -> None:
        self._directory = state_dir / DIRECTORY
        self._gateway_id = gateway_id
        self._name = name
        self._clock = clock
        self._new_key: certificates.Key | None = None
        self._ask_at_us = 0
        self.credential = self._read()

    def context(self) -> ssl.SSLContext:
        """TLS for the next dial, with what is on disk now: there may have been another enrolment.

        Raises:
            NotEnrolled, StateFileBroken: as at the start.
        """
        self.credential = self._read()
        try:
            return contexts.agent(self._directory / CA, self._directory / CREDENTIAL)
        except PkiError as exc:
            raise _broken(self._directory, str(exc)) from exc

    def _read(self) -> Credential:
        path = self._directory / CREDENTIAL
        try:
            data = path.read_bytes()
        except FileNotFoundError as exc:
            raise NotEnrolled(str(path)) from exc
        except OSError as exc:
            raise _broken(path, f"cannot be read ({exc.strerror})") from exc
        try:
            made = certificates.credential(certificates.certificate_in(data))
        except (ValueError, PkiError) as exc:
            raise _broken(path, f"holds no certificate of a gateway ({exc})") from exc
        if (made.gateway_id, made.name) != (self._gateway_id, self._name):
            raise _broken(
                path,
                f"is for {made.name} ({made.gateway_id}); this gateway is {self._name} ({self._gateway_id})",
            )
        return made

    def has_other_on_disk(self) -> bool:
        """Whether there was another enrolment since the last dial."""
        try:
            return self._read().serial != self.credential.serial
        except (NotEnrolled, StateFileBroken) as exc:
            log.warning("certificate-not-read", problem=str(exc))
            return False

    # -- renewal

    @property
    def due_us(self) -> int:
        """When ``request`` has something to say, on the wall clock."""
        return max(self.credential.renew_at_us, self._ask_at_us)

    @property
    def is_urgent(self) -> bool:
        """Whether less than a tenth of the certificate's life is left."""
        life_us = self.credential.not_after_us - self.credential.not_before_us
        return self._clock.unix_us() >= self.credential.not_after_us - life_us // 10

    def request(self) -> bytes | None:
        """A signing request if the certificate is due, at most one in ``RETRY_S``."""
        now_us = self._clock.unix_us()
        if now_us < self.due_us:
            return None
        retry_us = min(RETRY_S * 1e6, (self.credential.not_after_us - self.credential.not_before_us) / 20)
        self._ask_at_us = now_us + round(retry_us)
        self._new_key = certificates.make_key()
        return certificates.make_request(self._new_key, self._name)

    def store(self, der: bytes) -> str:
        """Keep the certificate that was asked for; returns what is wrong with it, or nothing.

        Durability: on disk when this returns.

        Raises:
            OSError: it could not be written; the former stays.
        """
        key, self._new_key = self._new_key, None
        if key is None:
            return "it was not asked for"
        try:
            made = certificates.issued(der, key, (self._directory / CA).read_bytes())
            credential = certificates.credential(made)
        except (ValueError, PkiError) as exc:
            return str(exc)
        if (credential.gateway_id, credential.name) != (self._gateway_id, self._name):
            return f"it is for {credential.name} ({credential.gateway_id})"
        write_credential(self._directory, key, der)
        self.credential = credential
        self._ask_at_us = 0
        log.info("certificate-renewed", serial=credential.serial, not_after_us=credential.not_after_us)
        return ""


def write_credential(directory: Path, key: certificates.Key, der: bytes) -> None:
    """Replace key and certificate, as one file of mode 0600; on disk when this returns."""
    text = (certificates.key_pem(key) + certificates.pem_of_der(der)).decode()
    write_whole(directory / CREDENTIAL, text, synced=True)


def _broken(path: Path, problem: str) -> StateFileBroken:
    return StateFileBroken(str(path), problem, "Enrol again: sla ca token NAME on the server says how")
