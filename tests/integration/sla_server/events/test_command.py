"""Programs as recipients: their exit status counts, and at the deadline their whole group is killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import CommandSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome
from sla_server.events.recipients.command import CommandRecipient
from tests.support.notices import notice


def _command(tmp_path: Path, script: str, *arguments: str) -> CommandRecipient:
    path = tmp_path / "tell"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    spec = CommandSpec.model_validate({"argv": ["tell", *arguments]})
    return CommandRecipient("pager", spec, tmp_path, timeout_s=60, most_notices=100)


def _deliver(target: CommandRecipient, limit_s: float = 60, count: int = 1) -> Answer:
    return target.deliver([notice(number) for number in range(1, count + 1)], Deadline(limit_s))


def test_the_notices_come_on_standard_input(tmp_path: Path) -> None:
    target = _command(
        tmp_path, f'cat > {tmp_path}/in; echo "$1 $SLA_RECIPIENT $PWD $HOME" > {tmp_path}/args', "a b"
    )
    assert _deliver(target, count=1000) == CONFIRMED
    found = json.loads((tmp_path / "in").read_text())
    assert found["recipient"] == "pager"
    assert [each["number"] for each in found["notices"]] == list(range(1, 1001))
    assert (tmp_path / "args").read_text() == "a b pager / \n"


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("exit 0", CONFIRMED),
        ("echo no such pager >&2; exit 65", Answer(Outcome.REFUSED, "exit status 65: no such pager")),
        ("exit 3", Answer(Outcome.RETRY, "exit status 3")),
        ("kill -9 $$", Answer(Outcome.RETRY, "killed by SIGKILL")),
        ("cat >/dev/null; head -c 1000000 /dev/zero >&2; echo end >&2", CONFIRMED),
    ],
)
def test_the_exit_status_is_the_answer(tmp_path: Path, script: str, answer: Answer) -> None:
    assert _deliver(_command(tmp_path, script), count=1000) == answer


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    target = _command(tmp_path, "exit 0")
    (tmp_path / "tell").unlink()
    answer = _deliver(target)
    assert answer == Answer(
        Outcome.RETRY, f"{tmp_path / 'tell'} does not start: No such file or directory", 60.0
    )


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_at_the_deadline_the_whole_group_is_killed(tmp_path: Path) -> None:
    target = _command(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; echo waiting >&2; wait")
    for limit_s in (2.0, 20.0, 200.0):  # on a busy machine it may be killed before it has begun
        answer = _deliver(target, limit_s)
        if answer.reason.endswith("waiting"):
            break
    assert answer == Answer(Outcome.RETRY, "it did not end in time and was killed: waiting")
    pid = int((tmp_path / "pid").read_text())
    deadline = Deadline(60)
    while _is_running(pid) and not deadline.passed:
        time.sleep(0.01)
    assert not _is_running(pid)


def test_a_child_that_is_left_behind_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    target = _command(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; exit 0")
    try:
        assert _deliver(target) == CONFIRMED
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)
