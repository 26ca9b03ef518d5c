"""A rig whose files are looked after, and a plain count of what SQL and files hold together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from pmdaemon.runtime.clock import FakeClock
from sla_server.db import schema
from sla_server.db.archive import manifest
from sla_server.db.archive.store import open_files
from sla_server.db.archive.upkeep import ArchiveUpkeep, UpkeepReport
from sla_server.db.config import FilesConfig
from sla_server.db.engine import begin
from tests.support.database import Rig
from tests.support.samples import T0, cuts_message, make_cut

HOUR_US = 3_600_000_000
# Rollups stay in SQL unless a test says otherwise.
CONFIG = {"cuts_max_age_h": 1e4, "rollups_after_h": 1e4, "rollups_max_age_days": 1e4, "grace_s": 100.0}


class FilesRig(Rig):
    """See ``Rig``."""

    def __init__(self, database, probe=lambda _point: None, clock: FakeClock | None = None, **config) -> None:
        super().__init__(database.config, database.data_dir, clock=clock)
        self.files = open_files(database.config, database.data_dir)
        self.settings = FilesConfig(**{**CONFIG, **config})
        owner = self.queue.queue_id
        self.upkeep = ArchiveUpkeep(self.engine, self.files, owner, self.settings, self.clock, probe)

    def files_of_cuts(self, count: int, per_file: int = 2, first_seq: int = 1) -> list:
        """Write ``count`` files, a minute apart; returns their cuts."""
        items = [make_cut(first_seq + n) for n in range(count * per_file)]
        for n in range(count):
            self.feed(cuts_message(items[n * per_file : (n + 1) * per_file]))
            self.clock.advance(61)
            self.drain()
        return items

    def step(self, **options) -> UpkeepReport:
        return self.upkeep.step(**options)

    def rows(self, *, in_use: bool = True):
        with begin(self.engine) as connection:
            return manifest.rows(connection, in_use=in_use)


def archived(rig: FilesRig) -> list[int]:
    """Sequence numbers of the cuts in files in use, as readers see them, sorted."""
    found: list[int] = []
    for row in rig.rows():
        if row.kind == "cuts":
            table = pq.read_table(Path(rig.files.path_for_readers(row.path)), columns=["seq"])
            seqs = sorted(set(table["seq"].to_pylist()))
            assert len(seqs) == row.cuts
            assert table.num_rows == row.rows
            found += seqs
    return sorted(found)


def counted(rig: FilesRig) -> tuple[Counter, Counter]:
    """(slot, stream) -> reads, and (slot, stream, io, threshold) -> missed, of SQL and files together."""
    reads: Counter = Counter()
    missed: Counter = Counter()
    rows = {"rollups": [], "missed": []}
    with begin(rig.engine) as connection:
        for kind, table in (("rollups", schema.rollups), ("missed", schema.rollup_missed)):
            rows[kind] += [dict(row) for row in connection.execute(table.select()).mappings()]
    for row in rig.rows():
        if row.kind in rows:
            table = pq.read_table(Path(rig.files.path_for_readers(row.path)))
            assert table.num_rows == row.rows
            rows[row.kind] += table.to_pylist()
    for row in rows["rollups"]:
        reads[row["slot_us"], row["stream_id"]] += row["reads"]
    for row in rows["missed"]:
        missed[row["slot_us"], row["stream_id"], row["io"], row["threshold_us"]] += row["missed"]
    return reads, missed


def later(hours: float) -> FakeClock:
    """A clock so many hours after T0."""
    clock = FakeClock(unix_us=T0)
    clock.advance(hours * 3600)
    return clock
