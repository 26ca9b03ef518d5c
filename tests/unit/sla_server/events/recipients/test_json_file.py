"""Lines of JSON: nothing torn, rotation, other programs that rename the file, a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import FileSpec
from sla_server.events.recipients import json_file
from sla_server.events.recipients.base import CONFIRMED, Outcome
from sla_server.events.recipients.json_file import JsonFile
from tests.support.notices import notice

DEADLINE = Deadline(60)


def _file(tmp_path: Path, **fields: Any) -> JsonFile:
    spec = FileSpec.model_validate({"path": "out.jsonl", **fields})
    return JsonFile("log", spec, tmp_path, timeout_s=10, most_notices=100)


def _numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_each_notice_is_a_line_that_is_synced_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync  # no other way to see what was on disk when the answer was given

    def fsync(fd: int) -> None:
        real(fd)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    target = _file(tmp_path)
    assert target.deliver([notice(1), notice(2)], DEADLINE) == CONFIRMED
    path = tmp_path / "out.jsonl"
    assert synced[-1] == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert _numbers(path) == [1, 2]


def test_the_name_of_a_file_that_a_process_made_that_died_is_synced_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").touch()
    synced: list[Path] = []
    monkeypatch.setattr(json_file, "sync_directory", synced.append)
    assert _file(tmp_path).deliver([notice(1)], DEADLINE) == CONFIRMED
    assert synced == [tmp_path]


def test_a_torn_line_of_a_writer_that_died_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"number":1}\n{"num')
    assert _file(tmp_path).deliver([notice(2)], DEADLINE) == CONFIRMED
    assert _numbers(path) == [1, 2]
    path.write_text("x" * 200_000)
    assert _file(tmp_path).deliver([notice(3)], DEADLINE) == CONFIRMED
    assert _numbers(path) == [3]


def test_a_full_file_is_renamed_and_the_oldest_removed(tmp_path: Path) -> None:
    target = _file(tmp_path, rotate_mb=0.01, keep=2)
    size = len(json.dumps(notice(1).as_json()))
    count = 10_000 // size + 1
    for number in range(1, 4 * count):
        assert target.deliver([notice(number)], DEADLINE) == CONFIRMED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.1", "out.jsonl.2"]
    found = [_numbers(tmp_path / name) for name in ("out.jsonl.2", "out.jsonl.1", "out.jsonl")]
    together = [number for numbers in found for number in numbers]
    assert together == list(range(together[0], 4 * count))
    assert all((tmp_path / name).stat().st_size <= 10_000 for name in ("out.jsonl", "out.jsonl.1"))


def test_a_file_that_was_renamed_or_removed_is_made_again(tmp_path: Path) -> None:
    target, path = _file(tmp_path), tmp_path / "out.jsonl"
    target.deliver([notice(1)], DEADLINE)
    path.rename(tmp_path / "moved")
    target.deliver([notice(2)], DEADLINE)
    path.unlink()
    target.deliver([notice(3)], DEADLINE)
    assert (_numbers(tmp_path / "moved"), _numbers(path)) == ([1], [3])


def test_reopen_and_close_let_go_of_the_file_at_once(tmp_path: Path) -> None:
    target, path = _file(tmp_path), tmp_path / "out.jsonl"
    before = len(os.listdir("/proc/self/fd"))
    target.deliver([notice(1)], DEADLINE)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    path.rename(tmp_path / "moved")
    target.reopen()
    assert len(os.listdir("/proc/self/fd")) == before
    target.deliver([notice(2)], DEADLINE)
    assert (_numbers(tmp_path / "moved"), _numbers(path)) == ([1], [2])
    target.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_to_be_opened_again_while_it_is_written_is_let_go_of_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, sync = _file(tmp_path), os.fsync
    before = len(os.listdir("/proc/self/fd"))

    def reopening(fd: int) -> None:
        target.reopen()  # as by another thread
        sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", reopening)
        assert target.deliver([notice(1)], DEADLINE) == CONFIRMED
    assert len(os.listdir("/proc/self/fd")) == before
    assert _numbers(tmp_path / "out.jsonl") == [1]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = _file(tmp_path)
    target.deliver([notice(1)], DEADLINE)
    real, calls = os.write, list[int]()

    def write(fd: int, content: Any) -> int:
        calls.append(len(content))
        if len(calls) == 1:
            return real(fd, content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:  # the disk of a unit test does not fill
        patch.setattr(os, "write", write)
        answer = target.deliver([notice(2)], DEADLINE)
    assert answer.outcome is Outcome.RETRY
    assert answer.reason == f"{tmp_path / 'out.jsonl'}: No space left on device"
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 1
    assert target.deliver([notice(2), notice(3)], DEADLINE) == CONFIRMED
    assert _numbers(tmp_path / "out.jsonl") == [1, 2, 3]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("keep\n")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere")
    assert _file(tmp_path).deliver([notice(1)], DEADLINE).outcome is Outcome.RETRY
    assert (tmp_path / "elsewhere").read_text() == "keep\n"
