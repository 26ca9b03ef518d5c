"""Looks after files and kills itself at a named point; ``tests.support.forks`` calls ``main``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import psycopg  # noqa: F401 - once, before the forks
import pyarrow as pa

from sla_server.db.config import DatabaseConfig
from tests.support.archive import FilesRig, later

# Two of six hours of cuts are given up, rollups move after three hours, replaced files go after 100 s.
LIMITS = {"cuts_max_age_h": 5.0, "rollups_after_h": 3.0}


pa.array([0])  # pyarrow looks for pandas at its first array: once, before the forks


def main(url: str, folder: str, hours: float, point: str, nth: int) -> None:
    left = [nth]

    def probe(name: str) -> None:
        if name == point:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    config = DatabaseConfig(url=url, queue_bytes=16 << 20)
    database = SimpleNamespace(config=config, data_dir=Path(folder))
    rig = FilesRig(database, probe, later(hours), **LIMITS)
    for _ in range(2):
        rig.step()
        rig.clock.advance(101)
    rig.close()
