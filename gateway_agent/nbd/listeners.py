"""How a plane's TCP listeners meet their clients: plain or with TLS; and which they turn away.

    tls       clients of this host (loopback) and of plain_networks     all others
    off       plain                                                    closed at once
    offer     plain, or TLS by STARTTLS                                TLS only
    require   TLS only                                                 TLS only

Unix sockets are always plain: the group of their file says who may connect. ``ListenerSecurity`` is what the
operator writes; ``ListenerGuard`` applies it, one for each plane, in the loop's thread.

The files of certificates are read at the start, and again for the next handshake when one was replaced. What
cannot be used then is logged once, and the former certificates stay in force; without former ones no client
gets TLS until the files can be used. With ``client_crl`` they are looked at every ``LISTS_NS``, too, so that
clients that are connected are ended soon after their certificate is on the list.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal

import structlog
from pydantic import field_validator, model_validator

from gateway_agent.nbd.access import ClientIdentity, is_within, why_refused
from gateway_agent.nbd.handshake import TLS_REQUIRED
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.protocol import TlsMode
from gateway_agent.nbd.sockets import group_id, parse_network
from gateway_agent.nbd.tls import (
    FileStates,
    TlsConnection,
    TlsEngine,
    TlsOpening,
    file_states,
    load_authority,
    load_own,
    load_revoked,
)
from pmdaemon.errors import ConfigError
from pmdaemon.pki.errors import PkiError
from pmdaemon.runtime.config import StrictModel

if TYPE_CHECKING:
    from gateway_agent.config import ExportConfig
    from gateway_agent.nbd.accounting import CountedSession
    from pmdaemon.pki.revocation import RevocationLists

log = structlog.get_logger("listeners")
LISTS_NS: Final = 2 * 10**9
TOTALS_NS: Final = 60 * 10**9  # between two lines that say how many clients were turned away

NOT_PLAIN: Final = "plain_networks does not have its address"
_VERIFY: Final = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}


class ListenerSecurity(StrictModel):
    """Settings of a plane's listeners: who may connect, and how."""

    tls: TlsMode = "off"
    """TLS for NBD clients over TCP: ``off``, ``offer``, or ``require``. Unix sockets are always plain."""
    tls_certificate: str = ""
    """PEM file with the certificate that clients see, and the rest of its chain; it must have the names or
    addresses that they connect to."""
    tls_key: str = ""
    """PEM file with its key, not encrypted; empty if ``tls_certificate`` has it, too."""
    client_certificates: Literal["required", "optional", "none"] = "required"
    """Whether a client must show a certificate; ``none`` encrypts only, for whoever reaches the port."""
    client_ca: str = ""
    """PEM file with the authorities that clients' certificates must come from; empty for that of the SLA
    server, which ``gateway-agent enrol`` stored."""
    client_crl: str = ""
    """PEM file with the newest revocation list of each authority in ``client_ca`` that certifies clients: no
    client on it is let in, one that is connected is ended, and none at all is let in once the list has
    expired. Empty: no certificate is revoked."""
    plain_networks: tuple[str, ...] = ()
    """Networks whose clients may do without TLS (``10.0.0.0/8``). Whoever can listen there reads what is
    stored, and can change it. Clients of this host always may, unless ``tls`` is ``require``."""

    socket_group: str = ""
    """Group of this host whose members may connect by Unix sockets (mode 0660), which are in a folder that
    they may enter; empty: the agent's own. The agent's user must be a member, or root."""

    @field_validator("plain_networks")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_network(text)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> ListenerSecurity:
        if self.tls != "off" and not self.tls_certificate:
            raise ValueError(
                f'tls = "{self.tls}" needs tls_certificate, a PEM file with a certificate for the names or '
                "addresses of this gateway; and tls_key, if the key is in a file of its own"
            )
        files = ("tls_certificate", "tls_key", "client_ca", "client_crl")
        idle = [name for name in files if getattr(self, name)]
        if self.tls == "off" and idle:
            raise ValueError(
                f'{idle[0]} is set, and tls is "off": nothing would be encrypted. Set tls = "require" or '
                f'"offer", or remove {idle[0]}'
            )
        if self.client_crl and self.client_certificates == "none":
            raise ValueError(
                'client_crl is set, and client_certificates = "none" asks no client for one. Set '
                'client_certificates = "required" or "optional", or remove client_crl'
            )
        if self.tls == "require" and self.plain_networks:
            raise ValueError(
                'plain_networks lets clients do without TLS, which tls = "require" forbids. Set tls = '
                '"offer", or remove plain_networks'
            )
        return self

    @property
    def names_clients(self) -> bool:
        """Whether clients can have names of certificates."""
        return self.tls != "off" and self.client_certificates != "none"

    def check(self, plane: str) -> None:
        """See that the files of certificates, and the group of Unix sockets, can be used.

        Raises:
            ConfigError: names the setting of ``[[plane]]`` and what is wrong with it.
        """
        if self.tls != "off":
            _load(self, plane)
        self.socket_gid(plane)

    def socket_gid(self, plane: str) -> int:
        """The number of ``socket_group``.

        Raises:
            ConfigError: see ``check``.
        """
        return group_id(self.socket_group, f"[[plane]] {plane} socket_group")


