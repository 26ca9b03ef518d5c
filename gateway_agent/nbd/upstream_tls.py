"""TLS with the upstream of one export, as its client: the certificates, and the beginning of a handshake.

The upstream must show a certificate of ``upstream_ca`` for the address in ``upstream``, or for
``upstream_name``. The files are read again when one was replaced. Thread: the loop's.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.sockets import parse_upstream
from gateway_agent.nbd.tls import (
    FileStates,
    TlsConnection,
    TlsEngine,
    TlsOpening,
    file_states,
    load_authority,
    load_own,
)

if TYPE_CHECKING:
    from gateway_agent.config import ExportConfig


class UpstreamTls:
    """See the module docstring.

    Args:
        loop: of the plane.
        engine: of the plane.
        export: whose upstream is ``nbds://``.
    """

    def __init__(self, loop: EventLoop, engine: TlsEngine, export: ExportConfig) -> None:
        self.export = export
        self._loop = loop
        self._engine = engine
        self._hostname = export.upstream_name or parse_upstream(export.upstream or "")[0].host
        self._context: ssl.SSLContext | None = None
        self._seen: FileStates = ()

    def secure(
        self, sock: socket.socket, on_ready: Callable[[], None], on_failed: Callable[[str], None]
    ) -> tuple[TlsConnection, TlsOpening]:
        """Begin the handshake; see ``TlsOpening``.

        Raises:
            ConfigError: a file cannot be used; names the setting.
        """
        export = self.export
        files = file_states(export.upstream_ca, export.upstream_certificate, export.upstream_key)
        if self._context is None or files != self._seen:
            self._context = None  # what was replaced is trusted no more
            self._context, self._seen = upstream_context(export), files
        connection = TlsConnection(
            self._loop, sock, self._context, server_side=False, hostname=self._hostname
        )
        return connection, TlsOpening(self._engine, connection, on_ready, on_failed, is_client=True)


def upstream_context(export: ExportConfig) -> ssl.SSLContext:
    """TLS 1.2 and newer, as the client of an upstream.

    Raises:
        ConfigError: a file cannot be used; names the setting.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # requires a certificate, and compares its names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    where = f"[[export]] {export.volume}"
    fix = "Give a PEM file with the authority of the upstream's certificate"
    load_authority(context, f"{where} upstream_ca", export.upstream_ca, fix)
    if export.upstream_certificate:
        load_own(context, f"{where} upstream_certificate", export.upstream_certificate, export.upstream_key)
    return context
