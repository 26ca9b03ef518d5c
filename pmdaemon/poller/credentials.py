"""Checks what a session's certificate allows: which gateway it may register, under which name. Pure.

Without TLS (loopback only) every peer may. With TLS a peer without a certificate may ask for the CA's
certificate and enrol, nothing else; a peer with one may register the gateway named in it, under the name in
it, unless it was revoked. Expired certificates and those of another CA do not get this far: the handshake
refuses them.

Source: P3; DESIGN.md 5 "Credentials"; docs/operations/security.md.
"""

from __future__ import annotations

from collections.abc import Container

from pmdaemon.errors import PeerRefused, not_enrolled
from pmdaemon.pki.certificates import Credential
from pmdaemon.wire.messages.agent import Hello


def check_holder(held: Credential | None, revoked: Container[str]) -> Credential:
    """Whether a peer with this certificate may speak at all; decided before its HELLO is read.

    Raises:
        PeerRefused: ``not-enrolled`` or ``revoked``.
    """
    if held is None:
        raise not_enrolled()
    if held.serial in revoked:
        raise PeerRefused(
            "revoked", f"the certificate {held.serial} of gateway {held.name} was revoked; enrol it again"
        )
    return held


def check_identity(held: Credential, hello: Hello) -> None:
    """Whether the holder of this certificate may say this HELLO.

    Raises:
        PeerRefused: ``wrong-identity`` or ``wrong-name``.
    """
    if held.gateway_id != hello.gateway_id:
        raise PeerRefused(
            "wrong-identity",
            f"it calls itself {hello.gateway_id}, its certificate is for {held.gateway_id} ({held.name})",
        )
    if held.name != hello.name:
        raise PeerRefused(
            "wrong-name",
            f"it calls itself {hello.name!r}, its certificate is for {held.name!r}. Correct `name` in the "
            "agent's file, or enrol it under the new name",
        )
