"""The local file beside ``_LOG``: log records of this machine's processes, until the cluster has them (C12).

    DIRECTORY/log/            mode 0700
      identity                random, made with the directory: positions of another one are not valid here
      0000000001 ...          one JSON object a line; the highest number is being written
      sent                    position after what the cluster has, written now and then

Processes append to the highest file, each under a shared lock; the node's agent, under an exclusive one,
begins the next file. So nothing is appended to a file that is not the highest, and a position, file and byte,
names a record for ever: it is the record's counter. Files that the cluster has are removed but for the last
``KEPT_FILES``; beyond ``MOST_FILES`` the oldest goes in any case, and the log says so.

Durability: what is appended survives its process, not a power cut of the machine. A line torn by a full disk
is passed on as text.

Thread: ``LogCopy`` has one of its own, ``log-copy``, so that no thread waits for a disk because it logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.runtime import logs, watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.sockets import wait_readable
from pmdaemon.runtime.threads import ThreadGroup, ThreadInbox

log = structlog.get_logger("cluster")
FILE_BYTES: Final = 4 << 20
KEPT_FILES: Final = 4
MOST_FILES: Final = 16
MOST_WAITING: Final = 10_000
"""Lines that wait for the disk, in memory; more are counted and dropped."""
MOST_LINE_CHARACTERS: Final = 4000
"""At most six bytes each, so that a batch holds any line, and the smallest payload of an engine a batch."""
LEVELS: Final = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}
IDENTITY: Final = "identity"
SENT: Final = "sent"
_OFFSET_BITS: Final = 40
_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True, order=True)
class LogRecord:
    """One line of one node; they sort by time, then node, then counter.

    Attributes:
        counter: position of the line in the node's files.
        line: as the process wrote it, ``key=value``.
    """

    at_unix_us: int
    node: str
    counter: int
    level: str
    line: str


def counter_of(file: int, offset: int) -> int:
    """One number for a position; later positions have higher ones."""
    return file << _OFFSET_BITS | offset


def position_of(counter: int) -> tuple[int, int]:
    """File and byte."""
    return counter >> _OFFSET_BITS, counter & ((1 << _OFFSET_BITS) - 1)


class LogCopy:
    """What a process has of the files: it appends.

    Args:
        directory: of the node.

    Attributes:
        lost: lines that were dropped, for want of room on the disk or in memory.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory / "log"
        self._clock = clock
        self._inbox: ThreadInbox[tuple[int, str, str] | None] = ThreadInbox()
        self._threads = ThreadGroup()
        self._waiting = 0
        self.lost = 0
        make_directory(self._directory, 0o700)
        self._threads.start("log-copy", self._run)

    def put(self, level: str, line: str) -> None:
        """One line; waits for nothing and raises nothing."""
        if self._waiting >= MOST_WAITING:
            self.lost += 1
            return
        self._waiting += 1  # may be off by the few lines of threads that log at the same moment
        self._inbox.put((self._clock.unix_us(), level, line[:MOST_LINE_CHARACTERS]))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._inbox.put(None)
        self._threads.join()

    def _run(self) -> None:
        while True:
            watchdog.beat()
            wait_readable((self._inbox,), _WAIT_S)
            items = self._inbox.drain()
            lines = [item for item in items if item is not None]
            self._waiting = max(0, self._waiting - len(lines))
            if lines:
                try:
                    append(self._directory, [encoded(*item) for item in lines])
                except OSError:  # no room: a log line is not worth a process
                    self.lost += len(lines)
            if len(lines) < len(items):
                return


@contextlib.contextmanager
def copied(directory: Path, clock: Clock) -> Iterator[None]:
    """Have lines of this process copied to the files of its node; without them if they cannot be written."""
    try:
        copy = LogCopy(directory, clock)
    except OSError as exc:
        log.warning("log-not-copied", directory=str(directory), problem=str(exc))
        yield
        return
    logs.copy_to(copy.put)
    try:
        yield
    finally:
        logs.copy_to(None)
        copy.close()


