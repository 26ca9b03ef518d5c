"""One epoll loop with timers: the only place of the data plane that waits.

Everything here and everything called from here runs in one thread and never blocks (file mode without
workers excepted: it trusts its file not to, but for flush and FUA).

Policy for surprises: a handler or a timer that raises is logged and reported to its owner (``on_failure``),
which closes that one connection; the others go on.

Timers are a heap of (time, number). One that is moved or cancelled leaves its entry behind, which is dropped
when it comes to the top, or when such entries are more than the timers as another is planned. So a turn looks
at what is due, not at every timer.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from gateway_agent.errors import GatewayError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.stop import Stop

log = structlog.get_logger("loop")


IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT
GONE: Final = select.EPOLLHUP | select.EPOLLERR
OnFailure = Callable[[Exception], None]
_MAX_WAIT_S: Final = 60.0
_MAX_IDLE_ENTRIES: Final = 64  # of the heap, beyond as many as there are timers


@dataclass(slots=True)
class _Watched:
    handler: Callable[[int], None]
    on_failure: Callable[[Exception], None]
    mask: int
    since: int  # the step that began to watch it


class EventLoop:
    """See the module docstring.

    Descriptors are watched until ``forget``; a timer is identified by its key and fires once.

    Attributes:
        warnings: about single connections; limited, because anyone can make bad ones as fast as a processor.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.warnings = LimitedLog("connections")
        self._epoll = select.epoll()
        self._watched: dict[int, _Watched] = {}
        self._step_number = 0
        self._buffered: set[int] = set()
        self._timers: dict[object, tuple[int, Callable[[int], None], OnFailure | None]] = {}  # number, ...
        self._keys: dict[int, object] = {}  # of the timers, by number
        self._heap: list[tuple[int, int]] = []  # (when_ns, number), also of numbers without a timer
        self._numbers = itertools.count()

    def watch(
        self, fd: int, mask: int, handler: Callable[[int], None], on_failure: Callable[[Exception], None]
    ) -> None:
        """Call ``handler(events)`` when ``fd`` is ready for ``mask``; 0 reports only a peer that is gone."""
        self._epoll.register(fd, mask)
        self._watched[fd] = _Watched(handler, on_failure, mask, self._step_number)

    def want(self, fd: int, mask: int) -> None:
        """Change what ``fd`` is watched for; cheap when nothing changes."""
        watched = self._watched[fd]
        if watched.mask != mask:
            self._epoll.modify(fd, mask)
            watched.mask = mask

    def pause_input(self, fd: int, for_ns: int) -> None:
        """Watch ``fd`` for nothing, and for ``IN`` again after ``for_ns``."""
        self.want(fd, 0)
        self.at(("pause", fd), self.clock.monotonic_ns() + for_ns, lambda _now_ns: self.want(fd, IN))

    def is_watched_for(self, fd: int, mask: int) -> bool:
        """Whether ``fd`` is watched for all of ``mask``."""
        return self._watched[fd].mask & mask == mask

    def forget(self, fd: int) -> None:
        """Stop watching; call it before the descriptor is closed. Unknown descriptors are ignored."""
        self.cancel(("pause", fd))
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def set_buffered(self, fd: int, has_input: bool) -> None:
        """Say whether ``fd`` has input that epoll does not see: it counts as readable while it is watched so.

        It holds until it is withdrawn, also over ``forget``; withdraw it before the descriptor is closed.
        """
        if has_input:
            self._buffered.add(fd)
        else:
            self._buffered.discard(fd)

    def at(
        self,
        key: object,
        when_ns: int,
        handler: Callable[[int], None],
        on_failure: OnFailure | None = None,
    ) -> None:
        """Call ``handler(now_ns)`` at ``when_ns``, instead of what ``key`` had planned before.

        ``on_failure`` gets what it raises; None: that is only logged.
        Those that are due fire in order of their time; of the same time, in the order of these calls.
        """
        self.cancel(key)
        number = next(self._numbers)
        self._timers[key] = (number, handler, on_failure)
        self._keys[number] = key
        heapq.heappush(self._heap, (when_ns, number))
        if len(self._heap) > 2 * len(self._timers) + _MAX_IDLE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._keys]
            heapq.heapify(self._heap)

    def cancel(self, key: object) -> None:
        """Drop the timer of ``key``, if there is one."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            del self._keys[timer[0]]

    def run(self, stop: Stop) -> None:
        """Serve until the stop is asked for."""
        self.watch(stop.fileno(), IN, lambda _events: None, lambda _exc: None)
        while not stop.is_set():
            self.step()
        self.forget(stop.fileno())  # it stays readable

    def step(self) -> None:
        """Wait for readiness or the next timer, then handle both once."""
        self._step_number += 1
        for fd, events in self._epoll.poll(self._timeout_s()):
            watched = self._watched.get(fd)
            # A handler before it in this batch may have closed it, and another one got its number since.
            if watched is not None and watched.since != self._step_number:
                self._call(watched, events)
        if self._buffered:
            for fd in self._readable():
                if fd in self._buffered and (watched := self._watched.get(fd)) is not None:
                    self._call(watched, IN)
        if self._timers:
            self._fire()

    def _readable(self) -> list[int]:
        """Descriptors whose input epoll does not see, and that are watched for it."""
        watched = self._watched
        return [fd for fd in self._buffered if fd in watched and watched[fd].mask & IN]

    def _timeout_s(self) -> float:
        if self._buffered and self._readable():
            return 0.0
        while self._heap and self._heap[0][1] not in self._keys:
            heapq.heappop(self._heap)
        if not self._heap:
            return _MAX_WAIT_S
        first_ns = self._heap[0][0]
        return max(0.0, min(_MAX_WAIT_S, (first_ns - self.clock.monotonic_ns()) / 1e9))

    def _call(self, watched: _Watched, events: int) -> None:
        try:
            watched.handler(events)
        except Exception as exc:  # noqa: BLE001 - outermost loop: logged, and only this connection is closed
            self.report(exc, watched.on_failure)

    def report(self, exc: Exception, on_failure: OnFailure) -> None:
        """Log what was raised for one connection, perhaps in another's event, and report it to its owner."""
        if isinstance(exc, GatewayError):
            self.warnings.warning(self.clock.monotonic_ns(), "connection-failed", error=str(exc))
        else:
            log.error("handler-failed", exc_info=exc)
        on_failure(exc)

    def _fire(self) -> None:
        now_ns = self.clock.monotonic_ns()
        due = []  # what a handler plans now waits for the next turn
        while self._heap and self._heap[0][0] <= now_ns:
            due.append(heapq.heappop(self._heap)[1])
        for number in due:
            key = self._keys.pop(number, None)
            if key is None:  # moved or cancelled, perhaps by a handler before it in this turn
                continue
            _, handler, on_failure = self._timers.pop(key)
            try:
                handler(now_ns)
            except Exception as exc:  # outermost loop: logged and reported to the owner
                if on_failure is not None:
                    self.report(exc, on_failure)
                else:
                    log.exception("timer-failed")

    def close(self) -> None:
        """Let go of the epoll descriptor."""
        self._epoll.close()
