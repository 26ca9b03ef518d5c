"""A relay between a data plane and a real NBD server, which holds or cuts single connections.

    plane ◄── near ── Passage ── far ──► server      each way with a buffer of its own, as a network has

What a server has sent is taken at once: it is on its way, also when the server has ended since. The relay
knows nothing of NBD. One thread; the lock guards all passages and their fields.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from typing import Self

from tests.support.planes import wait_for

PIECE_BYTES = 1 << 16


class Passage:
    """One connection.

    Attributes:
        asked, answered: bytes that went to the server, and that came to the plane.
        taken: bytes that came from the server.
        is_held: nothing goes to the plane, not even the end.
        cut_at: of ``answered``; then both ends are closed.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.to_far, self.to_near = bytearray(), bytearray()
        self.near_ended = self.far_ended = False
        self.asked = self.answered = self.taken = 0
        self.is_held = False
        self.cut_at: int | None = None
        self.is_open = True

    def masks(self) -> list[tuple[socket.socket, int]]:
        """What each end is waited for; an end that has said all is not asked again and again."""
        near = 0 if self.near_ended else select.POLLIN
        far = 0 if self.far_ended else select.POLLIN
        near |= select.POLLOUT if self.to_near and not self.is_held else 0
        far |= select.POLLOUT if self.to_far else 0
        return [(sock, mask) for sock, mask in ((self.near, near), (self.far, far)) if mask]

    def ready(self, sock: socket.socket) -> None:
        """One end can be read, or written, or is gone."""
        if sock is self.near:
            self.near_ended |= not _receive(self.near, self.to_far)
        else:
            before = len(self.to_near)
            self.far_ended |= not _receive(self.far, self.to_near)
            self.taken += len(self.to_near) - before
        self.move()

    def move(self) -> None:
        """Pass on what can be, and the ends."""
        if not self.is_open:
            return
        self.asked += _send(self.far, self.to_far)
        if not self.is_held:
            left = len(self.to_near) if self.cut_at is None else self.cut_at - self.answered
            self.answered += _send(self.near, self.to_near, left)
            if self.cut_at is not None and self.answered >= self.cut_at:
                self.close()
                return
        if self.near_ended and not self.to_far:
            with contextlib.suppress(OSError):
                self.far.shutdown(socket.SHUT_WR)
        if self.far_ended and not self.is_held and (not self.to_near or self.near_ended):
            self.close()

    def close(self) -> None:
        """End both ends."""
        self.is_open = False
        self.near.close()
        self.far.close()


def _receive(sock: socket.socket, into: bytearray) -> bool:
    """Whether more may come."""
    try:
        data = sock.recv(PIECE_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    into += data
    return bool(data)


def _send(sock: socket.socket, data: bytearray, most: int | None = None) -> int:
    try:
        sent = sock.send(data if most is None else data[:most]) if data else 0
    except BlockingIOError:
        return 0
    except OSError:  # that end is gone; what was meant for it is dropped
        data.clear()
        return 0
    del data[:sent]
    return sent


class Relay:
    """Listens at ``path`` for the plane, and connects to a server at ``target`` each time.

    ``passages`` are those that were ever made, in their order.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self._target = str(target)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._stops = False
        self.passages: list[Passage] = []
        self._thread = threading.Thread(target=self._run, name="nbd-relay")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._stops = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for passage in self.open():
            passage.close()
        self._listener.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stops:
                    return
                poll, owners = select.poll(), dict[int, tuple[Passage, socket.socket]]()
                poll.register(self._listener, select.POLLIN)
                poll.register(self._wake_fd, select.POLLIN)
                for passage in self.passages:
                    for sock, mask in passage.masks() if passage.is_open else ():
                        poll.register(sock, mask)
                        owners[sock.fileno()] = passage, sock
            ready = poll.poll()
            with self._lock:
                for fd, _ in ready:
                    if fd == self._wake_fd:
                        os.eventfd_read(self._wake_fd)
                    elif fd == self._listener.fileno():
                        self._accept()
                    elif owners[fd][0].is_open:
                        owners[fd][0].ready(owners[fd][1])
                for passage in self.passages:
                    passage.move()

    def _accept(self) -> None:
        near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._target)
        except OSError:  # as a host that refuses
            near.close()
            far.close()
            return
        near.setblocking(False)
        far.setblocking(False)
        self.passages.append(Passage(near, far))

    # -- for tests

    def open(self) -> list[Passage]:
        """Those whose ends are open, in the order in which they were made."""
        with self._lock:
            return [passage for passage in self.passages if passage.is_open]

    def wait_open(self, count: int) -> list[Passage]:
        """Until so many are open, each in transmission and not in use; these."""
        wait_for(f"{count} connections", lambda: len(self.open()) == count)
        return self.open()

    def hold(self, *passages: Passage) -> None:
        """Let nothing come to the plane."""
        with self._lock:
            for passage in passages:
                passage.is_held = True

    def release(self, *passages: Passage) -> None:
        """Let what is held, and all that follows, come to the plane."""
        with self._lock:
            for passage in passages:
                passage.is_held = False
        os.eventfd_write(self._wake_fd, 1)

    def cut(self, passage: Passage, after_bytes: int = 0) -> None:
        """End a connection, when so many bytes more have come to the plane."""
        with self._lock:
            passage.is_held = False
            passage.cut_at = passage.answered + after_bytes
        os.eventfd_write(self._wake_fd, 1)
