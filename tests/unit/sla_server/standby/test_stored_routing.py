"""What a server that stands by routes its events by: the documents that SQL has now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sla_server.db.errors import DatabaseUnavailable
from sla_server.events.routing import FILE, RoutingFile, RoutingReader
from sla_server.standby.process import StoredRouting


class Source:
    """SQL."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.agreed: list[dict[str, Any]] = []
        self.is_away = False
        self.read = 0

    def document_state(self) -> list[dict[str, Any]]:
        if self.is_away:
            raise DatabaseUnavailable("sla", "it is away")
        return [{"rows": json.dumps([self.rows, self.agreed])}]

    def documents(self, kind: str | None = None, in_force: bool = False) -> list[dict[str, Any]]:
        assert (kind, in_force) == (None, True)
        if self.is_away:
            raise DatabaseUnavailable("sla", "it is away")
        self.read += 1
        return self.rows

    def agreements(self, in_force: bool = True) -> list[dict[str, Any]]:
        assert in_force
        return self.agreed


def _recipient(name: str) -> dict[str, Any]:
    spec = {
        "apiVersion": "storage-sla/v1",
        "kind": "Recipient",
        "metadata": {"name": name},
        "spec": {"file": {"path": f"{name}.jsonl"}},
    }
    return {"kind": "Recipient", "name": name, "version": 1, "applied_us": 5, "spec": spec}


def _names(reader: RoutingReader) -> set[str]:
    reader.poll()
    return set(reader.router.table.recipients)


def test_delivery_has_the_documents_that_are_in_force_now(tmp_path: Path) -> None:
    source, reader = Source(), RoutingReader(tmp_path)
    routing = StoredRouting(source, RoutingFile(tmp_path))
    source.rows = [_recipient("oncall")]
    source.agreed = [{"name": "erp", "spec": {"spec": {"parties": {"recipients": ["oncall"]}}}}]
    routing.refresh()
    assert _names(reader) == {"oncall"}
    assert reader.router.table.of_agreements == {"erp": ["oncall"]}
    source.rows = [
        _recipient("night"),
        {"kind": "Recipient", "name": "later", "version": 1, "spec": {"a": 1}},
    ]
    routing.refresh()
    assert _names(reader) == {"night"}
    source.rows = []
    routing.refresh()
    assert _names(reader) == set()


def test_what_its_last_term_has_left_is_replaced_and_then_written_only_when_it_changes(
    tmp_path: Path,
) -> None:
    source, written = Source(), []

    def write(path: Path, text: str, **_how: object) -> None:
        written.append(text)
        path.write_text(text)

    (tmp_path / FILE).write_text(json.dumps({"documents": [_recipient("gone")["spec"]], "of_agreements": {}}))
    routing = StoredRouting(source, RoutingFile(tmp_path, write))
    for _ in range(3):
        routing.refresh()
    assert len(written) == source.read == 1
    assert _names(RoutingReader(tmp_path)) == set()


def test_while_the_database_is_away_the_documents_stay(tmp_path: Path) -> None:
    source, reader = Source(), RoutingReader(tmp_path)
    routing = StoredRouting(source, RoutingFile(tmp_path))
    source.rows = [_recipient("oncall")]
    routing.refresh()
    source.is_away, source.rows = True, []
    routing.refresh()
    assert _names(reader) == {"oncall"}
    source.is_away = False
    routing.refresh()
    assert _names(reader) == set()


def test_a_file_that_could_not_be_written_is_written_the_next_time(tmp_path: Path) -> None:
    source, fails = Source(), [True]

    def write(path: Path, text: str, **_how: object) -> None:
        if fails:
            fails.clear()
            raise OSError(28, "No space left on device")
        path.write_text(text)

    routing = StoredRouting(source, RoutingFile(tmp_path, write))
    source.rows = [_recipient("oncall")]
    routing.refresh()
    assert not (tmp_path / FILE).exists()
    routing.refresh()
    assert _names(RoutingReader(tmp_path)) == {"oncall"}


def test_what_waits_for_a_recipient_of_another_release_waits_on(tmp_path: Path) -> None:
    source, reader = Source(), RoutingReader(tmp_path)
    newer = {**_recipient("oncall"), "spec": {"kind": "Recipient", "spec": {"telepathy": {}}}}
    source.rows = [_recipient("night"), newer]
    StoredRouting(source, RoutingFile(tmp_path)).refresh()
    assert _names(reader) == {"night"}
    assert reader.router.table.unreadable == {"oncall"}
