"""Both databases for the same tests: SQLite in a file, PostgreSQL from Debian's packages, started here."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from tests.support.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def restarting_postgres(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """The server of all tests, which this one may stop and start, and leave stopped."""
    postgres.execute("CHECKPOINT")  # or a crash would replay what all tests before have written
    yield postgres
    if postgres.process is None:
        postgres.start()


@pytest.fixture(scope="session")
def migrated_template(postgres: PostgresServer) -> str:
    _migrate(DatabaseConfig(url=postgres.create("migrated")), Path())
    return "migrated"


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("migrated")
    _migrate(DatabaseConfig(), directory)
    return directory / "sla.db"


def _migrate(config: DatabaseConfig, directory: Path) -> None:
    engine = make_engine(config, directory)
    migrate.upgrade(engine)
    engine.dispose()


@dataclass
class Database:
    """A database for one test, and the data directory that goes with it."""

    config: DatabaseConfig
    data_dir: Path
    kind: str


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database with the newest schema and nothing in it."""
    return new_database(request, request.param, tmp_path)


def new_database(request: pytest.FixtureRequest, kind: str, data_dir: Path) -> Database:
    """As fixture ``database``, for fixtures of a wider scope."""
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), data_dir / "sla.db")
        url = ""
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create(new_name(), request.getfixturevalue("migrated_template"))
    return Database(DatabaseConfig(url=url, queue_bytes=16 << 20), data_dir, kind)


def new_name() -> str:
    return f"t{uuid.uuid4().hex}"


def copy_of(request: pytest.FixtureRequest, original: Database, data_dir: Path) -> Database:
    """A database and data directory with what ``original`` holds, to which nothing may be connected."""
    shutil.copytree(original.data_dir, data_dir, dirs_exist_ok=True)
    url = ""
    if original.kind == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create(new_name(), str(make_url(original.config.url).database))
    return Database(original.config.model_copy(update={"url": url}), data_dir, original.kind)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database without any table."""
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create(new_name())
    return Database(DatabaseConfig(url=url), tmp_path, request.param)


@pytest.fixture
def rig(database: Database) -> Iterator[Any]:
    from tests.support.database import Rig

    opened = Rig(database.config, database.data_dir)
    yield opened
    opened.close()
