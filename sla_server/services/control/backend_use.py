"""What the targets of a backend use, found in whole arrays: a backend may have many thousand.

A loop needs to know what all of them use together, and of single ones those that count: by far the most
are too small to be slowed down. So use is summed here over gateways, and only those that may count become
neighbours.

A ``BackendUse`` says where each target's use is in the tables of use. It holds until the gateways of the
backend, what they carry, their streams or the agreements change; the inventory makes another one then. Not
changed once it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from sla_server.services.control.client_use import COST, LAST_COST, PEAK, ClientUses
from sla_server.services.control.pieces import evenly
from sla_server.services.control.targets import client_of, volume_of
from sla_server.services.control.usage import Floats, GatewayTable, Ints, UsageTable

MOST_LISTED: Final = 16
"""Targets that are looked at one by one though they may not count: texts and figures name fewer."""
MOST_COUNTED: Final = 256
"""Targets that count, as clients of a volume may be many: the largest; some 4 ms of work."""
_VOLUME: Final = (0, 3, 4)  # of ``UsageTable.values``: cost, its peak, that of the newest cut
_CLIENT: Final = (COST, PEAK, LAST_COST)


class Place(NamedTuple):
    """A target at a gateway that is up."""

    target: str
    table: GatewayTable


class BackendUse:
    """See the module. ``names``: the targets, in order of volume and client; ``index``: place by name."""

    def __init__(self, names: Sequence[str], places: Iterable[Place], uses: ClientUses) -> None:
        self.names = names
        self.index = {name: at for at, name in enumerate(names)}
        volumes = {volume: at for at, volume in enumerate(dict.fromkeys(map(volume_of, names)))}
        self._volume: Ints = np.array([volumes[volume_of(name)] for name in names], dtype=np.int64)
        self._uses, self._tables = uses, dict[str, GatewayTable]()
        self._usage: UsageTable | None = None
        columns, targets, numbers, clients = list[int](), list[int](), list[int](), list[int]()
        for target, table in places:
            client = client_of(target)
            if not client:
                use = table.use.get(target)
                if use is not None:
                    self._usage = table.usage_table
                    columns.append(use.place)
                    targets.append(self.index[target])
                continue
            rows = uses.rows_of(table, target)
            if len(rows):
                self._tables[table.gateway_id] = table
                numbers += table.numbers[rows].tolist()
                clients += [self.index[target]] * len(rows)
        self._columns, self._numbers = np.array(columns, np.int64), np.array(numbers, np.int64)
        self._targets = np.array(targets + clients, np.int64)
        self._is_each = self._targets.tolist() == list(range(len(names)))
        self._at_columns, self._at_numbers = evenly(self._columns), evenly(self._numbers)

    def rates(self) -> tuple[Floats, Floats]:
        """Cost rate of each target, as a neighbour has it, and its fading peak; both of shape (names,)."""
        parts = list[list[Floats]]()
        if self._usage is not None:
            parts.append([self._usage.values[row, self._at_columns] for row in _VOLUME])
        if len(self._numbers):
            self._uses.refresh(self._tables.values())
            parts.append([self._uses.values[row, self._at_numbers] for row in _CLIENT])
        count = len(self.names)
        if not parts:
            return np.zeros(count), np.zeros(count)
        smoothed, peak, last = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        use = np.minimum(np.maximum(smoothed, last), peak)
        if self._is_each:  # one place a target
            return use, peak
        cost = np.bincount(self._targets, weights=use, minlength=count)
        peaks = np.bincount(self._targets, weights=peak, minlength=count)
        return np.asarray(cost, np.float64), np.asarray(peaks, np.float64)

    def chosen(self, cost: Floats, wanted: Collection[str], least_ratio: float) -> Ints:
        """Places of the targets that may count, in order.

        Args:
            cost: as ``rates`` has it.
            wanted: names that are chosen in any case, if they are here.
            least_ratio: share of the backend's cost from which on a volume counts, and so its clients may.
        """
        if len(cost) <= MOST_LISTED:
            return np.arange(len(cost))
        by_volume = np.bincount(self._volume, weights=cost)
        may_count = np.flatnonzero((by_volume[self._volume] >= least_ratio * cost.sum()) & (cost > 0))
        largest = np.argsort(-cost, kind="stable")[:MOST_LISTED]
        counting = may_count[np.argsort(-cost[may_count], kind="stable")][:MOST_COUNTED]
        named = np.array([self.index[name] for name in wanted if name in self.index], np.int64)
        return np.unique(np.concatenate((largest, counting, named)))
