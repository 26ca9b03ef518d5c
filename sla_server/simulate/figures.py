"""What came of a simulated mode: for each promise and each volume, in figures.

A second of a promise is *bad* when more of the requests that arrived in it exceeded the threshold of its
demand curve than the percentile allows; *above* when their rate is beyond the curve. A request that was not
answered by the end counts with its age, one that failed as too slow, unless the agreement leaves errors out.
Slices are judged by the server's own rule (``agreements.slices``);
only those that lie wholly within a span are. Seconds and slices in which nothing is promised (outside service
hours, in maintenance) are *excluded*, neither good nor bad. *Kept* is a volume's throughput against mode off.

A *turn* is a change of direction of a volume's cap, summed over its gateways: being capped is a way down,
being released a way up; changes below 1 % are none. A volume of which an agreement names some clients has
figures of each client, too: control slows those down one by one (ADR 21).

Pure. Latencies are seconds unless a name says otherwise.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_KINDS, IO_READ, IO_WRITE
from pmdaemon.wire.histogram import BUCKETS
from pmdaemon.wire.rates import COST_BYTES
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Metric, Promise, VolumeClass
from sla_server.agreements.selectors import is_pattern
from sla_server.agreements.slices import LimitCounts, StreamSlot
from sla_server.services.control.client_floors import ClientFloors
from sla_server.services.control.decisions import RaiseEvent, RecordThrottle
from sla_server.services.control.sharing import NeighbourTerms, terms
from sla_server.services.control.targets import client_of, target_of, volume_of
from sla_server.simulate.indicators import UNITS, Served, Waits, series_of, state_of, whole_seconds
from sla_server.simulate.run import ModeRun, Plan
from sla_server.simulate.setup import Stream

Floats = npt.NDArray[np.float64]
Arrays = Mapping[Stream, dict[str, npt.NDArray[Any]]]
ByVolume = dict[str, dict[Stream, dict[str, npt.NDArray[Any]]]]
POINTS_MAX: Final = 480  # of a chart
SAME_RATIO: Final = 0.01
MINUTE_S: Final = 60.0
MINUTE_US: Final = 60_000_000


@dataclass(frozen=True)
class PromiseFigures:
    """One promise in one mode.

    Attributes:
        percentile: None of another indicator than latency at a percentile.
        thresholds_ms: of the steps of its curve; of availability its ``outage``.
        judged_s, bad_s, above_s: seconds with requests inside the curve, bad ones of them, and beyond it.
        excluded_s: seconds with requests in which nothing was promised.
        excuse: why, of the first of them.
        slices: state to number.
        compliance, coverage: 0..1, None without slices.
        series: (second, figure of its indicator or None).
        bad_at: the bad seconds.
        promised: of a rate, I/Os or MB a second.
        measured: the figure of its indicator: the percentile, the mean (ms), what was delivered a second, or
            the longest time (s) without a completion.
    """

    sla: str
    objective: str
    percentile: float | None
    thresholds_ms: Sequence[float]
    ios: int
    latency_ms: float | None
    judged_s: int
    bad_s: int
    above_s: int
    excluded_s: int
    excuse: str
    slices: Mapping[str, int]
    compliance: float | None
    coverage: float | None
    series: Sequence[tuple[float, float | None]] = field(repr=False)
    bad_at: Sequence[int] = field(repr=False)
    metric: Metric = "latency"
    promised: float | None = None
    measured: float | None = None

    @property
    def unit(self) -> str:
        """Of ``measured``, ``promised`` and the series."""
        return UNITS[self.metric][1]

    @property
    def name(self) -> str:
        """agreement/objective."""
        return f"{self.sla}/{self.objective}"


@dataclass(frozen=True)
class VolumeFigures:
    """One volume, or one client of a volume, in one mode.

    Attributes:
        volume: its target (``services.control.targets``).
        floor_cost: cost rate that its agreement guarantees it; of a client its part by use in the whole run.
        kept_ratio: bytes against mode off; None where that was not run.
        changes, turns, turns_a_minute: of its cap; the last is the most within any 60 s.
        least_cost: the lowest cap, cost units a second; None when it was never capped.
        below_floor: caps below the floor, always 0; None of a client, whose part of it follows its use.
        series: (second, I/Os a second).
        caps: (second, cost rate or None), at each change.
    """

    volume: str
    priority: str
    ios: int
    iops: float
    bytes_per_s: float
    p95_ms: float | None
    kept_ratio: float | None
    floor_cost: float
    changes: int
    turns: int
    turns_a_minute: int
    least_cost: float | None
    below_floor: int | None
    mean_cost: float
    series: Sequence[tuple[float, float]] = field(repr=False)
    caps: Sequence[tuple[float, float | None]] = field(repr=False)


@dataclass(frozen=True)
class ModeFigures:
    """One mode.

    Attributes:
        clients: of volumes of which an agreement names some clients.
        events, texts: kind to number, and to the newest one's text.
        would: in mode observe, (target, reason) of what would have been done first, to number.
    """

    mode: str
    promises: Sequence[PromiseFigures]
    volumes: Sequence[VolumeFigures]
    clients: Sequence[VolumeFigures]
    events: Mapping[str, int]
    would: Mapping[tuple[str, str], int]
    left_out: int
    texts: Mapping[str, str]

    @property
    def users(self) -> list[VolumeFigures]:
        """Volumes, each followed by its clients if they have figures."""
        return sorted([*self.volumes, *self.clients], key=lambda v: (volume_of(v.volume), v.volume))


def figures_of(plan: Plan, run: ModeRun, off: ModeFigures | None) -> ModeFigures:
    """All figures of a mode; ``off``: those of mode off, if it was run."""
    arrays = {stream: _ended(log.arrays(), plan) for stream, log in run.logs.items()}
    base = {each.volume: each.bytes_per_s for each in off.users} if off is not None else {}
    kinds, texts = dict[str, int](), dict[str, str]()
    would: dict[tuple[str, str], int] = {}
    for _, decision in run.decisions:
        if isinstance(decision, RaiseEvent):
            kinds[decision.kind] = kinds.get(decision.kind, 0) + 1
            texts[decision.kind] = decision.text
        elif isinstance(decision, RecordThrottle) and decision.row["state"] == "observed":
            key = target_of(decision.row["volume"], decision.row["client"]), decision.row["victim"]
            would[key] = would.get(key, 0) + 1
    by_volume: ByVolume = {}
    for stream, found in arrays.items():
        by_volume.setdefault(stream.volume, {})[stream] = found
    classes = _ClassesOf(plan.contract.classes)
    return ModeFigures(
        run.mode,
        _of_promises(plan, by_volume),
        [_of_target(plan, run, name, by_volume, classes, base.get(name)) for name in sorted(by_volume)],
        [_of_target(plan, run, name, by_volume, classes, base.get(name)) for name in _divided(plan)],
        dict(sorted(kinds.items())),
        dict(sorted(would.items())),
        run.left_out,
        texts,
    )


class _ClassesOf:
    """Classes by volume; looked up, as there may be thousands of both."""

    def __init__(self, classes: Iterable[VolumeClass]) -> None:
        self._patterned, self._named = list[VolumeClass](), dict[str, list[VolumeClass]]()
        for each in classes:
            if any(map(is_pattern, each.volumes)):
                self._patterned.append(each)
                continue
            for volume in dict.fromkeys(each.volumes):
                self._named.setdefault(volume, []).append(each)

    def of(self, volume: str) -> list[VolumeClass]:
        """Of one volume."""
        return [*self._named.get(volume, ()), *(each for each in self._patterned if each.has_volume(volume))]


def _ended(arrays: dict[str, npt.NDArray[Any]], plan: Plan) -> dict[str, npt.NDArray[Any]]:
    """Requests that were not answered get their age at the end of their span, and ``done`` False."""
    arrays["done"] = np.isfinite(arrays["latency"])
    ends = np.array([last for _, last in plan.spans])
    firsts = np.array([first for first, _ in plan.spans])
    end = ends[np.maximum(np.searchsorted(firsts, arrays["at"], side="right") - 1, 0)]
    arrays["latency"] = np.where(arrays["done"], arrays["latency"], end - arrays["at"])
    return arrays


def _joined(parts: Iterable[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    found = list(parts)
    names = ("at", "latency", "size", "is_write", "failed", "done")
    if not found:
        empty = np.zeros(0)
        return {name: empty.astype(bool) if name in names[3:] else empty for name in names}
    joined = {name: np.concatenate([part[name] for part in found]) for name in names}
    order = np.argsort(joined["at"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _percentile(latency: Floats, percentile: float) -> float | None:
    """Smallest latency that at most (1 - q) of them exceed; None of none."""
    if not len(latency):
        return None
    index = min(math.ceil(percentile / 100 * len(latency) - 1e-9), len(latency)) - 1
    return float(np.partition(latency, max(index, 0))[max(index, 0)])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _of_promises(plan: Plan, arrays: ByVolume) -> list[PromiseFigures]:
    """Figures of each promise; of those that promise the same of the same requests they are made once."""
    known: dict[tuple[Promise, Applicability], PromiseFigures] = {}
    found = []
    for promise in plan.contract.promises:
        clauses = plan.contract.clauses.get(promise.key, Applicability())
        same = replace(promise, sla="", objective="", version=0), clauses
        figures = known.get(same)
        if figures is None or promise.sla in plan.contract.excusable:
            figures = _of_promise(plan, promise, arrays)
        if promise.sla not in plan.contract.excusable:
            known[same] = figures
        found.append(replace(figures, sla=promise.sla, objective=promise.objective))
    return found


def _of_promise(plan: Plan, promise: Promise, arrays: ByVolume) -> PromiseFigures:
    named = not any(map(is_pattern, promise.volumes))
    volumes = dict.fromkeys(promise.volumes) if named else filter(promise.has_volume, arrays)
    streams = ((s, part) for volume in volumes for s, part in arrays.get(volume, {}).items())
    found = _joined(part for s, part in streams if promise.covers(s.volume, s.client))
    if promise.io != "any":
        chosen = found["is_write"] == (promise.io == "write")
        found = {name: values[chosen] for name, values in found.items()}
    if promise.metric != "latency":
        return _of_other(plan, promise, found)
    held, excluded_s, excuse = _while_promised(plan, promise, found)
    if not promise.counts_errors:
        held = {name: values[~held["failed"]] for name, values in held.items()}
    judged_s, bad_at, above_s = _seconds(promise, held)
    waits = Waits(found)

    def verdict(first: float, last: float) -> str:
        low, high = np.searchsorted(found["at"], (first, last))
        part = {name: values[low:high] for name, values in found.items()}
        return _verdict(promise, _clauses(plan, promise), part, waits.within(first, last))

    slices = _slices(plan, promise, verdict)
    compliance, coverage = _ratios(slices)
    shown = found
    if not promise.counts_errors:
        shown = {name: values[~found["failed"]] for name, values in found.items()}
    latency_ms = _ms(_percentile(shown["latency"], promise.percentile))
    return PromiseFigures(
        promise.sla,
        promise.objective,
        promise.percentile,
        [step.threshold_us / 1e3 for step in promise.curve],
        len(found["at"]),
        latency_ms,
        judged_s,
        len(bad_at),
        above_s,
        excluded_s,
        excuse,
        slices,
        compliance,
        coverage,
        _latency_series(plan, shown, promise.percentile),
        bad_at,
        measured=latency_ms,
    )


def _of_other(plan: Plan, promise: Promise, found: Mapping[str, npt.NDArray[Any]]) -> PromiseFigures:
    """One of another indicator than latency at a percentile."""
    served = Served(promise, found)
    excluded, excuse = _excluded_seconds(plan, promise)
    seconds = served.seconds(plan.spans, excluded)
    with_io = np.isin(whole_seconds(plan.spans)[excluded], np.floor(found["at"]))

    def verdict(first: float, last: float) -> str:
        return state_of(promise, _clauses(plan, promise), served.slot(first, last))

    slices = _slices(plan, promise, verdict)
    compliance, coverage = _ratios(slices)
    measured = served.measured_in(plan.spans)
    return PromiseFigures(
        promise.sla,
        promise.objective,
        None,
        [step.threshold_us / 1e3 for step in promise.curve],
        len(found["at"]),
        measured if promise.metric == "mean_latency" else None,
        seconds.judged,
        len(seconds.bad),
        seconds.above,
        int(with_io.sum()),
        excuse if with_io.any() else "",
        slices,
        compliance,
        coverage,
        series_of(served, plan.spans, step_s(plan)),
        seconds.bad,
        metric=promise.metric,
        promised=promise.promised * UNITS[promise.metric][0] or None,
        measured=measured,
    )


def _clauses(plan: Plan, promise: Promise) -> Applicability:
    return plan.contract.clauses.get(promise.key, Applicability())


def _ratios(slices: Mapping[str, int]) -> tuple[float | None, float | None]:
    """Compliance and coverage."""
    eligible = slices.get("good", 0) + slices.get("bad", 0)
    every = sum(slices.values()) - slices.get("excluded", 0)
    compliance = slices.get("good", 0) / eligible if eligible else None
    return compliance, (eligible + slices.get("not_applicable", 0)) / every if every else None


def _excluded_seconds(plan: Plan, promise: Promise) -> tuple[npt.NDArray[np.bool_], str]:
    """Of all seconds, those of minutes in which nothing is promised, and why."""
    seconds = whole_seconds(plan.spans)
    if promise.sla not in plan.contract.excusable:
        return np.zeros(len(seconds), np.bool_), ""
    minutes, index = np.unique((plan.start_unix_us + seconds * 1_000_000) // MINUTE_US, return_inverse=True)
    bounds = ((minute * MINUTE_US, (minute + 1) * MINUTE_US) for minute in minutes.tolist())
    excuses = [plan.contract.excused(promise.sla, *each) for each in bounds]
    excluded: npt.NDArray[np.bool_] = np.array([excuse is not None for excuse in excuses])[index]
    return excluded, next((excuse for excuse in excuses if excuse is not None), "")


def _while_promised(
    plan: Plan, promise: Promise, found: Mapping[str, npt.NDArray[Any]]
) -> tuple[Mapping[str, npt.NDArray[Any]], int, str]:
    """The requests of minutes in which something was promised, the seconds of all others, and why."""
    if promise.sla not in plan.contract.excusable or not len(found["at"]):
        return found, 0, ""
    at_us = plan.start_unix_us + np.floor(found["at"]).astype(np.int64) * 1_000_000
    minutes, index = np.unique(at_us // MINUTE_US, return_inverse=True)
    bounds = ((minute * MINUTE_US, (minute + 1) * MINUTE_US) for minute in minutes.tolist())
    excuses = [plan.contract.excused(promise.sla, *each) for each in bounds]
    excluded = np.array([excuse is not None for excuse in excuses])[index]
    seconds = len(np.unique(at_us[excluded]))
    held = {name: values[~excluded] for name, values in found.items()}
    return held, seconds, next((excuse for excuse in excuses if excuse is not None), "")


def _seconds(promise: Promise, found: Mapping[str, npt.NDArray[Any]]) -> tuple[int, list[int], int]:
    """How many seconds are inside the curve, which are bad, and how many are above it."""
    if not len(found["at"]):
        return 0, [], 0
    names, second = np.unique(np.floor(found["at"]).astype(np.int64), return_inverse=True)
    counts = np.bincount(second, minlength=len(names))
    limits = [promise.threshold_us(float(count)) for count in counts]
    limit_s = np.array([math.inf if us is None else us / 1e6 for us in limits])
    misses = (found["latency"] > limit_s[second]) | found["failed"]
    missed = np.bincount(second, weights=misses, minlength=len(names))
    inside = np.isfinite(limit_s)
    allowed = (1_000_000 - round(promise.percentile * 10_000)) * counts
    bad = inside & (missed * 1_000_000 > allowed)
    return int(inside.sum()), names[bad].tolist(), int((~inside).sum())


def _slices(plan: Plan, promise: Promise, verdict: Callable[[float, float], str]) -> dict[str, int]:
    """State to number, of the slices that lie wholly within a span; ``verdict``: of one that counts."""
    states: dict[str, int] = {}
    phase_s = plan.start_unix_us / 1e6 % promise.slice_s
    for first, last in plan.spans:
        start = math.ceil((first + phase_s) / promise.slice_s - 1e-9) * promise.slice_s - phase_s
        while start + promise.slice_s <= last + 1e-9:
            from_us = plan.start_unix_us + round(start * 1e6)
            excuse = plan.contract.excused(promise.sla, from_us, from_us + promise.slice_s * 1_000_000)
            state = "excluded" if excuse is not None else verdict(start, start + promise.slice_s)
            states[state] = states.get(state, 0) + 1
            start += promise.slice_s
    return states


def _verdict(
    promise: Promise, clauses: Applicability, part: Mapping[str, npt.NDArray[Any]], ages_ms: tuple[int, int]
) -> str:
    """One slice, judged by the server's rule; ``ages_ms``: see ``Waits``."""
    is_write, failed = part["is_write"], part["failed"]
    size = np.where(failed, 0, part["size"])
    n, io = len(size), IO_KINDS[promise.io]
    errors = int(failed.sum())
    missed = {}
    for step in promise.curve:
        slow = part["latency"] > step.threshold_us / 1e6
        missed[io, step.threshold_us] = LimitCounts(
            n, int(slow.sum()), failed=errors, failed_missed=int((slow & failed).sum())
        )
    length_us = promise.slice_s * 1_000_000
    oldest_ms, stalled_ms = ages_ms
    nothing = np.zeros(BUCKETS, dtype=np.int64)
    slot = StreamSlot(
        arrived=n,
        reads=int((~is_write).sum()) if io != IO_WRITE else 0,
        writes=int(is_write.sum()) if io != IO_READ else 0,
        read_bytes=int(size[~is_write].sum()),
        write_bytes=int(size[is_write].sum()),
        hist_read=nothing,
        hist_write=nothing,
        missed=missed,
        errors=errors,
        failed=errors,
        failed_reads=int((failed & ~is_write).sum()),
        failed_writes=int((failed & is_write).sum()),
        covered_us=length_us,
        told_us=length_us,
        oldest_ms=oldest_ms,
        stalled_ms=stalled_ms,
        oldest_read_ms=oldest_ms if io == IO_READ else 0,
        stalled_read_ms=stalled_ms if io == IO_READ else 0,
        oldest_write_ms=oldest_ms if io == IO_WRITE else 0,
        stalled_write_ms=stalled_ms if io == IO_WRITE else 0,
    )
    return state_of(promise, clauses, slot)


