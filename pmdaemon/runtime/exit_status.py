"""A process says itself how it ends: for one whose parent may be gone before it.

A process that a ``template`` has forked has a pipe to the process that asked for it. Its exit status goes
there as the last thing: one byte. State: ``_reports_to``, set once, before the process does anything else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_reports_to: Final[list[tuple[int, int]]] = []  # descriptor, process id: a child forked from here is another


def report_to(fd: int) -> None:
    """From now on this process says there how it ends."""
    _reports_to.append((fd, os.getpid()))


def report(status: int) -> None:
    """It ends now, with this status; nobody may be left who wants to know."""
    for fd, pid in _reports_to:
        if pid == os.getpid():
            with contextlib.suppress(OSError):
                os.write(fd, bytes([status & 0xFF]))
    _reports_to.clear()


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Say how what runs in it ends, as the interpreter would."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        raise
    finally:
        report(status)


def read(fd: int, otherwise: int) -> int:
    """The parent's side: what a process has said that has ended; ``otherwise`` if it came to say nothing."""
    try:
        said = os.read(fd, 1)
    except OSError:
        return otherwise
    return said[0] if said else otherwise
