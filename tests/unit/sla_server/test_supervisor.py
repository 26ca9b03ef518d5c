"""The supervisor: its pure parts, and what it does when a part ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pmdaemon.mailbox import attach, describe
from pmdaemon.mailbox.errors import MailboxCorrupt, MessageDamaged
from pmdaemon.runtime.children import Child
from pmdaemon.runtime.clock import HOLD_S, ClockFile, FakeClock, SharedClock, SteadyClock
from pmdaemon.runtime.failures import record_failure
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.watchdog import FIRST_BEAT_S, KILLED_S, REPORTED_S
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import Problem
from sla_server import config as configuration
from sla_server.directories import APP, MAIN
from sla_server.supervisor import PARTS, PROCESSES, Supervisor


def test_the_restart_event_says_why_the_part_died(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.add("services", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    supervisor._start(part)
    assert part.process is not None
    part.process.wait(60)
    supervisor._step()
    assert part.reason == "killed by SIGKILL"
    part.due_ns = 0
    part.command = [sys.executable, "-c", ""]
    supervisor._step()
    assert part.process is not None
    part.process.wait(60)
    supervisor._pipe.close()
    event = next(row for table, row in supervisor._pending if table == "events")
    assert event["text"] == "services was restarted: killed by SIGKILL; restart 1"


def test_a_part_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.add("services", [str(tmp_path / "nobody")])
    supervisor._start(part)
    assert not part.is_running
    assert "could not be started: No such file" in part.reason
    assert not part.is_due
    part.due_ns, part.command = 0, [sys.executable, "-c", ""]
    supervisor._step()
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
    supervisor._record(Child(PROCESSES, "services", [], supervisor._pipe, supervisor.clock))
    assert len(box.posted) == 1
    supervisor._pipe.close()


@pytest.mark.parametrize("length", [900, 70_000])
def test_reasons_of_any_length_do_not_end_the_server(tmp_path: Path, length: int) -> None:
    class Box:
        def __init__(self) -> None:
            self.posted: list[dict[str, Any]] = []
            self.answers: list[Any] = []

        def take(self) -> list[Any]:
            answers, self.answers = self.answers, []
            return answers

        def post(self, _recipient: str, message: bytes) -> None:
            header = frame.decode(message).header
            self.posted.append(header)
            answer = frame.encode(Kind.RECORDED, {"req": header["req"]})
            self.answers.append(SimpleNamespace(sender="dbmanager", payload=answer))

    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor, box = Supervisor(config, None, Stop()), Box()
    part = supervisor.add("services", [])
    for number in range(40):
        part.starts = number + 1
        supervisor._plan_restart(part, "x" * length, 1)
        supervisor._part_event(part, "process-restarted", f"services was restarted: {'x' * length}")
    supervisor._pending.append(["events", {"text": "x" * 70_000}])
    supervisor._mailbox = cast(Any, box)
    for _ in range(300):
        supervisor._drain()
    rows = [row for header in box.posted for row in header["rows"]]
    assert supervisor._pending == []
    assert {row["restarts"] for table, row in rows if table == "processes"} == set(range(40))
    assert len(rows) == 80
    supervisor._pipe.close()


@pytest.mark.parametrize(
    "error", [MessageDamaged("lane of dbmanager", 5), MailboxCorrupt("lane of dbmanager", "a link")]
)
def test_damage_in_its_own_mailbox_does_not_end_the_server(tmp_path: Path, error: MailboxCorrupt) -> None:
    class Box:
        posted = 0

        def take(self) -> list[Any]:
            raise error

        def post(self, _recipient: str, _message: bytes) -> None:
            self.posted += 1

    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor, box = Supervisor(config, None, Stop()), Box()
    supervisor._mailbox = cast(Any, box)
    supervisor._record(Child(PROCESSES, "services", [], supervisor._pipe, supervisor.clock))
    supervisor._step()
    assert box.posted == 1
    assert supervisor.discarded == (2 if isinstance(error, MessageDamaged) else 0)
    supervisor._pipe.close()


SLEEPER = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); signal.pause()"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Supervisor]:
    """Four parts that do nothing, over real segments."""
    tmp_path.chmod(0o700)
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    supervisor._segments.prepare()
    supervisor._attach()
    for name in PARTS:
        supervisor._start(supervisor.add(name, [sys.executable, "-c", SLEEPER]))
    yield supervisor
    supervisor._stop_parts()
    supervisor._pipe.close()
    supervisor._detach()
    supervisor._segments.close()


def hurt(path: Path) -> None:
    """dbmanager meets damage."""
    box = attach(path, "dbmanager")
    box.post(next(iter(box.expected)), b"x")
    box._words[box._writer._head_word] = 777
    box.close()
    with contextlib.suppress(MailboxCorrupt):
        attach(path, "dbmanager")


def test_both_segments_may_be_damaged_at_once(served: Supervisor) -> None:
    for name in (MAIN, APP):
        hurt(served._segments.path(name))
    served._step()
    for name in (MAIN, APP):
        attach(served._segments.path(name), "dbmanager").close()
    assert all("segment" in part.reason for part in served.parts.values())


@pytest.mark.parametrize(("name", "untouched"), [(MAIN, "appserver"), (APP, "pmdaemon")])
def test_a_segment_that_is_damaged_while_parts_run_is_made_anew(
    served: Supervisor, name: str, untouched: str
) -> None:
    before = {part.name: part.process for part in served.parts.values()}
    path = served._segments.path(name)
    created_us = describe(path)["created_unix_us"]
    hurt(path)
    served._step()
    assert describe(path)["created_unix_us"] > created_us
    attach(path, "dbmanager").close()
    assert served._mailbox is not None
    for part in served.parts.values():
        is_untouched = part.name == untouched
        assert (part.process is before[part.name]) is is_untouched
        assert is_untouched or "segment" in part.reason
        assert is_untouched or cast(Any, before[part.name]).returncode is not None
    (event,) = [row for table, row in served._pending if row.get("kind") == "mailbox-damaged"]
    assert event["subject"] == name
    assert event["severity"] == "error"
    assert ": dbmanager has met damage in it" in event["text"]
    deadline = time.monotonic() + 60
    while not all(part.process for part in served.parts.values()) and time.monotonic() < deadline:
        served._step()
    texts = [row["text"] for table, row in served._pending if row.get("kind") == "process-restarted"]
    assert len(texts) == 3
    assert all("segment" in text for text in texts)
    with attach(served._segments.path(MAIN), "dbmanager") as keeper:  # what waited is posted into the new one
        served._drain()
        assert keeper.take() or name == APP


def test_an_orderly_stop_leaves_nothing_and_a_part_killed_keeps_what_was_posted(tmp_path: Path) -> None:
    for drained in (True, False):
        folder = tmp_path / f"run-{drained}"
        settings = configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=folder)
        stop = Stop()
        supervisor = Supervisor(configuration.resolve(settings), None, stop)
        ends = SLEEPER if drained else SLEEPER.replace("_exit(0)", "_exit(1)")
        supervisor._command = lambda _name, ends=ends: [sys.executable, "-c", ends]  # type: ignore[method-assign,misc]
        seen: list[str] = []

        def look(supervisor: Supervisor = supervisor, stop: Stop = stop, seen: list[str] = seen) -> None:
            seen.extend(path.name for path in supervisor.config.runtime_dir.iterdir())
            (supervisor.config.runtime_dir / "services.failed").write_text("why")
            stop.set("enough")

        supervisor._step = look  # type: ignore[method-assign]
        start = supervisor._start

        def started(part: Child, start: Any = start) -> None:
            start(part)
            wait_until_handled(part)  # else SIGTERM ends it, which is no orderly end either

        supervisor._start = started  # type: ignore[method-assign]
        assert supervisor.run() == 0
        assert {MAIN, APP} <= set(seen)
        left = {path.name for path in folder.glob("*")}
        assert left == (set() if drained else left | {MAIN, APP})


def wait_until_handled(part: Child) -> None:
    """Until the process has a handler for SIGTERM (bit 14 of SigCgt, proc(5))."""
    assert part.process is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = Path(f"/proc/{part.process.pid}/status").read_text()
        caught = next(line for line in text.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> 14 & 1:
            return
        time.sleep(0.01)
    raise AssertionError("no handler")


def running(tmp_path: Path, script: str) -> tuple[Supervisor, Child]:
    """A supervisor with one part, which has just been started."""
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.add("dbmanager", [sys.executable, "-c", script])
    supervisor._start(part)
    return supervisor, part


def ended(supervisor: Supervisor, part: Child) -> None:
    """Let the supervisor see that its part has ended."""
    assert part.process is not None
    part.process.wait(60)
    supervisor._step()


def events(supervisor: Supervisor) -> list[tuple[str, str]]:
    return [(row["kind"], row["text"]) for table, row in supervisor._pending if table == "events"]


def test_a_part_that_makes_no_progress_is_reported_then_killed_and_started_again(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "import time\ntime.sleep(600)")
    assert part.process is not None
    assert part.pulse is not None
    os.eventfd_write(part.pulse.fd, 1)
    reports: list[list[Problem]] = []
    supervisor._reports = cast(Any, SimpleNamespace(tick=reports.append))
    for _ in range(1 + REPORTED_S):
        supervisor._check_progress()
    assert reports[REPORTED_S - 1] == []
    [problem] = reports[REPORTED_S]
    assert problem.what == "dbmanager"
    assert problem.reason.startswith("dbmanager has made no progress for 10 s; it is killed")
    for _ in range(KILLED_S - REPORTED_S):
        assert part.process.poll() is None
        supervisor._check_progress()
    ended(supervisor, part)
    assert part.reason == "it made no progress for 60 s and was killed"
    part.due_ns = 0
    supervisor._step()
    text = "dbmanager was restarted: it made no progress for 60 s and was killed; restart 1"
    assert events(supervisor) == [("process-restarted", text)]
    part.process.kill()
    part.process.wait(60)
    supervisor._pipe.close()


def test_a_part_that_goes_on_by_itself_is_worth_an_event(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "import time\ntime.sleep(600)")
    assert part.process is not None
    assert part.pulse is not None
    for silent in (0, 40):
        for _ in range(silent):
            supervisor._check_progress()
        os.eventfd_write(part.pulse.fd, 1)
        supervisor._check_progress()
    assert events(supervisor) == [("process-stalled", "dbmanager made no progress for 40 s, and goes on")]
    supervisor._check_progress()
    assert len(events(supervisor)) == 1
    part.process.kill()
    part.process.wait(60)
    supervisor._pipe.close()


def test_a_part_that_is_slow_to_start_has_more_time(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "import time\ntime.sleep(600)")
    assert part.process is not None
    assert part.pulse is not None
    for _ in range(FIRST_BEAT_S - 1):
        supervisor._check_progress()
    assert not part.pulse.is_hung
    supervisor._check_progress()
    ended(supervisor, part)
    assert "made no progress" in part.reason
    supervisor._pipe.close()


def test_what_a_part_said_of_its_end_is_in_the_event(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "raise SystemExit(70)")
    record_failure(tmp_path, "dbmanager", "its thread db-writer has made no progress for 1200 s")
    ended(supervisor, part)
    assert part.reason == "exit status 70: its thread db-writer has made no progress for 1200 s"
    supervisor._pipe.close()


def test_data_that_do_not_fit_this_release_end_the_start(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "raise SystemExit(78)")
    record_failure(tmp_path, "dbmanager", "the schema is of a newer release")
    ended(supervisor, part)
    assert supervisor.stop.is_set()
    assert "the schema is of a newer release" in supervisor.stop.reason
    assert supervisor._status == 78
    supervisor._pipe.close()


def test_the_same_status_of_a_server_that_has_worked_is_tried_again(tmp_path: Path) -> None:
    supervisor, part = running(tmp_path, "raise SystemExit(78)")
    supervisor._has_recorded, part.starts = True, 2
    ended(supervisor, part)
    assert not supervisor.stop.is_set()
    assert supervisor._pending[-1][1]["state"] == "restarting"
    supervisor._pipe.close()


def test_a_step_of_the_clock_is_reported_once_and_the_children_keep_server_time(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    wall = FakeClock()
    steady = SteadyClock(wall, wall.monotonic_ns)
    supervisor = Supervisor(config, None, Stop(), clock=steady)
    supervisor._clock_file = ClockFile(tmp_path / "clock", steady.ahead_us)
    child = SharedClock(tmp_path / "clock", wall.monotonic_ns)
    before_us = child.unix_us()
    wall.step_wall(3600)
    for _ in range(3):
        wall.advance(1)
        supervisor._step()
    assert child.unix_us() == before_us + 3_000_000
    wall.advance(HOLD_S)
    supervisor._step()
    assert child.unix_us() == wall.unix_us()
    supervisor._pipe.close()
    events = [row for _table, row in supervisor._pending]
    assert [(row["kind"], row["details"]["state"]) for row in events] == [
        ("clock-stepped", "held"),
        ("clock-stepped", "adopted"),
    ]
    assert "the server's own clock was stepped by +3600.0 s" in events[0]["text"]
