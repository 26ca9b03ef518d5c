"""Every process raises its events: what goes to SQL as a row of ``events`` is in its reserve, too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, func, select

from pmdaemon.poller import announcements
from pmdaemon.reserve import attach_reserves, initialized, raise_event, raising
from pmdaemon.reserve.reader import ReserveReader
from sla_server.db import schema
from sla_server.db.ingest.outage import FILE, DatabaseOutage, OutageMark
from sla_server.db.ingest.records import add_events
from sla_server.db.ingest.records import event_row as db_event_row
from sla_server.events.event import Event, from_row, parse
from sla_server.recorder import Recorder
from sla_server.services.record_sender import RecordSender
from sla_server.services.rows import event_row
from tests.support.fake_mailbox import FakeMailbox

Raised = Callable[[], list[Event]]


@pytest.fixture
def raised(tmp_path: Path) -> Iterator[Raised]:
    """What this process has raised so far."""
    attach_reserves("here", tmp_path)
    initialized()
    reader = ReserveReader(tmp_path / "here.normal.reserve")
    yield lambda: [parse(record.payload) for record in reader.take(999)]
    reader.close()
    raising.detach_reserves()


def test_services_raise_each_event_among_their_rows_once(raised: Raised) -> None:
    sender = RecordSender(FakeMailbox(), "tag", 1 << 20, raise_event=raise_event)
    row = event_row("throttle-set", "warning", "volume", "v1", "text", 5)
    sender.append([("slices", {"name": "a"}), row])
    sender.flush(1)
    sender.flush(10**12)  # sent again
    assert [(event.kind, event.source) for event in raised()] == [("throttle-set", "here")]


def test_a_change_that_was_not_recorded_is_not_raised(raised: Raised) -> None:
    sender = RecordSender(FakeMailbox(), "tag", 100, raise_event=raise_event)
    said: list[tuple[bool, str]] = []
    row = event_row("agreement-applied", "info", "sla", "gold", "x" * 200, 5)
    sender.append([row], lambda is_ok, error: said.append((is_ok, error)))
    assert [is_ok for is_ok, _ in said] == [False]
    assert raised() == []


def test_the_supervisor_raises_its_events(raised: Raised) -> None:
    Recorder().add_event(
        "process-restarted", "warning", "services", "text", {"restarts": 1}, at_us=5, now_ns=1
    )
    assert [(event.kind, event.subject) for event in raised()] == [("process-restarted", "services")]


def test_the_daemon_raises_its_events(raised: Raised) -> None:
    announcements.event("gateway-enrolled", "info", "gw-1", "text", 5, code="c")
    assert [(event.kind, dict(event.details)) for event in raised()] == [("gateway-enrolled", {"code": "c"})]


def test_dbmanager_raises_what_it_stores_with_the_same_identity(raised: Raised) -> None:
    engine = create_engine("sqlite://")
    schema.metadata.create_all(engine, tables=[schema.events])
    row = db_event_row(
        ("x",), 5, "file-damaged", "critical", element="dbmanager", subject="parquet", text="t"
    )
    with engine.begin() as connection:
        add_events(connection, [row])
        assert connection.execute(select(func.count()).select_from(schema.events)).scalar() == 1
    assert [event.event_id for event in raised()] == [row["event_id"]]


def test_an_event_as_sql_has_it_is_readable() -> None:
    row = db_event_row(("x",), 5, "clock-skew", "warning", element="gateway", subject="g", details={"by": 2})
    assert from_row(json.loads(json.dumps(row))).details == {"by": 2}


def test_a_database_that_stays_away_is_announced_once_and_its_return_too(raised: Raised) -> None:
    outage = DatabaseOutage()
    for second in range(10):
        outage.failed(1_000_000 + second * 1_000_000, "full")
        outage.announce(1_000_000 + second * 1_000_000)
    outage.raise_end(20_000_000)
    outage.ended()
    outage.failed(30_000_000, "locked")
    outage.announce(30_000_000)
    assert [(event.kind, event.at_us) for event in raised()] == [
        ("database-away", 1_000_000),
        ("database-back", 20_000_000),
    ]


def test_people_are_notified_of_the_end_also_when_the_process_that_announced_the_outage_is_gone(
    raised: Raised, tmp_path: Path
) -> None:
    former = DatabaseOutage(OutageMark(tmp_path))
    former.failed(1_000_000, "full")
    former.announce(7_000_000)
    DatabaseOutage(OutageMark(tmp_path)).started(9_000_000)
    DatabaseOutage(OutageMark(tmp_path)).started(12_000_000)
    found = [(event.kind, event.at_us) for event in raised()]
    assert found == [("database-away", 1_000_000), ("database-back", 9_000_000)]
    assert raised()[1].text.endswith("after 8.0 s")


def test_a_start_without_an_outage_says_nothing(raised: Raised, tmp_path: Path) -> None:
    DatabaseOutage(OutageMark(tmp_path)).started(9_000_000)
    assert raised() == []


@pytest.mark.parametrize("content", ["", "\0" * 21, "x" * 21, "-5"])
def test_a_mark_of_any_content_is_no_outage(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert OutageMark(tmp_path).since_us() == 0


def test_the_name_of_a_new_mark_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content alone is not enough: a power cut would take the file, and with it that people were notified."""
    synced: list[Path] = []

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", fsync)
    OutageMark(tmp_path)
    assert synced == [tmp_path / FILE, tmp_path]
    OutageMark(tmp_path).set(7)
    assert synced[2:] == [tmp_path / FILE]


def test_a_mark_needs_no_room_on_the_disk_that_it_did_not_have_before(tmp_path: Path) -> None:
    mark = OutageMark(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    mark.set(1_800_000_000_000_000)
    assert (OutageMark(tmp_path).since_us(), (tmp_path / FILE).stat().st_size) == (
        1_800_000_000_000_000,
        size,
    )
