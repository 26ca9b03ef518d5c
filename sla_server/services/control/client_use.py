"""Recent use of single clients of a volume, summed on demand, in whole arrays.

The use of a volume is kept up with each cut (``usage.UsageTable``); that of its clients is asked for only
while one of them has a cap, or a loop looks for neighbours. So it is made of the last cuts, which the tables
keep anyway, and nothing is added to the path of every cut. A question about many gateways sums all of them at
once, and only those that had a cut since they were summed last: what it costs follows from the rows of those
cuts, not from how many volumes are divided.

State: ``values``, a column a stream as ``GatewayTable.numbers`` counts them, and of which cut each gateway's
are. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from sla_server.agreements.selectors import matches
from sla_server.services.control.pieces import Pick, evenly
from sla_server.services.control.targets import client_of, is_glob, volume_of, whole_client_of
from sla_server.services.control.usage import RECENT, RECENT_CUTS, Floats, GatewayTable, Ints, Recent, Usage


class ClientUse(NamedTuple):
    """Use of one client through one gateway; the words are those of ``usage.Usage``.

    Rates are means over the last cuts, the peak is that of the busiest of them; gauges are of the newest.
    """

    cost_per_s: float = 0.0
    ops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    peak_cost_per_s: float = 0.0
    last_cost_per_s: float = 0.0
    last_ops_per_s: float = 0.0
    last_bytes_per_s: float = 0.0
    held: int = 0
    inflight: int = 0


COST: Final = ClientUse._fields.index("cost_per_s")
PEAK: Final = ClientUse._fields.index("peak_cost_per_s")
LAST_COST: Final = ClientUse._fields.index("last_cost_per_s")
_HELD: Final = ClientUse._fields.index("held")


class _Known(NamedTuple):
    """What was summed of a gateway: up to which cut, of how many streams; how long each time was, by age."""

    newest: Recent | None
    streams: int
    spans_s: tuple[float, ...]


class _Rows:
    """Rows of a gateway's table by volume and client; rows are only added.

    ``globs``: of a target that is a glob, how many clients were looked at, whom it is not for, and its rows.
    ``whole``: of a whole client its rows, and what they were found by.
    """

    def __init__(self) -> None:
        self.count = 0
        self.by_volume: dict[str, dict[str, int]] = {}
        self.globs: dict[str, tuple[int, tuple[str, ...], Ints]] = {}
        self.whole: dict[str, tuple[tuple[object, ...], Ints]] = {}

    def of_glob(self, target: str, others: tuple[str, ...]) -> Ints:
        """Rows of the clients of a volume that match the target's glob, and none of ``others``."""
        clients, globs = self.by_volume.get(volume_of(target), {}), (client_of(target),)
        known = self.globs.get(target)
        if known is None or known[:2] != (len(clients), others):
            rows = [
                row
                for client, row in clients.items()
                if matches(client, globs) and not matches(client, others)
            ]
            known = self.globs[target] = len(clients), others, np.array(rows, np.int64)
        return known[2]

    def of_whole(self, client: str, table: GatewayTable) -> Ints:
        """Rows of a client on all volumes of which caps of clients have an effect here."""
        by = self.count, table.only_seen, table.refused, table.no_groups
        known = self.whole.get(client)
        if known is None or known[0] != by:
            rows = [
                clients[client]
                for volume, clients in self.by_volume.items()
                if client in clients and volume not in table.no_groups and table.can_throttle(volume)
            ]
            known = self.whole[client] = by, np.array(rows, np.int64)
        return known[1]

    def read(self, table: GatewayTable) -> None:
        for row in range(self.count, len(table.streams)):
            stream = table.streams[row]
            self.by_volume.setdefault(stream.volume, {})[stream.client] = row
        self.count = len(table.streams)


