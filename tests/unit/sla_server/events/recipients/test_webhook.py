"""Body and signature of webhooks, and what Alertmanager gets."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import WebhookSpec
from sla_server.events.recipients.alertmanager import begun, ended, question
from sla_server.events.recipients.base import Notice, Status, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.webhook import ZERO_TIME, HttpTarget, body, idempotency_key, signature
from tests.support.notices import AT_US, closed, notice


def test_the_signature_covers_time_and_body() -> None:
    expected = hmac.new(b"key", b"1767225600.{}", hashlib.sha256).hexdigest()
    assert signature("key", 1767225600, b"{}") == f"t=1767225600,v1={expected}"
    assert signature("key", 1767225601, b"{}") != signature("key", 1767225600, b"{}")


def test_the_key_is_that_of_the_delivery_and_does_not_change_with_the_attempt() -> None:
    assert idempotency_key([notice(1)]) == "event-1"
    assert idempotency_key([notice(1, reminder=2)]) == "event-1/2"
    several = [notice(1), notice(2)]
    again = [notice(1, attempt=3), notice(2, attempt=3)]
    assert idempotency_key(several) == idempotency_key(again) != idempotency_key([notice(1), notice(3)])


def test_the_body_is_that_of_alertmanagers_webhooks() -> None:
    found = body(
        "oncall", [notice(1, group_key="r:agreement=erp-gold"), closed(2, group_key="r:agreement=erp-gold")]
    )
    assert (found["version"], found["status"], found["receiver"]) == ("4", "firing", "oncall")
    assert found["groupKey"] == "r:agreement=erp-gold"
    assert found["truncatedAlerts"] == 0
    first, second = found["alerts"]
    assert first["labels"] == {
        "alertname": "violation", "severity": "critical", "element": "sla", "subject": "erp-gold/latency",
        "agreement": "erp-gold", "volume": "vol-1",
    }  # fmt: skip
    assert (first["status"], first["startsAt"], first["endsAt"]) == (
        "firing", "2026-01-01T00:00:01.000000Z", ZERO_TIME,
    )  # fmt: skip
    assert (second["status"], second["startsAt"], second["endsAt"]) == (
        "resolved", "2026-01-01T00:00:00.000000Z", "2026-01-01T00:00:02.000000Z",
    )  # fmt: skip
    assert found["commonLabels"] == {
        "alertname": "violation", "element": "sla", "subject": "erp-gold/latency", "agreement": "erp-gold",
    }  # fmt: skip
    assert first["delivery"]["delivery_id"] == "event-1"
    assert json.loads(first["annotations"]["details"]) == {"volume": "vol-1", "worst_u": 1.5}


def test_the_fingerprint_is_the_same_at_the_beginning_and_at_the_end() -> None:
    begun = body("oncall", [notice(1, event_fields={"details": {}})])["alerts"][0]
    ended = body("oncall", [closed(2)])["alerts"][0]
    other = body("oncall", [notice(1, event_fields={"details": {}, "subject": "crm/latency"})])["alerts"][0]
    assert begun["fingerprint"] == ended["fingerprint"] != other["fingerprint"]


@pytest.mark.parametrize(
    ("kind", "end", "by", "label"),
    [
        ("plane-died", "plane-back", "subject", "part"),
        ("throttle-set", "throttle-released", "throttle_id", "throttle_id"),
        ("burn-rate", "burn-rate-ended", "alert", "alert"),
    ],
)
def test_the_end_of_one_condition_is_not_that_of_another_one_of_the_same_subject(
    kind: str, end: str, by: str, label: str
) -> None:
    def about(which: str, name: str = kind, **details: str) -> Notice:
        status = Status.RESOLVED if name == end else Status.FIRING
        fields = {"kind": name, "element": "gateway", "subject": "gw-1", "details": {by: which, **details}}
        return notice(1, event_fields=fields, status=status, condition=kind.partition("-")[0])

    alerts = body("oncall", [about("a", volume="v"), about("b"), about("a", end)])["alerts"]
    first, second, ended_first = (each["fingerprint"] for each in alerts)
    assert first == ended_first != second
    assert [alert["labels"][label] for alert in alerts] == ["a", "b", "a"]
    assert f'{label}="a"' in parse_qs(urlsplit(question(about("a", end))).query)["filter"]


def test_alertmanager_is_asked_which_alerts_of_the_condition_are_active_and_ends_those() -> None:
    began = begun(notice(1, event_fields={"details": {}}), holds_s=3600)
    assert began["endsAt"] == "2026-01-01T01:00:01.000000Z"
    assert parse_qs(urlsplit(question(closed(2))).query) == {
        "filter": ['alertname="violation"', 'element="sla"', 'subject="erp-gold/latency"'],
        "active": ["true"], "silenced": ["true"], "inhibited": ["true"],
    }  # fmt: skip
    (end,) = ended(closed(2), json.dumps([{"labels": began["labels"], "status": {}}]).encode())
    assert (end["labels"], end["endsAt"]) == (began["labels"], "2026-01-01T00:00:02.000000Z")
    assert ended(closed(2), b"[]") == []
    with pytest.raises(ValueError, match="no list of alerts"):
        ended(closed(2), b"{}")


def test_a_beginning_after_the_end_is_not_believed() -> None:
    late = notice(3, event_fields={"details": {"opened_us": AT_US + 3600_000_000}})
    assert body("oncall", [late])["alerts"][0]["startsAt"] == "2026-01-01T00:00:03.000000Z"


def test_a_token_is_not_sent_in_clear_to_an_address_of_a_file(tmp_path: Path) -> None:
    for name, text in (("token", "geheim-1"), ("address", "http://a.example/geheim-2")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    spec = WebhookSpec.model_validate({"url_file": "address", "bearer_file": "token"})

    def lookup(*_args: object, **_more: object) -> list[object]:
        raise AssertionError("it was on its way")

    answer = HttpTarget(spec, tmp_path, Resolver(lookup)).send("POST", b"{}", Deadline(60), {})
    assert answer == retry("bearer_file: not sent in clear; use https:// in address", MENDED_AFTER_S)
