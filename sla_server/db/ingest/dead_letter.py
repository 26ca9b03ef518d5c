"""Records that the database refuses although they passed our checks: kept as files, and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from pmdaemon.runtime.files import make_directory, write_whole
from sla_server.db.ingest.inventory import event_row
from sla_server.db.ingest.queue import IngestRecord

log = structlog.get_logger("db-writer")


def put_aside(directory: Path, record: IngestRecord, reason: str, now_us: int) -> dict[str, Any]:
    """Keep a record's bytes in ``directory``, made if missing; returns the event that says so.

    Durability: on disk on return, because the queue forgets the record next.

    Raises:
        OSError: it is not kept; the record must stay in the queue.
    """
    make_directory(directory, 0o700)
    path = directory / f"{record.queue_seq:020d}.rec"
    write_whole(path, record.payload, synced=True)
    log.error("record-refused", queue_seq=record.queue_seq, error=reason)
    text = f"a record could not be stored and was put aside as {path.name}: {reason}"
    identity = (record.queue_seq, reason)
    return event_row(
        identity, now_us, "data-refused", "critical", element="dbmanager", subject="ingest", text=text
    )
