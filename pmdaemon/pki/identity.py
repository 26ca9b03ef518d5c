"""What a certificate says of its holder. Pure.

The identity stands in the subject alternative names, as URIs, because a common name holds 64 characters and a
gateway's name up to 128:

    gateway   urn:uuid:GATEWAY_ID   urn:storage-sla:name:NAME
    server    urn:storage-sla:server

Source: DESIGN.md 4 "Names", 5.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from pmdaemon.pki.errors import CredentialRefused

ID_PREFIX: Final = "urn:uuid:"
NAME_PREFIX: Final = "urn:storage-sla:name:"
SERVER_URI: Final = "urn:storage-sla:server"


class Credential(NamedTuple):
    """A gateway's certificate, as far as we care. ``serial``: lower-case hexadecimal."""

    gateway_id: str
    name: str
    serial: str
    not_before_us: int
    not_after_us: int

    @property
    def renew_at_us(self) -> int:
        """When two thirds of its life are over (wall clock)."""
        return self.not_before_us + (self.not_after_us - self.not_before_us) * 2 // 3


def unix_us(moment: datetime) -> int:
    """A certificate's date as microseconds since 1970."""
    return round(moment.timestamp()) * 1_000_000


def uris(certificate: x509.Certificate) -> list[str]:
    """The URIs among its alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def credential(certificate: x509.Certificate) -> Credential:
    """The gateway a certificate belongs to.

    Raises:
        CredentialRefused: it names no gateway (``no-identity``); a server's certificate, for example.
    """
    found = uris(certificate)
    ids = [item.removeprefix(ID_PREFIX) for item in found if item.startswith(ID_PREFIX)]
    names = [item.removeprefix(NAME_PREFIX) for item in found if item.startswith(NAME_PREFIX)]
    try:
        gateway_id = str(uuid.UUID(ids[0]))
        name = names[0]
    except (IndexError, ValueError):
        raise CredentialRefused(
            "no-identity", f"the certificate names no gateway (its names: {', '.join(found) or 'none'})"
        ) from None
    return Credential(
        gateway_id,
        name,
        f"{certificate.serial_number:x}",
        unix_us(certificate.not_valid_before_utc),
        unix_us(certificate.not_valid_after_utc),
    )


def credential_of_der(der: bytes) -> Credential:
    """The same from the bytes that TLS gives.

    Raises:
        CredentialRefused: not a certificate, or none of a gateway.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        return credential(certificate)
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as exc:
        raise CredentialRefused("no-identity", "the certificate cannot be read") from exc
