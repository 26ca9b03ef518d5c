"""Loads and devices from what the server stored: minutes become Poisson arrivals, latencies a queue.

Theory of operation. A stream's slot says how many requests arrived, of which kinds and sizes, and how many
were outstanding at most. It is replayed as a Poisson stream of that rate with at most so many outstanding (16
at least: the maximum was only sampled at polls). What happened within a slot is not stored with it, so bursts
shorter than it are not in the replay, unless raw cuts say when its requests arrived (``within``).

The device of a backend is fitted: each slot gives a rate and a mean service latency, which in a queue of c
servers (Sakasegawa's approximation for M/G/c, bounded by Little's law) asks for one service time; its median,
weighted by I/Os, is taken, with that c of 1, 2, 4 ... 256 under which the slots agree best.

Only *restless* slots are simulated, with ``MARGIN`` slots around them: those in which a promise used half of
its allowance, or its mean latency came near its threshold. In the others control has nothing to do. Without
any, the busiest slots are.

Pure. Source: Sakasegawa 1977, "An approximation formula L_q = a rho^b / (1 - rho)".
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.promise import Promise
from sla_server.agreements.selectors import is_pattern
from sla_server.simulate.device import CostPoint, DeviceModel
from sla_server.simulate.errors import NothingStored, TooManyIos
from sla_server.simulate.loads import Application, Arrival
from sla_server.simulate.run import Feed, Plan
from sla_server.simulate.setup import Contract, Stream

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEAST_OUTSTANDING: Final = 16
MARGIN: Final = 2
BUSIEST: Final = 10
RESTLESS_U: Final = 0.5
RESTLESS_R: Final = 0.35  # mean latency / threshold: a 95th percentile is some three times the mean
SERVERS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SPREAD: Final = 0.5
LEAST_IOS: Final = 50  # of a slot that says something of the device
FULL_RATIO: Final = 0.98
RESOLUTION: Final = "Resolution:"
"""Begin of the note that says it."""
Part = tuple[float, float, float]
"""Of a slot: begin and length in seconds, and its share of the slot's requests."""


class SlotParts(Mapping[int, Sequence[Part]]):
    """How the requests of one stream's slots are spread: the second of a slot's start to its parts.

    Some days of cuts of all streams are in memory at once: a part is 24 bytes of an array here, a tuple of
    three floats would be 150.

    Args:
        seconds: of slots, rising; shape (slots,).
        first: of each slot the row of its first part, and the number of rows; shape (slots + 1,).
        parts: columns of ``Part``, slot by slot; shape (rows, 3).
    """

    def __init__(self, seconds: Ints, first: Ints, parts: Floats) -> None:
        self._seconds, self._first, self._parts = seconds, first, parts

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return self._seconds.nbytes + self._first.nbytes + self._parts.nbytes

    def _place(self, second: object) -> int:
        place = int(np.searchsorted(self._seconds, second)) if isinstance(second, int) else len(self)
        return place if place < len(self) and self._seconds[place] == second else -1

    def __contains__(self, second: object) -> bool:
        return self._place(second) >= 0

    def __getitem__(self, second: int) -> Sequence[Part]:
        place = self._place(second)
        if place < 0:
            raise KeyError(second)
        rows = self._parts[self._first[place] : self._first[place + 1]].tolist()
        return [(begin, length_s, share) for begin, length_s, share in rows]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seconds.tolist())

    def __len__(self) -> int:
        return len(self._seconds)


class Slots(Protocol):
    """What ``db.queries.replay`` reads; see ``StoredSlots`` there."""

    @property
    def slot_s(self) -> int:
        """Length of a slot."""

    @property
    def slots(self) -> Mapping[str, Ints]:
        """Columns of rollups."""

    @property
    def missed(self) -> Mapping[str, Ints]:
        """Columns of misses."""

    @property
    def streams(self) -> Mapping[int, Mapping[str, Any]]:
        """Names."""


