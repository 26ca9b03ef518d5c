"""Opening a listening socket: the one place that words what is wrong when an address cannot be had."""

from __future__ import annotations

import socket

from pmdaemon.errors import ConfigError

BACKLOG = 1024
"""Who connects between the start and the first accept waits here; a fleet dials in at once."""


def open_listener(setting: str, host: str, port: int) -> socket.socket:
    """Bind and listen; blocking.

    Args:
        setting: the key the address comes from, for the error.
        host: an IP address.
        port: 0 takes any free one.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            setting,
            f"cannot listen on {host}:{port}: {exc.strerror}",
            f"Stop what uses the port ('ss -ltnp sport = :{port}' names it; it may be the SLA server of "
            f"another data directory), or choose another port for {setting}; 0 takes a free one",
        ) from exc
    return listener
