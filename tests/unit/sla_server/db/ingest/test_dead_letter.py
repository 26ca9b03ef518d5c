"""A record that the database refuses is kept: the queue forgets it next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sla_server.db.ingest.dead_letter import put_aside
from sla_server.db.ingest.queue import IngestRecord


def test_a_record_put_aside_is_on_disk_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    event = put_aside(tmp_path / "refused", IngestRecord(7, b"payload"), "out of range", 1_000)
    [kept] = (tmp_path / "refused").iterdir()
    assert kept.read_bytes() == b"payload"
    assert kept.name in event["text"]
    assert (event["kind"], event["at_us"]) == ("data-refused", 1_000)
    *parents, directory, content, name = synced
    assert directory == str(tmp_path), "the new directory's name"
    assert parents == [str(tmp_path.parent)], "that of the directory it is made in"
    assert Path(content).parent == tmp_path / "refused"
    assert name == str(tmp_path / "refused"), "content, then its name"
