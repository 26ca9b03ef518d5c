"""The whole process between real mailboxes and both databases."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from pmdaemon.mailbox import attach
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.db import process
from sla_server.db.archive.store import open_files
from sla_server.db.archive.upkeep import storage_lock
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DbError, NotAlone, SchemaTooNew
from sla_server.db.fence import Fence
from sla_server.db.ingest.queue import IngestQueue
from sla_server.db.queries.reader import open_reader
from sla_server.lease_file import FENCE
from tests.support.dbmanager import Peer, Peers, Running, make_config
from tests.support.samples import (
    EPOCH,
    assert_database_holds,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
    streams_message,
)


@pytest.fixture
def config(database, tmp_path):
    return make_config(tmp_path, database.config, database.data_dir)


@pytest.fixture
def peers(config):
    made = Peers(config)
    yield made
    made.close()


@pytest.fixture
def reader(config):
    opened = open_reader(config.database, config.data_dir)
    yield opened
    opened.close()


def no_thread_is_left():
    return not [t.name for t in threading.enumerate() if t.name.startswith("db-")]


def test_from_mailbox_to_tables_and_back(config, peers, reader):
    items = [make_cut(seq) for seq in (1, 2, 3)]
    with Running(config) as running:
        first = peers.pair.expect(Kind.WATERMARKS)
        assert first["hw"] == []
        peers.pair.post(gateway_message())
        peers.pair.post(streams_message())
        assert peers.pair.expect(Kind.WATERMARKS)["inc"] == first["inc"]
        peers.pair.post(cuts_message(items[:2]))
        assert peers.pair.expect(Kind.DURABLE) == {"inc": first["inc"], "hw": [[gateway(1), EPOCH, 2]]}
        peers.pair.post(cuts_message(items[1:]))
        assert peers.pair.expect(Kind.DURABLE)["hw"] == [[gateway(1), EPOCH, 3]]
        row = {"name": "pair-0", "state": "running", "pid": 7}
        peers.supervisor.post(record_message([("processes", row)]))
        peers.services.post(record_message([("events", {"event_id": "e"})], req="r1"))
        assert peers.services.expect(Kind.RECORDED) == {"req": "r1", "ok": True, "error": ""}
        peers.services.post(record_message([("nonsense", {})], req="r2"))
        refused = peers.services.expect(Kind.RECORDED)
        assert (refused["req"], refused["ok"]) == ("r2", False)
    assert running.status == 0
    assert no_thread_is_left()
    assert_database_holds(reader, items)
    assert [row["name"] for row in reader.processes()] == ["pair-0"]
    assert {row["kind"] for row in reader.events()} == {"", "gateway-up", "volume-new", "client-new"}
    assert sum(row["cuts"] for row in reader.manifest()) == 3, "a clean stop closes its file"


def test_a_restart_knows_what_it_has_under_a_new_incarnation(config, peers, reader):
    with Running(config):
        first = peers.pair.expect(Kind.WATERMARKS)
        peers.pair.post(cuts_message([make_cut(1), make_cut(2)]))
        peers.pair.expect(Kind.DURABLE)
    with Running(config):
        second = peers.pair.expect(Kind.WATERMARKS)
        assert second["inc"] != first["inc"]
        assert second["hw"] == [[gateway(1), EPOCH, 2]]
        peers.pair.post(cuts_message([make_cut(1), make_cut(2), make_cut(3)]))
        assert peers.pair.expect(Kind.DURABLE)["hw"] == [[gateway(1), EPOCH, 3]]
    assert_database_holds(reader, [make_cut(seq) for seq in (1, 2, 3)])


def test_a_queue_restored_from_an_older_copy_takes_no_number_that_was_consumed(
    config, peers, reader, tmp_path
):
    queue_dir = config.database.resolved_queue_dir(config.data_dir)
    for seq in (1, 2, 3):
        with Running(config):
            peers.pair.expect(Kind.WATERMARKS)
            peers.pair.post(cuts_message([make_cut(seq)]))
            peers.pair.expect(Kind.DURABLE)
        if seq == 1:
            shutil.copytree(queue_dir, tmp_path / "copy")
    shutil.rmtree(queue_dir)
    shutil.copytree(tmp_path / "copy", queue_dir)
    with Running(config), capture_logs() as logs:
        peers.pair.expect(Kind.WATERMARKS)
        peers.pair.post(cuts_message([make_cut(4)]))
        assert peers.pair.expect(Kind.DURABLE)["hw"] == [[gateway(1), EPOCH, 4]]
    assert_database_holds(reader, [make_cut(seq) for seq in (1, 2, 3, 4)])
    assert "queue-older-than-database" in [line["event"] for line in logs]


def test_messages_posted_while_it_was_down_are_taken(config, peers, reader):
    peers.pair.post(cuts_message([make_cut(1)]))
    with Running(config):
        peers.pair.expect(Kind.DURABLE)
    assert_database_holds(reader, [make_cut(1)])


def test_kill_9_of_the_real_process(config, peers, reader):
    program = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from pmdaemon.runtime.stop import Stop; from sla_server.db import process\n"
        "from sla_server.db.config import DatabaseConfig\n"
        "run, data, url = sys.argv[1:]\n"
        "settings = DatabaseConfig(url=url, flush_interval_s=0.05, queue_bytes=16 << 20)\n"
        "config = N(runtime_dir=Path(run), data_dir=Path(data), database=settings)\n"
        "config.volume_ownership, config.first_sight_volumes = 'open', 10_000\n"
        "config.cluster = None\n"
        "process.run(config, Stop())\n"
    )
    url = config.database.resolved_url(config.data_dir)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(config.runtime_dir), str(config.data_dir), url]
    )
    try:
        peers.pair.expect(Kind.WATERMARKS)
        for seq in range(1, 30):
            peers.pair.post(cuts_message([make_cut(seq)]))
        durable = peers.pair.expect(Kind.DURABLE)["hw"][0][2]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
    with Running(config):
        known = peers.pair.expect(Kind.WATERMARKS, lambda header: header["hw"])["hw"][0][2]
        assert known >= durable
        peers.pair.post(cuts_message([make_cut(seq) for seq in range(1, 35)]))
        peers.pair.expect(Kind.DURABLE, lambda header: header["hw"][0][2] == 34)
    assert_database_holds(reader, [make_cut(seq) for seq in range(1, 35)])
    assert sum(row["cuts"] for row in reader.manifest()) == 34


def test_a_second_manager_is_refused(config):
    with process.directory_lock(config.data_dir), pytest.raises(DbError, match="Stop it first"):
        process.run(config, Stop())


def test_a_newer_schema_stops_the_start(config, monkeypatch):
    monkeypatch.setattr(process.migrate, "upgrade", _too_new)
    with pytest.raises(SchemaTooNew):
        process.run(config, Stop())


def _too_new(_engine):
    raise SchemaTooNew("db", "9999", "0001")


def test_a_dead_thread_ends_the_process_with_status_1_and_services_hear_why(config, peers, monkeypatch):
    def dies(_self):
        raise RuntimeError("by the test")

    monkeypatch.setattr(process.IngestWriter, "run", dies)
    stop = Stop()
    assert process.run(config, stop) == 1
    assert "db-writer" in stop.reason
    assert no_thread_is_left()
    told = peers.services.expect(Kind.PRESSURE, lambda header: header["problems"])["problems"]
    assert [problem["what"] for problem in told] == ["dbmanager"]
    assert "db-writer died: by the test" in told[0]["reason"]


@pytest.mark.db
def test_what_a_dying_intake_had_taken_is_left_to_the_successor(config, peers, monkeypatch):
    def fails(_self, _messages):
        raise RuntimeError("by the test")

    monkeypatch.setattr(process.IngestIntake, "absorb", fails)
    message = frame.encode(Kind.RECORD, {"rows": [], "req": None, "from": "services"})
    peers.services.box.post("dbmanager", message)
    assert process.run(config, Stop()) == 1
    with attach(config.runtime_dir / "main.mbx", "dbmanager") as successor:
        assert [bytes(found.payload) for found in successor.take()] == [message]


def test_it_waits_for_a_database_that_is_away_says_so_and_can_be_stopped(tmp_path):
    settings = DatabaseConfig(url=f"postgresql+psycopg:///x?host={tmp_path}", queue_bytes=16 << 20)
    config = make_config(tmp_path, settings, tmp_path)
    peers, page = Peers(config), Peer(config.runtime_dir / "app.mbx", "appserver")
    with Running(config) as running:
        [told] = peers.services.expect(Kind.PRESSURE)["problems"]
        [again] = peers.services.expect(Kind.PRESSURE)["problems"]
        assert page.expect(Kind.PRESSURE)["problems"] == [told]
    peers.close()
    page.box.close()
    assert running.status == 0
    assert (told["what"], told["since_us"]) == ("database", again["since_us"])
    assert str(tmp_path) in told["reason"]


@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.db)], indirect=True)
def test_intake_goes_on_while_the_database_is_away(postgres, config, peers, reader):
    name = config.database.url.split("@/")[1].split("?")[0]
    with Running(config):
        peers.pair.post(cuts_message([make_cut(1)]))
        peers.pair.expect(Kind.DURABLE)
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        for seq in range(2, 12):
            peers.pair.post(cuts_message([make_cut(seq)]))
            peers.pair.expect(Kind.DURABLE, lambda header, seq=seq: header["hw"][0][2] == seq)
        [problem] = peers.services.expect(Kind.PRESSURE, lambda header: header["problems"])["problems"]
        assert problem["what"] == "database"
        assert "not currently accepting connections" in problem["reason"]
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        deadline = Deadline(60)
        while not deadline.passed and reader.totals()["cuts"] < 22:
            peers.pair.box.wait(0.05)
        peers.services.expect(Kind.PRESSURE, lambda header: not header["problems"])
    assert_database_holds(reader, [make_cut(seq) for seq in range(1, 12)])


def test_damage_of_the_queue_that_lost_records_is_an_event_once(config, peers, reader):
    directory = config.database.resolved_queue_dir(config.data_dir)
    payloads = [cuts_message([make_cut(seq)]) for seq in (1, 2, 3)]
    queue = IngestQueue(directory, config.database.queue_bytes)
    for payload in payloads:
        queue.append_many([payload])
    queue.close()
    content = (directory / "ingest").read_bytes()
    with (directory / "ingest").open("r+b") as file:
        file.seek(content.index(payloads[1]) + 40)
        file.write(b"\xff" * 8)
    for _ in range(2):
        with Running(config):
            peers.pair.expect(Kind.WATERMARKS)
    found = [row for row in reader.events(limit=50) if row["kind"] == "queue-damage"]
    assert [(row["severity"], row["subject"]) for row in found] == [("critical", "ingest-queue")]
    assert "1 record of cuts that were not yet in SQL and Parquet are lost" in found[0]["text"]


def emptied(config):
    """As after ``createdb`` of another one, or with SQLite's file cut to nothing."""
    engine = make_engine(config.database, config.data_dir)
    path = engine.url.database
    if engine.dialect.name == "sqlite":
        engine.dispose()
        for name in (f"{path}-wal", f"{path}-shm"):
            Path(name).unlink(missing_ok=True)
        os.truncate(path, 0)
        return
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


