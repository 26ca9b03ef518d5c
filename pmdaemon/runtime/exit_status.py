"""A process says itself how it ends: for one whose parent may be gone before it.

A process that a ``template`` has forked has a pipe to the process that asked for it. Its exit status goes
there as the last thing: one byte. State: ``_tells``, set once, before the process does anything else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_tells: Final[list[tuple[int, int]]] = []  # descriptor, process id: a child forked from here is another


def will_tell(fd: int) -> None:
    """From now on this process says there how it ends."""
    _tells.append((fd, os.getpid()))


def tell(status: int) -> None:
    """It ends now, with this status; nobody may be left who wants to know."""
    for fd, pid in _tells:
        if pid == os.getpid():
            with contextlib.suppress(OSError):
                os.write(fd, bytes([status & 0xFF]))
    _tells.clear()


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Say how what runs in it ends, as the interpreter would."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        raise
    finally:
        tell(status)


def read(fd: int, otherwise: int) -> int:
    """The parent's side: what a process has said that has ended; ``otherwise`` if it came to say nothing."""
    try:
        said = os.read(fd, 1)
    except OSError:
        return otherwise
    return said[0] if said else otherwise
