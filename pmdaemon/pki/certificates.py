"""Makes keys, requests and certificates, and says whose a certificate is. Pure: the time is given.

Keys are P-256: fast to sign and verify, and every TLS library has it. Certificates begin a little before they
are made (at most an hour), because a gateway's clock may be behind.

The identity is in the subject alternative names, as URIs, because a common name holds 64 characters and a
gateway's name up to 128:

    gateway   urn:uuid:GATEWAY_ID   urn:storage-sla:name:NAME; and urn:storage-sla:volumes:PATTERN for
              each entry of its list of volumes, percent-encoded, if it has one
    server    urn:storage-sla:server
    partner   urn:storage-sla:partner:NAME: one of two cooperating servers, as server and as client
    node      urn:storage-sla:node:NAME and its addresses: one of a cluster, as server and as client
    NBD       urn:storage-sla:name:NAME as a client of gateways, without an id, so that it can register none;
              host names and addresses as a gateway's listener

Source: DESIGN.md 4 "Names", 5.
"""

from __future__ import annotations

import hashlib
import ipaddress
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pmdaemon.pki.errors import CredentialRefused

Key = ec.EllipticCurvePrivateKey
BACKDATE_S: Final = 3600.0
MAX_CSR_BYTES: Final = 2048
CURVES: Final = (ec.SECP256R1, ec.SECP384R1)  # and no other of the same size: secp256k1, brainpool
ID_PREFIX: Final = "urn:uuid:"
NAME_PREFIX: Final = "urn:storage-sla:name:"
VOLUMES_PREFIX: Final = "urn:storage-sla:volumes:"
SERVER_URI: Final = "urn:storage-sla:server"
PARTNER_PREFIX: Final = "urn:storage-sla:partner:"
NODE_PREFIX: Final = "urn:storage-sla:node:"
ACCOUNT_PREFIX: Final = "urn:storage-sla:account:"
_COMMON_NAME_LIMIT: Final = 64
_UNREADABLE: Final = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion)


