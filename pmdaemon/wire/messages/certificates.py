"""Certificates of an agent: the questions ENROL, RENEW and CA_QUERY, and the answers to them.

The agent encodes the questions and ``pki`` reads what is in them; here only names and lengths are checked. No
text about a bad ENROL shows its token.

Pure. Source: DESIGN 5 (credentials); docs/formats/messages.md.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage

MAX_REQUEST_BYTES: Final = 2048  # of a certificate signing request
MAX_TOKEN_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class CaQuery(WireMessage):
    """The question for the CA's certificate. With TLS only, also by a peer without a certificate."""

    KIND: ClassVar = Kind.CA_QUERY


@dataclass(frozen=True, slots=True)
class CaCertificate(WireMessage):
    """The CA's certificate (DER)."""

    KIND: ClassVar = Kind.CA_CERT
    ca: bytes


@dataclass(frozen=True, slots=True)
class Enrol(WireMessage):
    """The request for a first certificate. ``csr`` is DER, at most 2 KiB."""

    KIND: ClassVar = Kind.ENROL
    token: str
    gateway_id: Annotated[str, Key("gw")]
    request: Annotated[bytes, Key("csr")]

    @classmethod
    def parse(cls, header: Header) -> Enrol:
        """Check a header.

        Raises:
            MalformedFrame: names the key and what is expected; never shows the token.
        """
        token, gateway_id = header.get("token"), header.get("gw")
        if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN_CHARACTERS:
            raise MalformedFrame(f"ENROL: key 'token' must be text of 1 to {MAX_TOKEN_CHARACTERS} characters")
        try:
            if not isinstance(gateway_id, str):
                raise ValueError("not text")
            gateway_id = str(uuid.UUID(gateway_id))
        except ValueError as exc:
            raise MalformedFrame(f"ENROL: key 'gw' is {excerpt(gateway_id)}, expected a UUID") from exc
        return cls(token, gateway_id, _signing_request("ENROL", header))


@dataclass(frozen=True, slots=True)
class Renew(WireMessage):
    """The request for the next certificate, for the same identity, while registered or polling."""

    KIND: ClassVar = Kind.RENEW
    request: Annotated[bytes, Key("csr")]

    @classmethod
    def parse(cls, header: Header) -> Renew:
        """Check a header.

        Raises:
            MalformedFrame: the request is missing or too long.
        """
        return cls(_signing_request("RENEW", header))


def _signing_request(frame_name: str, header: Header) -> bytes:
    request = header.get("csr")
    if not isinstance(request, bytes) or not 0 < len(request) <= MAX_REQUEST_BYTES:
        raise MalformedFrame(f"{frame_name}: key 'csr' must be 1 to {MAX_REQUEST_BYTES} bytes")
    return request


@dataclass(frozen=True, slots=True)
class Certificate(WireMessage):
    """The answer to ENROL or RENEW (DER). It comes later; one question at a time."""

    KIND: ClassVar = Kind.CERTIFICATE
    der: Annotated[bytes, Key("cert")]
    ca: bytes = b""

    @classmethod
    def parse(cls, header: Header) -> Certificate:
        """Check that there is a certificate; what is in it is not looked at.

        Raises:
            MalformedFrame: there is none.
        """
        der = header.get("cert")
        if not isinstance(der, bytes) or not der:
            raise MalformedFrame("CERTIFICATE key 'cert' is missing")
        return cls(der)
