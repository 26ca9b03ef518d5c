"""A dead man's switch: that delivery stands still is noticed by who waits for its heartbeat."""

from __future__ import annotations

import signal
from pathlib import Path

from pmdaemon.runtime.clock import Deadline
from tests.support.delivery_process import delivering, until
from tests.support.receivers import HttpReceiver

INTERVAL_S = 1.0
MISSED = 3
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: outside}}
spec: {{heartbeat: {{url: "{url}", interval: 1s}}}}
"""


class Switch:
    """What is at the other end: it raises the alarm when so many beats in a row do not come."""

    def __init__(self, receiver: HttpReceiver) -> None:
        self._receiver = receiver
        self._look()

    def has_alarm(self) -> bool:
        if self.beats != len(self._receiver.requests):
            self._look()
        return self._deadline.passed

    def _look(self) -> None:
        self.beats = len(self._receiver.requests)
        self._deadline = Deadline(MISSED * INTERVAL_S)


def test_a_delivery_process_that_is_stopped_is_noticed_from_outside(tmp_path: Path) -> None:
    with HttpReceiver() as receiver, delivering(tmp_path, DOCUMENTS.format(url=receiver.url)) as process:
        until(lambda: len(receiver.requests) > 1, "beats")
        process.send_signal(signal.SIGSTOP)
        try:
            switch = Switch(receiver)
            until(switch.has_alarm, "the alarm")
            assert process.poll() is None  # it is there, and its parent sees no death
        finally:
            process.send_signal(signal.SIGCONT)
        until(lambda: len(receiver.requests) > switch.beats, "beats again")