class ClientUses:
    """See the module.

    Attributes:
        values: shape (len(ClientUse._fields), streams of all gateways); those of gateways that nothing was
            asked about since their newest cut are old. Grown by doubling.
        sums, summed_rows: how often use was summed, and how many rows of cuts were read for it.

    ``except_of``: names and globs of the clients that a target with a glob is not for.
    """

    def __init__(self, except_of: Callable[[str], tuple[str, ...]] = lambda _target: ()) -> None:
        self.except_of = except_of
        self.values: Floats = np.zeros((len(ClientUse._fields), 64))
        self._rates: Floats = np.zeros((3, RECENT_CUTS, 64))  # cost, I/Os and bytes a second, newest first
        self.sums = self.summed_rows = 0
        self._known: dict[str, _Known] = {}
        self._rows: dict[str, _Rows] = {}

    def rows(self, table: GatewayTable, volume: str) -> dict[str, int]:
        """Row of every client of a volume that a gateway has seen."""
        return self._rows_of(table).by_volume.get(volume, {})

    def _rows_of(self, table: GatewayTable) -> _Rows:
        found = self._rows.get(table.gateway_id)
        if found is None:
            found = self._rows[table.gateway_id] = _Rows()
        if found.count != len(table.streams):
            found.read(table)
        return found

    def rows_of(self, table: GatewayTable, target: str) -> Ints:
        """Rows of the clients that a target is: one, those of a glob, of a whole one; none if never seen."""
        if whole := whole_client_of(target):
            return self._rows_of(table).of_whole(whole, table)
        if is_glob(target):
            return self._rows_of(table).of_glob(target, self.except_of(target))
        row = self.rows(table, volume_of(target)).get(client_of(target))
        return np.array([] if row is None else [row], np.int64)

    def of(self, table: GatewayTable, target: str) -> Usage | ClientUse | None:
        """Recent use of a target through a gateway; None if it was never seen there."""
        client, is_whole = client_of(target), bool(whole_client_of(target))
        if not (client or is_whole):
            return table.use.get(target)
        found: list[float]
        if is_whole or is_glob(target):
            rows = self.rows_of(table, target)
            if not len(rows):
                return None
            self.refresh((table,))
            found = self.values[:, table.numbers[rows]].sum(axis=1).tolist()
        else:
            row = self.rows(table, volume_of(target)).get(client)
            if row is None:
                return None
            self.refresh((table,))
            found = self.values[:, table.numbers[row]].tolist()
        *rates, held, inflight = found
        return ClientUse._make((*rates, int(held), int(inflight)))

    def volumes(self, table: GatewayTable, client: str) -> list[str]:
        """Every volume that a client was seen to use through a gateway, and that it still carries."""
        found = self._rows_of(table).by_volume.items()
        return [volume for volume, clients in found if client in clients and volume in table.use]

    def clients(self, table: GatewayTable, volume: str) -> list[str]:
        """Every client of a volume that a gateway has seen."""
        return list(self.rows(table, volume))

    def costs(self, table: GatewayTable, volume: str) -> dict[str, float]:
        """Cost rate of every client of a volume that a gateway has seen, the newest cut in full."""
        rows = self.rows(table, volume)
        self.refresh((table,))
        numbers = table.numbers[list(rows.values())]
        cost = np.maximum(self.values[COST, numbers], self.values[LAST_COST, numbers])
        return dict(zip(rows, cost.tolist(), strict=True))

    def refresh(self, tables: Iterable[GatewayTable]) -> None:
        """Sum the last cuts of those of these gateways that had one since."""
        stale = []
        for table in tables:
            newest, known = table.recent[0] if table.recent else None, self._known.get(table.gateway_id)
            if known is None or known.newest is not newest or known.streams != len(table.streams):
                stale.append(table)
        if stale:
            self._sum(stale)

    def _sum(self, tables: Sequence[GatewayTable]) -> None:
        """Use of every stream of these gateways; one that is not in the last cuts had none."""
        numbers = np.concatenate([table.numbers for table in tables])
        if not len(numbers):
            return
        while self.values.shape[1] <= numbers.max():
            self.values = np.concatenate((self.values, np.zeros_like(self.values)), axis=1)
            self._rates = np.concatenate((self._rates, np.zeros_like(self._rates)), axis=2)
        self.sums += 1
        followed = [table for table in tables if self._has_followed(table)]
        others = [table for table in tables if not self._has_followed(table)]
        at = evenly(numbers)
        if followed:
            self._take_next(followed, None if others else at)
        if others:
            self._take_all(others)
        seconds = np.array([self._known[table.gateway_id].spans_s for table in tables]).T
        sizes = [len(table.streams) for table in tables]
        weight = np.repeat(seconds / np.maximum(seconds.sum(axis=0), 1e-9), sizes, axis=1)
        # A time that caps have ended at once has a high rate with a few I/Os: that is no peak in full.
        in_full = np.minimum(10 * seconds / np.maximum(seconds.max(axis=0), 1e-9), 1.0)
        rates, in_full = self._rates[:, :, at], np.repeat(in_full, sizes, axis=1)
        mean, peak, last = (rates * weight).sum(axis=1), (rates[0] * in_full).max(axis=0), rates[:, 0]
        for into, part in zip(self.values[:_HELD], (*mean, peak, *last), strict=True):
            into[at] = part

    def _has_followed(self, table: GatewayTable) -> bool:
        """Whether one cut came since, of a time of its own."""
        known, cuts = self._known.get(table.gateway_id), table.recent
        if known is None or known.newest is None or known.streams != len(table.streams) or len(cuts) < 2:
            return False
        if not known.streams:  # all rows of its cuts are of streams not announced
            return False
        return cuts[1] is known.newest and cuts[0].number == known.newest.number + 1

    def _take_next(self, tables: Sequence[GatewayTable], at: Pick | None) -> None:
        """The newest cut of each of these; what was known of the others is a time older.

        ``at``: numbers of all their streams, if they are known.
        """
        if at is None:
            at = np.concatenate([table.numbers for table in tables])
        cuts, rates = [table.recent[0] for table in tables], self._rates
        rates[:, 1:, at] = rates[:, :-1, at]
        rates[:, 0, at], self.values[_HELD:, at] = 0.0, 0.0
        rows = np.concatenate([cut.rows for cut in cuts])
        known, parts = rows >= 0, _rates_of(cuts)
        cells = np.concatenate([table.numbers[cut.rows] for table, cut in zip(tables, cuts, strict=True)])
        if not known.all():
            cells, parts = cells[known], parts[:, known]
        self.summed_rows += len(rows)
        into = evenly(cells)
        for row, part in zip((*rates[:, 0], *self.values[_HELD:]), parts, strict=True):
            row[into] = part
        for table, cut in zip(tables, cuts, strict=True):
            spans_s = (_span_s(cut), *self._known[table.gateway_id].spans_s[:-1])
            self._known[table.gateway_id] = _Known(cut, len(table.streams), spans_s)

    def _take_all(self, tables: Sequence[GatewayTable]) -> None:
        """The last cuts of each of these, whatever was known."""
        numbers = np.concatenate([table.numbers for table in tables])
        total = len(numbers)
        # Of each time and stream. A time has several cuts where the planes of a gateway are apart; each of
        # them says the rates of its own rows.
        cuts, first_cells, first = list[Recent](), list[int](), 0
        for table in tables:
            spans_s = [0.0] * RECENT_CUTS
            for each in table.recent:
                age = table.recent[0].number - each.number
                spans_s[age] = max(spans_s[age], _span_s(each))
                cuts.append(each)
                first_cells.append(age * total + first)
            newest = table.recent[0] if table.recent else None
            self._known[table.gateway_id] = _Known(newest, len(table.streams), tuple(spans_s))
            first += len(table.streams)
        sums = np.zeros((5, RECENT_CUTS, total))
        if cuts:
            rows = np.concatenate([each.rows for each in cuts])
            self.summed_rows += len(rows)
            cells = rows + np.repeat(first_cells, [len(each.rows) for each in cuts])
            known = rows >= 0
            for index, part in enumerate(_rates_of(cuts)):
                found = np.bincount(cells[known], weights=part[known], minlength=RECENT_CUTS * total)
                sums[index] = found.reshape(RECENT_CUTS, total)
        self._rates[:, :, numbers], self.values[_HELD:, numbers] = sums[:3], sums[3:, 0]


def _rates_of(cuts: Sequence[Recent]) -> Floats:
    """Of each row cost, I/Os and bytes a second, and what was held and under way; shape (5, rows)."""
    scalars = np.concatenate([each.scalars for each in cuts], axis=1)
    span_s = np.repeat([_span_s(each) for each in cuts], [len(each.rows) for each in cuts])
    found = np.empty((5, len(span_s)))
    found[0] = scalars[RECENT["cost_milli"]] / 1000 / span_s
    found[1] = (scalars[RECENT["reads"]] + scalars[RECENT["writes"]]) / span_s
    found[2] = (scalars[RECENT["read_bytes"]] + scalars[RECENT["write_bytes"]]) / span_s
    found[3], found[4] = scalars[RECENT["held"]], scalars[RECENT["inflight"]]
    return found


def _span_s(cut: Recent) -> float:
    return max(cut.span_us[1] - cut.span_us[0], 1) / 1e6
