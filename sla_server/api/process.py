"""The application server as a process: configuration in, exit status out.

``RUNTIME_DIR/api.port`` (the port of the page) says that everything answers; ``DATA_DIR/api.sock`` is the
Unix socket of the command line. Nothing here needs recovery: the next snapshot comes within a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pmdaemon.mailbox import attach
from pmdaemon.runtime.files import make_directory
from pmdaemon.runtime.stop import Stop
from sla_server.api.config import ApiConfig
from sla_server.api.doors import SOCKET_NAME, open_local
from sla_server.api.server import WebServer, open_listener
from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import open_reader


class AppServerConfig(Protocol):
    """What is used of the server's configuration."""

    @property
    def runtime_dir(self) -> Path:
        """Mailboxes, port and login files."""

    @property
    def data_dir(self) -> Path:
        """Token file, SQLite file."""

    @property
    def database(self) -> DatabaseConfig:
        """Where SQL is."""

    @property
    def api(self) -> ApiConfig:
        """Table ``[api]``."""


def run(config: AppServerConfig, stop: Stop) -> int:
    """Serve until the stop; returns the exit status.

    Raises:
        ConfigError: the address is taken, or the token file is unusable.
        MailboxError: the small segment is missing or of another layout.
    """
    listener = open_listener(config.api.listen)
    box = attach(config.runtime_dir / "app.mbx", "appserver")
    local_path = config.data_dir / SOCKET_NAME
    make_directory(config.data_dir, 0o700)
    local = open_local(local_path)
    try:
        source = open_reader(config.database, config.data_dir)
        server = WebServer(config.api, config.data_dir, source, box, listener, stop, local=local)
        server.announce(config.runtime_dir)
        return server.serve()
    finally:
        (config.runtime_dir / "api.port").unlink(missing_ok=True)
        if local is not None:
            local_path.unlink(missing_ok=True)
            local.close()
        box.close()
        listener.close()
