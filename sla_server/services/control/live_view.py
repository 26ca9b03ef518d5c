"""The live snapshot: what pages show, once a second (docs/formats/messages.md, "Live snapshot").

Read-only over the controller's state. Rates are of the last cuts (``usage.RECENT_CUTS``);
percentiles are upper edges of histogram buckets, so they never flatter. Compliance, budgets, processes,
events and the policy version are added by the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.histogram import (
    BUCKETS,
    COARSE_BUCKETS,
    DELAY,
    SERVICE,
    WIRE_BUCKETS,
    highest_upper_us,
    percentile_upper_us,
    percentiles_upper_us,
)
from pmdaemon.wire.rates import NO_CAPS
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decision_log import rates_figures
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.live_state import LiveState
from sla_server.services.control.planes import PlaneStates
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.storage_faults import StorageFaults
from sla_server.services.control.stream_states import APART_US
from sla_server.services.control.throttle import SAME_RATIO, Throttle
from sla_server.services.control.usage import RECENT, GatewayTable, UsageTable
from sla_server.services.control.verdicts import Signal
from sla_server.services.control.windows import RETIRED_S

RATES: Final = ("cost_per_s", "ops_per_s", "bytes_per_s")
MOST_TEXT: Final = 400
"""Characters of a throttle's text shown: it names all volumes of a large backend. The whole is in SQL."""
MOST_VICTIMS: Final = 50
"""Promises named that the loop of one backend helps."""
_URGENT: Final = (
    "violating",
    "at-risk",
    "out-of-curve",
    "ok",
    "no-data",
    "not-applicable",
    "idle",
    "excluded",
)
_PACKED: Final = "<i8"  # HIST_DTYPE as one number: row, bucket << 16, count << 32
Hist = npt.NDArray[np.int64]
Key = tuple[str, str]
Interval = tuple[int, int]


class _Sum:
    """What the last cuts say of one volume, over its gateways."""

    def __init__(self) -> None:
        self.rates = dict.fromkeys(("iops", "read_iops", "write_iops", "bytes_per_s"), 0.0)
        self.total: Hist = np.zeros(BUCKETS, dtype=np.int64)
        self.service: Hist = np.zeros(COARSE_BUCKETS, dtype=np.int64)
        self.delay: Hist = np.zeros(COARSE_BUCKETS, dtype=np.int64)
        self.held = self.inflight = self.delay_us = self.done = 0
        self.backend = ""
        self.gateways: list[str] = []
        self.is_silent = True

    def add(self, scalars: Hist, hist: tuple[Hist, Hist, Hist], seconds: float) -> None:
        """Add one gateway.

        Args:
            scalars: shape (cuts, columns), sums over the volume's rows, a line a cut.
            hist: total (99), service and delay (50) counts over the same cuts.
            seconds: that they cover.
        """
        reads, writes = (int(scalars[:, RECENT[name]].sum()) for name in ("reads", "writes"))
        size = int(scalars[:, RECENT["read_bytes"]].sum() + scalars[:, RECENT["write_bytes"]].sum())
        for name, count in zip(self.rates, (reads + writes, reads, writes, size), strict=True):
            self.rates[name] += count / seconds
        self.total, self.service = self.total + hist[0], self.service + hist[1]
        self.delay = self.delay + hist[2]
        self.delay_us += int(scalars[:, RECENT["delay_sum_us"]].sum())
        self.done += reads + writes


def _sum_of(volume: str, carriers: Iterable[GatewayTable], spoke_after_ns: int) -> _Sum:
    """What a volume's gateways say; those that said nothing since then say nothing of now."""
    found = _Sum()
    for table in carriers:
        if not table.carries(volume):
            continue
        found.backend = found.backend or table.backend_of(volume)
        found.gateways.append(table.gateway_id)
        speaks = table.last_cut_ns is not None and table.last_cut_ns >= spoke_after_ns
        if table.recent and table.state == "up" and volume in table.use and speaks:
            found.is_silent = False
            found.add(*_recent_of(table, table.volumes.index(volume)))
            found.held += table.use[volume].held
            found.inflight += table.use[volume].inflight
    return found


