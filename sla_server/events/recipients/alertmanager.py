"""A real Alertmanager, over its own API (POST /api/v2/alerts).

Alertmanager pairs the beginning and the end of an alert by its labels, and severity is usually one of them.
The event that ends a condition has a severity of its own (info), so its end is posted for every severity: an
Alertmanager that never had an alert with those labels sends nothing about its end.

Alertmanager ends by itself what is not posted again within its ``resolve_timeout``; we post once, and tell it
an end far away (``holds``). An event that has no end is an alert of ``INFO_S``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import AlertmanagerSpec
from sla_server.events.event import SEVERITIES
from sla_server.events.recipients.base import Answer, Notice, Status
from sla_server.events.recipients.webhook import HttpTarget, annotations_of, began_us, idempotency_key, labels
from sla_server.events.recipients.wording import rfc3339

PATH: Final = "/api/v2/alerts"
INFO_S: Final = 300


def alerts_of(notice: Notice, holds_s: int) -> list[dict[str, Any]]:
    """What is posted for one notice."""
    event, found = notice.event, labels(notice)
    if notice.status is Status.RESOLVED:
        ends = {"annotations": annotations_of(notice), "endsAt": rfc3339(event.at_us)}
        return [{"labels": found | {"severity": severity}, **ends} for severity in SEVERITIES]
    lasts_s = holds_s if notice.status is Status.FIRING else INFO_S
    starts_us = began_us(notice)
    return [
        {
            "labels": found,
            "annotations": annotations_of(notice),
            "startsAt": rfc3339(starts_us),
            "endsAt": rfc3339(starts_us + lasts_s * 1_000_000),
        }
    ]


class Alertmanager:
    """See the module."""

    kind = "alertmanager"

    def __init__(
        self, name: str, spec: AlertmanagerSpec, target: HttpTarget, *, timeout_s: float, most_notices: int
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._spec = spec
        self._target = target

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        alerts = [alert for notice in notices for alert in alerts_of(notice, self._spec.holds)]
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key(notices)}
        return self._target.send("POST", strict_json.dumps(alerts).encode(), deadline, headers, PATH)

    def close(self) -> None:
        """See ``Recipient``."""
        self._target.close()
