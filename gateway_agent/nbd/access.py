"""Which client may see which export, and what a client is called.

A client is known by its address and, behind TLS, by the names in its certificate, which the listener's
``client_ca`` vouches for. An export without ``allow_names`` and ``allow_networks`` is for every client that
the listener lets in; of one that has them, each that is set must let the client in.

An export that a client may not see does not exist for it: it is not listed, and asked for by its name it is
refused as an unknown one is, in the same words, so that names cannot be tried out. The reason is in the log.

Pure: no I/O; a certificate is the dictionary of ``ssl.SSLObject.getpeercert``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal

from gateway_agent.nbd.sockets import IpAddress, IpNetwork, as_name, parse_network
from pmdaemon.runtime.excerpt import printable

if TYPE_CHECKING:
    from gateway_agent.config import ExportConfig

ClientRule = Literal["address", "export-suffix", "tls-name"]
UNIX: Final = "unix"
"""In ``allow_networks``: clients of this host by a Unix socket."""
NAME_URI: Final = "urn:storage-sla:name:"
"""Before a name in certificates of the product's own authority (``pmdaemon.pki.certificates``)."""
SHOWN_CHARACTERS: Final = 255  # a host name has no more


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """One client.

    Attributes:
        address_name: its address in a form that may name a client, ``uid-N`` for a Unix socket.
        address: None for a Unix socket.
        names: of its certificate, the one it is called by first; none without TLS or certificate.
        is_secure: whether the connection is TLS.
        certificate: that it showed, verified, DER; None without one.
    """

    address_name: str
    address: IpAddress | None
    names: tuple[str, ...] = ()
    is_secure: bool = False
    certificate: bytes | None = None

    def called(self, rule: ClientRule) -> str:
        """Its name in the statistics, unless the export it asks for says another."""
        return as_name(self.names[0], "tls-") if rule == "tls-name" and self.names else self.address_name

    def __str__(self) -> str:
        """For log lines."""
        return f"{self.address_name} ({_shown(self.names[0])})" if self.names else self.address_name


def _shown(name: str) -> str:
    """A name of a certificate for a log line: an authority may let a client choose it."""
    return printable(name, SHOWN_CHARACTERS)


def why_refused(export: ExportConfig, client: ClientIdentity) -> str:
    """Why a client may not see an export; empty if it may."""
    if export.allow_names and not is_one_of(client.names, export.allow_names):
        shown = ", ".join(map(_shown, client.names[:4])) or "none"
        return f"allow_names has no name of its certificate (its names: {shown})"
    if export.allow_networks and not is_within(client.address, export.allow_networks):
        where = UNIX if client.address is None else str(client.address)
        return f"allow_networks does not have its address {where}"
    return ""


def is_one_of(names: Iterable[str], patterns: tuple[str, ...]) -> bool:
    """Whether one of the names fits one of the patterns; capital letters do not count."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in names for pattern in patterns)


def is_within(address: IpAddress | None, networks: tuple[str, ...]) -> bool:
    """Whether an address is in one of the networks; a Unix socket only if they have ``unix``."""
    if address is None:
        return UNIX in networks
    return any(address in network for network in _parsed(networks))


@functools.lru_cache(maxsize=1024)  # as many as a plane has exports, twice over
def _parsed(networks: tuple[str, ...]) -> tuple[IpNetwork, ...]:
    return tuple(parse_network(text) for text in networks if text != UNIX)


def names_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a client's certificate that was verified.

    In this order: the product's own name, host names, the common name, then addresses, mail and other URIs.
    """
    if not certificate:
        return ()
    alternative = [(str(kind), str(value)) for kind, value in certificate.get("subjectAltName", ())]
    uris = [value for kind, value in alternative if kind == "URI"]
    found = [value.removeprefix(NAME_URI) for value in uris if value.startswith(NAME_URI)]
    found += [value for kind, value in alternative if kind == "DNS"]
    subject = (pair for group in certificate.get("subject", ()) for pair in group)
    found += [str(value) for kind, value in subject if kind == "commonName"]
    found += [value for kind, value in alternative if kind in ("IP Address", "email")]
    found += [value for value in uris if not value.startswith(NAME_URI)]
    return tuple(dict.fromkeys(name for name in found if name))
