"""A small authority for NBD over TLS: files as libnbd, QEMU and nbdkit want them, one folder a peer."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pmdaemon.pki.authority import Authority


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _alternative(text: str) -> x509.GeneralName:
    if text.startswith("urn:"):
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class NbdAuthority:
    """Makes folders with ``ca-cert.pem`` and ``client-`` or ``server-`` ``cert.pem`` and ``key.pem``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name(f"authority of {folder.name}")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            self._builder(self.name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "ca.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    def issue(self, kind: str, common_name: str, *names: str) -> Path:
        """A folder for a ``client`` or ``server`` with these alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        server = kind == "server"
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        made = self._builder(_name(common_name), key).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names:
            made = made.add_extension(
                x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False
            )
        folder = self.folder / common_name
        folder.mkdir()
        certificate = made.sign(self._key, hashes.SHA256())
        (folder / "ca-cert.pem").write_bytes(self.file.read_bytes())
        (folder / f"{kind}-cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{kind}-key.pem").write_bytes(_pem(key))
        return folder

    def revocation_list(self, *folders: Path, age_days: int = 0) -> bytes:
        """A list, PEM, good for a day, on which the client certificates in these folders are."""
        made = datetime.now(UTC) - timedelta(hours=1, days=age_days)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.name).last_update(made)
        builder = builder.next_update(made + timedelta(days=1))
        for folder in folders:
            certificate = x509.load_pem_x509_certificate((folder / "client-cert.pem").read_bytes())
            revoked = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(made).build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class ProductAuthority:
    """The same with the product's own authority, as ``sla ca nbd`` makes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority(folder / "ca")
        self._authority.init()
        self.file = folder / "ca" / "ca.crt"

    def issue(self, kind: str, name: str, *hosts: str) -> Path:
        """A folder for a ``client``, or for a ``server`` at these hosts."""
        key, certificate = self._authority.nbd_credential(name, hosts)
        folder = self.folder / name
        folder.mkdir()
        (folder / "ca-cert.pem").write_bytes(self.file.read_bytes())
        (folder / f"{kind}-cert.pem").write_bytes(certificate)
        (folder / f"{kind}-key.pem").write_bytes(key)
        return folder
