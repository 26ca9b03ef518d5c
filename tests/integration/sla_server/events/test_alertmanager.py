"""A real Alertmanager (Debian's) takes our alerts, ends them, and sends the same body as our webhook does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.base import CONFIRMED, Notice, Status
from sla_server.events.recipients.build import RecipientBuilder
from tests.support.notices import notice
from tests.support.ports import free_port
from tests.support.receivers import HttpReceiver

CONFIG = """
route: {{receiver: hook, group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: hook, webhook_configs: [{{url: "{url}", send_resolved: true}}]}}]
"""


def _program() -> str:
    found = os.environ.get("SLA_ALERTMANAGER") or shutil.which("prometheus-alertmanager")
    assert found, "prometheus-alertmanager is missing: deploy/setup.sh test"
    return found


def _until(condition: Callable[[], Any], what: str) -> Any:
    deadline = Deadline(180)
    while not deadline.passed:
        try:
            if found := condition():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"did not come: {what}")


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    with HttpReceiver() as made:
        yield made


@pytest.fixture
def address(tmp_path: Path, receiver: HttpReceiver) -> Iterator[str]:
    """Of an Alertmanager that sends to the receiver."""
    port = free_port()
    config = tmp_path / "alertmanager.yml"
    config.write_text(CONFIG.format(url=receiver.url))
    arguments = [
        f"--config.file={config}", f"--storage.path={tmp_path / 'data'}", "--cluster.listen-address=",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([_program(), *arguments], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: httpx.get(f"{url}/-/ready").status_code == 200, "Alertmanager is ready")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _notices() -> tuple[Notice, Notice]:
    """A violation that begins and ends now."""
    now_us = time.time_ns() // 1000
    fields = {"at_us": now_us, "details": {"episode_id": "x"}}
    begun = notice(1, event_fields=fields)
    ended = {
        **fields,
        "at_us": now_us + 1,
        "kind": "violation-closed",
        "severity": "info",
        "event_id": "event-2",
    }
    return begun, notice(2, event_fields=ended, status=Status.RESOLVED)


def _active(address: str) -> list[dict[str, Any]]:
    return [
        each
        for each in httpx.get(f"{address}/api/v2/alerts", timeout=60).json()
        if each["status"]["state"] == "active"
    ]


def test_alerts_begin_and_end_and_webhooks_have_the_same_form(
    tmp_path: Path, address: str, receiver: HttpReceiver
) -> None:
    builder = RecipientBuilder(tmp_path, tmp_path, tmp_path)
    target = builder("am", {"alertmanager": {"url": address}})
    begun, ended = _notices()
    assert target.deliver([begun], Deadline(60)) == CONFIRMED
    (alert,) = _until(lambda: _active(address), "the alert is active")
    assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("violation", "critical")
    far = datetime.fromisoformat(alert["endsAt"].replace("Z", "+00:00")) - datetime.now(UTC)
    assert far.days > 300, "Alertmanager does not end it by itself"
    _until(lambda: receiver.requests, "Alertmanager tells of it")
    assert target.deliver([ended], Deadline(60)) == CONFIRMED
    _until(lambda: not _active(address), "the alert has ended")
    bodies = _until(
        lambda: (
            (found := [json.loads(each[3]) for each in receiver.requests])
            and any(each["status"] == "resolved" for each in found)
            and found
        ),
        "Alertmanager tells of its end",
    )
    received = [(alert["status"], alert["labels"]["severity"]) for each in bodies for alert in each["alerts"]]
    assert set(received) == {("firing", "critical"), ("resolved", "critical")}, "no other severity is sent"
    target.close()

    hook = builder("hook", {"webhook": {"url": receiver.url}})
    count = len(receiver.requests)
    assert hook.deliver([begun, ended], Deadline(60)) == CONFIRMED
    ours = json.loads(receiver.requests[count][3])
    hook.close()
    assert set(bodies[0]) <= set(ours)
    assert set(bodies[0]["alerts"][0]) <= set(ours["alerts"][0])
    for name, value in bodies[0].items():
        assert type(ours[name]) is type(value), name
    for name, value in bodies[0]["alerts"][0].items():
        assert type(ours["alerts"][0][name]) is type(value), name