def server_context(security: ListenerSecurity, plane: str) -> ssl.SSLContext:
    """TLS 1.2 and newer, as the server of clients.

    Raises:
        ConfigError: see ``ListenerSecurity.check``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.num_tickets = 0
    where = f"[[plane]] {plane}"
    load_own(context, f"{where} tls_certificate", security.tls_certificate, security.tls_key)
    context.verify_mode = _VERIFY[security.client_certificates]
    if security.client_certificates != "none":
        fix = (
            "Give a PEM file with the authority of the clients' certificates; without client_ca it is the "
            "SLA server's, which gateway-agent enrol stores"
        )
        load_authority(context, f"{where} client_ca", security.client_ca, fix)
        if security.client_crl:
            load_revoked(context, f"{where} client_crl", security.client_crl)
    return context


def _load(security: ListenerSecurity, plane: str) -> tuple[ssl.SSLContext, RevocationLists | None]:
    """What the files of ``security``, which has TLS, say now.

    Raises:
        ConfigError: see ``ListenerSecurity.check``.
    """
    context = server_context(security, plane)
    if not security.client_crl:
        return context, None
    from pmdaemon.pki.revocation import RevocationLists  # cryptography, which other planes do not need

    where = f"[[plane]] {plane} client_crl"
    try:
        lists = RevocationLists(security.client_crl)
    except PkiError as exc:
        raise ConfigError(where, str(exc)) from exc
    if unsigned := lists.unsigned(context.get_ca_certs(binary_form=True)):
        problem = f"{security.client_crl} has a list of {unsigned[0]}, which client_ca does not have"
        raise ConfigError(where, problem, "Give the lists of the authorities in client_ca, and no others")
    return context, lists


class ListenerGuard:
    """See the module docstring.

    Args:
        plane: name of it.
        security: its settings, with every file named.
        loop: of the plane.
        engine: of the plane.
        on_lists: called when other revocation lists are in force, or one has expired.

    Attributes:
        turned_away: clients by reason, since the start.
        problem: what is wrong with the revocation lists, for people; empty: nothing.
    """

    def __init__(
        self,
        plane: str,
        security: ListenerSecurity,
        loop: EventLoop,
        engine: TlsEngine,
        on_lists: Callable[[], None] = lambda: None,
    ) -> None:
        self.turned_away: Counter[str] = Counter()
        self._plane = plane
        self._security = security
        self._loop = loop
        self._engine = engine
        self._on_lists: Callable[[], None] = lambda: None  # not while this is made
        self._lists: RevocationLists | None = None
        self.problem = ""
        self._context: ssl.SSLContext | None = None
        self._seen: FileStates = ()
        self._announced: Counter[str] = Counter()
        if security.tls != "off":
            try:
                self.context()
            except ConfigError as exc:  # clients without TLS are served, and each handshake tries again
                text = "no client gets TLS until they can be used"
                log.error("certificates-unusable", error=str(exc), text=text)
        self._on_lists = on_lists
        self._check_later()

    def mode_for(self, client: ClientIdentity) -> TlsMode | None:
        """What TLS is to this client; None if it is not let in, which is counted and logged."""
        mode = self._mode(client)
        if mode is None:
            self.turn_away("plain-network", client, NOT_PLAIN)
        return mode

    def _mode(self, client: ClientIdentity) -> TlsMode | None:
        if client.address is None:
            return "off"
        security = self._security
        if security.tls == "require":
            return "require"
        if client.address.is_loopback or is_within(client.address, security.plain_networks):
            return security.tls
        return "require" if security.tls == "offer" else None

    def refusal_of(self, client: ClientIdentity, export: ExportConfig) -> tuple[str, str] | None:
        """Why a client that uses an export would not be let in now: kind and text; None: it would."""
        mode, needs = self._mode(client), self._security.client_certificates
        if mode is None:
            return "plain-network", NOT_PLAIN
        if mode == "require" and not client.is_secure:
            return "tls-required", TLS_REQUIRED
        if mode != "off" and client.is_secure and needs == "required" and client.certificate is None:
            return "tls", "it shows no certificate"
        why = why_refused(export, client)
        return ("not-allowed", why) if why else None

    def secure(
        self, sock: socket.socket, on_ready: Callable[[], None], on_failed: Callable[[str], None]
    ) -> tuple[TlsConnection, TlsOpening]:
        """Begin the handshake of a client that asked for TLS; see ``TlsOpening``.

        Raises:
            ConfigError: there are no usable certificates.
        """
        connection = TlsConnection(self._loop, sock, self.context())
        return connection, TlsOpening(self._engine, connection, on_ready, on_failed)

    def context(self) -> ssl.SSLContext:
        """For the next handshake; see the module docstring.

        Raises:
            ConfigError: there have not been usable certificates yet.
        """
        security = self._security
        files = _states(security)
        if self._context is None or files != self._seen:
            self._seen = files
            try:
                loaded = _load(security, self._plane)
            except ConfigError as exc:
                if self._context is None:
                    raise
                log.error("certificates-unusable", error=str(exc), text="the former ones stay in force")
            else:
                self._put_in_force(*loaded)
        assert self._context is not None  # just loaded, or before
        return self._context

    def _put_in_force(self, context: ssl.SSLContext | None, lists: RevocationLists | None) -> None:
        has_lists = lists is not None or self._lists is not None
        self._context, self._lists = context, lists
        if has_lists:
            self._check_dates()
            self._on_lists()

    def _check_later(self) -> None:
        if self._security.client_crl:
            self._loop.at((self, "lists"), self._loop.clock.monotonic_ns() + LISTS_NS, self._check_files)

    def _check_files(self, _now_ns: int) -> None:
        """Whether there are other lists, also while no client comes."""
        if not self._security.client_crl:
            return
        self._check_later()
        with contextlib.suppress(ConfigError):  # which the next handshake says again
            self.context()
        before = self.problem
        self._check_dates()
        if self.problem != before:
            self._on_lists()

    def _check_dates(self) -> None:
        expired = self._lists.expired(self._loop.clock.unix_us()) if self._lists is not None else []
        before, self.problem = self.problem, ""
        if expired:
            self.problem = (
                f"client_crl: the list of {expired[0]} has expired, so none of its clients is let in; put a "
                f"newer one in {self._security.client_crl}"
            )
        if self.problem and self.problem != before:
            log.error("revocation-list-expired", problem=self.problem)

    def is_revoked(self, certificate: bytes | None) -> bool:
        """Whether a client's certificate, DER, is on a list in force, or cannot be compared with one."""
        if certificate is None or self._lists is None:
            return False
        try:
            return self._lists.has(certificate)
        except ValueError as exc:  # OpenSSL takes some that the library does not; the others are looked at
            log.error("certificate-not-understood", plane=self._plane, error=str(exc))
            return True

    def end_refused(self, connections: Iterable[CountedSession]) -> None:
        """End those that would not be let in now; they are counted as turned away."""
        known = {each: client for each in connections if (client := each.identity) is not None}
        revoked = [each for each, client in known.items() if self.is_revoked(client.certificate)]
        for each in revoked:
            each.close("its certificate was revoked")
        if revoked:
            self.turned_away["revoked"] += len(revoked)
            log.warning("revoked-clients-ended", connections=len(revoked))
        for each in revoked:
            del known[each]
        for each, client in known.items():
            if each.export is not None and (refused := self.refusal_of(client, each.export)) is not None:
                self.turn_away(refused[0], client, f"it was connected to {each.export.volume}; {refused[1]}")
                each.close(f"it would not be let in now: {refused[1]}")

    def apply(self, security: ListenerSecurity) -> None:
        """Other settings from the next client on; for those that are there see ``end_refused``.

        Raises:
            ConfigError: its certificates cannot be used; the former settings stay.
        """
        files = _states(security)  # before they are read: what is replaced meanwhile is read again
        loaded = _load(security, self._plane) if security.tls != "off" else (None, None)
        self._security, self._seen = security, files
        self._put_in_force(*loaded)
        self._check_later()

    def turn_away(self, reason: str, client: ClientIdentity, text: str) -> None:
        """Count and log a client that is not served; ``reason`` is one of a few."""
        now_ns = self._loop.clock.monotonic_ns()
        self._loop.warnings.warning(now_ns, "client-refused", peer=str(client), reason=text)
        if self.turned_away == self._announced:
            self._loop.at(self, now_ns + TOTALS_NS, self._announce)
        self.turned_away[reason] += 1

    def _announce(self, _now_ns: int) -> None:
        """Lines about single clients are limited; this one counts all of them."""
        self._announced = self.turned_away.copy()
        log.warning("clients-turned-away", since_start=dict(self.turned_away))


def _states(security: ListenerSecurity) -> FileStates:
    files = (security.tls_certificate, security.tls_key, security.client_ca, security.client_crl)
    return file_states(*files)
