"""From documents to people: a running server, a webhook on loopback, the command line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from tests.support.receivers import HttpReceiver, status
from tests.support.stage import Stage

pytestmark = pytest.mark.e2e
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: oncall}}
spec: {{webhook: {{url: "{url}", secret_file: oncall.key}}, timeout: 30s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: modes}}
spec: {{recipients: [oncall], match: {{kinds: [mode-changed]}}}}
"""


def _until(condition: Callable[[], Any], what: str) -> Any:
    deadline = Deadline(180)
    while not deadline.passed:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"did not come: {what}")


def _held_after(stage: Stage, mode: str) -> set[str]:
    stage.set_mode(mode)
    return {row["event_id"] for row in stage.get("undelivered")["items"] if row.get("state") == "held"}


def test_people_are_told_and_silences_hold_back(tmp_path: Path) -> None:
    with HttpReceiver(status(200)) as receiver, Stage(tmp_path) as stage:
        stage.start_server()
        key = stage.folder / "data" / "secrets" / "oncall.key"
        assert key.parent.stat().st_mode & 0o777 == 0o700
        (tmp_path / "notify.yaml").write_text(DOCUMENTS.format(url=receiver.url))
        applied = stage.sla("apply", "-f", str(tmp_path / "notify.yaml"))
        assert applied.returncode == 0
        assert f"note: oncall: webhook.secret_file: secret file {key}: no such file" in applied.stderr
        key.write_text("shared")
        key.chmod(0o600)
        assert stage.sla("apply", "-f", str(tmp_path / "notify.yaml")).stderr == ""
        _until(
            lambda: "oncall" in stage.sla("get", "recipients", check=False).stdout, "the recipient is listed"
        )
        tested = stage.sla("notify", "test", "oncall", check=False)
        assert tested.stdout == "oncall: confirmed\n", tested.stdout + tested.stderr
        (test,) = receiver.events()
        assert (test["kind"], test["subject"]) == ("notify-test", "oncall")
        assert all("Sla-Signature" in headers for _, _, headers, _ in receiver.requests)

        stage.set_mode("enforce")
        _until(lambda: "mode-changed" in {event["kind"] for event in receiver.events()}, "the event came")
        event_id = next(event["event_id"] for event in receiver.events() if event["kind"] == "mode-changed")
        assert stage.sla("ack", event_id, "--note", "seen").returncode == 0
        described = _until(
            lambda: (
                (found := stage.sla("describe", "event", event_id, check=False).stdout)
                and "oncall confirmed" in found
                and found
            ),
            "the delivery is in SQL",
        )
        assert ": seen" in described
        assert "goes to oncall: route modes: kinds mode-changed" in described

        started = stage.sla("silence", "start", "--for", "1h", "--reason", "test", "--all", "--name", "quiet")
        assert started.returncode == 0, started.stderr
        modes = itertools.cycle(("observe", "enforce"))  # delivery reads the silence within some seconds
        held = _until(lambda: _held_after(stage, next(modes)), "one is held back")
        assert not held & {event["event_id"] for event in receiver.events()}
        assert stage.sla("notify", "test", "oncall").stdout == "oncall: confirmed\n", (
            "tests are never held back"
        )
        assert stage.sla("silence", "end", "quiet").returncode == 0
        _until(
            lambda: held <= {event["event_id"] for event in receiver.events()},
            "what was held back is delivered",
        )
