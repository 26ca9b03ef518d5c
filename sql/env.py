"""Alembic's environment: uses the connection that ``sla_server.db.migrate`` puts into the configuration.

There is no alembic.ini and no offline mode on purpose: the manager migrates at its start, under its lock. To
write a new step, see docs/design/5-storage.md, "A new migration".
"""

from __future__ import annotations

from alembic import context

from sla_server.db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
with context.begin_transaction():
    context.run_migrations()
