"""What sources beside the I/O path have in common: they read lifetime counters, and hand over differences.

    base ──reading──► current ──► sample: current - base, row by row        spooled: current becomes the base

A volume that appears later, or whose counters ran backwards (replaced, made again) or made a step that no
storage makes, starts again: what it did before this reading is of no known interval. Lifetime sums begin with
this link process: I/O between its death and its restart is in no cut.

Counters are tuples of whole numbers that only grow, among them the four of ``LifetimeCounts``. Completions
are all that is known, so ``arrived`` equals completed.

State: the reading that was spooled last, the newest one, and the first sight of each volume.
Thread: the link's loop only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from gateway_agent.sources.sample import Sample, StreamKey, no_hist, no_missed
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire import cut
from pmdaemon.wire.rates import COST_BYTES

MOST_IOS: Final = 1 << 36
"""Of one kind between two readings: 19 million a second for an hour."""
MOST_SUM: Final = 1 << 59
"""Bytes or nanoseconds between two readings; sums of several fit 63 bits."""
_ARE_IOS: Final = ("reads", "writes", "others")


class LifetimeCounts(Protocol):
    """Lifetime counters: a NamedTuple of integers."""

    def __iter__(self) -> Iterator[int]: ...
    def _asdict(self) -> dict[str, int]: ...
    @property
    def reads(self) -> int:
        """Completed."""

    @property
    def writes(self) -> int:
        """Completed."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def write_bytes(self) -> int: ...


C = TypeVar("C", bound=LifetimeCounts)


def is_later(before: LifetimeCounts, now: LifetimeCounts) -> bool:
    """Whether ``now`` can have been counted behind ``before``: not if what counts was made again."""
    return all(a >= b for a, b in zip(now, before, strict=True))


def is_possible(step: LifetimeCounts) -> bool:
    """Whether storage can have done this between two readings; else the counters are not what they say."""
    return all(
        value <= (MOST_IOS if name in _ARE_IOS or name.startswith("failed_") else MOST_SUM)
        for name, value in step._asdict().items()
    )


def minus(now: C, before: C) -> C:
    """What was counted between two readings."""
    make = cast(Callable[..., C], type(now))
    return make(*(a - b for a, b in zip(now, before, strict=True)))


@dataclass(frozen=True, slots=True)
class Reading(Generic[C]):
    """Counters of all volumes at one moment.

    Attributes:
        at_ns, at_unix_us: the moment, monotonic and wall clock.
        counts: by volume.
        gen: generation of the caps in force; None for a source without caps.
    """

    at_ns: int
    at_unix_us: int
    counts: Mapping[str, C]
    gen: int | None = None


class CountedSource(ABC, Generic[C]):
    """See the module, and ``StatisticsSource``.

    Subclasses read the counters, and say what is in a row beside reads, writes, bytes, cost and sums.

    Args:
        name: of the source.
        client: the name of the one client that each volume has.
    """

    def __init__(self, name: str, client: str) -> None:
        self.name = name
        self.sample: Sample | None = None
        self._client = client
        self._base: Reading[C] | None = None
        self._first: dict[str, C] = {}
        self._current: Reading[C] | None = None

    @abstractmethod
    def backend_of(self, volume: str) -> str:
        """What a volume shares with others."""

    def more(self, volume: str, step: C) -> dict[str, int]:
        """Other columns of a volume's row; ``step``: what it did in the interval."""
        return {}

    def begin(self, reading: Reading[C]) -> None:
        """Count from here on."""
        self._base = reading
        for volume, now in reading.counts.items():
            self._first.setdefault(volume, now)

    def take(self, current: Reading[C]) -> list[tuple[str, C]]:
        """Make the sample of everything since the last spooled reading; returns the step of each row."""
        base = self._base
        assert base is not None  # a source begins with a reading
        steps, rows, streams = list[tuple[str, C]](), [], []
        for volume, now in current.counts.items():
            before = base.counts.get(volume)
            if before is None or not is_later(before, now) or not is_possible(minus(now, before)):
                before = self._first[volume] = now
            step = minus(now, before)
            steps.append((volume, step))
            rows.append(_row(step, minus(now, self._first[volume]), self.more(volume, step)))
            streams.append(StreamKey(volume, self._client, self.backend_of(volume)))
        same = current.gen is None or current.gen == base.gen
        self._current = current
        self.sample = Sample(
            source=self.name,
            start_ns=base.at_ns,
            end_ns=current.at_ns,
            start_unix_us=base.at_unix_us,
            throttle_gen=current.gen if same else -1,
            threshold_version=None,
            streams=tuple(streams),
            counters=cut.rows_array(rows),
            hist=no_hist(),
            missed=no_missed(),
        )
        return steps

    def spooled(self) -> None:
        """See ``StatisticsSource``."""
        if self._current is not None:
            self._base, self._current, self.sample = self._current, None, None


class ReadSource(CountedSource[C]):
    """One whose counters are read whenever it is asked, so that it answers at once."""

    can_be_asked = True
    awaits_answer = False

    def __init__(self, name: str, client: str, clock: Clock) -> None:
        super().__init__(name, client)
        self._clock = clock

    @abstractmethod
    def read(self) -> Reading[C]:
        """The counters now.

        Raises:
            SourceReadFailed: they cannot be read.
        """

    def ask(self) -> None:
        """See ``StatisticsSource``."""
        if self.sample is None:
            self.take(self.read())


def export_of(volume: str, backend: str, source: str, size_bytes: int = 0) -> dict[str, Any]:
    """An export, as REGISTER says it, of a volume that is not served here."""
    return {
        "volume": volume,
        "backend": backend,
        "size_bytes": size_bytes,
        "read_only": False,
        "source": source,
    }


def _row(step: LifetimeCounts, life: LifetimeCounts, more: Mapping[str, int]) -> list[int]:
    """One row in COLUMNS order."""
    ios, size = step.reads + step.writes, step.read_bytes + step.write_bytes
    values = {
        "arrived": ios,
        "reads": step.reads,
        "writes": step.writes,
        "read_bytes": step.read_bytes,
        "write_bytes": step.write_bytes,
        "cost_milli": 1000 * ios + 1000 * size // COST_BYTES,
        "cum_reads": life.reads,
        "cum_writes": life.writes,
        "cum_read_bytes": life.read_bytes,
        "cum_write_bytes": life.write_bytes,
        **more,
    }
    return [values.get(column, 0) for column in cut.COLUMNS]
