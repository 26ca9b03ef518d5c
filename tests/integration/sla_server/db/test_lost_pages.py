"""SQLite on a disk that could not write what it had taken, and could later: as a full thin volume."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.thin_disk import ThinDisk


def write(disk: ThinDisk, *steps: str) -> dict[str, int]:
    """What another process has written."""
    inside, root = disk.inside
    command = [*inside, sys.executable, "-m", "tests.support.thin_disk_writer", str(root), *steps]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_after_power_cut(disk: ThinDisk, folder: Path) -> int:
    for name in ("sla.db", "sla.db-wal"):
        if (found := disk.after_power_cut() / name).exists():
            shutil.copy(found, folder)
    with closing(sqlite3.connect(folder / "sla.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return int(connection.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.mark.parametrize(
    "steps",
    [
        ("1*2500", "fill", "4*600", "free", "6*500"),
        ("1*600", "fill", "3*300", "free", "3*10"),
    ],
    ids=["a checkpoint fails and nobody is told", "a commit fails and then a checkpoint"],
)
@pytest.mark.parametrize("is_overlaid", [False, True])
def test_what_was_confirmed_is_there_after_a_power_cut(tmp_path, steps, is_overlaid):
    with ThinDisk(is_overlaid=is_overlaid) as disk:
        written = write(disk, *steps)
        assert rows_after_power_cut(disk, tmp_path) == written["confirmed"]


def test_nor_is_it_lost_by_a_stop_and_a_start(tmp_path):
    """SQLite says nothing of a checkpoint that fails as the last connection is closed."""
    with ThinDisk() as disk:
        before = write(disk, "1*2500", "fill", "2*400", "close", "free")
        behind = write(disk, "first", "1*10", "close")
        assert rows_after_power_cut(disk, tmp_path) == before["confirmed"] + behind["confirmed"]
