"""Webhook: a signed POST with a body as Alertmanager's webhooks have it (version 4).

    Idempotency-Key  the same for the same notices: the receiver drops what it has processed
    Sla-Signature    t=SECONDS,v1=HEX: HMAC-SHA256 over "SECONDS." and the body, with the shared secret

The time is signed, too, so that a request that was written down cannot be sent again later
(docs/operations/notify.md has a receiver of thirty lines). ``body`` is pure.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Deadline
from sla_server.events import catalogue
from sla_server.events.documents import WebhookSpec, may_carry_bearer, secrets_of_query
from sla_server.events.recipients.base import Answer, Notice, Status, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S, HttpClient
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.secret_files import (
    SecretUnusable,
    read_address,
    read_secret,
    secrets_of_address,
)
from sla_server.events.recipients.wording import rfc3339

ZERO_TIME: Final = "0001-01-01T00:00:00Z"
"""What Alertmanager writes where an alert has no end yet."""

PART: Final = "part"
"""Label of which part of a subject it is about, such as a data plane of a gateway."""
TOLD_APART: Final = ("alert", "throttle_id", PART)
"""Labels that two conditions of one subject differ in."""
MOST_AGE_S: Final = 300
"""A request that was written down cannot be sent again later."""


def signature(secret: str, at_s: int, content: bytes) -> str:
    """The header ``Sla-Signature`` of a body sent at a time."""
    digest = hmac.new(secret.encode(), f"{at_s}.".encode() + content, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


def is_signed(secret: str, header: str, content: bytes, now_s: float) -> bool:
    """Whether a header ``Sla-Signature`` is of this body, and was made within ``MOST_AGE_S``."""
    parts = dict(part.strip().partition("=")[::2] for part in header.split(","))
    at = parts.get("t", "")
    if not (at.isascii() and at.isdecimal() and len(at) <= 12):
        return False
    wanted = signature(secret, int(at), content).rpartition("=")[2]
    is_same = hmac.compare_digest(wanted.encode(), parts.get("v1", "").encode("utf-8", "replace"))
    return is_same and abs(now_s - int(at)) <= MOST_AGE_S


def idempotency_key(notices: Sequence[Notice]) -> str:
    """Of one notice its delivery identity, of several a digest of theirs."""
    if len(notices) == 1:
        return notices[0].delivery_id
    joined = "\n".join(notice.delivery_id for notice in notices)
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def labels(notice: Notice) -> dict[str, str]:
    """What identifies the condition and routes it; the same when it begins and when it ends, but severity."""
    event = notice.event
    by = catalogue.described(event.kind).by
    found = {
        "alertname": notice.condition or event.kind,
        "severity": event.severity,
        "element": event.element,
        "subject": event.subject,
        "agreement": event.agreement,
        "gateway": event.gateway,
        "volume": event.volume,
        "alert": event.details.get("alert"),
    }
    if by:  # it tells two conditions of one subject apart
        found[PART if by == "subject" else by] = event.details.get(by)
    return {key: value for key, value in found.items() if isinstance(value, str) and value}


def annotations_of(notice: Notice) -> dict[str, str]:
    """Words and figures for people."""
    event = notice.event
    found = {"summary": event.text, "kind": event.kind, "event_id": event.event_id}
    found |= {"action": notice.action, "runbook": notice.runbook} if notice.runbook else {}
    return {**found, "details": strict_json.dumps(dict(event.details))}


def body(recipient: str, notices: Sequence[Notice], external_url: str = "") -> dict[str, Any]:
    """The body of one request."""
    alerts = [_alert(notice, external_url) for notice in notices]
    group_key = notices[-1].group_key if len({notice.group_key for notice in notices}) == 1 else ""
    return {
        "version": "4",
        "groupKey": group_key or f'{{}}:{{recipient="{recipient}"}}',
        "truncatedAlerts": 0,
        "status": "firing" if any(alert["status"] == "firing" for alert in alerts) else "resolved",
        "receiver": recipient,
        "groupLabels": {},
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": external_url,
        "alerts": alerts,
    }


def _alert(notice: Notice, external_url: str) -> dict[str, Any]:
    event, is_over = notice.event, notice.status is Status.RESOLVED
    identity = "\0".join(catalogue.condition_key(event))
    return {
        "status": "resolved" if is_over else "firing",
        "labels": labels(notice),
        "annotations": annotations_of(notice),
        "startsAt": rfc3339(began_us(notice)),
        "endsAt": rfc3339(event.at_us) if is_over else ZERO_TIME,
        "generatorURL": external_url,
        "fingerprint": hashlib.sha256(identity.encode()).hexdigest()[:16],
        "delivery": notice.as_json(),
    }


def began_us(notice: Notice) -> int:
    """When the condition began: an event that ends one may say so in its details."""
    opened_us = notice.event.details.get("opened_us")
    at_us = notice.event.at_us
    return opened_us if type(opened_us) is int and 0 < opened_us <= at_us else at_us


def _common(maps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first = maps[0]
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in maps)}


class HttpTarget:
    """Address, credentials and headers of a recipient's document, read for each request.

    Args:
        spec: of any recipient that is reached over HTTP.
        secrets_dir: where its files are.
        resolver: shared.
    """

    def __init__(self, spec: Any, secrets_dir: Path, resolver: Resolver) -> None:
        self._spec = spec
        self._secrets_dir = secrets_dir
        self._client = HttpClient(resolver, None if spec.ca_file is None else secrets_dir / spec.ca_file)

    def send(
        self,
        method: str,
        content: bytes,
        deadline: Deadline,
        headers: Mapping[str, str],
        path: str = "",
        secret_file: str | None = None,
    ) -> Answer:
        """One request; ``secret_file`` names the key that signs it."""
        return self.exchange(method, content, deadline, headers, path, secret_file)[0]

    def exchange(
        self,
        method: str,
        content: bytes,
        deadline: Deadline,
        headers: Mapping[str, str],
        path: str = "",
        secret_file: str | None = None,
        most_bytes: int = 0,
    ) -> tuple[Answer, bytes]:
        """The same with the content of its answer, ``most_bytes`` of it."""
        try:
            address = self._spec.url or read_address(self._secrets_dir / self._spec.url_file)
            bearer = self._read(self._spec.bearer_file)
            secret = self._read(secret_file)
        except SecretUnusable as exc:
            return retry(str(exc), MENDED_AFTER_S), b""
        fields = {**self._spec.headers, **headers}
        if bearer and not may_carry_bearer(address):  # of a url_file: a url is refused with its document
            return retry(
                f"bearer_file: not sent in clear; use https:// in {self._spec.url_file}", MENDED_AFTER_S
            ), b""
        if bearer:
            fields["Authorization"] = f"Bearer {bearer}"
        if secret:
            fields["Sla-Signature"] = signature(secret, int(time.time()), content)
        is_secret = self._spec.url is None
        hide = [secret, bearer, *(secrets_of_address if is_secret else secrets_of_query)(address)]
        url = address.rstrip("/") + path if path else address
        return self._client.exchange(
            method, url, fields, content, deadline, hide, most_bytes, quotes_body=not is_secret
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _read(self, name: str | None) -> str:
        return "" if name is None else read_secret(self._secrets_dir / name)


class Webhook:
    """See the module."""

    kind = "webhook"

    def __init__(
        self,
        name: str,
        spec: WebhookSpec,
        target: HttpTarget,
        *,
        timeout_s: float,
        most_notices: int,
        external_url: str = "",
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._spec = spec
        self._target = target
        self._external_url = external_url

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        content = strict_json.dumps(body(self.name, notices, self._external_url)).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key(notices)}
        return self._target.send("POST", content, deadline, headers, secret_file=self._spec.secret_file)

    def close(self) -> None:
        """See ``Recipient``."""
        self._target.close()
