"""Parts that are stopped (SIGSTOP) are named as what makes no progress, and it is over when they go on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from benchmarks.stage import Stage

PARTS = {
    "dbmanager": ("sla_server.part dbmanager", "dbmanager has made no progress for"),
    "services": ("sla_server.part services", "services has made no progress for"),
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
    if part != "supervisor":  # it may have been killed meanwhile on a machine that is slow enough
        kinds = ("process-stalled", "process-restarted")
        stage.wait(
            lambda: any(
                row["kind"] in kinds and row["subject"] == part for row in stage.get("events")["items"]
            ),
            f"the event about {part}",
            limit_s=LIMIT_S,
        )
