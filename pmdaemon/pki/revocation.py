"""Revocation lists (X.509 CRLs) of a file: which certificates their authorities have taken back.

OpenSSL holds new handshakes to the same file. This is for what it does not say: whether a peer that is
connected already is on the list, whose lists they are, and until when they hold. The time is given.

Source: RFC 5280 section 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography import x509

from pmdaemon.pki.certificates import unix_us
from pmdaemon.pki.errors import StateUnusable

_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


class RevocationLists:
    """See the module docstring.

    Args:
        path: a PEM file.

    Raises:
        StateUnusable: it cannot be read, or has no list that can be understood.
    """

    def __init__(self, path: str) -> None:
        try:
            found = _LIST.findall(Path(path).read_bytes())
            self._lists = [x509.load_pem_x509_crl(text) for text in found]
        except OSError as exc:
            raise StateUnusable(path, exc.strerror or str(exc)) from exc
        except ValueError as exc:
            raise StateUnusable(path, "it has a revocation list that cannot be understood") from exc
        if not self._lists:
            raise StateUnusable(path, "there is no revocation list in it")

    def has(self, certificate: bytes) -> bool:
        """Whether this certificate (DER) was taken back by its authority."""
        peer = x509.load_der_x509_certificate(certificate)
        return any(
            each.issuer == peer.issuer
            and each.get_revoked_certificate_by_serial_number(peer.serial_number) is not None
            for each in self._lists
        )

    def unsigned(self, authorities: Iterable[bytes]) -> list[str]:
        """Issuers of lists that none of these certificates (DER) has signed, for people."""
        known = [x509.load_der_x509_certificate(each) for each in authorities]
        return [each.issuer.rfc4514_string() for each in self._lists if not _is_signed(each, known)]

    def expired(self, now_unix_us: int) -> list[str]:
        """Issuers of lists that hold no more, for people."""
        return [
            each.issuer.rfc4514_string()
            for each in self._lists
            if each.next_update_utc is not None and unix_us(each.next_update_utc) < now_unix_us
        ]


def _is_signed(found: x509.CertificateRevocationList, authorities: Iterable[x509.Certificate]) -> bool:
    for each in authorities:
        if each.subject != found.issuer:
            continue
        key = each.public_key()
        try:
            if found.is_signature_valid(key):  # type: ignore[arg-type]  # any other key is a TypeError
                return True
        except TypeError:
            return True  # a kind of key that the library does not check; OpenSSL does
    return False