def make_key() -> Key:
    """A new P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """PKCS 8, not encrypted: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(certificate: x509.Certificate) -> bytes:
    """PEM of a certificate."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def der(certificate: x509.Certificate) -> bytes:
    """DER of a certificate."""
    return certificate.public_bytes(serialization.Encoding.DER)


def fingerprint(certificate_der: bytes) -> str:
    """SHA-256 of the DER form, 64 hexadecimal digits: what an agent pins."""
    return hashlib.sha256(certificate_der).hexdigest()


def make_request(key: Key, name: str) -> bytes:
    """A signing request (DER). It proves that its sender has the key; the server chooses the rest."""
    subject = _subject(name)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def public_key_of_request(data: bytes) -> ec.EllipticCurvePublicKey:
    """Check a request (DER or PEM).

    Raises:
        CredentialRefused: ``bad-request``: too long, damaged, a false signature, or no P-256 or P-384 key.
    """
    if len(data) > MAX_CSR_BYTES:
        raise CredentialRefused("bad-request", f"the request has {len(data)} bytes, limit {MAX_CSR_BYTES}")
    try:
        load = x509.load_pem_x509_csr if data.startswith(b"-----") else x509.load_der_x509_csr
        request = load(data)
        is_signed = request.is_signature_valid
        key = request.public_key()
    except _UNREADABLE as exc:
        # What the library says stays with us: it is for developers, and about bytes of an unknown peer.
        text = "the request cannot be read; send PKCS 10, DER or PEM, for a P-256 or P-384 key"
        raise CredentialRefused("bad-request", text) from exc
    if not is_signed:
        raise CredentialRefused("bad-request", "the request's signature is false")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise CredentialRefused("bad-request", "the request's key is not P-256 or P-384")
    return key


def make_authority(key: Key, now_us: int, lifetime_s: float) -> x509.Certificate:
    """The self-signed certificate of the CA."""
    subject = _subject(f"storage-sla CA {datetime.fromtimestamp(now_us / 1e6, UTC):%Y-%m-%d}")
    builder = _builder(subject, subject, key.public_key(), now_us, lifetime_s)
    usage = _usage(signs_certificates=True)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )


class Signer:
    """The CA's key and certificate in memory."""

    def __init__(self, key: Key, certificate: x509.Certificate) -> None:
        self._key = key
        self.certificate = certificate

    def server(self, key: Key, now_us: int, lifetime_s: float) -> x509.Certificate:
        """A certificate for the server itself."""
        names = _uris([SERVER_URI])
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        return self._sign(key.public_key(), "storage-sla server", names, usage, now_us, lifetime_s)

    def gateway(
        self,
        key: ec.EllipticCurvePublicKey,
        gateway_id: str,
        name: str,
        now_us: int,
        lifetime_s: float,
        volumes: Sequence[str] = (),
    ) -> x509.Certificate:
        """A certificate for a gateway; it can speak for this gateway_id only, and never as a server.

        ``volumes``: patterns of those it may show; none: no list.
        """
        listed = [f"{VOLUMES_PREFIX}{quote(pattern, safe='')}" for pattern in volumes]
        names = _uris([f"{ID_PREFIX}{uuid.UUID(gateway_id)}", f"{NAME_PREFIX}{name}", *listed])
        return self._sign(key, name, names, ExtendedKeyUsageOID.CLIENT_AUTH, now_us, lifetime_s)

    def nbd_client(self, key: Key, name: str, now_us: int, lifetime_s: float) -> x509.Certificate:
        """A certificate for a client of gateways' NBD listeners."""
        names = _uris([f"{NAME_PREFIX}{name}"])
        return self._sign(key.public_key(), name, names, ExtendedKeyUsageOID.CLIENT_AUTH, now_us, lifetime_s)

    def nbd_server(
        self, key: Key, name: str, hosts: Sequence[str], now_us: int, lifetime_s: float
    ) -> x509.Certificate:
        """A certificate for a gateway's NBD listeners; ``hosts`` are names or IP addresses."""
        names = [_host(text) for text in hosts]
        return self._sign(key.public_key(), name, names, ExtendedKeyUsageOID.SERVER_AUTH, now_us, lifetime_s)

    def partner(self, key: Key, name: str, now_us: int, lifetime_s: float) -> x509.Certificate:
        """A certificate for one of two cooperating servers, which dial each other."""
        names = _uris([f"{PARTNER_PREFIX}{name}"])
        usages = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        return self._sign(key.public_key(), name, names, usages, now_us, lifetime_s)

    def node(
        self, key: Key, name: str, hosts: Sequence[str], now_us: int, lifetime_s: float
    ) -> x509.Certificate:
        """A certificate for a node of a cluster and its clients; ``hosts`` are names or IP addresses."""
        names = [*_uris([f"{NODE_PREFIX}{name}"]), *(_host(text) for text in hosts)]
        usages = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        return self._sign(key.public_key(), name, names, usages, now_us, lifetime_s)

    def account(self, key: Key, name: str, now_us: int, lifetime_s: float) -> x509.Certificate:
        """A certificate for a client of a cluster's nodes."""
        names = _uris([f"{ACCOUNT_PREFIX}{name}"])
        return self._sign(key.public_key(), name, names, ExtendedKeyUsageOID.CLIENT_AUTH, now_us, lifetime_s)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        common_name: str,
        alternative: list[x509.GeneralName],
        usage: x509.ObjectIdentifier | tuple[x509.ObjectIdentifier, ...],
        now_us: int,
        lifetime_s: float,
    ) -> x509.Certificate:
        authority = self.certificate
        usages = usage if isinstance(usage, tuple) else (usage,)
        names = x509.SubjectAlternativeName(alternative)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        end_us = unix_us(authority.not_valid_after_utc)
        lifetime_s = min(lifetime_s, (end_us - now_us) / 1e6)
        if lifetime_s <= 0:
            raise CredentialRefused("authority-expired", "the certificate authority itself has expired")
        return (
            _builder(_subject(common_name), authority.subject, key, now_us, lifetime_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
            .add_extension(names, critical=False)
            .add_extension(issuer_key, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _uris(texts: list[str]) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(text) for text in texts]


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_COMMON_NAME_LIMIT])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now_us: int, lifetime_s: float
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(now_us // 1_000_000, UTC)
    begin = now - timedelta(seconds=min(BACKDATE_S, lifetime_s / 10))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + timedelta(seconds=lifetime_s))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def certificate_in(data: bytes) -> x509.Certificate:
    """The certificate of a PEM file that also holds a key.

    Raises:
        ValueError: there is none.
    """
    return x509.load_pem_x509_certificate(data[max(data.find(b"-----BEGIN CERTIFICATE"), 0) :])


def ends_us(data: bytes) -> int:
    """When the certificate of a PEM file ends.

    Raises:
        ValueError: there is none.
    """
    return unix_us(certificate_in(data).not_valid_after_utc)


def pem_of_der(data: bytes) -> bytes:
    """PEM of a certificate given as DER."""
    return pem(x509.load_der_x509_certificate(data))


def issued(data: bytes, key: Key, authority_pem: bytes) -> x509.Certificate:
    """A certificate just received, if it is for this key and from this authority.

    Raises:
        ValueError: it is not; says why.
    """
    try:
        made = x509.load_der_x509_certificate(data)
        is_ours = made.public_key() == key.public_key()
    except _UNREADABLE as exc:
        raise ValueError("the certificate cannot be read") from exc
    if not is_ours:
        raise ValueError("the certificate is for another key")
    try:
        made.verify_directly_issued_by(x509.load_pem_x509_certificate(authority_pem))
    except _UNREADABLE as exc:
        raise ValueError("the certificate is not from the pinned authority") from exc
    return made


class Credential(NamedTuple):
    """A gateway's certificate, as far as we care.

    ``serial``: lower-case hexadecimal; ``volumes``: patterns of those it may show, none: no list.
    """

    gateway_id: str
    name: str
    serial: str
    not_before_us: int
    not_after_us: int
    volumes: tuple[str, ...] = ()

    @property
    def renew_at_us(self) -> int:
        """When two thirds of its life have passed (wall clock)."""
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
        tuple(
            unquote(item.removeprefix(VOLUMES_PREFIX)) for item in found if item.startswith(VOLUMES_PREFIX)
        ),
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