def step_s(plan: Plan) -> float:
    """Seconds between two points of a chart."""
    length = plan.spans[-1][1] - plan.spans[0][0] if plan.spans else 1.0
    return float(max(1, math.ceil(length / POINTS_MAX)))


def _latency_series(
    plan: Plan, found: Mapping[str, npt.NDArray[Any]], percentile: float
) -> list[tuple[float, float | None]]:
    width, series = step_s(plan), list[tuple[float, float | None]]()
    for first, last in plan.spans:
        starts = np.arange(first, last, width)
        edges = np.searchsorted(found["at"], np.append(starts, last))
        for start, (low, high) in zip(starts, itertools.pairwise(edges), strict=True):
            series.append((float(start), _ms(_percentile(found["latency"][low:high], percentile))))
    return series


def _divided(plan: Plan) -> list[str]:
    """Clients of volumes of which an agreement names some, as targets."""
    named = [each for each in plan.contract.classes if "*" not in each.clients]
    targets = {
        target_of(stream.volume, stream.client)
        for stream in plan.streams
        if any(each.has_volume(stream.volume) for each in named)
    }
    return sorted(targets)


def _promised(plan: Plan, target: str, arrays: Arrays, classes: Sequence[VolumeClass]) -> NeighbourTerms:
    """What the agreements say of it; a client has a part of each floor by its use in the whole run."""
    volume, client = volume_of(target), client_of(target)
    if not client:
        return terms(volume, classes, plan.settings)
    floors, use = ClientFloors(plan.settings), dict[str, float]()
    for stream, found in arrays.items():
        done = found["done"] & ~found["failed"]
        cost = float(done.sum()) + float(found["size"][done].sum()) / COST_BYTES
        use[stream.client] = use.get(stream.client, 0.0) + cost
    floors.follow(volume, classes, use)
    return terms(volume, classes, plan.settings, client, floors.of(volume, client, classes))


