"""The schema: what migrations build equals what ``schema`` declares; newer schemas are refused."""

from __future__ import annotations

import re

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from sla_server.db import migrate, schema
from sla_server.db.engine import make_engine
from sla_server.db.errors import DatabaseUnavailable, SchemaTooNew
from sla_server.db.reads import open_reader


def _described(engine):
    """Every table as the database itself describes it."""
    inspector = inspect(engine)
    return {
        table: (
            [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(
                (i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in inspector.get_indexes(table)
            ),
        )
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }


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


def test_reading_before_the_schema_exists_is_retryable(empty_database):
    reader = open_reader(empty_database.config, empty_database.data_dir)
    with pytest.raises(DatabaseUnavailable) as caught:
        reader.gateways()
    assert caught.value.retryable
    reader.close()


def test_every_column_of_the_document_exists():
    """docs/formats/sql.md names each table; a table that is missing there is undocumented."""
    from pathlib import Path

    document = (Path(__file__).parents[2] / "docs/formats/sql.md").read_text()
    documented = set(re.findall(r"^\| (\w+) \|", document, re.MULTILINE)) - {"table"}
    assert documented == set(schema.metadata.tables)
