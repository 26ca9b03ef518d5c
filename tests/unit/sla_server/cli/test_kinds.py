"""Kinds as people type them, one thing by its name, and short ids of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sla_server.cli.kinds import plural_of, singular_of
from sla_server.cli.tables import KINDS
from tests.support import api
from tests.support.cli import Terminal, name_of


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_singular_of_every_kind_does_too(sla: Terminal, kind: str) -> None:
    assert plural_of(singular_of(kind)) == plural_of(kind) == kind
    assert sla("get", singular_of(kind), *name_of(kind)).output == sla("get", kind, *name_of(kind)).output


def test_an_agreement_may_be_called_so(sla: Terminal) -> None:
    assert sla("get", "agreement").output == sla("get", "slas").output


def test_a_kind_that_is_not_there_is_answered_with_those_near_it(sla: Terminal) -> None:
    done = sla("get", "throtles")
    assert done.exit_code == 2
    assert "'throtles' is no kind. Near it: throttles" in done.stderr
    missing = sla("get")
    assert (missing.exit_code, "Missing argument 'KIND'" in missing.stderr) == (2, True)
    assert "There are gateways, volumes, pools, slas" in " ".join(missing.stderr.split())


def test_the_usage_of_get_fits_a_line(sla: Terminal) -> None:
    lines = sla("get", "--help").output.splitlines()
    assert lines[0].endswith(" get [OPTIONS] KIND [NAME]...")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "key", "name"),
    [
        (("gateway", "gateway-a"), "name", "gateway-a"),
        (("volume", "batch"), "volume", "batch"),
        (("sla", "erp-gold"), "name", "erp-gold"),
        (("calendar", "bank"), "name", "bank"),
        (("throttle", "batch"), "volume", "batch"),
        (("event", "e0003"), "event_id", "e0003"),
    ],
)
def test_one_of_them_by_its_name(sla: Terminal, words: tuple[str, ...], key: str, name: str) -> None:
    rows = json.loads(sla("get", *words, "-o", "json").output)
    assert [row[key] for row in rows] == [name]
    assert name in sla("get", *words).output


def test_a_document_by_its_name_can_be_applied_again(sla: Terminal) -> None:
    assert "kind: Calendar" in sla("get", "calendar", "bank", "-o", "yaml").output


def test_throttles_of_a_volume_are_also_those_of_its_clients_and_its_group(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        api.throttle(throttle_id="t-1", client="host-b"),
        api.throttle(throttle_id="t-2", volume="", group_name="tier", members={"batch": 1.0}),
        api.throttle(throttle_id="t-3", volume="other"),
        api.throttle(throttle_id="t-4", volume="", client="host-c", members={"batch": 1.0}),
    ]
    monkeypatch.setattr(sla.source, "throttles", lambda *_args, **_options: rows)
    found = json.loads(sla("get", "throttle", "batch", "-o", "json").output)
    assert [row["throttle_id"] for row in found] == ["t-1", "t-2", "t-4"]
    found = json.loads(sla("get", "throttle", "client host-c", "-o", "json").output)
    assert [row["throttle_id"] for row in found] == ["t-4"]


def test_a_name_that_is_not_there_is_answered_with_those_near_it(sla: Terminal) -> None:
    done = sla("get", "volume", "bacth")
    assert done.exit_code == 1
    assert "no volume 'bacth' is listed" in done.stderr
    assert "Near it: batch" in done.stderr
    assert "'sla get slas' lists what there is" in sla("get", "sla", "zzz").stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("describe", "slices", "erp-gold"), "of slices use: sla get slices AGREEMENT"),
        (("delete", "volume", "batch"), "of volumes use: sla volumes revoke VOLUME"),
        (("delete", "events", "x"), "of events use: sla ack EVENT"),
        (("delete", "rout", "x"), "not 'rout'. Near it: route"),
    ],
)
def test_what_another_command_does_is_answered_with_it(
    sla: Terminal, words: tuple[str, ...], says: str
) -> None:
    done = sla(*words)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


def test_commands_of_kinds_take_the_plural(sla: Terminal) -> None:
    assert sla("describe", "slas", "erp-gold").output == sla("describe", "sla", "erp-gold").output
    assert sla("describe", "events", "e0001").output == sla("describe", "event", "e0001").output
    assert sla("delete", "routes", "all").output == "all: ended\n"


def ids_of(*ids: str) -> Any:
    """Events with these ids, as a source has them."""
    rows = [{**row, "event_id": each} for row, each in zip(api.events(len(ids)), ids, strict=True)]

    def find(event_id: str) -> dict[str, Any] | None:
        return next((row for row in rows if row["event_id"] == event_id), None)

    def beginning(part: str, limit: int) -> list[dict[str, Any]]:
        return [row for row in rows if row["event_id"].startswith(part)][:limit]

    return rows, find, beginning


FIRST, SECOND = "0b0e7a3e-77d1-5b0e-9a51-6f2f6c1f0d11", "0b0e7a3e-1111-5b0e-9a51-6f2f6c1f0d11"


def test_events_show_a_short_id_which_commands_take(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, find, beginning = ids_of(FIRST, "7c0e7a3e-77d1-5b0e-9a51-6f2f6c1f0d11")
    monkeypatch.setattr(sla.source, "events", lambda *_args, **_options: rows)
    monkeypatch.setattr(sla.source, "event", find)
    monkeypatch.setattr(sla.source, "events_of", beginning)
    at = sla("get", "events").output.index("ID")
    shown = [line[at : at + 8] for line in sla("get", "events").output.splitlines()[2:] if line[0] != " "]
    assert shown == ["0b0e7a3e", "7c0e7a3e"]
    assert sla("describe", "event", shown[0]).output.startswith(f"{FIRST}: violation-closed")
    sla.mailbox.answer = lambda header: (True, 200, {"event_id": header["body"]["event_id"]})
    assert sla("ack", "0b0", "--note", "disk ordered").output == f"{FIRST}: acknowledged\n"
    assert [body["event_id"] for _, body in sla.asked] == [FIRST]


def test_a_beginning_of_several_ids_is_refused_with_all_of_them(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rows, find, beginning = ids_of(FIRST, SECOND)
    monkeypatch.setattr(sla.source, "event", find)
    monkeypatch.setattr(sla.source, "events_of", beginning)
    for words in (("describe", "event", "0b0e7a3e"), ("ack", "0b0e7a3e", "--note", "x")):
        done = sla(*words)
        assert done.exit_code == 1
        assert all(each in done.stderr for each in (FIRST, SECOND))
        assert "Give more characters of the id" in done.stderr
    assert sla.asked == []
    assert sla("describe", "event", SECOND).output.startswith(SECOND)
