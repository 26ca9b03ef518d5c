"""Identifiers that are unique in the cluster and made without asking it (C7).

::

    63       48 47                                     0   63                                            0
    +----------+----------------------------------------+ +----------------------------------------------+
    |   node   |                 epoch                  | |                   counter                    |
    +----------+----------------------------------------+ +----------------------------------------------+

The node's number is configured. The epoch is of one run of one process: above all it has used before, and on
disk before the first identifier is made of it. So a crash loses the rest of an epoch, and no identifier is
made twice. The epoch is never below the wall clock in milliseconds: if the directory is lost, the next epoch
is still a new one. The counter begins at random, so that two that have an epoch in common all the same
(sessions of one program in one millisecond, a copied machine, a lost directory and a clock set back) make
different ones.

State: ``EPOCH_FILE`` in the directory; its lock is held while the source is open. A crash leaves either
epoch.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from pathlib import Path
from typing import Final, NamedTuple

from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.files import make_directory, write_whole
from sla_server.cluster.messages.errors import BadSettings, StateInUse

EPOCH_FILE: Final = "epoch"
NODES: Final = 1 << 16
EPOCHS: Final = 1 << 48
COUNTS: Final = 1 << 64


class Identifier(NamedTuple):
    """One identifier; those of one source are ordered as they were made."""

    node: int
    epoch: int
    counter: int

    def __str__(self) -> str:
        """32 hexadecimal digits; they sort as the identifiers do."""
        return f"{self.node:04x}{self.epoch:012x}{self.counter:016x}"

    @classmethod
    def parse(cls, text: str) -> Identifier:
        """What ``str`` has made.

        Raises:
            ValueError: it is none.
        """
        if len(text) != 32 or text.strip("0123456789abcdef"):
            raise ValueError(f"{text!r} is no identifier: 32 hexadecimal digits are")
        return cls(int(text[:4], 16), int(text[4:16], 16), int(text[16:], 16))


def next_epoch(stored: int, unix_ms: int) -> int:
    """The epoch after ``stored``, and not before the wall clock."""
    return max(stored + 1, unix_ms) % EPOCHS


class IdentifierSource:
    """Makes identifiers. Any thread.

    Args:
        directory: of this process alone; made if it is not there.
        node: number of the node, from 0 to 65,535; no two running nodes have the same.

    Raises:
        BadSettings: ``node`` is out of range, or the file holds no epoch.
        StateInUse: another process has the directory.
        OSError: the epoch cannot be stored.

    Durability: the epoch is on disk on return.
    """

    def __init__(self, directory: Path, node: int, clock: Clock | None = None) -> None:
        if not 0 <= node < NODES:
            raise BadSettings("node", node, f"a node's number is from 0 to {NODES - 1}")
        make_directory(directory, 0o700)
        self._lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = directory / EPOCH_FILE
            stored = _stored(path)
            self.epoch: Final = next_epoch(stored, (clock or SystemClock()).unix_us() // 1000)
            # If we die before this is on disk no identifier of the epoch exists; after it, none is repeated.
            write_whole(path, f"{self.epoch}\n", synced=True)
        except BlockingIOError as exc:
            os.close(self._lock_fd)
            raise StateInUse(directory) from exc
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.node: Final = node
        self._lock = threading.Lock()  # guards _counter
        self._counter = secrets.randbits(31) << 32

    def make(self) -> Identifier:
        """The next identifier."""
        with self._lock:
            self._counter += 1
            return Identifier(self.node, self.epoch, self._counter)

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock_fd)


def _stored(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    if not text.isascii() or not text.isdigit():
        raise BadSettings(
            str(path), text[:40], "the file has the last epoch as a number. Remove it if it is lost"
        )
    return int(text)
