"""One QEMU process as the link sees it: requests out, answers in; no socket, no thread.

    QmpConnected ──► look ──► drives found, limits known ──► ready: limits are set, and it is counted
                                                            │
    each collection: look (statistics, limits) ──► sample ──┴─► limits that are not right are set again
    a set of caps:   set every limit, read all of them ──► the generation is confirmed
    QmpLost ──► nothing is known; what was asked is not answered

``look`` asks for everything that the places need: query-blockstats and query-block if one is a drive, the
limits of each group. Requests are answered in their order (``gateway_agent.qmp``).

Drives are sent the edges of our histogram's buckets once. Where that cannot be (an old QEMU), or another
program has set edges of its own, there are mean latencies and no percentiles; it is said once.

Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import structlog

from gateway_agent.enforcers.qemu import LimitedPlace, QemuEnforcer
from gateway_agent.qemu import (
    DRIVES,
    NO_LIMITS,
    STATISTICS,
    Command,
    DriveCounts,
    DriveStatistics,
    QmpAnswer,
    QmpRequest,
    Refusal,
    drive_limits,
    drive_statistics,
    drives_in,
)
from gateway_agent.sources.counted import Reading
from gateway_agent.sources.qemu import QemuSource
from pmdaemon.runtime.clock import Clock

log = structlog.get_logger("qemu")

ABSENT: Final = "it is not there now; it is looked for at every collection"
OTHERS_HISTOGRAM: Final = (
    "another program has set a latency histogram with other edges, which is left alone: no percentiles"
)
NO_HISTOGRAM: Final = "this QEMU keeps no latency histogram of it: no percentiles ({})"

Step = tuple[Command, Callable[[Any], None]]
"""A command, and what takes in its answer. ValueError: the answer has another form."""


class _Open(NamedTuple):
    """A request that is not answered; ``done`` is called with the time of the answer."""

    steps: list[Step]
    done: Callable[[int], None]
    is_look: bool


class QemuClient:
    """State of one monitor; ``source`` and ``enforcer`` are its two faces.

    State: the requests that are not answered, what the newest look found, and the drives that were asked to
    keep a histogram on this connection.

    Args:
        name: of the monitor, unique among planes and sources.
        socket: its path, for people.
        places: its volumes.
        backends: by volume.
        send: posts a request.
    """

    def __init__(
        self,
        name: str,
        socket: str,
        places: Sequence[LimitedPlace],
        backends: Mapping[str, str],
        send: Callable[[QmpRequest], None],
        clock: Clock,
    ) -> None:
        self.name = name
        self.socket = socket
        self.problem = "not connected yet"
        self.source = QemuSource(name, backends, self._count, self._learn)
        self.enforcer = QemuEnforcer(name, places, self._enforce)
        self._places = places
        self._send = send
        self._clock = clock
        self._numbers = count(1)
        self._open: dict[int, _Open] = {}
        self._daemon = ""
        self._found: dict[str, DriveStatistics] = {}
        self._told: set[str] = set()
        self._place_of = {place.volume: place for place in places}

    # -- what the monitor does

    def connected(self, daemon: str) -> None:
        """The monitor can be asked; see ``qmp.QmpConnected``."""
        self.problem = ""
        self.source.connected(is_other=bool(self._daemon) and daemon != self._daemon)
        self.source.can_be_asked = False  # not before it is known what is there
        self._daemon = daemon
        self._told.clear()
        self._post(self._all_steps(), self._looked)

    def lost(self, reason: str, *, is_off: bool) -> None:
        """The monitor cannot be asked."""
        self.problem = reason
        self._open.clear()
        self.source.disconnected()
        self.enforcer.disconnected(is_off=is_off)

    def answered(self, answer: QmpAnswer) -> bool:
        """Take in an answer; returns whether this one made the monitor ready for caps."""
        request = self._open.pop(answer.number, None)
        if request is None:  # of a connection before
            return False
        was_ready, before = self.enforcer.reachable, self.problem
        problem = ""
        for (command, take), result in zip(request.steps, answer.results, strict=True):
            try:
                take(result)
            except ValueError as exc:
                problem = f"{command.name}: {exc}"
        if request.is_look:
            self.problem = problem
        if problem and problem != before:
            log.warning("qemu-answer-unusable", monitor=self.name, problem=problem)
        request.done(answer.at_ns)
        return self.enforcer.reachable and not was_ready

    def record(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "socket": self.socket,
            "is_connected": self.enforcer.reachable,
            "problem": self.problem,
            "volumes": [place.record() for place in self._places],
        }

    # -- requests

    def _post(
        self, steps: list[Step], done: Callable[[int], None] = lambda _at_ns: None, *, is_look: bool = True
    ) -> None:
        number = next(self._numbers)
        self._open[number] = _Open(steps, done, is_look)
        self._send(QmpRequest(number, tuple(command for command, _ in steps)))

    def _all_steps(self) -> list[Step]:
        """Statistics before limits: what is not there any more is noticed first."""
        drives = [place for place in self._places if place.drive]
        steps: list[Step] = []
        if drives:
            steps += [(Command(STATISTICS, {}), self._take_statistics)]
        return [*steps, *self._read_limits()]

    def _read_limits(self) -> list[Step]:
        steps: list[Step] = []
        if any(place.drive and place.group is None for place in self._places):
            steps.append((Command(DRIVES, {}), self._take_drive_limits))
        for place in self._places:
            if place.group is not None:
                steps.append((place.group.read_command(), _group_limits(place)))
        return steps

    def _take_statistics(self, answer: Any) -> None:
        self._found = {}
        rows = list(drives_in(_granted(answer)))
        for place in self._places:
            if not place.drive:
                continue
            place.at, row = next(((at, row) for at, row in rows if place.drive in at.names), (None, None))
            if row is None:
                place.report("drive", f"drive {place.drive}: {ABSENT}")
                continue
            place.report("drive", "")
            self._found[place.volume] = drive_statistics(row)

    def _take_drive_limits(self, answer: Any) -> None:
        places = [place for place in self._places if place.drive and place.group is None]
        for place in places:
            place.is_unread = True
        rows = list(drives_in(_granted(answer)))
        for place in places:
            row = next((row for at, row in rows if place.drive in at.names), None)
            place.found = drive_limits(row) if row is not None and place.at is not None else None
            place.is_unread = False

    def _looked(self, at_ns: int) -> None:
        """The first look of a connection: what is there is known."""
        if self.source.is_new:
            self.source.begin(self._reading(at_ns))
        for place in self._places:
            if place.found not in (None, NO_LIMITS) and place.found != place.wanted:
                log.info("limits-replaced", volume=place.volume, found=place.found, by=place.wanted)
        self.enforcer.connected()
        self.source.can_be_asked = True
        self._keep_histograms()

    def _reading(self, at_ns: int) -> Reading[Any]:
        counts = {volume: each.counts for volume, each in self._found.items()}
        return Reading(at_ns, self._unix_us(at_ns), counts, self.enforcer.gen)

    def _unix_us(self, at_ns: int) -> int:
        return self._clock.unix_us() - (self._clock.monotonic_ns() - at_ns) // 1000

    # -- statistics

    def _count(self) -> None:
        self._post(self._all_steps(), self._counted)

    def _counted(self, at_ns: int) -> None:
        self.enforcer.looked()
        self.source.answered(at_ns, self._unix_us(at_ns), self._found, self.enforcer.gen)
        self._keep_histograms()
        self.enforcer.keep()

    def _learn(self, volume: str, step: DriveCounts, elapsed_s: float) -> tuple[bool, bool]:
        place = self._place_of[volume]
        place.counted(step, elapsed_s)
        return place.is_full, place.found not in (None, NO_LIMITS)

    def _keep_histograms(self) -> None:
        """Tell drives that have come, or were plugged in again, the edges of our buckets."""
        for place in self._places:
            found = self._found.get(place.volume)
            if place.at is None or found is None:
                continue
            if found.has_other_histogram:
                place.report("statistics", OTHERS_HISTOGRAM)
            elif found.bins is None and place.volume not in self._told:
                self._told.add(place.volume)
                step = place.at.histogram_command(), _histogram_set(place)
                self._post([step], is_look=False)

    # -- limits

    def _enforce(self, gen: int) -> None:
        steps: list[Step] = []
        for place in self._places:
            command = place.command()
            if command is not None:
                steps.append((command, _limits_set(place)))
        self._post([*steps, *self._read_limits()], lambda _at_ns: self.enforcer.confirm(gen))


def _granted(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        raise ValueError(f"QEMU says: {answer.text}")
    return answer


def _group_limits(place: LimitedPlace) -> Callable[[Any], None]:
    def take(answer: Any) -> None:
        assert place.group is not None  # asked for those alone
        is_absent = isinstance(answer, Refusal) and answer.is_absence
        place.report("group", f"throttle group {place.group.name}: {ABSENT}" if is_absent else "")
        place.is_unread = True
        place.found = None if is_absent else place.group.limits_in(_granted(answer))
        place.is_unread = False

    return take


def _limits_set(place: LimitedPlace) -> Callable[[Any], None]:
    def take(answer: Any) -> None:
        place.refusal = f"limits refused: {answer.text}" if isinstance(answer, Refusal) else ""

    return take


def _histogram_set(place: LimitedPlace) -> Callable[[Any], None]:
    def take(answer: Any) -> None:
        if isinstance(answer, Refusal):
            place.report("statistics", NO_HISTOGRAM.format(answer.text))

    return take