def test_a_database_that_was_emptied_is_an_event_once_and_a_new_one_none(config, peers):
    kinds = []
    for is_emptied in (False, True, False):
        if is_emptied:
            emptied(config)
        with Running(config):
            peers.pair.expect(Kind.WATERMARKS)
            peers.pair.post(cuts_message([make_cut(len(kinds) + 1)]))
            peers.pair.expect(Kind.DURABLE)
        with contextlib.closing(open_reader(config.database, config.data_dir)) as reader:
            kinds.append([row["severity"] for row in reader.events(50) if row["kind"] == "database-emptied"])
    assert kinds == [[], ["critical"], ["critical"]]


def test_a_frozen_process_that_looks_after_the_files_holds_no_start_up(config, peers, reader):
    """As of another server whose machine stands still in the midst of its upkeep, and has not died."""
    with storage_lock(open_files(config.database, config.data_dir).lock_dir):
        with Running(config) as running:
            assert peers.pair.expect(Kind.WATERMARKS)["hw"] == []
            peers.pair.post(cuts_message([make_cut(1)]))
            assert peers.pair.expect(Kind.DURABLE)["hw"] == [[gateway(1), EPOCH, 1]]
        assert running.status == 0
    assert_database_holds(reader, [make_cut(1)])


def test_a_server_whose_file_says_that_it_is_alone_does_not_start_beside_others(config, peers):
    with Running(config):
        peers.pair.expect(Kind.WATERMARKS)
    engine = make_engine(config.database, config.data_dir)
    Fence(7, "n2").take(engine, "another", 0, 0)
    engine.dispose()
    with pytest.raises(NotAlone, match="that of node n2 acted last"):
        process.run(config, Stop())


