"""The supervisor over real processes: what it does when one ends or hangs, or a segment is damaged.

``_step`` and what it calls are called directly, so that each test decides what has happened in between.
"""

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
from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.runtime.children import Child
from pmdaemon.runtime.failures import record_failure
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.watchdog import FIRST_BEAT_S, KILLED_S, REPORTED_S
from pmdaemon.wire.messages.server import Problem
from sla_server import config as configuration
from sla_server.directories import APP, MAIN
from sla_server.supervisor import Supervisor
from sla_server.topology import PARTS
from tests.support.fake_mailbox import FakeMailbox


def rows(supervisor: Supervisor, table: str) -> list[dict[str, Any]]:
    """What is recorded and not yet durable, oldest first."""
    before, box = supervisor.records.mailbox, FakeMailbox()
    supervisor.records.attach(box)
    supervisor.records.flush(0)
    supervisor.records.attach(before)
    pairs = [pair for _to, posted in box.posted for pair in posted.header["rows"]]
    return [row for name, row in pairs if name == table]


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
    event = rows(supervisor, "events")[0]
    assert event["text"] == "services was restarted: killed by SIGKILL; restart 1"


def test_a_part_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.add("services", [str(tmp_path / "absent")])
    supervisor._start(part)
    assert not part.is_running
    assert "could not be started: No such file" in part.reason
    assert not part.is_due
    part.due_ns, part.command = 0, [sys.executable, "-c", ""]
    supervisor._step()
    assert part.process is not None
    part.process.wait(60)
    supervisor._pipe.close()
    states = [row["state"] for row in rows(supervisor, "processes")]
    assert states == ["restarting", "running"]


SLEEPER = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); signal.pause()"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Supervisor]:
    """Five parts that do nothing, over real segments."""
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


@pytest.mark.parametrize(("name", "untouched"), [(MAIN, {"appserver"}), (APP, {"pmdaemon", "delivery"})])
def test_a_segment_that_is_damaged_while_parts_run_is_made_again(
    served: Supervisor, name: str, untouched: set[str]
) -> None:
    before = {part.name: part.process for part in served.parts.values()}
    path = served._segments.path(name)
    created_us = describe(path)["created_unix_us"]
    hurt(path)
    served._step()
    assert describe(path)["created_unix_us"] > created_us
    attach(path, "dbmanager").close()
    assert served.records.mailbox is not None
    for part in served.parts.values():
        is_untouched = part.name in untouched
        assert (part.process is before[part.name]) is is_untouched
        assert is_untouched or "segment" in part.reason
        assert is_untouched or cast(Any, before[part.name]).returncode is not None
    (event,) = [row for row in rows(served, "events") if row["kind"] == "mailbox-damaged"]
    assert event["subject"] == name
    assert event["severity"] == "critical"
    assert ": dbmanager has met damage in it" in event["text"]
    deadline = time.monotonic() + 60
    while not all(part.process for part in served.parts.values()) and time.monotonic() < deadline:
        served._step()
    texts = [row["text"] for row in rows(served, "events") if row["kind"] == "process-restarted"]
    assert len(texts) == len(served.parts) - len(untouched)
    assert all("segment" in text for text in texts)
    with attach(served._segments.path(MAIN), "dbmanager") as keeper:  # what waited is posted into the new one
        served._step()
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
    return [(row["kind"], row["text"]) for row in rows(supervisor, "events")]


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
    supervisor.records.has_recorded, part.starts = True, 2
    ended(supervisor, part)
    assert not supervisor.stop.is_set()
    assert rows(supervisor, "processes")[-1]["state"] == "restarting"
    supervisor._pipe.close()


def test_a_lost_template_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    problems = ["it ended with status -9", ""]
    monkeypatch.setattr(supervisor.template, "check", lambda: problems.pop(0))  # it is another test's
    supervisor._check_template()
    supervisor._check_template()
    supervisor._pipe.close()
    (event,) = rows(supervisor, "events")
    assert (event["kind"], event["severity"]) == ("template-lost", "warning")
    assert "ended with status -9" in event["text"]
