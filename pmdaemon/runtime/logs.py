"""Logging: one line an event, ``key=value``, on stderr, with the process named; times in UTC.

Operators read these lines with ordinary tools; ``SLA_LOG_LEVEL`` (debug, info, warning, error) sets how many.

A log line is never worth a process. What cannot be written (a full disk, a pipe without a reader or one that
is not read) is dropped and counted, and the next line that can be written comes after ``log-lines-lost``.
Nothing here raises, and nothing waits for a reader: pipes and terminals are opened again for this process
alone, without blocking, and sockets are sent to without blocking. ``sys.stderr`` becomes the same sink, so
that prints, warnings and the interpreter's own words take the same way.

Of a service of systemd a line becomes an entry of the journal, with fields to select by (``journal``).

No value begins a line of its own, or reaches the terminal of its reader as a command.

A line that comes with an exception has its text (``error``) and names the file of its traceback
(``traceback``, see ``failures``): no traceback is written to the log.

State: ``LineSink``; its lock guards all of it. A process may have its lines copied (``copy_to``).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import select
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.excerpt import printable
from pmdaemon.runtime.failures import traceback_file
from pmdaemon.runtime.journal import APART, JournalEntry, encoded, opened

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
STDERR: Final = 2
MOST_NESTED: Final = 16  # lines that one line may cause while it is written; more are dropped
LINES_A_SECOND: Final = 10  # of one ``LimitedLog``
MOST_ERROR_CHARACTERS: Final = 500  # of an exception's text, which may quote a peer


class LineSink:
    """Writes whole lines, or counts them.

    Args:
        process: named in the line that reports the lost ones.
        write: as ``os.write`` to one descriptor; returns the bytes taken, raises OSError.
        encode: a line's bytes; those of text, with the end of line, unless given.

    Thread: any; also the one that writes a line just now, from a ``__del__`` or the handler of a signal.
    """

    def __init__(
        self, process: str, write: Callable[[bytes], int], encode: Callable[[str], bytes] | None = None
    ) -> None:
        self._process = process
        self._write = write
        self._encode = encode or _text
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._is_writing = False
        self._nested = 0
        self._lost = 0
        self._since = ""
        self._reason = ""
        self._is_torn = False  # the last write ended within a line

    def line(self, text: str) -> None:
        """Write one line; the end of line is added."""
        data = self._encode(text)
        with self._lock:
            if self._is_writing:  # by a call of this very thread, which writes this line after its own
                if self._nested < MOST_NESTED:  # else each line may cause another one for ever
                    self._nested += 1
                    self._waiting.append(data)
                return
            self._waiting.append(data)
            self._nested = 0
            self._is_writing = True
            try:
                while self._waiting:
                    self._write_or_count(self._waiting.popleft())
            finally:
                self._is_writing = False

    def _write_or_count(self, data: bytes) -> None:
        if (self._lost == 0 or self._put(self._report())) and self._put(data):
            self._lost = 0
        else:
            self._since = self._since if self._lost else _now()
            self._lost += 1

    def _put(self, data: bytes) -> bool:
        data = b"\n" + data if self._is_torn else data
        try:
            taken = self._write(data)
        except OSError as exc:
            self._reason = exc.strerror or str(exc)
            return False
        if taken:
            self._is_torn = taken < len(data)
        return taken == len(data)

    def _report(self) -> bytes:
        return self._encode(
            f"timestamp={_now()} level=warning process={self._process} event=log-lines-lost "
            f'lines={self._lost} since={self._since} reason="{self._reason or "no room"}"'
        )


def _text(line: str) -> bytes:
    return (line + "\n").encode(errors="backslashreplace")


class _Stderr(io.TextIOBase):
    """``sys.stderr`` as a sink: complete lines are passed on, ``flush`` passes on the rest.

    Lock ``_lock`` guards ``_begun``; its holder may print again from a ``__del__``.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, sink: LineSink) -> None:
        super().__init__()
        self._sink = sink
        self._lock = threading.RLock()
        self._begun = ""

    def writable(self) -> bool:
        """See ``io.IOBase``."""
        return True

    def fileno(self) -> int:
        """For those who hand it to a child process."""
        return STDERR

    def write(self, text: str) -> int:
        """See ``io.TextIOBase``."""
        with self._lock:
            complete, end, begun = (self._begun + text).rpartition("\n")
            self._begun = begun
        if end:
            self._sink.line(complete)
        return len(text)

    def flush(self) -> None:
        """See ``io.IOBase``."""
        with self._lock:
            begun, self._begun = self._begun, ""
        if begun:
            self._sink.line(begun)


