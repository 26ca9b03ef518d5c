"""Of which agreements nothing is promised at present: maintenance, and times outside service hours.

Judging asks the same of slices (``InForce.excluded``). Here it is asked of the moment, once a second, so that
control slows no volume down, and no page shows a violation, for what is not promised. Agreements without
either are not asked at all. Those with the same hours are asked together; the others take turns,
``MOST_ASKED`` a time, so a change may be seen some seconds late where there are very many.

State: the answer of each agreement. Belongs to the main loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sla_server.agreements.promise import InForce

MOST_ASKED: Final = 1000
"""Between two looks: some 20 ms."""


class Exclusions:
    """See the module."""

    def __init__(self) -> None:
        self._items: list[InForce] = []
        self._next = 0
        self._found: dict[str, str] = {}

    def set_items(self, items: Iterable[InForce]) -> None:
        """The agreements in force, complete."""
        self._items = [item for item in items if item.may_be_excluded]
        names = {item.name for item in self._items}
        self._found = {name: reason for name, reason in self._found.items() if name in names}
        self._next = 0

    def check_all(self, now_us: int) -> Mapping[str, str]:
        """As ``look``, of every agreement: before anything is decided under agreements that are new here."""
        self._next = 0
        found = self.check(now_us)
        while self._next:
            found = self.check(now_us)
        return found

    def check(self, now_us: int) -> Mapping[str, str]:
        """Agreements that promise nothing now, and why."""
        items, first = self._items, self._next
        asked = items[first : first + MOST_ASKED]
        self._next = first + MOST_ASKED if first + MOST_ASKED < len(items) else 0
        answers: dict[tuple[object, ...], str | None] = {}
        found = dict(self._found)
        for item in asked:
            key = key_of(item)
            if key not in answers:
                answers[key] = item.excluded(now_us)
            if reason := answers[key]:
                found[item.name] = reason
            else:
                found.pop(item.name, None)
        self._found = found
        return found


def key_of(item: InForce) -> tuple[object, ...]:
    """What the answer depends on: equal keys have equal answers. Parts of agreements are shared objects."""
    spec = item.agreement.spec
    parts = (spec.service_hours, spec.maintenance, spec.window)
    key = (*(id(part) for part in parts), tuple(map(id, item.work)), tuple(map(id, item.calendar)))
    if spec.maintenance.max_per_period is None or not (spec.maintenance.windows or item.work):
        return key
    # How much of it is used up depends on when which version was in force.
    return (*key, item.applied_us, item.ended_us, tuple(map(id, item.former)))
