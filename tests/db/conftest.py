"""Both databases for the same tests: SQLite in a file, PostgreSQL from Debian's packages, started here."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pmdaemon.runtime.clock import Deadline
from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine

_NUMBER = count(1)


@dataclass
class PostgresServer:
    """A private server behind a Unix socket; no TCP port."""

    directory: Path
    process: subprocess.Popen[bytes]

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}"

    def execute(self, statement: str) -> None:
        conninfo = f"host={self.directory} user=postgres dbname=postgres"
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(statement)

    def create(self, name: str, template: str = "template0") -> str:
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)


def _programs() -> Path:
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (path / "initdb").exists():
            return path
    on_path = shutil.which("initdb")
    if on_path is None:
        pytest.fail("PostgreSQL's server programs are missing: apt-get install postgresql")
    return Path(on_path).parent


def _account() -> dict[str, Any]:
    """PostgreSQL refuses root: run it as the package's user then."""
    if os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam("postgres")
    except KeyError:
        entry = pwd.getpwnam("nobody")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _start(directory: Path) -> subprocess.Popen[bytes]:
    programs, account = _programs(), _account()
    if account:
        os.chown(directory, account["user"], account["group"])
    data = directory / "data"
    initdb = [
        programs / "initdb",
        "-D",
        data,
        "-A",
        "trust",
        "-U",
        "postgres",
        "-E",
        "UTF8",
        "--no-locale",
        "--no-sync",
    ]
    subprocess.run(initdb, check=True, capture_output=True, cwd=directory, **account)
    options = {
        "listen_addresses": "",
        "unix_socket_directories": directory,
        "fsync": "off",
        "shared_buffers": "32MB",
    }
    command = [programs / "postgres", "-D", data, *(f"--{name}={value}" for name, value in options.items())]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, **account)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    directory = Path(tempfile.mkdtemp(prefix="sla-pg-"))
    process = _start(directory)
    server = PostgresServer(directory, process)
    try:
        deadline = Deadline(30)
        while True:
            try:
                server.execute("SELECT 1")
                break
            except psycopg.OperationalError:
                if deadline.passed or process.poll() is not None:
                    pytest.fail(f"PostgreSQL did not start: {(directory / 'log').read_text()[-2000:]}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
        yield server
    finally:
        process.send_signal(signal.SIGINT)  # "fast" shutdown: does not wait for clients
        process.wait(20)
        shutil.rmtree(directory)


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
    from db_rig import Rig

    opened = Rig(database.config, database.data_dir)
    yield opened
    opened.close()
