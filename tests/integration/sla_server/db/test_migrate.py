"""The schema: what migrations build equals what ``schema`` declares; newer schemas are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from sla_server.db import migrate, partitions, schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DatabaseUnavailable, FenceLost, SchemaTooNew
from sla_server.db.fence import Fence, FormerTerms
from sla_server.db.queries.reader import SqlReader, open_reader
from tests.support.database import Rig
from tests.support.paths import ROOT
from tests.support.samples import T0, assert_database_holds, cuts_message, make_cut


def _described(engine):
    """Every table as the database itself describes it."""
    inspector = inspect(engine)
    return {
        table: (
            _partition_key(engine, table),
            [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in inspector.get_indexes(table)
            ),
        )
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }


def _partition_key(engine, table):
    if engine.dialect.name == "sqlite":
        return None
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT pg_get_partkeydef('{table}'::regclass)")).scalar()


def test_fresh_equals_migrated(empty_database):
    engine = make_engine(empty_database.config, empty_database.data_dir)
    migrate.upgrade(engine)
    migrated = _described(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []
    with engine.begin() as connection:
        for table in [*migrated, "alembic_version"]:
            connection.execute(text(f'DROP TABLE "{table}"'))
        schema.metadata.create_all(connection)
    assert _described(engine) == migrated
    engine.dispose()


def test_upgrade_twice_changes_nothing(empty_database):
    engine = make_engine(empty_database.config, empty_database.data_dir)
    assert migrate.upgrade(engine) == migrate.upgrade(engine) == migrate.newest_revision()
    engine.dispose()


def test_newer_schema_is_refused_and_left_alone(database):
    engine = make_engine(database.config, database.data_dir)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNew, match=r"'9999'.*newer release") as caught:
        migrate.upgrade(engine)
    assert caught.value.newest_known == migrate.newest_revision()
    with engine.connect() as connection:
        assert migrate.current_revision(connection) == "9999"
    engine.dispose()


def test_failed_migration_leaves_nothing(empty_database):
    """All steps are one transaction: a name that is taken undoes the tables made before it."""
    engine = make_engine(empty_database.config, empty_database.data_dir)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE volumes (x integer)"))
    with pytest.raises(DatabaseUnavailable, match="volumes"):
        migrate.upgrade(engine)
    assert set(inspect(engine).get_table_names()) == {"volumes"}
    engine.dispose()


def upgrade_to(engine, revision):
    """As an older release did."""
    config = migrate._script_config()
    with begin(engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def insert(connection, table, **values):
    """Into a table as that release knew it."""
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


def test_a_database_of_one_server_can_be_taken_by_several(empty_database):
    engine = make_engine(empty_database.config, empty_database.data_dir)
    upgrade_to(engine, "0023")
    with begin(engine) as connection:
        insert(connection, "ingest_watermark", gateway_id="g", epoch="7", seq=5, updated_us=1)
    Fence(1, "n1").check(engine)  # there is no table of them yet
    migrate.upgrade(engine)
    reader = SqlReader(engine)
    assert reader.watermarks() == [("g", 7, 5)]
    assert reader.fences() == []
    assert Fence(6, "n2").take(engine, "q2", 9, 3) == FormerTerms()
    row = {"name": "gateways", "fence": 6, "server": "n2", "queue": "q2", "since_us": 3}
    assert reader.fences() == [row]
    with pytest.raises(FenceLost):
        Fence(5, "n1").check(engine)
    engine.dispose()


def test_rows_of_the_first_schema_are_kept_and_added_to(empty_database):
    engine = make_engine(empty_database.config, empty_database.data_dir)
    upgrade_to(engine, "0001")
    with begin(engine) as connection:
        for stream_id in (1, 2):
            insert(connection, "rollups", slot_us=T0, stream_id=stream_id, reads=5, hist=b"")
            insert(connection, "rollup_hours", hour_us=T0, stream_id=stream_id, reads=5, hist=bytes(400))
        insert(
            connection, "rollup_missed", slot_us=T0, stream_id=1, io=0, threshold_us=9, counted=5, missed=1
        )
        insert(connection, "coverage", slot_us=T0, gateway_id="g", covered_us=7, cuts=1)
    engine.dispose()
    engine = make_engine(empty_database.config, empty_database.data_dir)
    assert migrate.upgrade(engine) == migrate.newest_revision()
    engine.dispose()
    rig = Rig(empty_database.config, empty_database.data_dir)
    rows = rig.reader.slice_inputs([1, 2], ["g"], 0, 1 << 62)
    assert [(row["stream_id"], row["reads"]) for row in rows.rows] == [(1, 5), (2, 5)]
    assert (len(rows.missed), rows.coverage[0]["covered_us"]) == (1, 7)
    items = [make_cut(1), make_cut(2, start_us=T0 + 2 * partitions.DAY_US)]
    rig.feed(cuts_message(items))
    rig.drain()
    with begin(rig.engine) as connection:
        old = connection.execute(text("SELECT sum(reads) FROM rollup_hours WHERE stream_id <= 2")).scalar()
        assert old == 10
        for table in partitions.SPANS:
            column = partitions.TIME_COLUMN[table]
            connection.execute(text(f"DELETE FROM {table} WHERE {column} = {T0} AND {_key(table)}"))
    assert_database_holds(rig.reader, items)
    if rig.engine.dialect.name == "postgresql":
        with begin(rig.engine) as connection:
            oldest = partitions.existing(connection, "rollups")[0]
        assert (oldest.name, oldest.from_us) == ("rollups_0001", 0)
        rig.clock.advance(20 * 86_400)
        rig.retention.step()
        with begin(rig.engine) as connection:
            assert "rollups_0001" not in [part.name for part in partitions.existing(connection, "rollups")]
    rig.close()


def _key(table):
    return "gateway_id = 'g'" if table == "coverage" else "stream_id <= 2"


def test_two_starters_at_once(empty_database):
    """Both find a database at the newest schema, whoever was first."""
    ends = []
    barrier = threading.Barrier(2)

    def start():
        engine = make_engine(empty_database.config, empty_database.data_dir)
        barrier.wait(60)
        for _ in range(20):  # who waited too long for the other is to try again, as the manager does
            with suppress(DatabaseUnavailable):
                ends.append(migrate.upgrade(engine))
                break
        engine.dispose()

    threads = [threading.Thread(target=start, name=f"starter-{n}") for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [migrate.newest_revision()] * 2


@pytest.mark.db
def test_a_table_in_use_delays_the_migration(postgres):
    url = postgres.create("in_use")
    from sla_server.db.config import DatabaseConfig

    engine = make_engine(DatabaseConfig(url=url, lock_timeout_s=0.1), postgres.directory)
    upgrade_to(engine, "0001")
    with engine.connect() as reading:
        reading.execute(text("SELECT count(*) FROM rollups")).all()
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            migrate.upgrade(engine)
        assert migrate.current_revision(reading) == "0001"
    assert migrate.upgrade(engine) == migrate.newest_revision()
    engine.dispose()


@pytest.mark.db
def test_a_migration_under_way_elsewhere_is_waited_for_and_then_reported(postgres):
    url = postgres.create("under_way")
    from sla_server.db.config import DatabaseConfig

    engine = make_engine(DatabaseConfig(url=url, lock_timeout_s=0.1), postgres.directory)
    with engine.connect() as other:
        other.execute(text("SELECT pg_advisory_lock(:key)"), {"key": migrate.ADVISORY_LOCK})
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            migrate.upgrade(engine)
        other.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": migrate.ADVISORY_LOCK})
    assert migrate.upgrade(engine) == migrate.newest_revision()
    engine.dispose()


def test_reading_before_the_schema_exists_is_retryable(empty_database):
    reader = open_reader(empty_database.config, empty_database.data_dir)
    with pytest.raises(DatabaseUnavailable) as caught:
        reader.gateways()
    assert caught.value.retryable
    reader.close()


def test_every_column_of_the_document_exists():
    """docs/formats/sql.md names each table; a table that is missing there is undocumented."""

    document = (ROOT / "docs/formats/sql.md").read_text()
    documented = set(re.findall(r"^\| (\w+) \|", document, re.MULTILINE)) - {"table"}
    assert documented == set(schema.metadata.tables)


def test_volumes_of_before_belong_to_the_gateways_that_showed_them(empty_database):
    engine = make_engine(empty_database.config, empty_database.data_dir)
    upgrade_to(engine, "0011")
    with begin(engine) as connection:
        insert(connection, "gateways", gateway_id="g-1", name="host-1")
        insert(connection, "volumes", volume="vol-1", backend="pool-2")
        insert(connection, "volumes", volume="shown-only", backend="pool-2")
        for number, (gateway_id, volume, backend) in enumerate(
            [
                ("g-1", "vol-1", "pool-2"),
                ("g-1", "vol-1", "pool-9"),  # where it was before
                ("g-2", "vol-1", "pool-3"),
                ("g-1", "", ""),  # a stream that was never announced
            ]
        ):
            values = {"gateway_id": gateway_id, "volume": volume, "backend": backend}
            insert(connection, "streams", stream_id=number, first_seen_us=T0 + number, **values)
    migrate.upgrade(engine)
    engine.dispose()
    reader = open_reader(empty_database.config, empty_database.data_dir)
    columns = ("volume", "gateway_id", "name", "state", "backend", "shown_backend", "decided_by")
    assert [tuple(row[name] for name in columns) for row in reader.volume_owners()] == [
        ("vol-1", "g-1", "host-1", "approved", "pool-2", "pool-2", "update"),
        ("vol-1", "g-2", "g-2", "approved", "pool-3", "pool-3", "update"),
    ]
    assert [row["first_seen_us"] for row in reader.volume_owners()] == [T0, T0 + 2]
    reader.close()


def test_the_revisions_that_files_name_are_those_of_the_steps():
    """What is known of the schema is read from names of files: Alembic is imported to change it, only."""
    scripts = ScriptDirectory.from_config(migrate._script_config())  # what the names must agree with
    steps = [script.revision for script in scripts.walk_revisions()]
    assert steps == migrate.known_revisions()[::-1]
    assert scripts.get_current_head() == migrate.newest_revision()


def test_a_process_that_finds_its_schema_imports_neither_alembic_nor_arrow(tmp_path):
    """Both stay in a process that imported them: 30 MB of an idle server."""
    database = tmp_path / "sla.db"
    migrate.upgrade(make_engine(DatabaseConfig(url=f"sqlite:///{database}"), tmp_path))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import sla_server.process, sla_server.db.process\n"
        "from sla_server.db import migrate\n"
        "from sla_server.db.config import DatabaseConfig\n"
        "from sla_server.db.engine import make_engine\n"
        f"config = DatabaseConfig(url='sqlite:///{database}')\n"
        "migrate.upgrade(make_engine(config, Path('.')))\n"
        "print({'alembic', 'pyarrow', 'pygments', 'plotly', 'weasyprint'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "set()\n"
