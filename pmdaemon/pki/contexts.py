"""TLS contexts: 1.3 only, certificates on both sides, no session tickets.

A session resumed by a ticket would skip the certificate and with it expiry and revocation; a handshake costs
about a millisecond, once a session. The server's context lets a peer without a certificate finish the
handshake, because that is how a gateway asks for its first one; the session then allows nothing else
(``poller.frame_handlers``). Host names are not compared: an agent accepts the server because its certificate
comes from the pinned CA, is for a server and says so (``SERVER_URI``), at whatever address it is reached.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pmdaemon.pki.errors import StateUnusable


def server(authority: Path, certificate: Path) -> ssl.SSLContext:
    """For the PMDaemon. ``certificate``: PEM with its key and certificate.

    Raises:
        StateUnusable: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_OPTIONAL
    _trust(context, authority)
    load_certificate(context, certificate)
    return context


def agent(authority: Path, certificate: Path | None) -> ssl.SSLContext:
    """For a gateway agent. ``certificate``: PEM with its key and certificate; None while it enrols.

    Raises:
        StateUnusable: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, authority)
    if certificate is not None:
        load_certificate(context, certificate)
    return context


def partner(authority: Path, certificate: Path, *, server_side: bool) -> ssl.SSLContext:
    """For the connections between two cooperating servers; either side demands a certificate.

    Raises:
        StateUnusable: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0
    _trust(context, authority)
    load_certificate(context, certificate)
    return context


def node(authority: Path, certificate: Path) -> ssl.SSLContext:
    """For a client of a cluster's nodes; the node's certificate must name the address that was dialled.

    Raises:
        StateUnusable: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _trust(context, authority)
    load_certificate(context, certificate)
    return context


def unverified() -> ssl.SSLContext:
    """For asking a server for its CA: nothing secret is sent, and what comes is compared with the pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path) -> None:
    """Use this key and certificate from the next handshake on.

    Raises:
        StateUnusable: not a key and its certificate.
    """
    try:
        context.load_cert_chain(certificate)
    except (OSError, ssl.SSLError) as exc:
        raise StateUnusable(str(certificate), f"is no key with its certificate ({exc})") from exc


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as exc:
        raise StateUnusable(str(authority), f"is no CA certificate ({exc})") from exc
