"""Recent use of single clients of a volume, summed on demand.

The use of a volume is kept up with each cut (``usage.UsageTable``); that of its clients is asked for only
while one of them has a cap, or a loop looks for neighbours. So it is made of the last cuts, which the tables
keep anyway, and nothing is added to the path of every cut.

State: what was summed for a volume at a gateway, until that gateway's next cut. Changed only by the
controller's one thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from sla_server.services.control.targets import client_of, volume_of
from sla_server.services.control.usage import RECENT, GatewayTable, Recent, Usage


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


NO_USE: Final = ClientUse()


class _Known(NamedTuple):
    """What was summed: of which newest cut, and of how many streams of the gateway."""

    newest: Recent | None
    streams: int
    uses: dict[str, ClientUse]


class ClientUses:
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}

    def of(self, table: GatewayTable, target: str) -> Usage | ClientUse | None:
        """Recent use of a target through a gateway; None if it was never seen there."""
        client = client_of(target)
        if not client:
            return table.use.get(target)
        return self.clients(table, volume_of(target)).get(client)

    def clients(self, table: GatewayTable, volume: str) -> dict[str, ClientUse]:
        """Recent use of every client of a volume that a gateway has seen."""
        key, newest = (table.gateway_id, volume), table.recent[0] if table.recent else None
        known = self._known.get(key)
        if known is None or known.newest is not newest or known.streams != len(table.streams):
            known = _Known(newest, len(table.streams), clients_of(table, volume))
            self._known[key] = known
        return known.uses


def clients_of(table: GatewayTable, volume: str) -> dict[str, ClientUse]:
    """Use of every client of a volume at a gateway; one that is not in the last cuts had none."""
    if volume not in table.use:
        return {}
    rows = np.flatnonzero(table.volume_of_row == table.volumes.index(volume))
    names = [table.streams[row].client for row in rows.tolist()]
    if not table.recent:
        return dict.fromkeys(names, NO_USE)
    # By time, newest first: cost, ops and bytes a second, held, inflight of each row. A time has several cuts
    # where the planes of a gateway are apart; each of them says the rates of its own rows.
    times = list(dict.fromkeys(each.number for each in table.recent))
    sums, seconds = np.zeros((len(times), 5, len(rows))), np.zeros(len(times))
    for each in table.recent:
        at, span_s = times.index(each.number), max(each.span_us[1] - each.span_us[0], 1) / 1e6
        seconds[at] = max(seconds[at], span_s)
        chosen = np.flatnonzero(np.isin(each.rows, rows))
        place = np.searchsorted(rows, each.rows[chosen])
        scalars = each.scalars[:, chosen]
        sums[at, 0, place] += scalars[RECENT["cost_milli"]] / 1000 / span_s
        sums[at, 1, place] += (scalars[RECENT["reads"]] + scalars[RECENT["writes"]]) / span_s
        sums[at, 2, place] += (scalars[RECENT["read_bytes"]] + scalars[RECENT["write_bytes"]]) / span_s
        sums[at, 3, place] += scalars[RECENT["held"]]
        sums[at, 4, place] += scalars[RECENT["inflight"]]
    mean = (sums[:, :3] * seconds[:, None, None]).sum(axis=0) / seconds.sum()
    last, peak = sums[0, :3], sums[:, 0].max(axis=0)
    figures = np.vstack((mean, peak[None], last)).T.tolist()
    gauges = sums[0, 3:].astype(int).T.tolist()
    return {
        name: ClientUse(*rates, *counts) for name, rates, counts in zip(names, figures, gauges, strict=True)
    }
