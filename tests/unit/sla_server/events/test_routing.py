"""The file of the documents in force: read again when it has changed, kept when it cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sla_server.agreements.load import load_documents
from sla_server.events.outlets import RecordingRouter
from sla_server.events.routing import (
    FILE,
    DocumentRouter,
    NotificationInForce,
    RoutingFile,
    RoutingReader,
    RoutingTable,
)
from sla_server.events.sql_link import NAME
from tests.support.notices import AT_US, event

TEXT = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {name: mail}
spec: {inbox: {}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {name: all}
spec: {recipients: [mail], remind: 4h}
---
apiVersion: storage-sla/v1
kind: Silence
metadata: {name: night}
spec: {start: 2026-01-01T00:00, duration: 1h, reason: test}
"""


def table(text: str = TEXT, applied_us: int = AT_US) -> RoutingTable:
    held = [NotificationInForce(each.document, 1, applied_us) for each in load_documents(text, 60)]
    return RoutingTable.of(held, {"erp-gold": ["mail"]})


def test_delivery_reads_what_services_wrote(tmp_path: Path) -> None:
    reader = RoutingReader(tmp_path)
    assert not reader.poll()
    assert list(reader.router.route(event())) == []
    assert RoutingFile(tmp_path).publish(table())
    assert reader.poll()
    assert not reader.poll()
    assert reader.router.table == table()
    (found,) = reader.router.route(event())
    assert (found.recipient, found.remind_s) == ("mail", 4 * 3600.0)
    assert reader.router.held(event(), "mail", AT_US) is not None
    assert reader.router.held(event(), "mail", AT_US - 1) is None
    RoutingFile(tmp_path).publish(RoutingTable())
    assert reader.poll()
    assert list(reader.router.route(event())) == []


def test_only_recipients_of_a_route_that_escalates_are_read_ahead_for() -> None:
    escalating = """---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {name: oncall}
spec: {inbox: {}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {name: urgent}
spec: {recipients: [oncall], escalate: {after: 5m, recipients: [mail]}}
"""
    router = RecordingRouter(DocumentRouter(table(TEXT + escalating)))
    assert [router.escalates(name) for name in ("oncall", "mail", NAME)] == [True, False, False]


def test_a_file_that_cannot_be_read_leaves_what_was_known(tmp_path: Path) -> None:
    RoutingFile(tmp_path).publish(table())
    reader = RoutingReader(tmp_path)
    reader.poll()
    (tmp_path / FILE).write_text("{torn")
    assert not reader.poll()
    assert reader.router.table == table()


def test_a_document_of_another_release_is_left_out() -> None:
    content = table().as_json()
    content["documents"][0]["spec"] = {"pigeon": {}}
    content["documents"].append({"kind": "Later"})
    found = RoutingTable.from_json(content)
    assert (dict(found.recipients), len(found.routes), len(found.silences)) == ({}, 1, 1)
    assert DocumentRouter(found).route(event()) == []


def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    calls: list[Path] = []

    def write(path: Path, _content: Any, *, synced: bool) -> None:
        assert synced
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = RoutingFile(tmp_path, write)
    assert not target.publish(table())
    assert target.retry()
    assert target.retry()
    assert calls == [tmp_path / FILE] * 2


NOT_WRITTEN_BY_US = [
    '{"documents":[1]}',
    '{"documents":7}',
    "{}",
    "[]",
    '{"documents":[{"kind":[]}]}',
    '{"documents":[{"kind":"Recipient"}]}',
    '{"documents":[{"kind":"Silence","applied_us":"now"}]}',
    '{"documents":[],"of_agreements":[1]}',
    '{"documents":[],"of_agreements":{"a":[1]}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", NOT_WRITTEN_BY_US, ids=lambda content: content[:40])
def test_content_of_any_shape_leaves_what_was_known(tmp_path: Path, content: str) -> None:
    RoutingFile(tmp_path).publish(table())
    reader = RoutingReader(tmp_path)
    reader.poll()
    (tmp_path / FILE).write_text(content)
    assert not reader.poll()
    assert reader.router.table == table()


@pytest.mark.parametrize("content", [*NOT_WRITTEN_BY_US, None], ids=lambda content: str(content)[:40])
def test_a_start_at_which_the_file_cannot_be_read_goes_on_with_the_last_that_could(
    tmp_path: Path, content: str | None
) -> None:
    RoutingFile(tmp_path).publish(table())
    copy = tmp_path / "copy.json"
    assert RoutingReader(tmp_path, copy).poll()
    (tmp_path / FILE).unlink()
    if content is not None:
        (tmp_path / FILE).write_text(content)
    reader = RoutingReader(tmp_path, copy)
    assert [reader.poll(), reader.poll()] == [True, False]
    assert reader.router.table == table()
    RoutingFile(tmp_path).publish(RoutingTable())
    assert [reader.poll(), reader.poll()] == [True, False]
    assert reader.router.table == RoutingTable()


def test_recipients_whose_documents_cannot_be_read_are_named() -> None:
    content = table().as_json()
    content["documents"][0]["spec"] = {"pigeon": {}}
    assert RoutingTable.from_json(content).unreadable == {"mail"}
    assert RoutingTable.from_json(table().as_json()).unreadable == set()
