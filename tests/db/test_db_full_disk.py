"""PostgreSQL on a disk that is really full, under the real process: nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from db_samples import MINUTE_US, T0, assert_database_holds, cuts_message, make_cut
from process_rig import Peers, Running, make_config
from small_disk import SmallDisk

from benchmarks.postgres import PostgresServer
from pmdaemon.runtime.clock import Deadline
from pmdaemon.wire.kinds import Kind
from sla_server.db import outage
from sla_server.db.config import DatabaseConfig
from sla_server.db.reads import open_reader

DISK_BYTES = 48 << 20
OPTIONS = {"fsync": "off", "shared_buffers": "32MB", "min_wal_size": "2MB", "max_wal_size": "4MB"}
MOST_CUTS = 500  # many MB of rows, an eighth of the queue


@contextmanager
def server_on(disk: SmallDisk, what: str) -> Iterator[tuple[PostgresServer, str]]:
    """PostgreSQL and the URL of a database; its tables or its write-ahead log are on the small disk."""
    initdb = ["--wal-segsize=1"]
    if what == "wal":
        initdb.append(f"--waldir={disk.folder('wal')}")
    server = PostgresServer(OPTIONS, initdb)
    try:
        url = server.create("filled")
        if what == "tables":
            server.execute(f"CREATE TABLESPACE small LOCATION '{disk.folder('tables')}'")
            server.execute("ALTER DATABASE filled SET TABLESPACE small")
        yield server, url
    finally:
        server.remove()


class Traffic:
    """A gateway with many streams, each cut in a minute of its own, so that every one makes new rows."""

    def __init__(self, peers: Peers) -> None:
        self.items: list = []
        self._peers = peers

    def send(self) -> None:
        """One more cut; returns when it is durable in the ingest queue."""
        seq = len(self.items) + 1
        self.items.append(make_cut(seq, start_us=T0 + seq * MINUTE_US, streams=range(60)))
        self._peers.pair.post(cuts_message(self.items[-1:]))
        self._peers.pair.expect(Kind.DURABLE, lambda header: header["hw"][0][2] == seq)


def revive(server: PostgresServer) -> None:
    """What an operator does who has made room: start it again if it has given up."""
    deadline = Deadline(30)
    while True:
        assert server.process is not None
        if server.process.poll() is not None:
            server.start()
            return
        try:
            server.execute("SELECT 1")
        except psycopg.OperationalError:
            assert not deadline.passed, "it neither answers nor ends"
            continue
        return


@pytest.mark.db
@pytest.mark.parametrize("what", ["tables", "wal"])
def test_a_full_disk_of_postgresql_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(outage, "BACKOFF_LIMIT_S", 0.5)
    with SmallDisk(DISK_BYTES) as disk, server_on(disk, what) as (server, url):
        config = make_config(tmp_path, DatabaseConfig(url=url, queue_bytes=64 << 20), tmp_path)
        peers = Peers(config)
        traffic = Traffic(peers)
        with Running(config) as running:
            traffic.send()
            disk.fill()
            problem = until_it_is_told(traffic, peers)
            assert problem["what"] == "database"
            assert "No space left" in (server.directory / "log").read_text()
            if what == "tables":
                assert "No space left" in problem["reason"]
            else:
                assert "PANIC" in (server.directory / "log").read_text(), "PostgreSQL stops for want of WAL"
            for _ in range(5):
                traffic.send()
            [still] = peers.services.expect(Kind.PRESSURE)["problems"]
            assert still["since_us"] == problem["since_us"]
            disk.free()
            revive(server)
            peers.services.expect(Kind.PRESSURE, lambda header: not header["problems"])
            traffic.send()
        assert running.status == 0
        reader = open_reader(config.database, config.data_dir)
        assert_database_holds(reader, traffic.items)
        assert sum(row["cuts"] for row in reader.manifest()) == len(traffic.items)
        assert "database-away" in {row["kind"] for row in reader.events()}
        reader.close()
        peers.close()


def until_it_is_told(traffic: Traffic, peers: Peers) -> dict:
    """Send until services hear of the trouble; every cut is taken meanwhile."""
    deadline = Deadline(60)
    while not deadline.passed:
        if len(traffic.items) < MOST_CUTS:
            traffic.send()
        else:
            peers.services.box.wait(0.1)
        if found := [header for header in peers.services.arrived(Kind.PRESSURE) if header["problems"]]:
            return found[-1]["problems"][0]
    raise AssertionError("the disk did not fill")
