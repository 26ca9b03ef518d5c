"""What the supervisor does by itself, without any part running.

``_step`` and what it calls are called directly: ``run`` would start the parts.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import HOLD_S, ClockFile, FakeClock, SharedClock, SteadyClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.template import UNKNOWN_STATUS
from sla_server import config as configuration
from sla_server.supervisor import MOST_REASON, Supervisor
from tests.support.fake_mailbox import FakeMailbox


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
    box = FakeMailbox()
    supervisor.records.attach(box)
    supervisor.records.flush(0)
    events = [row for _to, posted in box.posted for _table, row in posted.header["rows"]]
    assert [(row["kind"], row["details"]["state"]) for row in events] == [
        ("clock-stepped", "held"),
        ("clock-stepped", "adopted"),
    ]
    assert "the server's own clock was stepped by +3600.0 s" in events[0]["text"]


def test_reasons_of_any_length_are_recorded_cut(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor, box = Supervisor(config, None, Stop()), FakeMailbox()
    supervisor.records.attach(box)
    part = supervisor.add("services", [])
    supervisor._plan_restart(part, "x" * 70_000, 1)  # what a step does when a part has ended
    supervisor._part_event(part, "process-restarted", f"services was restarted: {'x' * 70_000}")
    (_, state), (_, event) = [row for _to, posted in box.posted for row in posted.header["rows"]]
    assert (len(state["reason"]), len(event["text"])) == (MOST_REASON, 2 * MOST_REASON)
    supervisor._pipe.close()


@pytest.mark.parametrize(("status", "words"), [(UNKNOWN_STATUS, "it was killed"), (3, "exit status 3")])
def test_a_part_that_was_killed_when_its_template_was_lost_did_not_exit(
    tmp_path: Path, status: int, words: str
) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = supervisor.add("services", [])
    supervisor._ended(part, status)
    assert part.reason == words
    supervisor._pipe.close()


def test_a_hangup_goes_on_to_delivery_once(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    sent: list[int] = []

    class Running:
        pid = 1

        def wait(self) -> int:
            return 0

        def send_signal(self, number: int, /) -> None:
            sent.append(number)

    part = supervisor.add("delivery", [])
    part.process = Running()
    supervisor.parts = {"delivery": part}
    supervisor.hangup.set()
    supervisor.hangup.set()
    supervisor._pass_hangup_on()
    supervisor._pass_hangup_on()
    assert sent == [signal.SIGHUP]
    part.process = None
    supervisor._pipe.close()
    supervisor.hangup.close()


def test_systemd_gets_a_beat_at_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor, beats, is_due = Supervisor(config, None, Stop()), [], [False]
    monkeypatch.setattr(supervisor._second, "is_due", lambda: is_due[0])
    monkeypatch.setattr(supervisor._manager, "beat", lambda: beats.append(1))
    supervisor._step()
    assert not beats
    is_due[0] = True
    supervisor._step()
    assert len(beats) == 1
    supervisor._pipe.close()
