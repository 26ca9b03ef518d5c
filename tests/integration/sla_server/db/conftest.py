"""Both databases for the same tests: SQLite in a file, PostgreSQL from Debian's packages, started here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from tests.support.postgres import PostgresServer

_NUMBER = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


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
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "sla.db")
        url = ""
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create(f"t{next(_NUMBER)}", request.getfixturevalue("migrated_template"))
    return Database(DatabaseConfig(url=url, queue_bytes=16 << 20), tmp_path, request.param)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database without any table."""
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create(f"e{next(_NUMBER)}")
    return Database(DatabaseConfig(url=url), tmp_path, request.param)


@pytest.fixture
def rig(database: Database) -> Iterator[Any]:
    from tests.support.database import Rig

    opened = Rig(database.config, database.data_dir)
    yield opened
    opened.close()
