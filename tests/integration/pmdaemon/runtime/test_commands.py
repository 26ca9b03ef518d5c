"""Commands with a limit: real programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.commands import CommandFailed, CommandRunner
from pmdaemon.space.config import SpaceSource
from pmdaemon.space.readers import read


def test_output_comes_back_and_the_environment_is_small() -> None:
    assert CommandRunner().run(["sh", "-c", "pwd; echo $LC_ALL"], 60).split() == ["/", "C.UTF-8"]
    assert "HOME" not in CommandRunner().run(["env"], 60)


def test_a_status_and_its_words_are_the_reason() -> None:
    with pytest.raises(CommandFailed, match="sh: exit status 3: no such pool"):
        CommandRunner().run(["sh", "-c", "echo no such pool >&2; exit 3"], 60)
    with pytest.raises(CommandFailed, match="nothing-of-this-name: there is no such program; install it"):
        CommandRunner().run(["nothing-of-this-name"], 60)


def test_one_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(CommandFailed, match=r"did not end within 0.5 s, and was killed"):
        CommandRunner().run(["sh", "-c", f"sleep 600 & echo $! >{pid_file}; wait"], 0.5)
    if pid_file.exists() and (pid := pid_file.read_text().strip()):
        deadline = Deadline(60)  # a killed process goes on existing until it next has the processor
        while is_running(int(pid)):
            assert not deadline.passed
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_that_is_cancelled_ends_long_before_its_limit() -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 1

    with pytest.raises(CommandFailed, match="the process stops, and was killed"):
        CommandRunner(cancelled).run(["sleep", "600"], 500)


def test_much_output_does_not_block() -> None:
    assert len(CommandRunner().run(["head", "-c", "3000000", "/dev/zero"], 60)) == 3_000_000


def test_one_that_writes_without_end_is_killed_unless_its_end_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was kept whole until the limit, gigabytes of it."""
    monkeypatch.setattr("pmdaemon.runtime.commands.MOST_BYTES", 1 << 20)
    with pytest.raises(CommandFailed, match="it wrote more than 1 MiB, and was killed"):
        CommandRunner().run(["cat", "/dev/zero"], 60)
    much = ["sh", "-c", "head -c 9000000 /dev/zero; echo; echo the end"]
    said = CommandRunner().run(much, 60, is_end_enough=True)
    assert said.endswith("\nthe end\n")
    assert len(said) < 3 << 20
    with pytest.raises(CommandFailed, match=r"exit status 3: .*the end"):
        CommandRunner().run(["sh", "-c", "yes | head -c 900000 >&2; echo the end >&2; exit 3"], 60)


def test_a_program_that_cannot_be_named_is_a_failure() -> None:
    with pytest.raises(CommandFailed, match="it does not start: embedded null byte"):
        CommandRunner().run(["sh", "-c", "a\0b"], 60)


def test_a_directory_is_read_as_statvfs_says(tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(b"x" * 5000)
    runner = CommandRunner()
    source = SpaceSource(name="d", kind="loop", path=str(tmp_path))
    found = read(source, lambda argv: runner.run(argv, 60), {str(tmp_path / "a.img"): "vol-1"}, 5)
    seen = os.statvfs(tmp_path)
    assert found.size_bytes == pytest.approx(
        (seen.f_blocks - seen.f_bfree + seen.f_bavail) * seen.f_frsize, rel=0.01
    )
    assert [(each["name"], each["size_bytes"], each["volume"]) for each in found.volumes] == [
        ("a.img", 5000, "vol-1")
    ]
