"""A heartbeat: a request at an interval, sent only while delivery makes progress (dead man's switch).

It takes no events. The engine calls ``beat`` every ``interval_s``, and leaves it out while the queue stands
still: the service at the other end raises the alarm then, also when this host is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import HeartbeatSpec
from sla_server.events.recipients.base import Answer, Notice, refused
from sla_server.events.recipients.webhook import HttpTarget


class Heartbeat:
    """See the module."""

    kind = "heartbeat"

    def __init__(
        self, name: str, spec: HeartbeatSpec, target: HttpTarget, *, timeout_s: float, most_notices: int
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self.interval_s = float(spec.interval)
        self._spec = spec
        self._target = target

    def beat(self, at_us: int, deadline: Deadline) -> Answer:
        """Say that delivery works."""
        content, headers = b"", {}
        if self._spec.method == "POST":
            content = strict_json.dumps({"recipient": self.name, "at_us": at_us, "state": "ok"}).encode()
            headers = {"Content-Type": "application/json"}
        return self._target.send(self._spec.method, content, deadline, headers)

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``: a route that names it is wrong."""
        return refused("a heartbeat takes no events; name another recipient in the route")

    def close(self) -> None:
        """See ``Recipient``."""
        self._target.close()