class Terms:
    """The manager of server n1, term after term; another server, n2, may write in between."""

    def __init__(self, config, monkeypatch):
        self._config = config
        self._monkeypatch = monkeypatch

    @contextlib.contextmanager
    def term(self, fence):
        """One term; fence 0: it is alone."""
        takeover = SimpleNamespace(enabled=True, lease_s=6.0)
        self._config.cluster = SimpleNamespace(node="n1", takeover=takeover) if fence else None
        self._monkeypatch.setenv(FENCE, str(fence or ""))
        with contextlib.ExitStack() as stack:
            yield process.open_manager(self._config, Stop(), stack)

    def other_acts(self, fence):
        engine = make_engine(self._config.database, self._config.data_dir)
        Fence(fence, "n2").take(engine, "another", 0, 0)
        engine.dispose()

    def leave_others(self):
        """As the text of ``NotAlone`` says."""
        engine = make_engine(self._config.database, self._config.data_dir)
        with begin(engine) as connection:
            connection.execute(text("UPDATE fences SET fence = 0 WHERE name = 'gateways'"))
        engine.dispose()


def kept(manager, items):
    """Cuts that come from agents: how many are new; they are in the queue then."""
    absorbed = manager.intake.absorb([SimpleNamespace(sender="pair-0", payload=cuts_message(items))])
    manager.queue.append_many(absorbed.records)
    return manager.intake.counts["new"]