@dataclass(frozen=True)
class StoredFeed:
    """One stream's slots.

    Attributes:
        rates: second of a slot's start to (requests a second, share of reads, bytes of a read, bytes of a
            write, most outstanding).
        stream_id: negative: of several streams together.
        within: second of a slot's start to how its requests are spread; of others evenly.
    """

    stream: Stream
    slot_s: int
    rates: Mapping[int, tuple[float, float, int, int, int]]
    stream_id: int = -1
    within: Mapping[int, Sequence[Part]] = field(default_factory=dict)

    def begin(self, application: Application, span: tuple[float, float], rng: random.Random) -> None:
        """See ``Feed``."""
        application.replay(self._arrivals(application, span, rng))

    def _arrivals(
        self, application: Application, span: tuple[float, float], rng: random.Random
    ) -> Iterator[Arrival]:
        for start in range(math.floor(span[0]), math.ceil(span[1]), self.slot_s):
            found = self.rates.get(start)
            if found is None:
                continue
            rate, reads, read_bytes, write_bytes, most = found
            application.most = most
            for begin, length_s, share in self.within.get(start, ((float(start), float(self.slot_s), 1.0),)):
                if not share:
                    continue
                part_rate = rate * self.slot_s * share / length_s
                now = begin + rng.expovariate(part_rate)
                while now < begin + length_s:
                    is_write = rng.random() >= reads
                    yield Arrival(now, is_write, write_bytes if is_write else read_bytes)
                    now += rng.expovariate(part_rate)


@dataclass(frozen=True)
class FittedDevice:
    """A device, and how well it explains the slots: median of |model / stored - 1| of the mean latency."""

    model: DeviceModel
    error_ratio: float
    slots: int


