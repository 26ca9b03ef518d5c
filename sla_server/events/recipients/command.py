"""A local program for each batch: JSON on its standard input, its exit status is the answer.

    0      confirmed
    65     refused: it will never take these notices (EX_DATAERR)
    else   sent again

The program runs in a session of its own, with few variables of the environment and "/" as its directory. At
the deadline its whole process group is killed. Of what it writes to standard error the end is the reason;
standard output goes nowhere. It may exit without having read everything.

Thread: the recipient's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.children import describe_status
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import printable
from sla_server.events.documents import CommandSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, refused, retry
from sla_server.events.recipients.http_client import MENDED_AFTER_S, REASON_CHARACTERS
from sla_server.events.recipients.network import reason_of

REFUSED_STATUS: Final = 65
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 2000
_REAPED_S: Final = 5.0


class CommandRecipient:
    """See the module."""

    kind = "command"

    def __init__(
        self, name: str, spec: CommandSpec, commands_dir: Path, *, timeout_s: float, most_notices: int
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.most_notices = most_notices
        self._argv = [str(commands_dir / spec.argv[0]), *spec.argv[1:]]

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        content = {"recipient": self.name, "notices": [notice.as_json() for notice in notices]}
        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"PATH": PATH, "LANG": "C.UTF-8", "SLA_RECIPIENT": self.name},
                start_new_session=True,
            )
        except OSError as exc:
            return retry(f"{self._argv[0]} does not start: {reason_of(exc)}", MENDED_AFTER_S)
        try:
            tail = _converse(process, strict_json.dumps(content).encode() + b"\n", deadline)
        finally:
            is_late = _end(process)
        said = printable(
            " ".join(tail.decode("utf-8", "replace").split())[-REASON_CHARACTERS:], REASON_CHARACTERS
        )
        more = f": {said}" if said else ""
        if is_late:
            return retry(f"it did not end in time and was killed{more}")
        if process.returncode == 0:
            return CONFIRMED
        reason = f"{describe_status(process.returncode)}{more}"
        return refused(reason) if process.returncode == REFUSED_STATUS else retry(reason)

    def close(self) -> None:
        """See ``Recipient``; a program is of one delivery."""


def _converse(process: subprocess.Popen[bytes], content: bytes, deadline: Deadline) -> bytes:
    """Write the input until the program ends or the deadline; the end of what it wrote to standard error.

    A child that it leaves behind may keep its standard error open: only the program's own end counts.
    """
    assert process.stdin is not None
    assert process.stderr is not None
    tail, left = b"", memoryview(content)
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector, contextlib.closing(os.fdopen(ended, "rb", 0)):
        for pipe, event in ((process.stdin, selectors.EVENT_WRITE), (process.stderr, selectors.EVENT_READ)):
            flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            selector.register(pipe, event)
        selector.register(ended, selectors.EVENT_READ)
        while not deadline.passed:
            ready = {key.fileobj for key, _ in selector.select(deadline.left_s())}
            if process.stdin in ready:
                try:
                    left = left[os.write(process.stdin.fileno(), left) :]
                except BrokenPipeError:
                    left = memoryview(b"")  # it wants no more, and says by its status what that means
                if not left:
                    selector.unregister(process.stdin)
                    _close(process.stdin)
            if process.stderr in ready:
                read = os.read(process.stderr.fileno(), _READ_BYTES)
                tail = (tail + read)[-_TAIL_BYTES:]
                if not read:
                    selector.unregister(process.stderr)
            elif ended in ready:
                break  # and nothing more is there to be read
    return tail


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Reap the program; whether it had to be killed, its process group with it."""
    is_late = process.poll() is None
    if is_late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep: Popen reaps it later
            process.wait(_REAPED_S)
    for pipe in (process.stdin, process.stderr):
        if pipe is not None:
            _close(pipe)
    return is_late


def _close(pipe: object) -> None:
    with contextlib.suppress(OSError):  # what was not written is of no use any more
        pipe.close()  # type: ignore[attr-defined]
