"""TCP ports on loopback for processes that a test starts."""

from __future__ import annotations

import socket

_held: list[int] = []


def free_port(wanted: int = 0) -> int:
    """A free TCP port on loopback (the wanted one, or any), given to no other process while this one runs.

    A socket stays bound to it, so neither ``bind`` to port 0 nor an outgoing connection picks it. A listener
    that sets ``SO_REUSEADDR``, as servers do, may still listen on it, also a second time after a restart.

    Raises:
        OSError: a process listens on the wanted one.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("127.0.0.1", wanted))
    except OSError:
        holder.close()
        raise
    port = int(holder.getsockname()[1])
    _held.append(holder.detach())  # as a number, which nothing closes before the process ends
    return port