def stored_plan(
    found: Slots,
    contract: Contract,
    from_us: int,
    most_ios: int,
    *,
    servers: int | None = None,
    device: DeviceModel | None = None,
    every: bool = False,
    sample: bool = False,
) -> Plan:
    """A plan that replays slots.

    Args:
        found: what was stored.
        contract: agreements to keep.
        from_us: wall clock at second 0 of the plan; the start of a slot.
        most_ios: limit of what is simulated in a mode.
        servers: of each device; None: fitted.
        device: for all backends; None: fitted.
        every: simulate quiet slots, too.
        sample: instead of refusing too many I/Os, leave out spans, evenly.

    Raises:
        NothingStored: no I/O in that time.
        SimulationError: too many I/Os; choose a shorter time.
    """
    slots = found.slots
    if not len(slots["slot_us"]) or not slots["arrived"].any():
        raise NothingStored(
            "--stored", "no I/O is stored of that time", "See sla get volumes, and choose a longer time"
        )
    second = (slots["slot_us"] - from_us) // 1_000_000
    rows = _RowsOf(slots["stream_id"])
    streams = {number: Stream(**found.streams[number]) for number in rows.numbers if number in found.streams}
    by_backend: dict[str, list[int]] = {}
    for number, stream in streams.items():
        by_backend.setdefault(stream.backend, []).append(number)
    fits = {name: _fitted(found, rows.of(by_backend[name]), servers) for name in sorted(by_backend)}
    restless = _restless(found, contract, streams, rows)
    is_quiet = not restless
    chosen = np.unique(second).tolist() if every else [(us - from_us) // 1_000_000 for us in restless]
    if not chosen:
        chosen = _busiest(second, slots["arrived"])
    spans = _spans(chosen, 0 if every else MARGIN, found.slot_s, int(second.max()) + found.slot_s)
    expected = sum(_ios(span, second, slots["arrived"]) for span in spans)
    notes = _notes(found, second, spans, is_quiet and not every, {} if device else fits)
    if sample and expected > most_ios:
        every_ios, of = expected, sum(last - first for first, last in spans)
        spans = _sampled(spans, second, slots["arrived"], most_ios, found.slot_s)
        expected = sum(_ios(span, second, slots["arrived"]) for span in spans)
        part = sum(last - first for first, last in spans) / of
        notes.append(
            f"A sample: {part:.0%} of that time, spread evenly, as all of it has {every_ios} I/Os and "
            f"--most-ios is {most_ios}. Bad seconds and slices are those of the sample."
        )
    if expected > most_ios:
        raise TooManyIos(
            expected,
            most_ios,
            "Choose a shorter time with --stored and --until, or simulate a --sample of it",
        )
    feeds = list(_feeds(slots, second, streams, found.slot_s, spans, rows))
    devices = {name: device or fit.model for name, fit in fits.items()}
    title = f"stored load in slots of {found.slot_s} s"
    return Plan(contract, feeds, devices, spans, start_unix_us=from_us, title=title, notes=notes)


class _RowsOf:
    """Rows of each stream, found without looking at those of all others."""

    def __init__(self, stream_ids: Ints) -> None:
        self._order = np.argsort(stream_ids, kind="stable")
        names, first = np.unique(stream_ids[self._order], return_index=True)
        bounds = [*first.tolist(), len(stream_ids)]
        self._spans = dict(zip(names.tolist(), itertools.pairwise(bounds), strict=True))

    @property
    def numbers(self) -> list[int]:
        """All streams, in order."""
        return list(self._spans)

    def of(self, numbers: Iterable[int]) -> Ints:
        """Of these streams, one after another."""
        spans = (self._spans[number] for number in numbers if number in self._spans)
        parts = [self._order[first:last] for first, last in spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _feeds(
    slots: Mapping[str, Ints],
    second: Ints,
    streams: Mapping[int, Stream],
    slot_s: int,
    spans: Sequence[tuple[float, float]],
    rows: _RowsOf,
) -> Iterator[Feed]:
    """Of every stream; with the slots that lie within a span, of which the others are never asked."""
    firsts, lasts = np.array(spans).T
    within = lasts[np.maximum(np.searchsorted(firsts, second, side="right") - 1, 0)] > second
    useful = within & (second >= firsts[0]) & (slots["arrived"] > 0)
    for number, stream in streams.items():
        rates, mine = {}, rows.of((number,))
        for row in mine[useful[mine]].tolist():
            reads, writes = int(slots["reads"][row]), int(slots["writes"][row])
            most = int(slots["held_max"][row] + slots["inflight_max"][row])
            rates[int(second[row])] = (
                int(slots["arrived"][row]) / slot_s,
                reads / (reads + writes) if reads + writes else 1.0,
                max(int(slots["read_bytes"][row]) // reads, 1) if reads else 4096,
                max(int(slots["write_bytes"][row]) // writes, 1) if writes else 4096,
                max(most, LEAST_OUTSTANDING),
            )
        yield StoredFeed(stream, slot_s, rates, number)


# Which slots.


def _restless(found: Slots, contract: Contract, streams: Mapping[int, Stream], rows: _RowsOf) -> list[int]:
    """slot_us in which a promise was not at ease."""
    slots, missed, restless = found.slots, found.missed, set[int]()
    ios = slots["reads"] + slots["writes"]
    missed_rows = _RowsOf(missed["stream_id"])
    of_volume: dict[str, list[int]] = {}
    for number, stream in streams.items():
        of_volume.setdefault(stream.volume, []).append(number)
    for promise in contract.promises:
        named = not any(map(is_pattern, promise.volumes))
        volumes = promise.volumes if named else filter(promise.has_volume, of_volume)
        numbers = (number for volume in dict.fromkeys(volumes) for number in of_volume.get(volume, ()))
        covered = [n for n in numbers if promise.covers(streams[n].volume, streams[n].client)]
        mine = rows.of(covered)
        if not len(mine):
            continue
        if not promise.curve:
            restless.update(_short(found, promise, mine))
            continue
        names, index = np.unique(slots["slot_us"][mine], return_inverse=True)
        latency_us = np.bincount(index, weights=slots["lat_sum_us"][mine])
        done = np.bincount(index, weights=ios[mine])
        near_r = RESTLESS_R if promise.metric == "latency" else RESTLESS_U
        near = latency_us >= near_r * promise.curve[0].threshold_us * np.maximum(done, 1)
        restless.update(names[near & (done > 0)].tolist())
        if promise.metric == "availability":
            nothing = (done == 0) & (np.bincount(index, weights=slots["arrived"][mine]) > 0)
            restless.update(names[nothing].tolist())
        restless.update(_missing(missed, promise, missed_rows.of(covered)))
    return sorted(restless)


def _short(found: Slots, promise: Promise, mine: Ints) -> list[int]:
    """Slots in which less was delivered than was promised, and not all that was asked for."""
    slots, kinds = found.slots, ("read", "write") if promise.io == "any" else (promise.io,)
    unit = "{}_bytes" if promise.metric == "throughput" else "{}s"
    names, index = np.unique(slots["slot_us"][mine], return_inverse=True)
    delivered = np.bincount(index, weights=sum(slots[unit.format(kind)][mine] for kind in kinds))
    arrived = np.bincount(index, weights=slots["arrived"][mine])
    done = np.bincount(index, weights=(slots["reads"] + slots["writes"])[mine])
    is_short = (delivered < promise.promised * found.slot_s) & (done < FULL_RATIO * arrived)
    short: list[int] = names[is_short].tolist()
    return short


def _missing(missed: Mapping[str, Ints], promise: Promise, mine: Ints) -> list[int]:
    if promise.metric != "latency":
        return []
    mine = mine[missed["io"][mine] == IO_KINDS[promise.io]]
    mine = mine[missed["threshold_us"][mine] == promise.curve[-1].threshold_us]
    if not len(mine):
        return []
    names, index = np.unique(missed["slot_us"][mine], return_inverse=True)
    counted = np.bincount(index, weights=missed["counted"][mine])
    late = np.bincount(index, weights=missed["missed"][mine])
    found: list[int] = names[late > RESTLESS_U * promise.allowed_miss_ratio * counted].tolist()
    return found


def _busiest(second: Ints, arrived: Ints) -> list[int]:
    names, index = np.unique(second, return_inverse=True)
    order = np.argsort(-np.bincount(index, weights=arrived), kind="stable")[:BUSIEST]
    found: list[int] = np.sort(names[order]).tolist()
    return found


def _spans(starts: Sequence[int], margin: int, slot_s: int, end: int) -> list[tuple[float, float]]:
    """Slots that begin at these seconds, with the slots around them, joined where they touch."""
    spans: list[tuple[float, float]] = []
    for start in sorted(starts):
        first = max(start - margin * slot_s, 0)
        last = min(start + (margin + 1) * slot_s, end)
        if spans and first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], float(last))
        else:
            spans.append((float(first), float(last)))
    return spans


def _ios(span: tuple[float, float], second: Ints, arrived: Ints) -> int:
    return int(arrived[(second >= span[0]) & (second < span[1])].sum())


def _sampled(
    spans: Sequence[tuple[float, float]], second: Ints, arrived: Ints, most_ios: int, slot_s: int
) -> list[tuple[float, float]]:
    """Every n-th span, n as small as the limit allows; if one alone is too much, what fits of its begin."""
    ios = [_ios(span, second, arrived) for span in spans]
    for step in range(1, len(spans) + 1):
        if sum(ios[::step]) <= most_ios:
            return list(spans[::step])
    first, last = spans[0]
    while last - first > slot_s and _ios((first, last), second, arrived) > most_ios:
        last -= slot_s
    return [(first, last)]


# The device.


def mean_latency(rate: Floats, service_s: float | Floats, servers: int) -> Floats:
    """Mean time in a queue of ``servers`` at this arrival rate, infinite beyond its capacity."""
    load = rate * service_s / servers
    power = math.sqrt(2 * (servers + 1)) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = (1 + SPREAD**2) / 2 * load**power / (1 - load) * service_s / servers
    return np.where(load < 1, service_s + wait, np.inf)


def service_time(rate: Floats, latency_s: Floats, servers: int) -> Floats:
    """The service time under which each slot's mean latency comes out, by bisection; shape as ``rate``."""
    low = np.zeros_like(rate)
    high = np.minimum(latency_s, FULL_RATIO * servers / rate)
    for _ in range(50):
        middle = (low + high) / 2
        is_long = mean_latency(rate, middle, servers) > latency_s
        low, high = np.where(is_long, low, middle), np.where(is_long, middle, high)
    return (low + high) / 2


def fit(rate: Floats, latency_s: Floats, most: Floats, mean_kib: float, servers: int | None) -> FittedDevice:
    """The device that explains these slots best.

    Args:
        rate: requests a second, above 0; shape (slots,).
        latency_s: mean service latency, above 0.
        most: requests outstanding at most, which bound the latency (Little's law).
        mean_kib: mean size.
        servers: fixed number; None: that which fits best.
    """
    best: FittedDevice | None = None
    for count in (servers,) if servers else SERVERS:
        times = service_time(rate, latency_s, count)
        order = np.argsort(times)
        weight = np.cumsum(rate[order])
        service_s = float(times[order][np.searchsorted(weight, weight[-1] / 2)])
        expected = np.minimum(mean_latency(rate, service_s, count), most / rate)
        error = float(np.median(np.abs(expected / latency_s - 1)))
        if best is None or error < best.error_ratio - 0.01:
            point = CostPoint(kib=max(mean_kib, 1 / 64), ms=max(service_s * 1e3, 1e-6))
            best = FittedDevice(DeviceModel(servers=count, spread=SPREAD, read=[point]), error, len(rate))
    if best is None:  # cannot happen: there is a number of servers
        raise AssertionError("no number of servers")
    return best


def _fitted(found: Slots, mine: Ints, servers: int | None) -> FittedDevice:
    """Of the backend of these rows."""
    slots = found.slots
    names, index = np.unique(slots["slot_us"][mine], return_inverse=True)

    def summed(name: str) -> Floats:
        return np.bincount(index, weights=slots[name][mine], minlength=len(names)).astype(np.float64)

    ios = summed("reads") + summed("writes")
    service_us = summed("svc_sum_us")
    useful = (ios >= LEAST_IOS) & (service_us > 0)
    if not useful.any():
        return FittedDevice(DeviceModel(servers=servers or 1), math.nan, 0)
    most = np.maximum(summed("inflight_max"), 1)
    size = float((summed("read_bytes") + summed("write_bytes")).sum() / max(ios.sum(), 1) / 1024)
    ios, service_us, most = ios[useful], service_us[useful], most[useful]
    return fit(ios / found.slot_s, service_us / ios / 1e6, most, size, servers)


def device_note(name: str) -> str:
    """Begin of the note about the device of a backend."""
    return f"Device {name}"


def _notes(
    found: Slots,
    second: Ints,
    spans: Sequence[tuple[float, float]],
    is_quiet: bool,
    fits: Mapping[str, FittedDevice],
) -> list[str]:
    """What the reader must know of a replay."""
    slot_s, total = found.slot_s, len(np.unique(second))
    played = round(sum(last - first for first, last in spans) / slot_s)
    notes = [
        f"{RESOLUTION} {slot_s} s. Rates, kinds, mean sizes and most outstanding I/Os are those of each "
        f"slot; within it arrivals are drawn at random, so shorter bursts are missing."
    ]
    if is_quiet:
        notes.append(
            f"No promise came near its limit in the {total} slots stored: control had nothing to do. "
            f"Simulated are the {played} around the busiest."
        )
    else:
        notes.append(
            f"Simulated are {played} slots of {total}: those in which a promise used half of its allowance "
            f"or came near its limit, and {MARGIN} around them. Control has nothing to do in the others."
        )
    for name, fitted in fits.items():
        if not fitted.slots:
            notes.append(
                f"{device_note(name)}: too little I/O to fit it; the default is used. Give --device."
            )
            continue
        notes.append(
            f"{device_note(name)} is fitted to {fitted.slots} slots: half of their mean latencies differ by "
            f"at most {fitted.error_ratio:.0%} from the model's."
            + (" That is a poor fit: give --device." if fitted.error_ratio > 0.5 else "")
        )
    delay, latency = int(found.slots["delay_sum_us"].sum()), int(found.slots["lat_sum_us"].sum())
    if delay > 0.01 * latency:
        notes.append(
            f"{delay / latency:.0%} of the stored latency is delay by throttles that were in force then: the "
            f"load without control would have been larger."
        )
    return notes
