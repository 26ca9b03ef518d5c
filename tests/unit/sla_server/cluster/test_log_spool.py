"""The files beside _LOG: positions that name a record for ever, and what is removed when."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.cluster import log_spool
from sla_server.cluster.log_spool import LogCopy, LogRecord, LogSpool, append, encoded, numbers

LIMIT = 1 << 15


@pytest.fixture
def spool(tmp_path: Path) -> LogSpool:
    return LogSpool(tmp_path, "n1")


def _write(directory: Path, *texts: str, at: int = 5) -> None:
    append(directory / "log", [encoded(at, "info", text) for text in texts])


def _lines(records: list[LogRecord]) -> list[str]:
    return [record.line for record in records]


def _all(spool: LogSpool, position: int = 0, limit: int = LIMIT) -> list[LogRecord]:
    found: list[LogRecord] = []
    while True:
        records, position = spool.read(position, limit)
        if not records:
            return found
        found += records


def test_what_was_read_is_not_read_again(spool: LogSpool, tmp_path: Path) -> None:
    _write(tmp_path, "a", "b")
    records, position = spool.read(0, LIMIT)
    assert _lines(records) == ["a", "b"]
    assert spool.read(position, LIMIT) == ([], position)
    _write(tmp_path, "c")
    more, _ = spool.read(position, LIMIT)
    assert _lines(more) == ["c"]
    assert [record.counter for record in (*records, *more)] == sorted(
        record.counter for record in (*records, *more)
    )


def test_a_position_goes_on_over_files_and_small_pieces(
    spool: LogSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_spool, "FILE_BYTES", 100)
    for number in range(12):
        _write(tmp_path, f"line {number}")
        spool.keep_up(0)
    assert len(numbers(tmp_path / "log")) > 3
    assert _lines(_all(spool, limit=60)) == [f"line {number}" for number in range(12)]


def test_lines_of_any_text_are_one_line_each(spool: LogSpool, tmp_path: Path) -> None:
    texts = ["two\nlines", "\x00\x1b", "é😀", "\udc80"]
    _write(tmp_path, *texts)
    assert _lines(_all(spool)) == texts


def test_a_torn_line_is_passed_on_and_hides_no_other(spool: LogSpool, tmp_path: Path) -> None:
    _write(tmp_path, "a")
    with (tmp_path / "log" / "0000000001").open("ab") as stream:
        stream.write(b'{"at": 5, "li\n')
    _write(tmp_path, "b")
    assert _lines(_all(spool)) == ["a", '{"at": 5, "li', "b"]


def test_a_line_that_is_being_written_is_left_until_it_is_whole(spool: LogSpool, tmp_path: Path) -> None:
    _write(tmp_path, "a")
    path = tmp_path / "log" / "0000000001"
    whole = encoded(5, "info", "b")
    with path.open("ab") as stream:
        stream.write(whole[:10])
    records, position = spool.read(0, LIMIT)
    assert _lines(records) == ["a"]
    with path.open("ab") as stream:
        stream.write(whole[10:])
    assert _lines(spool.read(position, LIMIT)[0]) == ["b"]


def test_files_that_the_cluster_has_go_but_for_the_last(
    spool: LogSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_spool, "FILE_BYTES", 1)
    for number in range(8):
        _write(tmp_path, f"line {number}")
        spool.keep_up(0)
    assert len(numbers(tmp_path / "log")) == 9  # nothing is forwarded yet
    _, position = spool.read(log_spool.counter_of(8, 0), LIMIT)
    spool.keep_up(position)
    assert numbers(tmp_path / "log") == [6, 7, 8, 9]
    assert spool.sent() == position
    assert LogSpool(tmp_path, "n1").identity == spool.identity


def test_without_a_cluster_the_oldest_go_at_last(
    spool: LogSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_spool, "FILE_BYTES", 1)
    for number in range(log_spool.MOST_FILES + 3):
        _write(tmp_path, f"line {number}")
        spool.keep_up(0)
    spool.keep_up(0)
    assert len(numbers(tmp_path / "log")) == log_spool.MOST_FILES
    assert _lines(_all(spool))[-1] == f"line {log_spool.MOST_FILES + 2}"


def test_no_file_is_begun_while_a_process_writes(
    spool: LogSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_spool, "FILE_BYTES", 1)
    _write(tmp_path, "a")
    fd = os.open(tmp_path / "log" / "0000000001", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        spool.keep_up(0)
        assert numbers(tmp_path / "log") == [1]
    finally:
        os.close(fd)
    spool.keep_up(0)
    assert numbers(tmp_path / "log") == [1, 2]


def test_a_process_writes_its_lines_with_their_time_before_it_ends(spool: LogSpool, tmp_path: Path) -> None:
    copy = LogCopy(tmp_path, FakeClock(unix_us=77))
    copy.put("warning", "event=a")
    copy.put("info", "x" * 10_000)
    copy.close()
    one, two = _all(spool)
    assert (one.at_unix_us, one.node, one.level, one.line) == (77, "n1", "warning", "event=a")
    assert len(two.line) == log_spool.MOST_LINE_CHARACTERS


def test_lines_without_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_spool, "MOST_WAITING", 0)
    copy = LogCopy(tmp_path, FakeClock())
    copy.put("info", "a")
    copy.close()
    assert copy.lost == 1
