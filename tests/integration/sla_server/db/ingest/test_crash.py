"""kill -9 at every point where something has just become true, and proof of the sums afterwards."""

from __future__ import annotations

import signal
from itertools import cycle

import pyarrow.parquet as pq
import pytest

from sla_server.db.queries.reader import open_reader
from tests.support.forks import Children
from tests.support.samples import EPOCH, assert_database_holds, gateway, make_cut

POINTS = [
    "appended",  # written, not synced
    "synced",  # durable, the pair does not know
    "noticed",  # the pair knows, SQL does not have it
    "in-transaction",  # rollups written, not committed
    "sql-committed",  # committed, still in the queue
    "file-written",  # a synced file under way
    "renamed",  # the file has its name, no manifest row
    "file-committed",  # the row is there, records not deleted
    "deleted",
]


@pytest.fixture(scope="module")
def children():
    with Children("tests.support.db_crash_child") as made:
        yield made


def acks(database):
    """(word, seq) of each line the children wrote."""
    lines = (database.data_dir / "acks").read_text().splitlines()
    return [(word, int(seq)) for word, seq in (line.split() for line in lines)]


def assert_exactly_once(database, reader):
    """SQL holds exactly the cuts up to its own watermark; files hold each of theirs once."""
    [(_, _, stored)] = reader.watermarks() or [("", 0, 0)]
    items = [make_cut(seq) for seq in range(1, stored + 1)]
    if items:
        assert_database_holds(reader, items)
    directory = database.config.resolved_parquet_dir(database.data_dir)
    seqs = []
    for row in reader.manifest():
        seqs += sorted(set(pq.ParquetFile(directory / row["path"]).read(["seq"])["seq"].to_pylist()))
    assert seqs == list(range(1, len(seqs) + 1)), "a prefix, each cut in one file"
    return stored


def test_nothing_is_lost_or_doubled_by_kill_9(database, children):
    where = (database.config.resolved_url(database.data_dir), str(database.data_dir))
    reader = open_reader(database.config, database.data_dir)
    last_seq = 0
    for point, nth in zip(POINTS, cycle((2, 1)), strict=False):
        last_seq += 24
        code, output = children.run(*where, point, nth, last_seq)
        assert code == -signal.SIGKILL, (point, output)
        assert_exactly_once(database, reader)
    code, output = children.run(*where, "never", 1, last_seq)
    assert code == 0, output
    assert assert_exactly_once(database, reader) == last_seq
    assert sum(row["cuts"] for row in reader.manifest()) == last_seq
    directory = database.config.resolved_parquet_dir(database.data_dir)
    assert {path.relative_to(directory).as_posix() for path in directory.rglob("*.parquet")} == {
        row["path"] for row in reader.manifest()
    }, "orphans are swept"
    durable = 0
    for word, seq in acks(database):
        assert seq >= durable, f"{word} {seq} after {durable} was confirmed"
        durable = max(durable, seq)
    assert reader.watermarks() == [(gateway(1), EPOCH, last_seq)]
    reader.close()
