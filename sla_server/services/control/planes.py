"""Data planes whose statistics are missing from a gateway's cuts: of their streams nothing is known then.

A gateway has several sources of statistics, data planes and its host, which usually share a cut. A plane that
hangs is in none, and the cuts of the others go on. A stream that these leave out is not idle: no one has
counted it. Its promise has no data, as if its gateway was gone (SLA-MODEL.md 2, "Never good without proof").

Which planes are in a cut follows from its header (``pmdaemon.wire.cut``): key ``of`` names those of a cut of
several sources; else a plane is in the cut if its mark in ``dp`` has changed since the cut before. Where cuts
between were not seen, or of the first one, all whose marks changed are taken to be in it. A plane that ``dp``
names no longer has been removed, or has another name: whose its streams are is not known then.

Whose a stream is: that of the newest cut that had it, row by row in ``of``, else the only source of the cut.
An agent of before does not send ``of``; a stream that only its cuts of several planes had may be of any of
them, so it is missing as soon as one of them is.

State: of each gateway that has planes their marks, and when each was in a cut; the planes of streams, and
which are missing, are arrays of the ``StreamStates``. Changed only by the controller's one thread. No clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from pmdaemon.wire.cut import Cut
from pmdaemon.wire.plane_marks import marks_of, rows_by_plane
from sla_server.services.control.pieces import Bools, Ints
from sla_server.services.control.scopes import RowPlan
from sla_server.services.control.stream_states import NO_PLANE, UNKNOWN_PLANE, StreamStates
from sla_server.services.control.usage import GatewayTable

_FIRST: Final = NO_PLANE + 1


class MissingPlanes(NamedTuple):
    """Whether planes are missing from a cut; and whether one of them has *stopped*."""

    some: bool = False
    has_stopped: bool = False


NONE_MISSING: Final = MissingPlanes()


@dataclass(slots=True)
class _Gateway:
    """What is known of one gateway.

    ``seen_ns``: when the newest cut with each plane came; ``learned``: what streams were learned from;
    ``whole``: streams (``RowPlan.ids``) and ``of`` of the newest cut, if it had all planes and nothing is to
    be learned from it any more.
    """

    marks: dict[str, int] = field(default_factory=dict)
    seen_ns: dict[str, int] = field(default_factory=dict)
    learned: tuple[bytes, Any] | None = None
    whole: tuple[bytes, Any] | None = None

    def goes_on(self, said: Any, ids: bytes, of: dict[Any, Any] | None) -> bool:
        """Whether a cut of the same streams has all the planes again, as nearly every cut does."""
        known = self.marks
        if self.whole != (ids, of) or not isinstance(said, dict) or said.keys() != known.keys():
            return False
        return all(
            type(mark) is int and (of is not None or known[name] != mark) for name, mark in said.items()
        )


class PlaneStates:
    """See the module; ``silent_s``: age of a plane's newest statistics from which on it is *stopped*."""

    def __init__(self, streams: StreamStates, silent_s: float) -> None:
        self._streams = streams
        self._silent_ns = silent_s * 1e9
        self._gateways: dict[str, _Gateway] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    def check(self, table: GatewayTable, cut: Cut, plan: RowPlan, now_ns: int) -> MissingPlanes:
        """Note what an accepted cut of a gateway says; whether planes of it are missing from the cut."""
        said = cut.extra.get("dp")
        if not said:
            return NONE_MISSING
        of = cut.extra.get("of")
        of = of if isinstance(of, dict) else None
        gateway = self._gateways.get(table.gateway_id)
        if gateway is not None and gateway.goes_on(said, plan.ids, of):
            gateway.marks, gateway.seen_ns = said, dict.fromkeys(said, now_ns)
            return NONE_MISSING
        if not (marks := marks_of(said)):
            return NONE_MISSING
        if gateway is None:
            gateway = self._gateways[table.gateway_id] = _Gateway()
        if of is not None:
            inside = frozenset(of)
        else:
            inside = frozenset(name for name, mark in marks.items() if gateway.marks.get(name) != mark)
        for name in gateway.marks.keys() - marks.keys():
            self._remove(gateway, table, name)
        has_stopped = False
        for name in marks:
            is_inside = name in inside
            if is_inside or name not in gateway.seen_ns:
                gateway.seen_ns[name] = now_ns
            is_stopped = now_ns - gateway.seen_ns[name] > self._silent_ns
            has_stopped |= is_stopped
            self._streams.set_missing(self._number(table, name), not is_inside, is_stopped)
        gateway.marks = marks
        self._learn(gateway, table, plan, of, None if table.skipped else inside)
        is_whole = inside.issuperset(marks)
        gateway.whole = None
        if is_whole and not (of is None and table.skipped):
            gateway.whole = plan.ids, of
        return MissingPlanes(not is_whole, has_stopped)

    def _remove(self, gateway: _Gateway, table: GatewayTable, name: str) -> None:
        """A plane is no longer in the agent's configuration, perhaps for it has another name now.

        Whose its streams are then is not known before they have I/O again.
        """
        number = self._number(table, name)
        gateway.seen_ns.pop(name, None)
        self._streams.set_missing(number, False)
        mine = table.numbers[self._streams.plane[table.numbers] == number]
        self._streams.plane[mine] = UNKNOWN_PLANE
        gateway.learned = gateway.whole = None

    def _number(self, table: GatewayTable, name: str) -> int:
        return self._numbers.setdefault((table.gateway_id, name), _FIRST + len(self._numbers))

    def _learn(
        self,
        gateway: _Gateway,
        table: GatewayTable,
        plan: RowPlan,
        of: dict[Any, Any] | None,
        inside: frozenset[str] | None,
    ) -> None:
        """Whose the streams of a cut are; ``inside``: the planes in it, None if that is not sure."""
        source: Any = of if of is not None else inside
        if source is None or gateway.learned == (plan.ids, source):
            return
        if of is not None:
            planes = np.full(len(plan.rows), NO_PLANE)
            for name, rows in rows_by_plane(of, len(plan.rows)).items():
                planes[rows] = self._number(table, name)
        elif inside is not None and len(inside) <= 1:
            number = next((self._number(table, name) for name in inside), NO_PLANE)
            planes = np.full(len(plan.rows), number)
        else:
            return
        gateway.learned = plan.ids, source
        self._streams.plane[plan.numbers] = planes[plan.known]

    def exports_changed(self, table: GatewayTable) -> None:
        """A gateway says what it exports: no plane is missing for a volume that it exports no more."""
        gateway = self._gateways.get(table.gateway_id)
        if gateway is None:
            return
        gone = np.array([volume not in table.exports for volume in table.volumes], np.bool_)
        if gone.any():
            self._streams.plane[table.numbers[gone[table.volume_of_row]]] = NO_PLANE
            gateway.learned = gateway.whole = None

    def stopped(self, table: GatewayTable, mask: Bools) -> dict[str, float]:
        """Planes of some streams of a gateway that are in no cut, and for how long (s).

        Args:
            table: of the gateway.
            mask: which of its streams, shape (streams,).
        """
        gateway, newest_ns = self._gateways.get(table.gateway_id), table.last_cut_ns
        if gateway is None or newest_ns is None:
            return {}
        numbers: Ints = np.unique(self._streams.plane[table.numbers[: len(mask)][mask]])
        return {
            name: (newest_ns - seen_ns) / 1e9
            for name, seen_ns in gateway.seen_ns.items()
            if newest_ns - seen_ns > self._silent_ns
            and (UNKNOWN_PLANE in numbers or self._number(table, name) in numbers)
        }
