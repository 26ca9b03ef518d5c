"""Bring a database to this release's schema. The steps are in ``sql/versions``.

All steps run in one transaction under a lock: an advisory one in PostgreSQL, ``BEGIN IMMEDIATE`` in SQLite
(where the data directory's lock keeps a second manager away anyway). A crash leaves the former schema; so
does a lock that is not got within ``lock_timeout_s``: the manager tries again.
"""

from __future__ import annotations

import importlib.resources

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from sla_server.db import engine as engines
from sla_server.db.errors import SchemaTooNew

STATEMENT_LIMIT_S = 3600  # a step may rewrite a large table; `lock_timeout_s` still limits waiting for others
ADVISORY_LOCK = 0x51A5_0001  # any constant; all releases must use the same


def _script_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("sql")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def newest_revision() -> str:
    """The revision this release brings a database to."""
    head = ScriptDirectory.from_config(_script_config()).get_current_head()
    if head is None:
        raise AssertionError("sql/versions is empty: the package was built without its migrations")
    return head


def current_revision(connection: Connection) -> str | None:
    """The database's revision, None for an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(engine: Engine) -> str:
    """Upgrade to the newest revision and return it; nothing happens if it is there already.

    Raises:
        SchemaTooNew: the database's revision is unknown to this release; it is left as it is.
        DatabaseUnavailable: try again later.
    """
    config = _script_config()
    scripts = ScriptDirectory.from_config(config)
    newest = newest_revision()
    with engines.begin(engine) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            connection.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_LIMIT_S}s'"))
        found = current_revision(connection)
        known = {script.revision for script in scripts.walk_revisions()}
        if found is not None and found not in known:
            raise SchemaTooNew(engines.where(engine), found, newest)
        if found != newest:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    return newest
