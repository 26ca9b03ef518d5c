"""The live snapshot: what pages show, once a second (docs/formats/messages.md, "Live snapshot").

Read-only over the brain's state. Rates and gauges are of the last cuts (at most ``entity.RING_CUTS``);
percentiles are upper edges of histogram buckets, so they flatter nobody. Compliance, budgets, processes,
events and the policy version are the shell's to add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import BUCKETS, COARSE_BUCKETS, SERVICE, percentile_upper_us
from sla_server.services.control import BackendControl
from sla_server.services.entity import RING, GatewayTable
from sla_server.services.live_state import LiveState
from sla_server.services.policy import PolicyManager

VIEW_CUTS: Final = 3
"""Cuts a view sums over: one alone would show sampling noise."""
Hist = npt.NDArray[np.int64]


class _Sum:
    """What the last cuts say of one volume, over its gateways."""

    def __init__(self) -> None:
        self.rates = dict.fromkeys(("iops", "read_iops", "write_iops", "bytes_per_s"), 0.0)
        self.total: Hist = np.zeros(BUCKETS, dtype=np.int64)
        self.service: Hist = np.zeros(COARSE_BUCKETS, dtype=np.int64)
        self.held = self.inflight = self.delay_us = self.done = 0
        self.backend = ""
        self.gateways: list[str] = []

    def add(self, scalars: Hist, hist: tuple[Hist, Hist], seconds: float) -> None:
        """Add one gateway.

        Args:
            scalars: shape (cuts, columns), sums over the volume's rows, a line a cut, newest first.
            hist: total (99) and service (50) counts over the same cuts.
            seconds: their duration.
        """
        reads, writes = (int(scalars[:, RING[name]].sum()) for name in ("reads", "writes"))
        size = int(scalars[:, RING["read_bytes"]].sum() + scalars[:, RING["write_bytes"]].sum())
        for name, count in zip(self.rates, (reads + writes, reads, writes, size), strict=True):
            self.rates[name] += count / seconds
        self.total, self.service = self.total + hist[0], self.service + hist[1]
        self.held += int(scalars[0, RING["held"]])
        self.inflight += int(scalars[0, RING["inflight"]])
        self.delay_us += int(scalars[:, RING["delay_sum_us"]].sum())
        self.done += reads + writes


def _add_table(table: GatewayTable, sums: dict[str, _Sum]) -> None:
    cuts = min(len(table.durations_us), VIEW_CUTS)
    per_volume: dict[str, list[int]] = {volume: [] for volume in table.exports}
    for row, stream in enumerate(table.streams):
        per_volume.setdefault(stream.volume, []).append(row)
    seconds = sum(list(table.durations_us)[:cuts]) / 1e6
    hist = np.concatenate(list(table.hists)[:cuts]) if cuts else None
    for volume, rows in per_volume.items():
        found = sums.setdefault(volume, _Sum())
        found.backend = found.backend or table.backend_of(volume)
        found.gateways.append(table.gateway_id)
        if hist is None or table.state != "up" or not rows:
            continue
        mine = hist[np.isin(hist["row"], rows)]
        dense = np.bincount(mine["bucket"], weights=mine["count"], minlength=SERVICE + COARSE_BUCKETS)
        counts = dense.astype(np.int64)
        total = counts[:BUCKETS] + counts[BUCKETS : 2 * BUCKETS]
        scalars = table.ring[:cuts, :, rows].sum(axis=2)
        found.add(scalars, (total, counts[SERVICE : SERVICE + COARSE_BUCKETS]), seconds)


def _gateways(tables: Iterable[GatewayTable]) -> list[dict[str, Any]]:
    return [
        {
            "gateway_id": t.gateway_id,
            "name": t.name,
            "state": t.state,
            "last_cut_us": t.end_unix_us or None,
            "clock_offset_us": t.offset_us,
            "exports": len(t.exports),
            "streams": len(t.streams),
            "dropped_cuts": t.dropped_cuts,
        }
        for t in tables
    ]


def _volumes(sums: Mapping[str, _Sum], policy: PolicyManager) -> list[dict[str, Any]]:
    capped = {t.volume for t in policy.throttles()}
    return [
        {
            "volume": volume,
            "backend": s.backend,
            **{name: round(rate, 1) for name, rate in s.rates.items()},
            "p50_us": percentile_upper_us(s.total, 50),
            "p95_us": percentile_upper_us(s.total, 95),
            "p99_us": percentile_upper_us(s.total, 99),
            "service_p95_us": percentile_upper_us(s.service, 95),
            "held": s.held,
            "inflight": s.inflight,
            "cap_cost_per_s": policy.effective(volume).cost if volume in capped else None,
            "delay_us": round(s.delay_us / s.done) if s.done else 0,
            "gateways": s.gateways,
        }
        for volume, s in sorted(sums.items())
    ]


def _slas(live: Iterable[LiveState]) -> list[dict[str, Any]]:
    return [
        {
            "name": state.promise.sla,
            "objective": state.promise.objective,
            "priority": state.promise.priority.label,
            "state": state.state,
            "latency_us": round(state.signal.latency_us) if state.signal.latency_us else None,
            "threshold_us": state.signal.threshold_us or state.promise.curve[0].threshold_us,
            "percentile": state.promise.percentile,
            "u": round(state.signal.u, 4),
            "offered_iops": round(state.signal.offered_iops, 1),
            "inexact": state.signal.inexact,
        }
        for state in live
    ]


def _throttles(policy: PolicyManager) -> list[dict[str, Any]]:
    return [
        {
            **{
                key: row[key]
                for key in ("throttle_id", "volume", "backend", "source", "cost_per_s", "ops_per_s")
            },
            **{key: row[key] for key in ("bytes_per_s", "reason", "text", "victim", "state", "expires_us")},
            "since_us": row["requested_us"],
        }
        for row in (throttle.row() for throttle in policy.throttles())
    ]


def _backends(tables: Iterable[GatewayTable], controls: Mapping[str, BackendControl]) -> list[dict[str, Any]]:
    cost: dict[str, float] = {}
    for table in tables:
        for volume in table.volumes:
            use = table.use[volume].cost_per_s if table.state == "up" else 0.0
            backend = table.backend_of(volume)
            cost[backend] = cost.get(backend, 0.0) + use
        for backend in table.exports.values():
            cost.setdefault(backend, 0.0)
    return [
        {
            "backend": backend,
            "cost_per_s": round(rate, 1),
            "cap_cost_per_s": round(c.allowed, 1) if (c := controls.get(backend)) and c.active else None,
            "phase": controls[backend].phase.value if backend in controls else "idle",
        }
        for backend, rate in sorted(cost.items())
    ]


def snapshot(
    mode: str,
    tables: Mapping[str, GatewayTable],
    live: Mapping[tuple[str, str], LiveState],
    policy: PolicyManager,
    controls: Mapping[str, BackendControl],
    unix_us: int,
) -> dict[str, Any]:
    """The view at ``unix_us``."""
    sums: dict[str, _Sum] = {}
    for table in tables.values():
        _add_table(table, sums)
    return {
        "at_us": unix_us,
        "mode": mode,
        "gateways": _gateways(tables.values()),
        "volumes": _volumes(sums, policy),
        "slas": _slas(live.values()),
        "throttles": _throttles(policy),
        "backends": _backends(tables.values(), controls),
    }