def _of_target(
    plan: Plan,
    run: ModeRun,
    target: str,
    by_volume: ByVolume,
    classes: _ClassesOf,
    base_bytes_per_s: float | None,
) -> VolumeFigures:
    volume, client = volume_of(target), client_of(target)
    arrays = by_volume.get(volume, {})
    found = _joined(part for stream, part in arrays.items() if client in ("", stream.client))
    done = found["done"] & ~found["failed"]
    ios, size = int(done.sum()), float(found["size"][done].sum())
    mean_cost = 1 + (size / ios if ios else 4096) / COST_BYTES
    promised = _promised(plan, target, arrays, classes.of(volume))
    floor = promised.floor_cost(mean_cost)
    caps = cap_history(run, target, mean_cost)
    below = None if client else 0
    turned = turns(caps)
    bytes_per_s = size / plan.seconds
    kept = bytes_per_s / base_bytes_per_s if base_bytes_per_s else None
    least = [cap for _, cap in caps if cap is not None]
    ends = found["at"][done] + found["latency"][done]
    width, series = step_s(plan), list[tuple[float, float]]()
    for first, last in plan.spans:
        starts = np.arange(first, last, width)
        counts, _ = np.histogram(ends, np.append(starts, last))
        lengths = np.diff(np.append(starts, last))
        series += [(float(s), float(n / w)) for s, n, w in zip(starts, counts, lengths, strict=True)]
    if promised.agreed and not client:
        below = sum(cap < floor * (1 - SAME_RATIO) for cap in least)
    return VolumeFigures(
        target,
        promised.priority.label,
        ios,
        ios / plan.seconds,
        bytes_per_s,
        _ms(_percentile(found["latency"], 95.0)),
        kept,
        floor,
        len(caps),
        len(turned),
        most_within(turned, MINUTE_S),
        min(least, default=None),
        below,
        mean_cost,
        series,
        caps,
    )