def _recent_of(table: GatewayTable, index: int) -> tuple[Hist, tuple[Hist, Hist, Hist], float]:
    """Scalars by cut and histograms, of one volume at one gateway; and the seconds they cover."""
    scalars, present, absent = [], list[Interval](), list[Interval]()
    entries: list[Hist] = []
    for each in table.recent:
        of_volume = table.volume_of_row[each.rows] == index
        of_volume &= each.rows >= 0
        at = np.flatnonzero(of_volume)
        if not len(at):
            absent.append(each.span_us)
            continue
        present.append(each.span_us)
        scalars.append(each.sums_of(at))
        packed = each.hist.view(_PACKED)
        row = packed & 0xFFFF
        entries.append(packed[row == at[0] if len(at) == 1 else of_volume[row]])
    dense = _dense(entries)
    total = dense[:BUCKETS] + dense[BUCKETS : 2 * BUCKETS]
    by_cut = np.array(scalars).reshape(len(scalars), len(RECENT))
    return by_cut, (total, dense[SERVICE:DELAY], dense[DELAY:]), _covered_s(present, absent)


def _dense(entries: Sequence[Hist]) -> Hist:
    """Counts by bucket of the wire, of HIST_DTYPE entries as one number each."""
    if not entries:
        return np.zeros(WIRE_BUCKETS, dtype=np.int64)
    packed = np.concatenate(entries)
    bucket, count = (packed >> 16) & 0xFFFF, (packed >> 32) & 0xFFFF_FFFF
    return np.bincount(bucket, weights=count, minlength=WIRE_BUCKETS)[:WIRE_BUCKETS].astype(np.int64)


def _covered_s(present: list[Interval], absent: Iterable[Interval]) -> float:
    """Seconds of the cuts that have a volume, and of those that leave it out because it was idle.

    One that leaves it out and reaches into one that has it is about another plane's volumes.
    """
    idle = (
        (start, end)
        for start, end in absent
        if all(end <= s + APART_US or start >= e - APART_US for s, e in present)
    )
    total_us, until_us = 0, 0
    for start, end in sorted((*present, *idle)):
        total_us += max(end - max(start, until_us), 0)
        until_us = max(until_us, end)
    return max(total_us, 1) / 1e6


def _gateways(tables: Iterable[GatewayTable]) -> list[dict[str, Any]]:
    return [
        {
            "gateway_id": t.gateway_id,
            "name": t.name,
            "state": t.shown_state,
            "last_cut_us": t.end_unix_us or None,
            "clock_offset_us": t.offset_us,
            "exports": len(t.exports),
            "streams": len(t.streams),
            "dropped_cuts": t.dropped_cuts,
            "starved_ratio": round(t.starved_ratio, 3),
            "io_waited_ratio": t.io_waited_ratio,
        }
        for t in tables
    ]


def _volumes(sums: Mapping[str, _Sum], policy: PolicyManager) -> list[dict[str, Any]]:
    capped = {t.volume for t in policy.throttles()}
    caps = {volume: policy.effective(volume) for volume in capped & sums.keys()}
    return [
        {
            "volume": volume,
            "backend": s.backend,
            **{name: None if s.is_silent else round(rate, 1) for name, rate in s.rates.items()},
            **dict(
                zip(("p50_us", "p95_us", "p99_us"), percentiles_upper_us(s.total, 50, 95, 99), strict=True)
            ),
            "service_p95_us": percentile_upper_us(s.service, 95),
            "held": None if s.is_silent else s.held,
            "inflight": None if s.is_silent else s.inflight,
            **{f"cap_{name}": getattr(caps.get(volume, NO_CAPS), name) for name in RATES},
            "cap_group": policy.groups.of_volume(volume),
            "delay_us": round(s.delay_us / s.done) if s.done else 0,
            "gateways": s.gateways,
        }
        for volume, s in sorted(sums.items())
        if s.gateways
    ]


