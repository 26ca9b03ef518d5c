"""``sla delete``: by name, by label, as a file names them, or only said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sla_server.cli import client as client_module
from sla_server.cli.client import Client
from sla_server.cli.errors import ServerDown
from tests.support import api
from tests.support.agreements import FULL, calendar_text
from tests.support.api import FakeSource
from tests.support.cli import Terminal


def two(*_args: Any) -> list[dict[str, Any]]:
    return [{**FakeSource._agreement(name)} for name in ("a", "b")]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("sla", "a", "b"), [("delete", {"name": "a"}), ("delete", {"name": "b"})]),
        (("slas", "sla/a"), [("delete", {"name": "a"})]),
        (("sla/a",), [("delete", {"name": "a"})]),
        (("sla", "-l", "customer in (acme)"), [("delete", {"name": "a"}), ("delete", {"name": "b"})]),
        (("maintenance", "disks"), [("end_document", {"kind": "Maintenance", "name": "disks"})]),
        (("silence", "now"), [("end_document", {"kind": "Silence", "name": "now"})]),
    ],
)
def test_what_is_named_is_ended(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], asked: list[Any]
) -> None:
    monkeypatch.setattr(sla.source, "agreements", two)
    done = sla("delete", *words)
    assert done.exit_code == 0, done.stderr
    assert sla.asked == asked
    assert done.output == "".join(f"{body['name']}: ended\n" for _, body in asked)


def test_a_dry_run_changes_nothing(sla: Terminal) -> None:
    assert sla("delete", "sla", "erp-gold", "--dry-run").output == "erp-gold: would be ended\n"
    missing = sla("delete", "sla", "erp-gild", "--dry-run")
    assert (missing.exit_code, "Near it: erp-gold" in missing.stderr) == (1, True)
    assert sla.asked == []


def test_one_that_cannot_be_ended_does_not_keep_the_others(sla: Terminal) -> None:
    def answer(header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
        name = header["body"]["name"]
        return (name == "c", 200 if name == "c" else 404, {} if name == "c" else {"detail": f"no {name}"})

    sla.mailbox.answer = answer
    done = sla("delete", "sla", "a", "b", "c")
    assert (done.exit_code, done.stdout) == (1, "c: ended\n")
    assert "2 of 3 were not ended" in done.stderr


def test_what_was_ended_is_said_to_programs_though_the_server_goes_away(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Client.change

    def lost(client: Client, method: str, path: str, **how: Any) -> Any:
        if path.endswith("/b"):
            raise ServerDown(client.server, "reset")
        return change(client, method, path, **how)

    monkeypatch.setattr(Client, "change", lost)
    done = sla("delete", "sla", "a", "b", "c", "-o", "json")
    assert done.exit_code == 69
    assert [row["name"] for row in json.loads(done.stdout)] == ["a"]


def test_documents_of_a_file_those_that_name_others_first(sla: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(f"{calendar_text('bank')}---\n{FULL}")
    rows = json.loads(sla("delete", "-f", str(path), "-o", "json").output)
    assert [(row["kind"], row["name"]) for row in rows] == [("sla", "erp-gold"), ("calendar", "bank")]
    assert [name for name, _body in sla.asked] == ["delete", "end_document"]


def test_a_throttle_by_volume_client_group_or_id(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        api.throttle(throttle_id="t-1", client="host-b"),
        api.throttle(throttle_id="t-2", volume="", group_name="tier", members={"batch": 1.0}),
        api.throttle(throttle_id="t-3", volume="", client="host-b", members={"batch": 1.0}),
    ]
    monkeypatch.setattr(sla.source, "throttles", lambda *_args, **_options: rows)
    for name, body in (
        ("t-1", {"throttle_id": "t-1"}),
        ("batch", {"volume": "batch"}),
        ("batch/host-b", {"volume": "batch", "client": "host-b"}),
        ("group tier", {"group": "tier"}),
        ("client host-b", {"client": "host-b"}),
    ):
        assert sla("delete", "throttle", name).output == f"{name}: ended\n"
        asked = {key: value for key, value in sla.asked[-1][1].items() if value}
        assert asked == body


def test_a_throttle_behind_the_first_page_is_found_and_pages_are_read_once(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [api.throttle(throttle_id=f"t-{at}", volume=f"v-{at}", cursor=f"1:{at}") for at in range(2500)]
    asked: list[str | None] = []

    def throttles(
        _in_force: bool, limit: int, before: str | None = None, _since_us: int | None = None
    ) -> list[dict[str, Any]]:
        asked.append(before)
        first = 0 if before is None else int(before.partition(":")[2]) + 1
        return rows[first : first + limit]

    monkeypatch.setattr(sla.source, "throttles", throttles)
    assert sla("delete", "throttle", "v-2400", "t-2499").output == "v-2400: ended\nt-2499: ended\n"
    wanted = [{key: value for key, value in body.items() if value} for _, body in sla.asked]
    assert [each.get("volume") or each.get("throttle_id") for each in wanted] == ["v-2400", "t-2499"]
    assert asked == [None, "1:999", "1:1999"]


def test_one_that_is_pending_does_not_keep_the_others(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PENDING_LIMIT_S", 0.0)
    sla.mailbox.answer = lambda header: None if header["body"]["name"] == "a" else (True, 200, {})
    done = sla("delete", "sla", "a", "b")
    assert (done.exit_code, done.stdout) == (75, "a: pending\nb: ended\n")
    assert "/api/v1/operations/" in done.stderr
    rows = json.loads(sla("delete", "sla", "a", "b", "-o", "json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [("a", "pending"), ("b", "ended")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say what to end"),
        (("sla",), "say which slas to end: sla delete sla NAME..., or -l LABELS"),
        (("sla", "a", "-l", "b=c"), "say which slas to end"),
        (("sla", "-l", "b="), "is no label"),
    ],
)
def test_nothing_is_ended_that_was_not_named(sla: Terminal, words: tuple[str, ...], says: str) -> None:
    done = sla("delete", *words)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr
    assert sla("delete", "sla", "-l", "customer=none").exit_code == 1
    assert sla.asked == []
