"""One row of the bank as a tracker, one piece of a batch as a value: doors between arrays and objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import Promise
from sla_server.services.control.signal import NEVER, Floats, Pieces, SignalTable
from sla_server.services.control.windows import (
    NOTHING,
    Piece,
    Signal,
    SignalWindow,
    WindowTracker,
    work_out,
)


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """One closed window of a row, as ``windows.work_out`` and a tracker read it."""

    offered_iops: float
    done: int
    missed: dict[int, int]
    hist: npt.NDArray[Any]
    inexact: bool
    excused: float


class SignalRow:
    """One row as a tracker: what ``WindowTracker`` answers, it answers."""

    __slots__ = ("_bank", "_said", "row")

    def __init__(self, bank: SignalTable, row: int) -> None:
        self._bank, self.row = bank, row
        self._said: tuple[int, float, Signal] | None = None

    @property
    def promise(self) -> Promise:
        """Whose windows these are."""
        promise = self._bank.promises[self.row]
        assert promise is not None  # a freed row has no tracker left
        return promise

    @property
    def last_piece_ns(self) -> int | None:
        """When the last piece came."""
        return _time(self._bank.last_ns[self.row])

    @property
    def idle(self) -> bool:
        """See ``WindowTracker.idle``."""
        first_ns, last_ns = _time(self._bank.first_ns[self.row]), self.last_piece_ns
        if first_ns is None or last_ns is None:
            return False
        active_ns = _time(self._bank.active_ns[self.row])
        since_ns = first_ns if active_ns is None else active_ns
        return last_ns - since_ns >= self._bank.settings.idle_release_s * 1e9

    def reset(self) -> None:
        """Forget all windows."""
        self._bank.reset(self.row)

    def signal(self, r_on: float) -> Signal:
        """See ``WindowTracker.signal``."""
        bank, row = self._bank, self.row
        if not bank.count[row]:
            return NOTHING
        version = int(bank.version[row])
        if self._said is None or self._said[:2] != (version, r_on):
            said = work_out(self.closed(), self.promise, bank.settings, r_on)
            self._said = (version, r_on, said)
        return self._said[2]

    def closed(self) -> list[ClosedWindow]:
        """Closed windows, oldest first."""
        bank, row, found = self._bank, self.row, []
        count, pos = int(bank.count[row]), int(bank.pos[row])
        for age in range(count):
            slot = row * bank.depth + (pos - count + age) % bank.depth
            missed = _by_threshold(self.promise, bank.w_missed[slot])
            found.append(
                ClosedWindow(
                    float(bank.w_iops[slot]),
                    int(bank.w_done[slot]),
                    missed,
                    bank.w_hist[slot].astype(np.int64),
                    bool(bank.w_inexact[slot]),
                    float(bank.w_excused[slot]),
                )
            )
        return found

    def leave(self) -> WindowTracker:
        """The row as a tracker of its own, because its promise reaches a second gateway; the row is freed."""
        bank, row = self._bank, self.row
        tracker = WindowTracker(bank.settings, self.promise)
        tracker.windows.extend(self.closed())
        tracker.first_piece_ns = _time(bank.first_ns[row])
        tracker.last_piece_ns, tracker.last_active_ns = self.last_piece_ns, _time(bank.active_ns[row])
        if bank.o_covered[row]:
            tracker.open = SignalWindow(
                covered_us={bank.gateways[row]: int(bank.o_covered[row])},
                offered={bank.gateways[row]: float(bank.o_offered[row])},
                done=int(bank.o_done[row]),
                missed=_by_threshold(self.promise, bank.o_missed[row]),
                hist=bank.o_hist[row].astype(np.int64),
                inexact=bool(bank.o_inexact[row]),
                excused=float(bank.o_excused[row]),
            )
        bank.free(row)
        return tracker


def piece_at(pieces: Pieces, index: int, gateway_id: str, promise: Promise) -> Piece:
    """One of the pieces as a value, for a tracker of its own."""
    return Piece(
        gateway_id,
        int(pieces.covered_us[index]),
        float(pieces.offered[index]),
        int(pieces.done[index]),
        _by_threshold(promise, pieces.missed[index]),
        pieces.hist[index].astype(np.int64),
        int(pieces.waiting[index]),
        bool(pieces.inexact[index]),
        float(pieces.excused[index]),
    )


def _by_threshold(promise: Promise, missed: Floats) -> dict[int, int]:
    return {step.threshold_us: int(missed[index]) for index, step in enumerate(promise.curve)}


def _time(value: Any) -> int | None:
    return None if value == NEVER else int(value)