def _stopped_plane(
    state: LiveState, scopes: PromiseScopes, tables: Mapping[str, GatewayTable], planes: PlaneStates
) -> str:
    """The data plane of a promise's streams that is missing from statistics for longest, in words; or ""."""
    scope = scopes.over_all(state.promise.key)
    found = [
        (silent_s, name, tables[gateway_id].name or gateway_id)
        for gateway_id, part in (scope.parts.items() if scope is not None else ())
        for name, silent_s in planes.stopped(tables[gateway_id], part.mask).items()
    ]
    if not found:
        return ""
    silent_s, name, gateway = max(found)
    return f"data plane {name} of gateway {gateway} does not answer: no statistics of it for {silent_s:.0f} s"


def _silent_gateway(state: LiveState, scopes: PromiseScopes, tables: Mapping[str, GatewayTable]) -> str:
    """The gateway of a promise's streams that is silent for longest while others speak, in words; or ""."""
    scope = scopes.over_all(state.promise.key)
    newest_ns = scope.row.last_piece_ns if scope is not None else None
    if scope is None or newest_ns is None:
        return ""
    concerned = [tables[gateway_id] for gateway_id in scope.parts]
    never = sorted(table.name or table.gateway_id for table in concerned if table.last_cut_ns is None)
    if never:
        return f"no statistics of gateway {never[0]} have come yet, and it has volumes of this promise, too"
    ages = [((newest_ns - (t.last_cut_ns or 0)) / 1e9, t.name or t.gateway_id) for t in concerned]
    silent_s, gateway = max((age for age in ages if age[0] <= RETIRED_S), default=(0.0, ""))
    if silent_s <= state.settings.silent_s:
        return ""
    return f"no statistics of gateway {gateway} for {silent_s:.0f} s: what the others measure is no proof"


def _why(
    state: LiveState, scopes: PromiseScopes, tables: Mapping[str, GatewayTable], planes: PlaneStates
) -> str:
    if state.state != "no-data":
        return state.why_no_data(True)
    is_measured = scopes.is_measured(state.promise.key, tables)
    silent = _stopped_plane(state, scopes, tables, planes) or _silent_gateway(state, scopes, tables)
    return state.why_no_data(is_measured, silent or _unmeasured(state, scopes, tables))


def _unmeasured(state: LiveState, scopes: PromiseScopes, tables: Mapping[str, GatewayTable]) -> str:
    """The volume of a promise with I/O of which what is promised cannot be measured, in words; or ""."""
    volume = scopes.blind_volume(state.promise.key, tables)
    if not volume:
        return ""
    return (
        f"{volume} is counted beside the I/O path: no {state.what} can be measured there, and what the "
        "others measure is no proof"
    )


def _slas(
    live: Sequence[LiveState],
    scopes: PromiseScopes,
    tables: Mapping[str, GatewayTable],
    planes: PlaneStates,
) -> list[dict[str, Any]]:
    scopes.table.work_out(state.row for state in live if state.row is not None)
    return [_sla(state, state.signal, _why(state, scopes, tables, planes)) for state in live]


def _sla(state: LiveState, signal: Signal, reason: str) -> dict[str, Any]:
    return {
        "name": state.promise.sla,
        "objective": state.promise.objective,
        "metric": state.promise.metric,
        "priority": state.promise.priority.label,
        "state": state.state,
        "reason": reason,
        "latency_us": round(signal.latency_us) if signal.latency_us else None,
        "threshold_us": _threshold_us(state, signal),
        "percentile": state.promise.percentile if state.promise.metric == "latency" else None,
        **_other_figures(state, signal),
        "u": round(signal.u, 4),
        "offered_iops": round(signal.offered_iops, 1),
        "inexact": signal.inexact,
        "excused_ratio": round(signal.excused_ratio, 3),
        "stall_us": round(signal.stall_us),
        "failed_ratio": round(signal.failed_ratio, 4),
    }


def _threshold_us(state: LiveState, signal: Signal) -> int | None:
    """In force at the rate offered; of a rate none."""
    curve = state.promise.curve
    return (signal.threshold_us or curve[0].threshold_us) if curve else None


