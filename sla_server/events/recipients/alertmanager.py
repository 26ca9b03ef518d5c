"""A real Alertmanager, over its own API (/api/v2/alerts).

Alertmanager pairs the beginning and the end of an alert by its labels, and severity is usually one of them.
The event that ends a condition has a severity of its own (info). So before an end is posted, Alertmanager is
asked which alerts of this condition are active, and exactly those are ended; where there is none (it was
restarted without its data), there is nothing to end. Posting the end for every severity would not do:
Alertmanager tells of all ends in a group, also of alerts that never began.

Alertmanager ends by itself what is not posted again within its ``resolve_timeout``; we post once, and tell it
an end far away (``holds``). An event that has no end is an alert of ``INFO_S``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import AlertmanagerSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, Outcome, Status, retry
from sla_server.events.recipients.webhook import (
    TOLD_APART,
    HttpTarget,
    annotations_of,
    began_us,
    idempotency_key,
    labels,
)
from sla_server.events.recipients.wording import rfc3339

PATH: Final = "/api/v2/alerts"
INFO_S: Final = 300
MOST_BYTES: Final = 1 << 20
Alert = dict[str, Any]


def begun(notice: Notice, holds_s: int) -> Alert:
    """What is posted of a condition that begins, or of an event without an end."""
    lasts_s = holds_s if notice.status is Status.FIRING else INFO_S
    starts_us = began_us(notice)
    return {
        "labels": labels(notice),
        "annotations": annotations_of(notice),
        "startsAt": rfc3339(starts_us),
        "endsAt": rfc3339(starts_us + lasts_s * 1_000_000),
    }


def question(notice: Notice) -> str:
    """Path that asks for the alerts of a notice's condition, whatever their severity."""
    wanted = {
        name: value
        for name, value in labels(notice).items()
        if name in ("alertname", "element", "subject", *TOLD_APART)
    }
    matchers = [("filter", f"{name}={json.dumps(value)}") for name, value in wanted.items()]
    return f"{PATH}?{urlencode([*matchers, ('active', 'true'), ('silenced', 'true'), ('inhibited', 'true')])}"


def ended(notice: Notice, content: bytes) -> list[Alert]:
    """What is posted of a condition that ends.

    Args:
        notice: of the end.
        content: Alertmanager's answer to ``question``.

    Raises:
        ValueError: the answer is none of Alertmanager's.
    """
    found = json.loads(content)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("it is no list of alerts")
    ends = {"annotations": annotations_of(notice), "endsAt": rfc3339(notice.event.at_us)}
    return [{"labels": each["labels"], **ends} for each in found if isinstance(each.get("labels"), dict)]


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
        """See ``Recipient``; what begins is posted before it is asked what is active."""
        alerts: list[Alert] = []
        key = idempotency_key(notices)
        for notice in notices:
            if notice.status is not Status.RESOLVED:
                alerts.append(begun(notice, self._spec.holds))
                continue
            answer = self._post(alerts, key, deadline)
            if answer.outcome is not Outcome.CONFIRMED:
                return answer
            path = question(notice)
            answer, content = self._target.exchange("GET", b"", deadline, {}, path, most_bytes=MOST_BYTES)
            if answer.outcome is not Outcome.CONFIRMED:
                return answer
            try:
                alerts = ended(notice, content)
            except ValueError:
                return retry("its answer about active alerts cannot be read")
        return self._post(alerts, key, deadline)

    def close(self) -> None:
        """See ``Recipient``."""
        self._target.close()

    def _post(self, alerts: list[Alert], key: str, deadline: Deadline) -> Answer:
        if not alerts:
            return CONFIRMED
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        return self._target.send("POST", strict_json.dumps(alerts).encode(), deadline, headers, PATH)
