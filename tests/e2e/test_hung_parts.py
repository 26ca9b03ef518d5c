"""Parts that are stopped (SIGSTOP) are named as what makes no progress, and it is over when they go on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.stage import Stage
from tests.support.stored_cuts import stored_cuts, wait_for_more_cuts

PARTS = {
    "delivery": ("sla_server.process delivery", "delivery has made no progress for"),
    "dbmanager": ("sla_server.process dbmanager", "dbmanager has made no progress for"),
    "services": ("sla_server.process services", "services has made no progress for"),
    "pmdaemon": ("-m pmdaemon run", "pmdaemon has made no progress for"),
    "supervisor": ("-m sla_server start", "supervisor has not reported for"),
}
LIMIT_S = 180.0


def problems(stage: Stage) -> list[dict[str, Any]]:
    """What /health names, whatever its status."""
    return list(stage.client.get("/api/v1/health").json()["problems"])


@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_that_hangs_is_named_until_it_goes_on(stage: Stage, part: str) -> None:
    fragment, words = PARTS[part]
    stage.wait(lambda: not problems(stage), "a server without problems", limit_s=LIMIT_S)
    pid = stage.pid(fragment)
    os.kill(pid, signal.SIGSTOP)
    try:
        stage.wait(
            lambda: any(row["process"] == part and words in row["reason"] for row in problems(stage)),
            f"the words about {part}",
            limit_s=LIMIT_S,
        )
    finally:
        with contextlib.suppress(ProcessLookupError):  # on a slow machine it was killed for its silence
            os.kill(pid, signal.SIGCONT)
    stage.wait(lambda: not problems(stage), "the end of the problem", limit_s=LIMIT_S)
    stage.pid(fragment)
    if part != "supervisor":  # it may have been killed meanwhile on a machine that is slow enough
        kinds = ("process-stalled", "process-restarted")
        stage.wait(
            lambda: any(
                row["kind"] in kinds and row["subject"] == part for row in stage.get("events")["items"]
            ),
            f"the event about {part}",
            limit_s=LIMIT_S,
        )


def test_a_database_manager_without_memory_for_a_thread_comes_back(stage: Stage) -> None:
    """CPython waits for ever for a thread that dies before it has begun."""
    fragment = PARTS["dbmanager"][0]
    pid = stage.pid(fragment)
    before, since_us = stored_cuts(stage), time.time() * 1e6
    size_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (size_bytes, hard))
    stage.wait(lambda: stage.pids(fragment) not in ([], [pid]), "another process", limit_s=LIMIT_S)
    wait_for_more_cuts(stage, 10, before)
    stage.wait(lambda: not problems(stage), "a server without problems", limit_s=LIMIT_S)
    stage.pid(fragment)

    def restarts() -> list[str]:
        return [
            row["text"]
            for row in stage.get("events?limit=100")["items"]
            if (row["kind"], row["subject"]) == ("process-restarted", "dbmanager") and row["at_us"] > since_us
        ]

    stage.wait(restarts, "the event, which comes by another way than cuts", limit_s=LIMIT_S)
    assert len(restarts()) == 1, restarts()  # which call found no memory, and so the status, differs