def _other_figures(state: LiveState, signal: Signal) -> dict[str, Any]:
    """What is promised and measured of an indicator without a percentile."""
    promise = state.promise
    if promise.metric == "latency":
        return {}
    if promise.promised:
        return {"promised": promise.promised}
    measured_us = signal.latency_us if promise.metric == "mean_latency" else signal.stall_us
    return {"promised": None, "measured": round(measured_us) if signal.windows else None}


def _holds(throttle: Throttle, sums: Mapping[str, _Sum], inventory: BackendInventory) -> tuple[int, int]:
    """(mean, worst) of how long its caps held an I/O in the last cuts, in us; the worst never flatters."""
    if throttle.client:
        delay_us, done, delay = _client_delay(throttle, inventory)
    else:
        found = [sums[volume] for volume in throttle.volumes if volume in sums]
        delay_us, done = sum(each.delay_us for each in found), sum(each.done for each in found)
        delay = sum((each.delay for each in found), np.zeros(COARSE_BUCKETS, dtype=np.int64))
    if not done:
        return 0, 0
    return round(delay_us / done), round(highest_upper_us(delay)) if delay_us else 0


def _client_delay(throttle: Throttle, inventory: BackendInventory) -> tuple[int, int, Hist]:
    delay_us = done = 0
    delay = np.zeros(COARSE_BUCKETS, dtype=np.int64)
    carriers = {g: t for volume in throttle.volumes for g, t in inventory.carriers_of(volume).items()}
    for table in carriers.values():
        rows = inventory.uses.rows_of(table, throttle.target)
        if not len(rows) or table.state != "up":
            continue
        for each in table.recent:
            is_client = np.isin(each.rows, rows)
            sums = each.scalars[:, is_client].sum(axis=1)
            delay_us += int(sums[RECENT["delay_sum_us"]])
            done += int(sums[RECENT["reads"]] + sums[RECENT["writes"]])
            hist = each.hist
            hist = hist[is_client[hist["row"]] & (hist["bucket"] >= DELAY)]
            np.add.at(delay, hist["bucket"] - DELAY, hist["count"])
    return delay_us, done, delay


def _throttles(
    throttles: Iterable[Throttle],
    sums: Mapping[str, _Sum],
    policy: PolicyManager,
    inventory: BackendInventory,
) -> list[dict[str, Any]]:
    holds = {each.throttle_id: _holds(each, sums, inventory) for each in throttles}
    return [
        {
            **{
                key: row[key]
                for key in ("throttle_id", "volume", "client", "backend", "source", "who", "cost_per_s")
            },
            **{
                key: row[key]
                for key in ("ops_per_s", "bytes_per_s", "burst_s", "peak_ops_per_s", "reason", "victim")
            },
            **{key: row[key] for key in ("state", "expires_us")},
            "group_name": throttle.group,
            "members": dict(throttle.weights),
            **_lifted(throttle, policy),
            "mean_hold_us": holds[throttle.throttle_id][0],
            "worst_hold_us": holds[throttle.throttle_id][1],
            "text": _shortened(row["text"]),
            "since_us": row["requested_us"],
            "late_ios": throttle.late_ios,
            "longest_hold_us": throttle.longest_hold_us,
        }
        for throttle, row in ((throttle, throttle.row()) for throttle in throttles)
    ]


def _lifted(throttle: Throttle, policy: PolicyManager) -> dict[str, Any]:
    """The rates that hold in place of those asked for, as a floor lies above them, and the floor in words."""
    held = policy.held(throttle)
    if not held.differs(throttle.rates, SAME_RATIO):
        return {"lifted_to": None, "floor": ""}
    whose = "its agreement" if policy.answers.terms_of(throttle.target).agreed else "every volume"
    return {"lifted_to": rates_figures(held), "floor": f"the floor of {whose}"}


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "\u2026"


