"""A PostgreSQL server of one's own, behind a Unix socket, for benchmarks and tests.

Made from Debian's packages in a folder that goes away with it; no TCP port. PostgreSQL refuses root, so root
runs it as the package's user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg

from pmdaemon.runtime.clock import Deadline

START_S: Final = 120.0
FIRST_WITH_STRATEGY: Final = 15
STOP_S: Final = 120.0
TEST_OPTIONS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",  # with a database for each test it would do nothing but visit them
    "shared_buffers": "32MB",
}


class PostgresMissing(RuntimeError):
    """The programs are not there, or the server does not start."""


class PostgresServer:
    """A running server: ``stop`` and ``start`` it at will, ``remove`` it at the end, or use ``with``.

    Args:
        options: settings, given on the command line. The default is for tests: what it holds need not survive
            the machine.
        initdb: further arguments of ``initdb``.

    Attributes:
        directory: socket, data and log.
        process: while it runs.

    Raises:
        PostgresMissing: the server programs are missing, or it did not start.
    """

    def __init__(self, options: Mapping[str, str] = TEST_OPTIONS, initdb: Sequence[str] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sla-pg-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._options = {"listen_addresses": "", "unix_socket_directories": str(self.directory), **options}
        self._programs = _programs()
        self._account = account()
        if self._account:
            os.chown(self.directory, self._account["user"], self._account["group"])
        command = f"{self._programs}/initdb -A trust -U postgres -E UTF8 --no-locale --no-sync -D"
        subprocess.run(
            [*command.split(), str(self.directory / "data"), *initdb],
            check=True,
            capture_output=True,
            cwd=self.directory,
            **self._account,
        )
        self.start()

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def start(self) -> None:
        """Start and wait until it answers."""
        settings = (f"--{name}={value}" for name, value in self._options.items())
        command = [str(self._programs / "postgres"), "-D", str(self.directory / "data"), *settings]
        with (self.directory / "log").open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, **self._account
            )
        self.process = process
        deadline = Deadline(START_S)
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError as exc:
                if deadline.passed or process.poll() is not None:
                    tail = (self.directory / "log").read_text()[-2000:]
                    raise PostgresMissing(f"PostgreSQL did not start: {tail}") from exc
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT breaks all sessions in good order, SIGQUIT as a crash would."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(STOP_S)
            self.process = None

    def remove(self) -> None:
        """Stop it and delete everything; nothing is written first."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory)

    def url(self, database: str, user: str = "postgres") -> str:
        """SQLAlchemy URL of one of its databases."""
        return f"postgresql+psycopg://{user}@/{database}?host={self.directory}"

    def execute(self, statement: str) -> None:
        """Run a statement outside any transaction."""
        conninfo = f"host={self.directory} user=postgres dbname=postgres"
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(statement)

    def create(self, name: str, template: str = "template0") -> str:
        """Create a database and return its URL.

        Files of the template are copied as they are: through the log (the default since PostgreSQL 15, which
        knows both ways) each of the some 300 databases of a test run takes 70 ms of processor instead of 28.
        """
        way = "STRATEGY FILE_COPY" if self._version() >= FIRST_WITH_STRATEGY else ""
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} {way}")
        return self.url(name)

    def _version(self) -> int:
        return int((self.directory / "data" / "PG_VERSION").read_text())


def _programs() -> Path:
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (path / "initdb").exists():
            return path
    on_path = shutil.which("initdb")
    if on_path is None:
        raise PostgresMissing("PostgreSQL's server programs are missing: apt-get install postgresql")
    return Path(on_path).parent


def account() -> dict[str, Any]:
    """``Popen`` arguments: whom the server runs as; empty for the caller."""
    if os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam("postgres")
    except KeyError:
        entry = pwd.getpwnam("nobody")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
