"""sql/roles.sql: what each role may do, and what it may not."""

from __future__ import annotations

from contextlib import closing
from importlib.resources import files

import psycopg
import pytest
from sqlalchemy import text

from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DatabaseUnavailable, NoRightToPublish
from sla_server.db.partitions import DAY_US
from sla_server.db.policies import open_policies
from sla_server.db.statistics import StatisticsSnapshot
from sla_server.db.statistics_parts import Part, read_part
from tests.support.database import Rig
from tests.support.samples import assert_database_holds, cuts_message, make_cut, record_message

pytestmark = pytest.mark.db


def run_script(postgres, database):
    script = files("sql").joinpath("roles.sql").read_text()
    conninfo = f"host={postgres.directory} user=postgres dbname={database}"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(script)


@pytest.fixture
def config(postgres, tmp_path):
    """A database whose tables were made by ``sla_writer``, between two runs of the script."""
    name = f"roles_{abs(hash(tmp_path)) % 10**9}"
    postgres.create(name)
    run_script(postgres, name)
    config = DatabaseConfig(
        url=postgres.url(name, "sla_writer"),
        reader_url=postgres.url(name, "sla_reader"),
        policy_url=postgres.url(name, "sla_policy"),
    )
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    run_script(postgres, name)
    return config


def refused(engine, statement, before="SELECT 1", match=r"permission denied|read-only|must be owner"):
    def run():
        with begin(engine) as connection:
            connection.execute(text(before))
            connection.execute(text(statement))

    with pytest.raises(DatabaseUnavailable, match=match) as caught:
        run()
    return caught.value.reason


WRITES = [
    "INSERT INTO events (event_id) VALUES ('x')",
    "UPDATE policies SET state = 'in-force'",
    "DELETE FROM rollups",
    "TRUNCATE audit",
    "DROP TABLE slices",
    "CREATE TABLE mine (x integer)",
    "CREATE TEMPORARY TABLE mine (x integer)",
]


def test_the_writer_does_its_work(config, tmp_path):
    rig = Rig(config, tmp_path)
    items = [make_cut(seq, streams=range(150)) for seq in (1, 2)]
    rig.feed(cuts_message(items), record_message([("events", {"event_id": "e"})]))
    assert_database_holds(rig.reader, items)
    rig.clock.advance(20 * 86_400)
    rig.retention.step()
    later = make_cut(3, start_us=rig.clock.unix_us() // DAY_US * DAY_US)
    rig.feed(cuts_message([later]))
    assert len(rig.reader.slice_inputs(later.column("stream_id").tolist(), [], 0, 1 << 62).rows) == 2
    rig.close()


@pytest.mark.parametrize("statement", WRITES)
def test_the_reader_cannot_write(config, tmp_path, statement):
    engine = make_engine(config, tmp_path, read_only=True)
    assert engine.url.username == "sla_reader"
    refused(engine, statement)
    engine.dispose()


@pytest.mark.parametrize("statement", [*WRITES[:6], "INSERT INTO policies (version) VALUES (1)"])
def test_the_reader_has_no_rights_even_in_a_writing_session(config, tmp_path, statement):
    """Not only because its sessions are read-only: that, it could change."""
    engine = make_engine(config.model_copy(update={"url": config.reader_url}), tmp_path)
    pattern = r"permission denied|must be owner"
    assert refused(engine, statement, before="SET TRANSACTION READ WRITE", match=pattern)
    engine.dispose()


def test_the_policy_job_reads_and_publishes_and_changes_nothing(config, tmp_path):
    store = open_policies(config, tmp_path)
    columns = {"rollups": ("slot_us", "reads")}
    with closing(StatisticsSnapshot(config, tmp_path, (0, 1), columns, tmp_path)) as snapshot:
        assert snapshot.streams.num_rows == snapshot.rows("rollups") == 0
        part = Part("rollups", "slot_us", 0, 1)
        assert list(read_part(snapshot.source, part, columns["rollups"])) == []
    cap = {"volume": "v", "hour_of_week": 3, "cost_per_s": 5.0}
    assert store.publish([cap], job={}, report={}, published_by="test") == 1
    assert store.publish([cap], job={}, report={}, published_by="test") == 2
    assert store.reader.policy_caps(2)[0]["volume"] == "v"
    with store.alone("policy"):
        store.end_job(store.begin_job("policy", "test"), "done", 0, version=2)
    assert store.reader.jobs()[0]["state"] == "done"
    store.check_may_store()
    for end_us in (1, 2):
        store.results.replace("capacity", end_us, "basis", [(b"one", 3), (b"two", 4)])
    found = store.results.head("capacity")
    assert (found.end_us, found.basis, found.rows) == (2, "basis", 7)
    assert store.results.bodies("capacity") == [b"one", b"two"]
    assert store.results.head("demand") is None
    for statement in (*WRITES, "UPDATE policy_caps SET cost_per_s = 1", "DELETE FROM policies"):
        assert "permission denied" in refused(store._engine, statement) or statement.startswith("DROP")
    for table in ("accounts", "api_tokens", "sessions"):
        refused(store._engine, f"SELECT * FROM {table}", match="permission denied")
    store.close()


def test_no_other_role_of_the_same_postgresql_connects(config, postgres):
    """Review, finding 16: PUBLIC kept the right to connect."""
    database = config.url.partition("@/")[2].partition("?")[0]
    server = f"host={postgres.directory}"
    with psycopg.connect(f"{server} user=postgres dbname={database}", autocommit=True) as connection:
        connection.execute("CREATE ROLE passer_by LOGIN")
    try:
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(f"{server} user=passer_by dbname={database}")
        psycopg.connect(f"{server} user=sla_policy dbname={database}").close()
    finally:
        with psycopg.connect(f"{server} user=postgres dbname={database}", autocommit=True) as connection:
            connection.execute("DROP ROLE passer_by")


def test_the_policy_job_is_told_before_its_work_that_the_script_was_not_run_again(postgres, tmp_path):
    name = f"once_{abs(hash(tmp_path)) % 10**9}"
    postgres.create(name)
    run_script(postgres, name)
    config = DatabaseConfig(url=postgres.url(name, "sla_writer"), policy_url=postgres.url(name, "sla_policy"))
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    store = open_policies(config, tmp_path)
    with pytest.raises(NoRightToPublish, match=r"into policies, policy_caps and jobs\. Run sql/roles\.sql"):
        store.check_may_publish()
    run_script(postgres, name)
    store.check_may_publish()
    store.close()


def test_tables_of_a_database_with_one_role_are_handed_over(postgres, tmp_path):
    name = f"handed_{abs(hash(tmp_path)) % 10**9}"
    engine = make_engine(DatabaseConfig(url=postgres.create(name)), tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    run_script(postgres, name)
    rig = Rig(DatabaseConfig(url=postgres.url(name, "sla_writer")), tmp_path)
    rig.feed(cuts_message([make_cut(1)]))
    assert_database_holds(rig.reader, [make_cut(1)])
    rig.close()