def _backends(
    tables: Iterable[GatewayTable],
    inventory: BackendInventory,
    usage_table: UsageTable,
    controls: Mapping[str, BackendControl],
    helped: Callable[[str], set[Key]],
    faults: StorageFaults,
    most: int,
) -> list[dict[str, Any]]:
    silent = (table.places for table in tables if table.state != "up")
    cost = dict.fromkeys(inventory.backends(), 0.0) | usage_table.cost_by_backend(silent)
    active = {backend for backend, control in controls.items() if control.active}
    shown = sorted(cost, key=lambda backend: (backend not in active, -cost[backend], backend))[:most]
    return [
        {
            "backend": backend,
            "cost_per_s": round(cost[backend], 1),
            "cap_cost_per_s": round(c.allowed, 1) if (c := controls.get(backend)) and c.active else None,
            "phase": controls[backend].phase.value if backend in controls else "idle",
            "fault": faults.kind_of(backend),
            "victims": sorted("/".join(key) for key in helped(backend))[:MOST_VICTIMS],
        }
        for backend in sorted(shown)
    ]


def _chosen_volumes(
    inventory: BackendInventory, policy: PolicyManager, usage_table: UsageTable, most: int
) -> list[str]:
    """All of them, or those that are capped and those that use most."""
    if len(inventory.volumes()) <= most:
        return sorted(inventory.volumes())
    capped = sorted({v for t in policy.throttles() for v in t.volumes} & inventory.volumes())[:most]
    costs = usage_table.values[0, : len(usage_table.volumes)]
    busiest = np.argsort(-costs)[: 2 * most].tolist()  # a volume may have several places
    return list(dict.fromkeys((*capped, *(usage_table.volumes[place] for place in busiest))))[:most]


def _chosen_promises(
    live: Mapping[Key, LiveState], names: Sequence[str], counts: Mapping[str, int], most: int
) -> list[LiveState]:
    """All of them, or the most urgent ones, in their order.

    Args:
        live: of all promises.
        names: the state of each.
        counts: how many there are of each state: a state that none has is not searched for.
        most: so many at most.
    """
    states = list(live.values())
    if len(states) <= most:
        return states
    chosen: list[int] = []
    for wanted in _URGENT:
        if not counts.get(wanted) or len(chosen) >= most:
            continue
        found = (index for index, name in enumerate(names) if name == wanted)
        chosen += islice(found, most - len(chosen))
    return [states[index] for index in sorted(chosen)]


def snapshot(
    mode: str,
    tables: Mapping[str, GatewayTable],
    live: Mapping[Key, LiveState],
    scopes: PromiseScopes,
    policy: PolicyManager,
    controls: Mapping[str, BackendControl],
    helped: Callable[[str], set[Key]],
    inventory: BackendInventory,
    faults: StorageFaults,
    usage_table: UsageTable,
    planes: PlaneStates,
    most: int,
    unix_us: int,
    spoke_after_ns: int,
) -> dict[str, Any]:
    """The view at ``unix_us``, at most ``most`` rows of each kind; ``totals`` says how many there are.

    ``promises`` and ``states`` are of all: (agreement, objective) and the state of each, in one order. What
    a volume does is None while none of its gateways had a cut after ``spoke_after_ns``.
    """
    throttles = policy.throttles()
    names = [state.state for state in live.values()]
    counts = Counter(names)
    gateways = sorted(tables.values(), key=lambda t: t.shown_state == "up")[:most]
    volumes = _chosen_volumes(inventory, policy, usage_table, most)
    sums = {name: _sum_of(name, inventory.carriers_of(name).values(), spoke_after_ns) for name in volumes}
    return {
        "at_us": unix_us,
        "mode": mode,
        "backend_modes": dict(policy.backend_modes),
        "gateways": _gateways(gateways),
        "volumes": _volumes(sums, policy),
        "slas": _slas(_chosen_promises(live, names, counts, most), scopes, tables, planes),
        "throttles": _throttles(throttles[:most], sums, policy, inventory),
        "backends": _backends(tables.values(), inventory, usage_table, controls, helped, faults, most),
        "promises": list(live),
        "states": names,
        "totals": {
            "gateways": dict(Counter(t.shown_state for t in tables.values())),
            "volumes": len(inventory.volumes()),
            "slas": dict(counts),
            "throttles": len(throttles),
            "backends": len(inventory.backends()),
        },
    }