def cap_history(run: ModeRun, target: str, mean_cost: float) -> list[tuple[float, float | None]]:
    """(second, cost rate over all gateways or None) at each change of a target's cap by 1 % or more."""
    volume, client = volume_of(target), client_of(target)
    held: dict[str, float] = {}
    history: list[tuple[float, float | None]] = []
    sent = heapq.merge(*(run.sent.get(gateway, ()) for gateway in run.carriers.get(volume, ())))
    for at, group in itertools.groupby(sent, key=lambda each: each[1]):
        for _, _, decision in group:
            held.pop(decision.gateway_id, None)
            for cap in decision.clients if client else decision.caps:
                is_it = cap["volume"] == volume and cap.get("client", "") == client
                if is_it and (cost := _cost(cap, mean_cost)) is not None:
                    held[decision.gateway_id] = cost
        total = sum(held.values()) if held else None
        if _differs(total, history[-1][1] if history else None):
            history.append((at, total))
    return history


def _cost(cap: Mapping[str, Any], mean_cost: float) -> float | None:
    """The tightest rate of an entry of SET_CAPS, as a cost rate."""
    ops, size, cost = cap.get("ops_per_s"), cap.get("bytes_per_s"), cap.get("cost_per_s")
    mean_bytes = max(mean_cost - 1, 1 / 64) * COST_BYTES
    rates = [cost, None if ops is None else ops * mean_cost]
    rates.append(None if size is None else size / mean_bytes * mean_cost)
    return min((rate for rate in rates if rate is not None), default=None)


def _differs(one: float | None, two: float | None) -> bool:
    if one is None or two is None:
        return one is not two
    return abs(one - two) > SAME_RATIO * two


def turns(caps: Sequence[tuple[float, float | None]]) -> list[float]:
    """Seconds at which a cap changed direction."""
    found, before, down = list[float](), math.inf, None
    for at, cap in caps:
        value = math.inf if cap is None else cap
        is_down = value < before
        if down is not None and is_down != down:
            found.append(at)
        before, down = value, is_down
    return found


def most_within(times: Sequence[float], seconds: float) -> int:
    """The most of these times, which rise, within any so many seconds."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while at - times[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
