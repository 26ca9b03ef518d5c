"""Writes rows of SQLite where a thin disk is mounted: ``thin_disk_writer ROOT STEP...`` with the steps

    first      as the server's main process does before it has a connection
    N*COUNT    N transactions with COUNT rows of 2,000 bytes each; one that is refused is not tried again
    fill       the disk has no room any more; ``free``: it has again
    close      all connections, and what that leaves is synced, as some seconds later by itself

The last line says which transactions were confirmed, and which were refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sqlalchemy import text

from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine, prepare_files
from sla_server.db.errors import DatabaseUnavailable
from tests.support.thin_disk import free, use_up


def main() -> None:
    root, config = Path(sys.argv[1]), DatabaseConfig(lock_timeout_s=30)
    engine = make_engine(config, root / "disk")
    confirmed, refused = 0, 0
    for step in sys.argv[2:]:
        times, _, count = step.partition("*")
        if step == "first":
            prepare_files(config, root / "disk")
        elif step == "fill":
            os.sync()
            use_up(root)
        elif step == "free":
            free(root)
        elif step == "close":
            engine.dispose()
            os.sync()
        for _ in range(int(times) if count else 0):
            try:
                with begin(engine) as connection:
                    connection.execute(text("CREATE TABLE IF NOT EXISTS t (x blob)"))
                    for _ in range(int(count)):
                        connection.execute(text("INSERT INTO t VALUES (:x)"), {"x": os.urandom(2000)})
            except DatabaseUnavailable:
                refused += 1
            else:
                confirmed += int(count)
    print(json.dumps({"confirmed": confirmed, "refused": refused}), flush=True)
    os._exit(0)  # as a kill: nothing is closed


if __name__ == "__main__":
    main()
