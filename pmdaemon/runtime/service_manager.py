"""The watchdog of systemd: a process that no parent of ours watches tells it once a second that it goes on.

With ``WatchdogSec`` in its unit, systemd leaves the address of a datagram socket in ``NOTIFY_SOCKET``, and
ends and restarts a service that has not written to it for so long. Without it nothing is sent.

A gateway's agent has no ``WatchdogSec``: systemd would end its data planes with it, and application I/O
passes through them. Its link reports a parent that hangs (``watchdog.ParentPulse``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"


class ServiceManager:
    """What this process says to systemd. Taken out of the environment: its children are not asked.

    Thread: the one that ``beat`` speaks for.
    """

    def __init__(self) -> None:
        given = os.environ.pop(NOTIFY_SOCKET, "")
        self._address = f"\0{given[1:]}" if given.startswith("@") else given

    def beat(self) -> None:
        """This process goes on. Neither waits nor raises: a beat that cannot be sent is one missed."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"WATCHDOG=1", self._address)
