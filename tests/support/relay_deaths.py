"""What tests/crash/test_relay_kills runs in children: a relay that kills itself at its k-th point.

A point is before and after each step that makes something durable or that another side sees: a post is
answered, events are appended, identities are recorded, a recipient has its lines, the state is written,
records are deleted. ``tests.support.forks`` calls ``main``; nothing is started at import.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from pmdaemon.runtime.stop import Stop
from sla_server.events.lane import DeliveryState
from sla_server.events.queue import EventQueue
from sla_server.events.receiver.handler import PostHandler
from sla_server.events.recipients.json_file import JsonFile
from sla_server.relay import process
from sla_server.relay.config import load
from sla_server.relay.records import IdentityMemory

POINTS: list[tuple[Any, str]] = [
    (PostHandler, "answer"),
    (EventQueue, "append"),
    (IdentityMemory, "record"),
    (JsonFile, "deliver"),
    (DeliveryState, "write"),
    (EventQueue, "delete_through"),
]


class PointsToLive:
    """How many points are left; points of all threads count."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def main(folder: str, kill_at: float) -> None:
    """A relay's life: until its point, or until there is a file ``stop``; what was left is in ``left``."""
    fate = PointsToLive(int(kill_at))
    for owner, name in POINTS:
        setattr(owner, name, mortal(getattr(owner, name), fate))
    stop, asked = Stop(), Path(folder) / "stop"

    def look() -> None:
        while not asked.exists():
            time.sleep(0.02)
        stop.set("the test asked for it")

    threading.Thread(target=look, daemon=True).start()
    status = process.run(load(Path(folder) / "site"), stop)
    (Path(folder) / "left").write_text(str(fate.left))
    assert status == 0


def mortal(method: Any, fate: PointsToLive) -> Any:
    @functools.wraps(method)
    def stepping(*arguments: Any, **options: Any) -> Any:
        fate.step()
        found = method(*arguments, **options)
        fate.step()
        return found

    return stepping
