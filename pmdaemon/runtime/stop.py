"""When a process must stop: SIGTERM, SIGINT, a stop asked for inside, or the death of its parent.

Children are exec'ed with one end of a pipe (its number in ``SLA_PARENT_FD``); the parent never writes, so
the pipe becomes readable when the parent is gone, however it died. ``Stop`` is usable in a selector through
``fileno`` (a pipe of its own, written once).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

PARENT_FD_VARIABLE: Final = "SLA_PARENT_FD"
_PR_SET_PDEATHSIG: Final = 1


STOPPED: Final = 128 + signal.SIGTERM
"""Exit status of a command that SIGTERM has ended in order."""


@contextlib.contextmanager
def stopped_in_order(stop_s: int, first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the end of a run is noted; a second one kills.

    Thread: the main one.

    Args:
        stop_s: seconds until the end must be noted; then it is killed.
        first: called when the signal comes.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(stop_s)
        first()
        raise SystemExit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)


class Stop:
    """A flag that is set once, readable by any thread and by selectors.

    Thread: all methods may be called from any thread; ``install_signals`` from the main thread.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._read_fd, self._write_fd = ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, _close, ends).atexit = False
        self.reason = ""

    def set(self, reason: str = "asked to stop") -> None:
        """Ask for the stop; the first reason is kept. Safe in a signal handler."""
        if not self._event.is_set():
            self.reason = self.reason or reason
            self._event.set()
            with contextlib.suppress(BlockingIOError):
                os.write(self._write_fd, b"\0")

    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until the stop or the timeout; returns ``is_set()``."""
        return self._event.wait(timeout_s)

    def fileno(self) -> int:
        """Descriptor that becomes readable at the stop and stays so."""
        return self._read_fd

    def install_signals(self) -> None:
        """Let SIGTERM and SIGINT ask for the stop."""

        def handler(number: int, _frame: FrameType | None) -> None:
            self.set(f"signal {signal.Signals(number).name}")

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def watch_parent(self) -> threading.Thread | None:
        """Stop when the parent dies, if it left its pipe in the environment."""
        value = os.environ.pop(PARENT_FD_VARIABLE, "")
        if not value.isdigit():
            return None
        parent_fd = int(value)
        with contextlib.suppress(OSError):
            os.set_inheritable(parent_fd, False)

        def watch() -> None:
            ends = select.poll()  # of descriptors of any number, unlike select.select
            ends.register(parent_fd, select.POLLIN)
            ends.register(self._read_fd, select.POLLIN)
            while not self.is_set():
                if parent_fd in dict(ends.poll()):
                    self.set("the parent process is gone")

        thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
        thread.start()
        return thread


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def end_with_parent() -> None:
    """Let the kernel end this process (SIGTERM) when the thread that started it is gone. Linux only.

    For ``Popen(preexec_fn=...)`` in a process of one thread, where the child is a program that cannot watch a
    pipe. The request is kept by exec, and not inherited by the child's own children.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class ParentPipe:
    """The parent's side: hold it open as long as the children should live.

    Usage: ``Popen(..., pass_fds=(pipe.child_fd,), env={**os.environ, **pipe.child_env()})``.

    Args:
        descriptors: of a pipe that the program before has left to this one, by exec.
    """

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        self.child_fd, self._held_fd = descriptors or os.pipe2(os.O_CLOEXEC)
        for fd in descriptors:
            os.set_inheritable(fd, False)

    @property
    def descriptors(self) -> list[int]:
        """Of both ends."""
        return [self.child_fd, self._held_fd]

    def child_env(self) -> dict[str, str]:
        """What to add to a child's environment."""
        return {PARENT_FD_VARIABLE: str(self.child_fd)}

    def close(self) -> None:
        """Let go: every child that still runs is asked to stop."""
        _close((self.child_fd, self._held_fd))