def configure(process: str) -> None:
    """Set up structlog and ``sys.stderr`` for this process.

    Raises:
        ConfigError: ``SLA_LOG_LEVEL`` is not one of the four levels.
    """
    name = os.environ.get("SLA_LOG_LEVEL", "info").lower()
    if name not in LEVELS:
        raise ConfigError("SLA_LOG_LEVEL", f"{name!r} is not a level", f"Use one of {', '.join(LEVELS)}")
    journal = opened(STDERR)
    if journal is None:
        sink = LineSink(process, _writer())
    else:
        sink = LineSink(process, journal, functools.partial(encoded, process))
    sys.stderr = _Stderr(sink)
    structlog.configure(
        # Bound for the whole process: contextvars of threads started later begin empty.
        processors=[_Renderer(process, for_journal=journal is not None)],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[name]),
        logger_factory=lambda *_: _LineLogger(sink),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    if threading.excepthook is threading.__excepthook__:  # a test runner has its own, which must see all
        threading.excepthook = _thread_died
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _exception_ignored
    logging.basicConfig(handlers=[_Libraries()], level=max(LEVELS[name], logging.WARNING), force=True)


_copies: list[Callable[[str, str], None]] = []


def copy_to(copy: Callable[[str, str], None] | None) -> None:
    """Give level and text of each line to ``copy`` as well, which waits for nothing and raises nothing.

    None ends it.
    """
    _copies[:] = [] if copy is None else [copy]


def _thread_died(given: threading.ExceptHookArgs) -> None:
    """A thread that no ``ThreadGroup`` of ours has started."""
    if given.exc_type is SystemExit:  # an end in order
        return
    name = given.thread.name if given.thread is not None else ""
    structlog.get_logger("threads").error("thread-died", thread=name, exc_info=given.exc_value)


def _exception_ignored(given: sys.UnraisableHookArgs) -> None:
    """What a ``__del__`` or a callback of the interpreter has raised."""
    with contextlib.suppress(Exception):  # at the end of the interpreter little is left
        where = getattr(given.object, "__qualname__", type(given.object).__name__)
        structlog.get_logger("interpreter").error("exception-ignored", where=where, exc_info=given.exc_value)


class _Libraries(logging.Handler):
    """What libraries log (waitress, alembic) as lines of ours; their tracebacks at level debug only."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``; raises nothing."""
        log = structlog.get_logger(record.name)
        try:
            text = record.getMessage()
        except Exception as exc:  # noqa: BLE001 - a message that does not fit its arguments
            text = f"{record.msg} ({type(exc).__name__})"
        error = record.exc_info[1] if record.exc_info else None
        cause = {"error": f"{type(error).__name__}: {error}"} if error is not None else {}
        level = "error" if record.levelno >= logging.ERROR else "warning"
        getattr(log, level)("library", library=record.name, text=text, **cause)
        if error is not None:
            log.debug("traceback", exc_info=error)


class _LineLogger:
    """What structlog calls with the rendered line; every level is the same to it."""

    def __init__(self, sink: LineSink) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = sink.line


