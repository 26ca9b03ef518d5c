"""The thread that reads sources of space, one after the other, every ``interval_s``.

Nothing waits for it: a source that hangs delays the other sources by its time limit, and nothing
more. What fails is said once (``SourceFailed``), and once that it can be read again (``SourceBack``).

Shared: ``inbox`` (a ``ThreadInbox``, drained by the owner) and the event that ends the thread. All else
belongs to the thread.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.commands import CommandRunner
from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup, ThreadInbox
from pmdaemon.space import readers
from pmdaemon.space.config import SpaceConfig, SpaceSource
from pmdaemon.space.readers import SpaceUnreadable
from pmdaemon.wire.messages.space import Space

log = structlog.get_logger("space")
COMMANDS_A_SOURCE = 4  # what the longest round of one source runs
STOP_S = 5.0
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source cannot be read; ``problem`` is another one than before."""

    source: str
    problem: str


@dataclass(frozen=True, slots=True)
class SourceBack:
    """A source that failed can be read again."""

    source: str


SpaceOutcome = Space | SourceFailed | SourceBack


@dataclass(frozen=True, slots=True)
class WatchedSource:
    """A source: ``read`` gives a reading of the time it is given, or raises ``SpaceUnreadable``."""

    name: str
    read: Callable[[int], Space]


class SpaceWatcher:
    """See the module.

    Args:
        sources: what is read, made with ``stopping``.
        interval_s: from the end of one round to the next.
        limit_s: how long one source may take.
        clock: for the time of a reading.
        on_failure: called in the thread if it dies.
    """

    def __init__(
        self,
        sources: Callable[[Callable[[], bool]], Sequence[WatchedSource]],
        interval_s: float,
        limit_s: float,
        clock: Clock,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.inbox: ThreadInbox[SpaceOutcome] = ThreadInbox()
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._clock = clock
        self._threads = ThreadGroup(on_failure)
        self._stopping = threading.Event()
        self._sources = tuple(sources(self.stopping))
        self._problems: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Of the sources. Thread: any."""
        return [source.name for source in self._sources]

    def start(self) -> None:
        """Begin to read."""
        self._threads.start("space", self._run)

    def stop(self) -> None:
        """End the thread; one that waits for an answer for longer is left behind, it holds nothing."""
        self._stopping.set()
        try:
            self._threads.join(STOP_S)
        except ThreadDidNotStop as exc:
            log.warning("space-source-left", problem=str(exc))

    def stopping(self) -> bool:
        """Whether what runs should be given up. Thread: any."""
        return self._stopping.is_set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.read_all()
            watchdog.rest()
            self._stopping.wait(self._interval_s)

    def read_all(self) -> None:
        """One round. Thread: its own; tests call it without one."""
        for source in self._sources:
            if self._stopping.is_set():
                return
            watchdog.beat(watchdog.LIMIT_S + self._limit_s)
            try:
                reading = source.read(self._clock.unix_us())
            except SpaceUnreadable as exc:
                self._failed(source.name, exc.problem)
                continue
            if self._problems.pop(source.name, None) is not None:
                log.info("space-source-back", source=source.name)
                self.inbox.put(SourceBack(source.name))
            self.inbox.put(reading)

    def _failed(self, name: str, problem: str) -> None:
        kind = _DIGITS.sub("0", problem)  # figures differ each round, and it is the same failure
        if self._stopping.is_set() or self._problems.get(name) == kind:
            return
        self._problems[name] = kind
        log.warning("space-source-failed", source=name, problem=problem)
        self.inbox.put(SourceFailed(name, problem))


def local_sources(
    config: SpaceConfig, exported: Mapping[str, str], cancelled: Callable[[], bool]
) -> list[WatchedSource]:
    """The sources of a file that are read by commands of this host.

    Args:
        config: the file's.
        exported: path of a file or device to the volume that an export serves from it.
        cancelled: whether a command should be given up.
    """
    return [
        WatchedSource(source.name, _reader(source, CommandRunner(cancelled), config.timeout_s, exported))
        for source in config.source
    ]


def _reader(
    source: SpaceSource, runner: CommandRunner, timeout_s: float, exported: Mapping[str, str]
) -> Callable[[int], Space]:
    run = functools.partial(runner.run, limit_s=timeout_s)
    return lambda now_us: readers.read(source, run, exported, now_us)
