"""The one call by which every process raises an event.

``attach_reserves`` opens the two reserves of a process once, at its start; without the environment variable
that the supervisor sets (a part that runs alone, a test) there are none, and raising does nothing. Until
``initialized`` events go to the reserve of the initialization period, which syncs each of them; it is
delivered first (E6).

``raise_event`` never raises and never waits for another process: code that notices trouble must not get into
more of it. Memory for one event is kept aside, and given back to the system for the moment when there is
none.

State: ``_raiser``, of the process; set once, by its main thread or, where the reserves come late, by the
thread that raises the event with which they do. ``_late``: what waits until then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.reserve.layout import MOST_PAYLOAD
from pmdaemon.reserve.moment import MOMENT, Moments
from pmdaemon.reserve.row import event_row
from pmdaemon.reserve.writer import RecordOutcome, ReserveWriter
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.excerpt import printable

log = structlog.get_logger("events")
EVENTS_DIR: Final = "SLA_EVENTS_DIR"
"""Environment variable: where the reserves are."""
SLOTS: Final = 256
SLOTS_OF: Final = {
    "services": 2048,  # 8 MiB: 1,000 gateways that go at once, and what that breaks, before anybody reads
    "pair": 1024,  # they come back
}
INITIAL_SLOTS: Final = 64
RETRY_NS: Final = 10_000_000_000  # on a full disk a try costs a few calls
MOST_WAITING: Final = 64  # as many as the reserve of the initialization period has slots
KEPT_SHARE: Final = 6  # the last sixth of the slots is for critical events
FILLING_RATIO: Final = 0.8  # below where that sixth begins: a flood of lesser events reaches it, too
CALM_RATIO: Final = 0.5
TOLD_APART: Final = ("alert", "episode_id", "event_id", "report", "subject", "throttle_id")
"""Details by which events of one subject are about different things: they are never folded into one."""
NAMING: Final = frozenset({"agreement", "sla", "gateway", "volume"})
"""Details that routes look at; short texts come next: ``by`` of a kind in the catalogue is one."""
NAME_CHARACTERS: Final = 256
_SPARE_BYTES: Final = 256 << 10
_CUT_CHARACTERS: Final = 400  # four bytes each at most, twice
SUFFIX: Final = ".reserve"


class EventRaiser:
    """The reserves of one process; see the module.

    Args:
        moments: of its events.

    Attributes:
        lost: events that could not be recorded: they are counted by kind, for an event ``events-lost``.

    Raises:
        OSError: no room for the reserves, or another process of this name has them.
    """

    def __init__(self, directory: Path, name: str, moments: Moments | None = None) -> None:
        self._name = name
        self._moments = moments or Moments()
        self._initial = ReserveWriter(
            directory / f"{name}.initial{SUFFIX}",
            INITIAL_SLOTS,
            synced=True,
            kept_slots=INITIAL_SLOTS // KEPT_SHARE,
        )
        slots = slots_of(name)
        try:
            self._normal = ReserveWriter(
                directory / f"{name}.normal{SUFFIX}", slots, kept_slots=slots // KEPT_SHARE
            )
        except BaseException:
            self._initial.close()
            raise
        self._current = self._initial
        self._spare: bytearray | None = bytearray(_SPARE_BYTES)
        self._is_filling = False
        self._newest_us = 0
        self.lost = 0

    def initialized(self) -> None:
        """The initialization period has ended."""
        self._current = self._normal

    def record(self, row: Mapping[str, Any]) -> RecordOutcome | None:
        """Record an event; None if it could not be kept: then it is counted."""
        try:
            return self._record_with_spare(row)
        except MemoryError:
            pass
        except OSError as exc:  # of the sync: it is kept, as without one
            log.error("event-not-synced", kind=printable(row.get("kind"), 64), problem=str(exc))
            return RecordOutcome.KEPT
        except (ValueError, TypeError, LookupError) as exc:
            log.error("event-not-recorded", kind=printable(row.get("kind"), 64), problem=str(exc))
        self.count(str(row.get("kind")), 1)
        return None

    def count(self, kind: str, events: int) -> None:
        """Events that could not be recorded: how many there were is an event all the same."""
        self.lost += events
        with contextlib.suppress(MemoryError, ValueError):  # ValueError: the reserve was closed meanwhile
            self._current.count(kind, events, self._newest_us or time.time_ns() // 1000)

    def close(self) -> None:
        """Let go of the files."""
        self._initial.close()
        self._normal.close()

    def _record_with_spare(self, row: Mapping[str, Any]) -> RecordOutcome:
        try:
            return self._record(row)
        except MemoryError:
            self._spare = None  # room for what follows
            recorded = self._record(row)
            with contextlib.suppress(MemoryError):
                self._spare = bytearray(_SPARE_BYTES)
            return recorded

    def _record(self, row: Mapping[str, Any]) -> RecordOutcome:
        reserve, event_id, at_us = self._current, str(row["event_id"]), int(row["at_us"])
        self._newest_us = at_us
        recorded = reserve.record(
            self._packed(row), event_id=event_id, subject=f"{row['element']}/{row['subject']}",
            kind=str(row["kind"]), at_us=at_us, severity=str(row.get("severity")), about=_about(row),
        )  # fmt: skip
        self._check_fill(reserve, at_us)
        return recorded

    def _packed(self, row: Mapping[str, Any]) -> bytes:
        return packed({**row, "source": self._name, MOMENT: row.get(MOMENT) or self._moments.now()})

    def _check_fill(self, reserve: ReserveWriter, at_us: int) -> None:
        """80 % is an event; the next one comes after it was half empty."""
        ratio = reserve.fill_ratio
        if self._is_filling:
            self._is_filling = ratio > CALM_RATIO
        elif ratio >= FILLING_RATIO:
            self._is_filling = True
            text = (
                f"the reserve of events of {self._name} is {ratio:.0%} full: events are folded, then counted"
            )
            details = {"fill_ratio": ratio, "waiting": reserve.waiting}
            row = event_row("event-reserve-filling", "warning", "server", self._name, text, at_us, details)
            reserve.record(
                self._packed(row), event_id=row["event_id"],
                subject=f"server/{self._name}", kind=row["kind"], at_us=at_us,
            )  # fmt: skip


def _about(row: Mapping[str, Any]) -> str:
    """Which of the things that its subject has an event is about."""
    details = row.get("details")
    found = details if isinstance(details, Mapping) else {}
    return "/".join(str(found[name]) for name in TOLD_APART if name in found)


def slots_of(name: str) -> int:
    """Slots of a process; those of a pair ``pair-N`` are as many."""
    return SLOTS_OF.get(name.partition("-")[0], SLOTS)


def packed(row: Mapping[str, Any]) -> bytes:
    """An event as JSON that fits a slot; one that is too long is cut.

    Of the details single values stay as far as there is room, the names that routes and conditions need
    first; ``cut`` is the beginning of all of them.
    """
    data = _encoded(row)
    if len(data) <= MOST_PAYLOAD:
        return data
    names = {name: printable(value, 200) for name, value in row.items() if isinstance(value, str)}
    short = {**row, **names, "text": printable(row.get("text"), _CUT_CHARACTERS), "details": {}}
    details = row.get("details")
    excerpt = printable(strict_json.dumps(details), _CUT_CHARACTERS)
    kept: dict[str, Any] = {}
    room = MOST_PAYLOAD - len(_encoded({**short, "details": {"cut": excerpt}}))
    for name, value in _singles(details if isinstance(details, Mapping) else {}):
        needed = len(_encoded({name: value}))  # its braces make up for the comma
        if needed <= room:
            kept[name] = value
            room -= needed
    return _encoded({**short, "details": {**kept, "cut": excerpt}})


def _singles(details: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Texts, figures and truth values among the details, in the order in which they are kept."""
    singles = [
        (name, value)
        for name, value in details.items()
        if name != "cut" and isinstance(name, str) and isinstance(value, str | int | float)
    ]
    return sorted(singles, key=lambda single: (single[0] not in NAMING, not _is_name(single[1])))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= NAME_CHARACTERS


