"""Large payloads from an upstream's socket to a client's without a copy: splice(2), by a pipe of the kernel.

    upstream's socket ──fill: splice──► pipe ──give: splice──► client's socket
    head of the reply ──fill: write───►

The kernel hands on the pages in which the payload arrived; this process touches none of them. Only for plain
sockets, and payloads that nothing here has to look at. What the client's socket does not take waits in the
pipe, and is a part of what ``buffers.ReplyBuffer`` keeps.

``PipePool`` keeps empty pipes, so a plane has one, and one for each client that does not take its answers at
the moment. Each user of the host may have so many pages of pipes (``pipe-user-pages-soft``); beyond that, or
without descriptors, there is no pipe, and payloads are copied as small ones are.

Thread: the loop's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import Final

LARGE_BYTES: Final = 256 << 10  # payloads that are worth it: below, two copies cost less than the calls
PIPE_BYTES: Final = 1 << 20  # what a pipe may have without privileges
_MOST_IDLE: Final = 4


class PayloadPipe:
    """See the module docstring.

    Attributes:
        held_bytes: in the pipe.

    Raises:
        OSError: there are no descriptors, or no large pipes for this user any more.
    """

    def __init__(self) -> None:
        self._out_fd, self._in_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held_bytes = 0
        try:
            fcntl.fcntl(self._in_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            self.close()
            raise

    def fill(self, head: memoryview | bytes, fd: int, most_bytes: int) -> int:
        """Put some bytes of our own into an empty pipe, and behind them what a socket has.

        Returns how much of the socket's it was: at most so much, and ``PIPE_BYTES``.

        Raises:
            OSError: the connection broke, or its peer has ended it.
        """
        if head:
            self.held_bytes += os.write(self._in_fd, head)
        try:
            taken = os.splice(fd, self._in_fd, min(most_bytes, PIPE_BYTES), flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return 0
        if not taken:
            raise ConnectionAbortedError(errno.ECONNABORTED, "it closed the connection")
        self.held_bytes += taken
        return taken

    def give(self, fd: int) -> bool:
        """Give all of it to a socket, as far as that takes it; returns whether the pipe is empty.

        Raises:
            OSError: the connection broke.
        """
        while self.held_bytes:
            try:
                self.held_bytes -= os.splice(self._out_fd, fd, self.held_bytes, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Drop what is in it."""
        for fd in (self._out_fd, self._in_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


class PipePool:
    """See the module docstring."""

    def __init__(self) -> None:
        self._idle: list[PayloadPipe] = []

    def take(self) -> PayloadPipe | None:
        """An empty pipe, to be put back; None where there is none."""
        if self._idle:
            return self._idle.pop()
        with contextlib.suppress(OSError):
            return PayloadPipe()
        return None

    def put_back(self, pipe: PayloadPipe) -> None:
        """It is not needed any more; what is in it is dropped."""
        if pipe.held_bytes or len(self._idle) >= _MOST_IDLE:
            pipe.close()
        else:
            self._idle.append(pipe)

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()