def store_all(manager):
    while manager.writer.step(final=True):
        pass


def test_refused_cuts_are_taken_from_the_agents_also_when_files_have_passed_them(config, reader, monkeypatch):
    """Server n1 loses the lease with cuts 4 and 5 in its queue alone, and their agent is away meanwhile."""
    items = [make_cut(seq) for seq in range(1, 6)]
    others = [make_cut(seq, gw=gateway(2)) for seq in (1, 2)]
    terms = Terms(config, monkeypatch)
    with terms.term(5) as manager:
        assert kept(manager, items[:3]) == 3
        store_all(manager)
        assert kept(manager, items[3:]) == 5
    terms.other_acts(6)
    with terms.term(7) as manager:
        assert kept(manager, others) == 2
        store_all(manager)
        assert manager.writer.parquet_seq == manager.queue.synced_seq
    with terms.term(7) as manager:  # a restart within the term
        assert manager.queue.refused == ()
        assert kept(manager, items[3:]) == 2
        store_all(manager)
    assert_database_holds(reader, items + others)


def test_one_of_several_that_goes_on_alone_counts_nothing_that_the_others_have_had(
    config, reader, monkeypatch
):
    items = [make_cut(seq) for seq in range(1, 6)]
    terms = Terms(config, monkeypatch)
    with terms.term(5) as manager:
        kept(manager, items[:3])
        store_all(manager)
        kept(manager, items[3:])
    terms.other_acts(6)
    with pytest.raises(NotAlone, match="UPDATE fences SET fence = 0 WHERE name = 'gateways'"):
        terms.term(0).__enter__()
    terms.leave_others()
    for _ in range(2):
        with terms.term(0) as manager:
            store_all(manager)
    assert_database_holds(reader, items[:3])  # n2 may have had the others, and those it had not come again
    with terms.term(0) as manager:
        assert kept(manager, items[3:]) == 2
        store_all(manager)
    assert_database_holds(reader, items)
