"""The certificate authority as the server and ``sla ca`` use it: enrol, renew, issue, revoke, list.

What is decided here. A gateway_id belongs to one name as long as it has a valid certificate: a token for
another name does not take it over. Renewal needs a certificate that is valid and not revoked, and gives a
certificate for the same identity. Revoking names a gateway or a serial and ends *all* its certificates,
also one that is being renewed at that moment: issuing and revoking hold the same lock. It withdraws the
tokens that wait for the gateway, too.

One gateway, one certificate. Enrolment ends the older certificates of that gateway_id at once: an operator
who makes a token again has lost the key, or distrusts its holder. A renewed certificate, and one issued by
hand, leaves the older one valid until it expires or the new one is first used (``supersede``), because its
holder may never receive it.

Durability: a certificate is recorded before it is handed out. A token is burnt before a certificate is made,
so that it never makes two, but not by a request that is refused.

Thread: any; the functions read and write files and may take milliseconds, so the threads that serve gateways
never call them (``poller.certificates`` does).

Source: P3, P7; DESIGN.md 5 "Credentials".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pmdaemon.pki import certificates, tokens
from pmdaemon.pki.certificates import Credential
from pmdaemon.pki.errors import (
    CredentialRefused,
    NoAuthority,
    NothingToRevoke,
    PkiError,
    StateUnusable,
)
from pmdaemon.pki.store import CA_CERTIFICATE, CA_KEY, ISSUED, REVOKED, SERVER, CaStore
from pmdaemon.runtime.clock import Clock, SystemClock

CA_DAYS: Final = 3650.0
GATEWAY_DAYS: Final = 90.0
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """One certificate ever issued.

    Attributes:
        revoked_us: None while it is not revoked.
        replaces: serials of that gateway that were valid when it was issued.
        volumes: patterns of those it may show; none: no list.
    """

    serial: str
    gateway_id: str
    name: str
    issued_us: int
    not_after_us: int
    how: str
    revoked_us: int | None
    reason: str
    replaces: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def state(self, now_us: int) -> str:
        """``valid``, ``expired`` or ``revoked``."""
        if self.revoked_us is not None:
            return "revoked"
        return "valid" if now_us < self.not_after_us else "expired"


class Authority:
    """See the module. ``lifetime_s``: of the certificates it makes for gateways and for the server."""

    def __init__(
        self, directory: Path, lifetime_s: float = GATEWAY_DAYS * DAY_S, clock: Clock | None = None
    ) -> None:
        self.store = CaStore(directory)
        self._lifetime_s = lifetime_s
        self._clock = clock or SystemClock()

    # -- the authority itself

    def init(self, lifetime_s: float = CA_DAYS * DAY_S) -> str:
        """Make key and certificate of the CA; returns its fingerprint.

        Raises:
            PkiError: there is one already, or the directory cannot be used.
        """
        self.store.create()
        with self.store.locked():
            if self.store.path(CA_KEY).exists():
                raise PkiError(
                    f"{self.store.directory}: a certificate authority exists already, and a new one would "
                    "refuse every gateway that is enrolled. To begin again on purpose, move the directory "
                    "away first"
                )
            key = certificates.make_key()
            made = certificates.make_authority(key, self._clock.unix_us(), lifetime_s)
            # The key last: its presence is what says that the authority is complete.
            self.store.write(CA_CERTIFICATE, certificates.pem(made))
            self.store.write(CA_KEY, certificates.key_pem(key))
        return certificates.fingerprint(certificates.der(made))

    def certificate_der(self) -> bytes:
        """The CA's certificate.

        Raises:
            PkiError: there is none, or it cannot be used.
        """
        return certificates.der(self._certificate())

    def fingerprint(self) -> str:
        """SHA-256 of the CA's certificate; raises as ``certificate_der``."""
        return certificates.fingerprint(self.certificate_der())

    def check_key(self) -> None:
        """That certificates can be signed: else it would be noticed when the first must be renewed.

        Raises:
            PkiError: the key is missing, damaged, or not that of the certificate.
        """
        self._signer()

    def ensure_server(self) -> Path:
        """The server's key and certificate, made again from two thirds of its life on; returns the file.

        Raises:
            PkiError: there is no CA, or it cannot be used.
        """
        with self.store.locked():
            if self._clock.unix_us() >= self.server_due_us():
                signer, key, now_us = self._signer(), certificates.make_key(), self._clock.unix_us()
                made = signer.server(key, now_us, self._lifetime_s)
                self.store.write(SERVER, certificates.key_pem(key) + certificates.pem(made))
        return self.store.path(SERVER)

    def server_due_us(self) -> int:
        """When the server's certificate must be made again; 0 while there is none."""
        try:
            data = self.store.read(SERVER)
        except FileNotFoundError:
            return 0
        try:
            made = certificates.certificate_in(data)
            made.verify_directly_issued_by(self._certificate())
        except (ValueError, TypeError, InvalidSignature) as exc:
            raise StateUnusable(
                str(self.store.path(SERVER)), f"is not the server's certificate ({exc})"
            ) from exc
        begin_us, end_us = (
            certificates.unix_us(made.not_valid_before_utc),
            certificates.unix_us(made.not_valid_after_utc),
        )
        return begin_us + (end_us - begin_us) * 2 // 3

    # -- gateways

    def token(self, name: str, lifetime_s: float, volumes: Sequence[str] = ()) -> tuple[str, int]:
        """A one-time token for the gateway ``name`` and when it expires; see ``tokens.make``."""
        self._certificate()
        self.sweep()
        return tokens.make(self.store, name, self._clock.unix_us(), lifetime_s, volumes)

    def waiting_tokens(self) -> list[tokens.Token]:
        """Tokens that can still be used, by name."""
        self.store.check()
        return tokens.waiting(self.store, self._clock.unix_us())

    def enrol(self, token: str, request: bytes, gateway_id: str) -> bytes:
        """Spend a token on a certificate (DER) for ``gateway_id``.

        Raises:
            CredentialRefused: the token, the request or the identity is not accepted.
            PkiError: the authority cannot be used.
        """
        now_us = self._clock.unix_us()
        found = tokens.find(self.store, token, now_us)
        key = certificates.public_key_of_request(request)
        with self.store.locked():
            for entry in self.entries(gateway_id):
                if entry.name != found.name and entry.state(now_us) == "valid":
                    raise CredentialRefused(
                        "identity-taken",
                        f"gateway {gateway_id} is enrolled as {entry.name}, the token is for {found.name}. "
                        "If the disk was copied, delete gateway_id on the copy; to rename, first: sla ca "
                        f"revoke {entry.name}",
                    )
            tokens.burn(self.store, found)
            made = self._issue(key, gateway_id, found.name, "token", found.volumes)
            self._supersede(certificates.credential_of_der(made))
            return made

    def renew(self, credential: Credential, request: bytes) -> bytes:
        """A new certificate (DER) for the holder of a valid one.

        Raises:
            CredentialRefused: ``revoked``, ``expired`` or ``bad-request``.
            PkiError: the authority cannot be used.
        """
        key = certificates.public_key_of_request(request)
        with self.store.locked():
            if self.store.path(f"{REVOKED}/{credential.serial}.json").exists():
                raise CredentialRefused("revoked", f"the certificate of {credential.name} was revoked")
            if self._clock.unix_us() >= credential.not_after_us:
                raise CredentialRefused(
                    "expired", f"the certificate of {credential.name} has expired; enrol again"
                )
            return self._issue(key, credential.gateway_id, credential.name, "renewal", credential.volumes)

    def supersede(self, credential: Credential) -> list[IssuedCertificate]:
        """This certificate was used: end the older ones of its gateway; returns them.

        Raises:
            PkiError: the authority cannot be used.
        """
        with self.store.locked():
            return self._supersede(credential)

    def _supersede(self, credential: Credential) -> list[IssuedCertificate]:
        valid = self._valid(credential.gateway_id)
        used = next((entry for entry in valid if entry.serial == credential.serial), None)
        older = [entry for entry in valid if used is not None and entry.serial in used.replaces]
        for entry in older:
            self._revoke(entry, f"superseded by {credential.serial}", self._clock.unix_us())
        return older

    def _valid(self, gateway_id: str) -> list[IssuedCertificate]:
        now_us = self._clock.unix_us()
        return [entry for entry in self.entries(gateway_id) if entry.state(now_us) == "valid"]

    def holders(self) -> Counter[str]:
        """How many certificates are recorded of each gateway_id; the names of files alone are read."""
        return Counter(stem.rpartition(".")[0] for stem in self.store.names(ISSUED))

    def issue(self, request: bytes, gateway_id: str, name: str, volumes: Sequence[str] = ()) -> bytes:
        """A certificate (DER) by hand, for a host that cannot reach the server to enrol."""
        key = certificates.public_key_of_request(request)
        with self.store.locked():
            return self._issue(key, gateway_id, name, "by hand", volumes)

    def _issue(
        self,
        key: ec.EllipticCurvePublicKey,
        gateway_id: str,
        name: str,
        how: str,
        volumes: Sequence[str],
    ) -> bytes:
        now_us = self._clock.unix_us()
        made = self._signer().gateway(key, gateway_id, name, now_us, self._lifetime_s, volumes)
        credential = certificates.credential(made)
        entry = {
            "name": credential.name,
            "issued_us": now_us,
            "not_after_us": credential.not_after_us,
            "how": how,
            # By serial, not by date: the server's clock may have been ahead when an older one was made.
            "replaces": [other.serial for other in self._valid(credential.gateway_id)],
            "volumes": list(volumes),
        }
        self.store.write_json(f"{ISSUED}/{credential.gateway_id}.{credential.serial}.json", entry)
        return certificates.der(made)

    # -- peers of gateways' NBD listeners

    def nbd_credential(
        self, name: str, hosts: Sequence[str], lifetime_s: float | None = None
    ) -> tuple[bytes, bytes]:
        """Key and certificate (PEM) for a client of gateways, or, with ``hosts``, for a gateway's listeners.

        It is not recorded: gateways ask no one whether it was revoked. It ends by its date, or by the
        exports' lists of names.
        """
        key, now_us = certificates.make_key(), self._clock.unix_us()
        signer, life_s = self._signer(), lifetime_s or self._lifetime_s
        if hosts:
            made = signer.nbd_server(key, name, hosts, now_us, life_s)
        else:
            made = signer.nbd_client(key, name, now_us, life_s)
        return certificates.key_pem(key), certificates.pem(made)

    def partner_credential(self, name: str, lifetime_s: float) -> bytes:
        """Key and certificate (PEM, one behind the other) for one of two cooperating servers.

        It is not recorded, as those for NBD: it ends by its date, or by `events.pair.partner`.
        """
        key, now_us = certificates.make_key(), self._clock.unix_us()
        made = self._signer().partner(key, name, now_us, lifetime_s)
        return certificates.key_pem(key) + certificates.pem(made)

    def node_credential(self, name: str, hosts: Sequence[str], lifetime_s: float) -> bytes:
        """Key and certificate (PEM, one behind the other) for a node of a cluster at these addresses.

        It is not recorded, as those for NBD: it ends by its date.
        """
        key, now_us = certificates.make_key(), self._clock.unix_us()
        made = self._signer().node(key, name, hosts, now_us, lifetime_s)
        return certificates.key_pem(key) + certificates.pem(made)

    def account_credential(self, name: str, lifetime_s: float) -> bytes:
        """Key and certificate (PEM, one behind the other) for an account of a cluster.

        It is not recorded, as those for NBD: it ends by its date, or when the account is removed.
        """
        key, now_us = certificates.make_key(), self._clock.unix_us()
        made = self._signer().account(key, name, now_us, lifetime_s)
        return certificates.key_pem(key) + certificates.pem(made)

    # -- revocation

    def revoke(self, who: str, reason: str) -> tuple[list[IssuedCertificate], list[tokens.Token]]:
        """Revoke every valid certificate of a gateway (name or gateway_id), or one by serial.

        Returns:
            What was revoked, and the tokens that waited for that gateway and were withdrawn.

        Raises:
            NothingToRevoke: there is neither.
        """
        now_us = self._clock.unix_us()
        with self.store.locked():
            found = [
                entry
                for entry in self.entries()
                if entry.state(now_us) == "valid" and who in (entry.name, entry.gateway_id, entry.serial)
            ]
            names = {who} | {entry.name for entry in found if entry.serial != who}
            withdrawn = tokens.cancel(self.store, names, now_us)
            if not found and not withdrawn:
                raise NothingToRevoke(who)
            for entry in found:
                self._revoke(entry, reason, now_us)
        return found, withdrawn

    def _revoke(self, entry: IssuedCertificate, reason: str, now_us: int) -> None:
        self.store.write_json(f"{REVOKED}/{entry.serial}.json", {"at_us": now_us, "reason": reason})

    def revoked(self) -> frozenset[str]:
        """Serials of all revoked certificates."""
        return frozenset(self.store.names(REVOKED))

    def entries(self, gateway_id: str = "") -> list[IssuedCertificate]:
        """The certificates issued to one gateway, or to all, oldest first; long ended ones are forgotten."""
        self.store.check()
        return sorted(self._entries(gateway_id), key=lambda entry: entry.issued_us)

    def _entries(self, gateway_id: str) -> Iterator[IssuedCertificate]:
        revoked = self.revoked()
        for stem in self.store.names(ISSUED):
            holder, _, serial = stem.rpartition(".")
            if gateway_id and holder != gateway_id:
                continue
            issued = self.store.read_json(f"{ISSUED}/{stem}.json")
            ended: dict[str, Any] = (
                self.store.read_json(f"{REVOKED}/{serial}.json") if serial in revoked else {}
            )
            yield IssuedCertificate(
                serial=serial,
                gateway_id=holder,
                name=str(issued.get("name", "")),
                issued_us=int(issued.get("issued_us", 0)),
                not_after_us=int(issued.get("not_after_us", 0)),
                how=str(issued.get("how", "")),
                revoked_us=int(ended.get("at_us", 0)) if serial in revoked else None,
                reason=str(ended.get("reason", "")),
                replaces=tuple(map(str, issued.get("replaces", ()))),
                volumes=tuple(map(str, issued.get("volumes", ()))),
            )

    def sweep(self) -> None:
        """Forget tokens and certificates that ended more than 30 days ago."""
        now_us = self._clock.unix_us()
        tokens.sweep(self.store, now_us)
        with self.store.locked():
            for entry in self.entries():
                if now_us >= entry.not_after_us + tokens.KEEP_USED_US:
                    self.store.path(f"{ISSUED}/{entry.gateway_id}.{entry.serial}.json").unlink(
                        missing_ok=True
                    )
                    self.store.path(f"{REVOKED}/{entry.serial}.json").unlink(missing_ok=True)

    # -- files

    def _certificate(self) -> x509.Certificate:
        self.store.check()
        try:
            return x509.load_pem_x509_certificate(self.store.read(CA_CERTIFICATE))
        except FileNotFoundError as exc:
            raise NoAuthority(str(self.store.directory)) from exc
        except ValueError as exc:
            raise StateUnusable(str(self.store.path(CA_CERTIFICATE)), f"is no certificate ({exc})") from exc

    def _signer(self) -> certificates.Signer:
        certificate = self._certificate()
        try:
            key = serialization.load_pem_private_key(self.store.read(CA_KEY), None)
        except FileNotFoundError as exc:
            raise StateUnusable(str(self.store.path(CA_KEY)), "is missing") from exc
        except (ValueError, TypeError) as exc:
            raise StateUnusable(str(self.store.path(CA_KEY)), f"is no private key ({exc})") from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StateUnusable(str(self.store.path(CA_KEY)), "is no elliptic-curve key")
        if key.public_key() != certificate.public_key():
            raise StateUnusable(str(self.store.path(CA_KEY)), f"is not the key of {CA_CERTIFICATE} beside it")
        return certificates.Signer(key, certificate)