class _Renderer:
    """An event to a line, whatever its values do."""

    def __init__(self, process: str, *, for_journal: bool = False) -> None:
        self._process = process
        self._logfmt = structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "process", "event"]
        )
        self._message = structlog.processors.LogfmtRenderer()
        self._steps: tuple[Callable[..., Any], ...] = (
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            self._tracebacks_to_files,
            self._copied,
            self._entry if for_journal else self._logfmt,
        )

    def _entry(self, logger: object, method: str, event: structlog.typing.EventDict) -> JournalEntry:
        """The line for the journal, which has time, level and process in fields of its own."""
        values = self._message(logger, method, {key: event[key] for key in event if key not in APART})
        return JournalEntry.of(f"{event.get('event', '')} {values}".strip(), event)

    def _copied(
        self, logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        for copy in _copies:
            copy(method, str(self._logfmt(logger, method, dict(event))))
        return event

    def _tracebacks_to_files(
        self, _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        given = event.pop("exc_info", None)
        if isinstance(given, tuple):
            given = given[1]
        error = given if isinstance(given, BaseException) else sys.exc_info()[1] if given else None
        if error is not None:
            event.setdefault("error", printable(f"{type(error).__name__}: {error}", MOST_ERROR_CHARACTERS))
            try:
                event["traceback"] = str(traceback_file(self._process, error))
            except OSError as exc:
                event["traceback"] = f"cannot be written: {exc.strerror or exc}"
        return event

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> str:
        name = event.get("event")
        event.setdefault("process", self._process)
        try:
            line: Any = event
            for step in self._steps:
                line = step(logger, method, line)
            if isinstance(line, JournalEntry):  # which journalctl shows safely
                return line
            text = line if isinstance(line, str) else str(line)
            return text if text.isprintable() else printable(text, len(text))
        except Exception as exc:  # noqa: BLE001 - a log line must not raise, not even for want of memory
            return (
                f"timestamp={_now()} level={method} process={self._process} event={name} "
                f"unprintable={type(exc).__name__}"
            )


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _writer() -> Callable[[bytes], int]:
    """How bytes get to this process's stderr without waiting for a reader."""
    for standard in (0, 1, STDERR):  # one that is closed must not become some file of ours
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.__stderr__ is None:  # it was closed at the start: its number may belong to a file by now
        return len
    mode = os.fstat(STDERR).st_mode
    if stat.S_ISSOCK(mode):
        stream = socket.socket(fileno=os.dup(STDERR))
        return lambda data: stream.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # it belongs to another user: ask before each write
            own = os.open(f"/proc/self/fd/{STDERR}", flags)
            return lambda data: os.write(own, data)
        return _write_if_ready
    return lambda data: os.write(STDERR, data)


def _write_if_ready(data: bytes) -> int:
    """A pipe that is ready takes ``PIPE_BUF`` bytes at once, and might wait for a reader with more."""
    poll = select.poll()
    poll.register(STDERR, select.POLLOUT)
    taken = 0
    while taken < len(data) and poll.poll(0):
        taken += os.write(STDERR, data[taken : taken + select.PIPE_BUF])
    return taken


class LimitedLog:
    """Lines that come by the thousand when something happens to a whole fleet at once.

    At most ``LINES_A_SECOND`` are written; what was left out is counted by a line of a later second.

    Thread: belongs to one; another one makes its own.
    """

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)
        self._window_s = -1
        self._written = 0
        self._left_out = 0

    def warning(self, now_ns: int, event: str, **values: Any) -> None:
        """One line, or none."""
        if self._has_room(now_ns):
            self._log.warning(event, **values)

    def info(self, now_ns: int, event: str, **values: Any) -> None:
        """One line, or none."""
        if self._has_room(now_ns):
            self._log.info(event, **values)

    def _has_room(self, now_ns: int) -> bool:
        if now_ns // 10**9 != self._window_s:
            if self._left_out:
                self._log.warning("log-suppressed", left_out=self._left_out)
            self._window_s, self._written, self._left_out = now_ns // 10**9, 0, 0
        if self._written >= LINES_A_SECOND:
            self._left_out += 1
            return False
        self._written += 1
        return True
