"""Parts that are stopped (SIGSTOP) are named as what makes no progress, and it is over when they go on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import open_reader
from tests.support.stage import Stage

PARTS = {
    "delivery": ("sla_server.process delivery", "delivery has made no progress for"),
    "dbmanager": ("sla_server.process dbmanager", "dbmanager has made no progress for"),
    "services": ("sla_server.process services", "services has made no progress for"),
    "pmdaemon": ("-m pmdaemon run", "pmdaemon has made no progress for"),
    "supervisor": ("-m sla_server start", "supervisor has not reported for"),
}
LIMIT_S = 60.0


def problems(stage: Stage) -> list[dict[str, Any]]:
    """What /health names, whatever its status."""
    return list(stage.client.get("/api/v1/health").json()["problems"])


@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_that_hangs_is_named_until_it_goes_on(stage: Stage, part: str) -> None:
    fragment, words = PARTS[part]
    stage.wait(lambda: not problems(stage), "a server without problems", limit_s=LIMIT_S)
    [pid] = stage.pids(fragment)
    os.kill(pid, signal.SIGSTOP)
    try:
        stage.wait(
            lambda: any(row["process"] == part and words in row["reason"] for row in problems(stage)),
            f"the words about {part}",
            limit_s=LIMIT_S,
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    stage.wait(lambda: not problems(stage), "the end of the problem", limit_s=LIMIT_S)
    assert len(stage.pids(fragment)) == 1
    if part != "supervisor":  # it may have been killed meanwhile on a machine that is slow enough
        kinds = ("process-stalled", "process-restarted")
        stage.wait(
            lambda: any(
                row["kind"] in kinds and row["subject"] == part for row in stage.get("events")["items"]
            ),
            f"the event about {part}",
            limit_s=LIMIT_S,
        )


def stored(stage: Stage) -> dict[tuple[str, int], int]:
    """The newest cut of each gateway and epoch in SQL."""
    with contextlib.closing(open_reader(DatabaseConfig(), stage.folder / "data")) as reader:
        return {(gateway_id, epoch): seq for gateway_id, epoch, seq in reader.watermarks()}


def has_stored_more(stage: Stage, before: dict[tuple[str, int], int], cuts: int) -> bool:
    """Whether SQL has so many more cuts of every gateway."""
    now = stored(stage)
    return all(now[key] >= seq + cuts for key, seq in before.items())


def test_a_database_manager_without_memory_for_a_thread_comes_back(stage: Stage) -> None:
    """CPython waits for ever for a thread that dies before it has begun."""
    [pid] = stage.pids(PARTS["dbmanager"][0])
    before = stored(stage)
    size_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (size_bytes, hard))
    stage.wait(lambda: has_stored_more(stage, before, 10), "more cuts in SQL", limit_s=120)
    stage.wait(lambda: not problems(stage), "a server without problems", limit_s=LIMIT_S)
    assert len(stage.pids(PARTS["dbmanager"][0])) == 1