def _encoded(value: Mapping[str, Any]) -> bytes:
    return strict_json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace")


class LateReserves:
    """Reserves that could not be made when the process started.

    The disk was full, or the predecessor of the process had not ended. They are tried again when an event is
    raised, at most each ``RETRY_NS``; until then the newest events wait in memory.

    Thread: any; ``_lock`` guards all fields.
    """

    def __init__(self, name: str, directory: Path, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._name = name
        self._directory = directory
        self._clock = clock
        self._moments = Moments()
        self._rows: deque[dict[str, Any]] = deque()
        self._tried_ns = clock.monotonic_ns()
        self._is_initialized = False
        self._dropped: Counter[str] = Counter()
        self._raiser: EventRaiser | None = None

    def initialized(self) -> EventRaiser | None:
        """The initialization period has ended; the reserves, if there is room for them now."""
        with self._lock:
            self._is_initialized = True
            if self._raiser is None:
                return self._open()
            self._raiser.initialized()
            return self._raiser

    def record(self, row: Mapping[str, Any]) -> tuple[EventRaiser | None, bool]:
        """The reserves, if there are any now, and whether the event is in them."""
        with self._lock:
            raiser = self._raiser or self._open()
            if raiser is not None:
                return raiser, raiser.record(row) is not None
            self._rows.append({**row, MOMENT: self._moments.now()})
            if len(self._rows) > MOST_WAITING:
                self._dropped[str(self._rows.popleft().get("kind"))] += 1
            return None, False

    def _open(self) -> EventRaiser | None:
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._tried_ns < RETRY_NS:
            return None
        self._tried_ns = now_ns
        try:
            self._raiser = raiser = EventRaiser(self._directory, self._name, self._moments)
        except (OSError, ValueError, MemoryError) as exc:
            log.error("no-event-reserve", process=self._name, problem=str(exc), waiting=len(self._rows))
            return None
        dropped = self._dropped.total()
        log.warning("event-reserve-late", process=self._name, kept=len(self._rows), dropped=dropped)
        if self._is_initialized:
            raiser.initialized()
        while self._rows:
            raiser.record(self._rows.popleft())
        for kind, events in self._dropped.items():
            raiser.count(kind, events)
        return raiser


_raiser: EventRaiser | None = None
_late: LateReserves | None = None


def attach_reserves(name: str, directory: Path | None = None, clock: Clock | None = None) -> None:
    """Open this process's reserves; without a directory, given or in the environment, there are none.

    Where they cannot be made the log says so, events go the way of SQL, and it is tried again later.
    """
    global _raiser, _late  # noqa: PLW0603 - one a process: events are raised from everywhere
    given = os.environ.get(EVENTS_DIR)
    directory = directory or (Path(given) if given else None)
    detach_reserves()
    if directory is None:
        return
    try:
        _raiser = EventRaiser(directory, name)
    except OSError as exc:
        log.error("no-event-reserve", process=name, directory=str(directory), problem=str(exc))
        _late = LateReserves(name, directory, clock or SystemClock())


def initialized() -> None:
    """This process has ended its initialization."""
    global _raiser  # noqa: PLW0603 - see ``attach_reserves``
    if _raiser is not None:
        _raiser.initialized()
    elif _late is not None:
        _raiser = _late.initialized()


def raise_event(row: Mapping[str, Any]) -> bool:
    """Record an event for delivery; whether it was. Any thread.

    Args:
        row: the columns of the table ``events``.
    """
    global _raiser
    if _raiser is None and _late is not None:
        _raiser, is_recorded = _late.record(row)
        return is_recorded
    return _raiser is not None and _raiser.record(row) is not None


def detach_reserves() -> None:
    """Close them, at the end of a process or a test."""
    global _raiser, _late  # noqa: PLW0603 - see ``attach_reserves``
    if _raiser is not None:
        _raiser.close()
    _raiser = _late = None
