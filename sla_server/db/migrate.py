"""Bring a database to this release's schema. The steps are in ``sql/versions``.

All steps run in one transaction under a lock: an advisory one in PostgreSQL, ``BEGIN IMMEDIATE`` in SQLite
(where the data directory's lock keeps a second manager away anyway). A crash leaves the former schema; so
does a lock that is not got within ``lock_timeout_s``: the manager tries again.

Alembic is imported only when there are steps to take: with what it brings it is 9 MB of a process that stays.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, inspect, text

from sla_server.db import engine as engines
from sla_server.db.errors import SchemaTooNew

if TYPE_CHECKING:
    from alembic.config import Config

STATEMENT_LIMIT_S = 3600  # a step may rewrite a large table; `lock_timeout_s` still limits waiting for others
ADVISORY_LOCK = 0x51A5_0001  # any constant; all releases must use the same

_STEP: Final = re.compile(r"(\d{4})_\w+\.py")  # a step's file begins with its revision


def _script_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("sql")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def known_revisions() -> list[str]:
    """The revisions of this release's steps, the oldest first."""
    names = (entry.name for entry in importlib.resources.files("sql").joinpath("versions").iterdir())
    known = sorted(found[1] for found in map(_STEP.fullmatch, names) if found)
    if not known:
        raise AssertionError("sql/versions is empty: the package was built without its migrations")
    return known


def newest_revision() -> str:
    """The revision this release brings a database to."""
    return known_revisions()[-1]


def current_revision(connection: Connection) -> str | None:
    """The database's revision, None for an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def is_empty(engine: Engine) -> bool:
    """Whether it has no schema yet: nothing was ever stored in it.

    Raises:
        DatabaseUnavailable: try again later.
    """
    with engines.begin(engine) as connection:
        return current_revision(connection) is None


def upgrade(engine: Engine) -> str:
    """Upgrade to the newest revision and return it; nothing happens if it is there already.

    Raises:
        SchemaTooNew: the database's revision is unknown to this release; it is left as it is.
        DatabaseUnavailable: try again later.
    """
    known = known_revisions()
    newest = known[-1]
    with engines.begin(engine) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
            connection.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_LIMIT_S}s'"))
        found = current_revision(connection)
        if found is not None and found not in known:
            raise SchemaTooNew(engines.where(engine), found, newest)
        if found != newest:
            from alembic import command

            config = _script_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    return newest
