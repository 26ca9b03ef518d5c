"""A private PostgreSQL from Debian's packages, behind a Unix socket in a folder of its own; no TCP port.

Used by the database tests and the chaos run. ``fsync`` is off: nothing here outlives the machine.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

READY_S = 30.0


class PostgresMissing(RuntimeError):
    """The programs are not there, or the server does not start."""


def _programs() -> Path:
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (path / "initdb").exists():
            return path
    on_path = shutil.which("initdb")
    if on_path is None:
        raise PostgresMissing("PostgreSQL's server programs are missing: apt-get install postgresql")
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


@dataclass
class PostgresServer:
    """Use as a context manager, or ``make`` and ``start`` it and ``remove`` it at the end."""

    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sla-pg-")))
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        self.make()
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def make(self) -> None:
        """Create the cluster's files."""
        account = _account()
        if account:
            os.chown(self.directory, account["user"], account["group"])
        command = [_programs() / "initdb", "-D", self.directory / "data", "-A", "trust", "-U", "postgres"]
        options = ["-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run([*command, *options], check=True, capture_output=True, cwd=self.directory, **account)

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            PostgresMissing: it does not; holds the end of its log.
        """
        options = {
            "listen_addresses": "",
            "unix_socket_directories": self.directory,
            "fsync": "off",
            "shared_buffers": "32MB",
        }
        command = [_programs() / "postgres", "-D", self.directory / "data"]
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=log, stderr=log, cwd=self.directory, **_account()
            )
        end_s = time.monotonic() + READY_S
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError as exc:
                if time.monotonic() > end_s or self.process.poll() is not None:
                    tail = (self.directory / "log").read_text()[-2000:]
                    raise PostgresMissing(f"PostgreSQL did not start: {tail}") from exc
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.05)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast shutdown, does not wait for clients. SIGQUIT: at once, as if it had crashed."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(20)
            self.process = None

    def remove(self) -> None:
        """Stop it and delete its files."""
        self.stop()
        shutil.rmtree(self.directory)

    def url(self, database: str) -> str:
        """SQLAlchemy's URL of a database."""
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}"

    def execute(self, statement: str) -> None:
        """One statement in database ``postgres``."""
        conninfo = f"host={self.directory} user=postgres dbname=postgres"
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(statement)

    def create(self, name: str, template: str = "template0") -> str:
        """Create a database; returns its URL."""
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)