def encoded(at_unix_us: int, level: str, line: str) -> bytes:
    """One line of a file."""
    document = {"at": at_unix_us, "level": level, "line": line}
    return json.dumps(document, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def append(directory: Path, lines: Sequence[bytes]) -> None:
    """Append lines to the highest file.

    Raises:
        OSError: they cannot be written.
    """
    while True:
        highest = (numbers(directory) or [1])[-1]
        fd = os.open(_path(directory, highest), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if numbers(directory)[-1:] != [highest]:  # it was full meanwhile
                continue
            data = b"".join(lines)
            if os.write(fd, data) < len(data):
                os.write(fd, b"\n")  # else the next line would begin within this one
                raise OSError("the disk has taken a part of the lines")
            return
        finally:
            os.close(fd)


def numbers(directory: Path) -> list[int]:
    """Files that there are, the oldest first."""
    return sorted(int(entry.name) for entry in os.scandir(directory) if entry.name.isdigit())


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:010d}"


class LogSpool:
    """What the agent has of the files: it reads, begins new ones and removes old ones.

    Args:
        directory: of the node.
        node: its name.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory / "log"
        self._node = node
        make_directory(self._directory, 0o700)
        path = self._directory / IDENTITY
        if not path.exists():
            write_whole(path, secrets.token_hex(8), synced=True)
        self.identity: Final = path.read_text().strip()

    def read(self, position: int, limit_bytes: int) -> tuple[list[LogRecord], int]:
        """Records from ``position`` on, and the position after them. Lines that are being written stay."""
        records: list[LogRecord] = []
        file, offset = position_of(position)
        there = numbers(self._directory)
        for number in (number for number in there if number >= file):
            begin = offset if number == file else 0
            with contextlib.suppress(FileNotFoundError), _path(self._directory, number).open("rb") as stream:
                stream.seek(begin)
                data = stream.read(limit_bytes)
                end = data.rfind(b"\n") + 1
                if not end and len(data) == limit_bytes:  # no line of ours is so long
                    end = len(data)
                if not end and number != there[-1]:  # torn, and no one writes there any more
                    end = len(data)
                at = begin
                for line in data[:end].splitlines(keepends=True):
                    records.append(self._record(counter_of(number, at), line, records))
                    at += len(line)
                position = counter_of(number, at)
                if records:
                    break
        return records, position

    def _record(self, counter: int, line: bytes, before: Sequence[LogRecord]) -> LogRecord:
        try:
            found = json.loads(line)
            return LogRecord(int(found["at"]), self._node, counter, str(found["level"]), str(found["line"]))
        except (ValueError, KeyError, TypeError):
            at_unix_us = before[-1].at_unix_us if before else 0
            text = line.decode(errors="backslashreplace").rstrip("\n")[:MOST_LINE_CHARACTERS]
            return LogRecord(at_unix_us, self._node, counter, "warning", text)

    def sent(self) -> int:
        """Position after what the cluster has, as last noted here; 0: nothing."""
        try:
            return int((self._directory / SENT).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def keep_up(self, sent: int) -> None:
        """Note what the cluster has, begin the next file if the highest is full, remove what is old.

        Raises:
            OSError: the disk fails.
        """
        if sent != self.sent():
            write_whole(self._directory / SENT, str(sent))
        there = numbers(self._directory)
        if there and _path(self._directory, there[-1]).stat().st_size > FILE_BYTES:
            self._begin_next(there[-1])
        done = position_of(sent)[0]
        for place, number in enumerate(reversed(there)):
            if place >= MOST_FILES or (place >= KEPT_FILES and number < done):
                if number >= done:
                    log.warning("cluster-log-dropped", file=str(_path(self._directory, number)))
                _path(self._directory, number).unlink(missing_ok=True)

    def _begin_next(self, highest: int) -> None:
        fd = os.open(_path(self._directory, highest), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(
                os.open(_path(self._directory, highest + 1), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            )
        except BlockingIOError:
            pass  # a process is writing; the next round tries again
        finally:
            os.close(fd)
