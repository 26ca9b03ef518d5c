"""The supervisor: its pure parts, and what it does when a part ends."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pmdaemon.runtime.stop import Stop
from sla_server import config as configuration
from sla_server.supervisor import (
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    STABLE_S,
    Part,
    Supervisor,
    describe_status,
    next_backoff,
)


def test_backoff_doubles_up_to_its_limit_and_starts_again_after_a_stable_life() -> None:
    seen = [BACKOFF_FIRST_S]
    while seen[-1] < BACKOFF_MOST_S:
        seen.append(next_backoff(seen[-1], lived_s=1.0))
    assert seen[1] == 2 * BACKOFF_FIRST_S
    assert next_backoff(BACKOFF_MOST_S, 1.0) == BACKOFF_MOST_S
    assert next_backoff(BACKOFF_MOST_S, STABLE_S) == BACKOFF_FIRST_S


def test_a_status_in_words() -> None:
    assert describe_status(0) == "exit status 0"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-40) == "killed by signal 40"


def test_the_restart_event_says_why_the_part_died(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = Part("services", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    supervisor.parts["services"] = part
    supervisor._start(part)
    assert part.process is not None
    part.process.wait(60)
    supervisor._look()
    assert part.reason == "killed by SIGKILL"
    part.start_at_s = 0.0
    part.command = [sys.executable, "-c", ""]
    supervisor._look()
    assert part.process is not None
    part.process.wait(60)
    supervisor._pipe.close()
    event = next(row for table, row in supervisor._pending if table == "events")
    assert event["text"] == "services was restarted: killed by SIGKILL; restart 1"


def test_a_part_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.parts["services"] = Part("services", [str(tmp_path / "nobody")])
    supervisor._start(part)
    assert (part.process, part.state) == (None, "restarting")
    assert "could not be started: No such file" in part.reason
    assert part.start_at_s > part.started_s
    part.start_at_s, part.command = 0.0, [sys.executable, "-c", ""]
    supervisor._look()
    assert part.process is not None
    part.process.wait(60)
    supervisor._pipe.close()
    states = [row["state"] for table, row in supervisor._pending if table == "processes"]
    assert states == ["restarting", "running"]


def test_a_message_that_is_no_frame_does_not_end_the_server(tmp_path: Path) -> None:
    class Box:
        def __init__(self) -> None:
            self.posted: list[bytes] = []

        def take(self) -> list[Any]:
            return [SimpleNamespace(sender="dbmanager", payload=b"torn")]

        def post(self, _recipient: str, message: bytes) -> None:
            self.posted.append(message)

    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor, box = Supervisor(config, None, Stop()), Box()
    supervisor._mailbox = cast(Any, box)
    supervisor._record(Part("services", []))
    assert len(box.posted) == 1
    supervisor._pipe.close()
