"""PostgreSQL without room, under the real process: nothing is lost or doubled.

Twice. Everywhere with a PostgreSQL that behaves as it does then: with full tables each transaction fails
with ``disk_full``, with a full write-ahead log it crashes. And on a small disk that is really full, for which
the test needs one of two things: CAP_SYS_ADMIN (root of a machine has it, root of a container mostly not), or
user namespaces for unprivileged users (``sysctl kernel.unprivileged_userns_clone=1``,
``kernel.apparmor_restrict_unprivileged_userns=0``). /dev/full and RLIMIT_FSIZE need neither, but with none of
them PostgreSQL meets ENOSPC in its own files. Without both, these two are skipped, with the kernel's reason.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
import pytest

from pmdaemon.runtime.clock import Deadline
from pmdaemon.wire.kinds import Kind
from sla_server.db.config import DatabaseConfig
from sla_server.db.ingest import outage
from sla_server.db.queries.reader import open_reader
from tests.support.dbmanager import Peers, Running, make_config
from tests.support.postgres import PostgresServer
from tests.support.samples import MINUTE_US, T0, assert_database_holds, cuts_message, make_cut
from tests.support.small_disk import SmallDisk

DISK_BYTES = 48 << 20
OPTIONS = {"fsync": "off", "shared_buffers": "32MB", "min_wal_size": "2MB", "max_wal_size": "4MB"}
MOST_CUTS = 500  # many MB of rows, an eighth of the queue


class Trouble(Protocol):
    """A way to leave a server without room.

    Attributes:
        server: PostgreSQL.
        url: of a database.
    """

    server: PostgresServer
    url: str

    def begin(self) -> None:
        """No room from now on."""

    def end(self) -> None:
        """There is room again, and the server answers."""


class AsTold:
    """No disk is full: PostgreSQL does what it does when one is."""

    FAIL = (
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION USING "
        "ERRCODE = ''disk_full'', MESSAGE = ''could not extend file: No space left on device''; END'",
        "CREATE TRIGGER full_disk BEFORE UPDATE ON consumed EXECUTE FUNCTION full_disk()",
    )

    def __init__(self, server: PostgresServer, what: str) -> None:
        self.server, self._name = server, f"filled_{what}"
        self.url = server.create(self._name)
        self._what = what

    def begin(self) -> None:
        if self._what == "wal":
            self.server.stop(signal.SIGQUIT)
            return
        self._execute(*self.FAIL)

    def end(self) -> None:
        if self._what == "wal":
            self.server.start()
            return
        self._execute("DROP TRIGGER full_disk ON consumed")

    def _execute(self, *statements: str) -> None:
        where = f"host={self.server.directory} user=postgres dbname={self._name}"
        with psycopg.connect(where, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)


class Mounted:
    """Its tables or its write-ahead log are on a small disk that is filled."""

    def __init__(self, server: PostgresServer, url: str, what: str, disk: SmallDisk) -> None:
        self.server, self.url = server, url
        self._what, self._disk = what, disk

    def begin(self) -> None:
        self._disk.fill()

    def end(self) -> None:
        log = (self.server.directory / "log").read_text()
        assert "No space left" in log
        assert ("PANIC" in log) == (self._what == "wal"), (
            "PostgreSQL stops for want of WAL, and for nothing else"
        )
        self._disk.free()
        revive(self.server)


@contextmanager
def as_told(what: str, server: PostgresServer) -> Iterator[Trouble]:
    """See ``AsTold``."""
    yield AsTold(server, what)


@contextmanager
def mounted(what: str, _shared: PostgresServer) -> Iterator[Trouble]:
    """See ``Mounted``."""
    with SmallDisk(DISK_BYTES) as disk:
        wal = [f"--waldir={disk.folder('wal')}"] if what == "wal" else []
        with PostgresServer(OPTIONS, ["--wal-segsize=1", *wal]) as server:
            url = server.create("filled")
            if what == "tables":
                server.execute(f"CREATE TABLESPACE small LOCATION '{disk.folder('tables')}'")
                server.execute("ALTER DATABASE filled SET TABLESPACE small")
            yield Mounted(server, url, what, disk)


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
    deadline = Deadline(120)
    while True:
        assert server.process is not None
        if server.process.poll() is not None:
            server.start()
            return
        try:
            server.execute("SELECT 1")
            return
        except psycopg.OperationalError:
            assert not deadline.passed, "it neither answers nor ends"
        time.sleep(0.05)


@pytest.mark.db
@pytest.mark.parametrize("what", ["tables", "wal"])
@pytest.mark.parametrize("how", [as_told, mounted])
def test_a_postgresql_without_room_loses_and_doubles_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarting_postgres: PostgresServer,
    how: Callable[[str, PostgresServer], AbstractContextManager[Trouble]],
    what: str,
) -> None:
    monkeypatch.setattr(outage, "BACKOFF_LIMIT_S", 0.5)
    with how(what, restarting_postgres) as trouble:
        config = make_config(tmp_path, DatabaseConfig(url=trouble.url, queue_bytes=64 << 20), tmp_path)
        peers = Peers(config)
        traffic = Traffic(peers)
        with Running(config) as running:
            traffic.send()
            trouble.begin()
            problem = until_it_is_told(traffic, peers)
            assert problem["what"] == "database"
            if what == "tables":
                assert "No space left" in problem["reason"]
            for _ in range(5):
                traffic.send()
            [still] = peers.services.expect(Kind.PRESSURE)["problems"]
            assert still["since_us"] == problem["since_us"]
            trouble.end()
            peers.services.expect(Kind.PRESSURE, lambda header: not header["problems"])
            traffic.send()
        assert running.status == 0
        reader = open_reader(config.database, config.data_dir)
        assert_database_holds(reader, traffic.items)
        assert sum(row["cuts"] for row in reader.manifest()) == len(traffic.items)
        assert "database-was-away" in {row["kind"] for row in reader.events()}
        reader.close()
        peers.close()


def until_it_is_told(traffic: Traffic, peers: Peers) -> dict:
    """Send until services hear of the trouble; every cut is taken meanwhile."""
    deadline = Deadline(120)
    while not deadline.passed:
        if len(traffic.items) < MOST_CUTS:
            traffic.send()
        else:
            peers.services.box.wait(0.1)
        if found := [header for header in peers.services.arrived(Kind.PRESSURE) if header["problems"]]:
            return found[-1]["problems"][0]
    raise AssertionError("the disk did not fill")
