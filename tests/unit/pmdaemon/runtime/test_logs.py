"""Log lines: one write each, and no trouble for the process that writes them, whatever stderr is."""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import logs
from pmdaemon.runtime.logs import LINES_A_SECOND, LimitedLog, LineSink

LIMIT_S = 60


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # configure() replaces it
    yield
    structlog.reset_defaults()


class Device:
    """Takes what is written, or fails, as the test says; ``most_bytes`` of each write."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.error: OSError | None = None
        self.most_bytes = 1 << 20

    def __call__(self, data: bytes) -> int:
        if self.error is not None:
            raise self.error
        self.pieces.append(data[: self.most_bytes])
        return len(self.pieces[-1])


def test_a_line_is_one_write_and_names_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("pair-0")
    structlog.get_logger("x").info("gateway-up", gateway="a")
    line = capfd.readouterr().err
    assert line.endswith("event=gateway-up gateway=a\n")
    assert "level=info process=pair-0" in line
    device = Device()
    LineSink("pair-0", device).line("a line")
    assert device.pieces == [b"a line\n"]


@pytest.mark.parametrize("given", ["exception", "exc_info", "tuple"])
def test_a_traceback_goes_to_a_file_that_the_line_names(
    given: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    logs.configure("pair-0")
    log = structlog.get_logger("x")
    for _ in range(3):
        try:
            raise ZeroDivisionError("by\x1b nothing\nat all")
        except ZeroDivisionError as exc:
            if given == "exception":
                log.exception("handler-failed", peer="a")
            else:
                info = exc if given == "exc_info" else (type(exc), exc, exc.__traceback__)
                log.error("handler-failed", peer="a", exc_info=info)
    (file,) = tmp_path.iterdir()  # the same place, the same file
    assert "Traceback" in file.read_text()
    assert file.name.startswith("pair-0-fault-")
    said = (
        f'event=handler-failed peer=a error="ZeroDivisionError: by\ufffd nothing at all" traceback={file}\n'
    )
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert [line.partition("event=")[2] for line in lines] == [said.partition("event=")[2]] * 3


def test_a_traceback_without_room_leaves_the_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_given: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs, "traceback_file", no_room)
    logs.configure("pair-0")
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError:
        structlog.get_logger("x").exception("handler-failed")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(
        'error="ZeroDivisionError: by nothing" traceback="cannot be written: No space left on device"'
    )


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        logs.configure("x")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")]
)
def test_lines_that_cannot_be_written_are_counted_and_reported_later(error: OSError) -> None:
    device = Device()
    sink = LineSink("link", device)
    sink.line("before")
    device.error = error
    for _ in range(3):
        sink.line("lost")
    device.error = None
    sink.line("after")
    sink.line("later")
    before, note, after, later = device.pieces
    assert (before, after, later) == (b"before\n", b"after\n", b"later\n")
    assert b"process=link event=log-lines-lost lines=3" in note
    assert str(error.strerror).encode() in note


def test_a_torn_line_does_not_spoil_the_next_one() -> None:
    device = Device()
    sink = LineSink("x", device)
    device.most_bytes = 4  # the disk became full within the line
    sink.line("torn line")
    device.most_bytes = 1 << 20
    sink.line("whole line")
    lines = b"".join(device.pieces).decode().splitlines()
    assert lines[0] == "torn"
    assert "lines=1" in lines[1]
    assert lines[2] == "whole line"


def test_a_value_that_cannot_be_rendered_does_not_raise(capfd: pytest.CaptureFixture[str]) -> None:
    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no text of me")

        __repr__ = __str__

    logs.configure("x")
    structlog.get_logger("x").warning("rude", value=Rude(), **{"a key": "with a space"})
    structlog.get_logger("x").warning("surrogate", value="\udc80")
    first, second = capfd.readouterr().err.splitlines()
    assert "event=rude" in first
    assert "event=surrogate" in second


def test_no_value_reaches_a_terminal_as_a_command_or_begins_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("x")
    structlog.get_logger("x").warning(
        "hostile", value="a\x1b]0;pwned\x07b\r\u2028\x9bevent=forged", ok="grün"
    )
    [line] = capfd.readouterr().err.splitlines()
    assert line.isprintable()
    assert "pwned" in line
    assert "ok=grün" in line


def test_what_libraries_log_is_a_line_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("appserver")
    try:
        raise OSError(24, "Too many open files")
    except OSError:
        logging.getLogger("waitress").warning("accept() threw %s", "something", exc_info=True)
    logging.getLogger("waitress").warning("does not fit %d", "its argument")
    first, second = capfd.readouterr().err.splitlines()
    assert "process=appserver event=library" in first
    assert 'text="accept() threw something"' in first
    assert "Too many open files" in first
    assert "Traceback" not in first
    assert "does not fit" in second


def test_threads_lose_no_line_and_count_each_lost_one() -> None:
    device = Device()
    sink = LineSink("x", device)
    device.error = OSError(28, "No space left on device")
    threads = [threading.Thread(target=lambda: [sink.line("x") for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    device.error = None
    sink.line("end")
    assert b"lines=400" in device.pieces[0]


@pytest.mark.parametrize("begun", ["", "a beginning "])
def test_what_is_printed_while_a_line_is_written_comes_after_it(begun: str) -> None:
    """As a ``__del__`` does that the collector happens to run there."""
    pieces: list[bytes] = []

    def write(data: bytes) -> int:
        if not pieces:
            stderr.write("from within\n")
        pieces.append(data)
        return len(data)

    sink = LineSink("x", write)
    stderr = logs._Stderr(sink)
    stderr.write(begun)
    thread = threading.Thread(target=sink.line, args=("a line",), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert pieces == [b"a line\n", f"{begun}from within\n".encode()]


def test_a_collection_within_stderr_itself_does_not_wait_for_itself() -> None:
    device = Device()
    stderr = logs._Stderr(LineSink("x", device))

    class Text(str):
        """Prints when it is joined, as the collector may at any allocation."""

        def __radd__(self, other: str) -> str:
            stderr.write("from within\n")
            return other + str(self)

    thread = threading.Thread(target=stderr.write, args=(Text("a line\n"),), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert device.pieces == [b"from within\n", b"a line\n"]


def test_ten_thousand_refusals_are_a_few_lines_and_none_is_uncounted() -> None:
    limited = LimitedLog("test")
    with structlog.testing.capture_logs() as lines:
        for index in range(10_000):
            limited.warning(5 * 10**9 + index, "refused", n=index)
        limited.warning(6 * 10**9, "refused", n=10_000)
    assert len(lines) == LINES_A_SECOND + 2
    assert [line["left_out"] for line in lines if "left_out" in line] == [10_000 - LINES_A_SECOND]
