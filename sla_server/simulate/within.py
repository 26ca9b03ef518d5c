"""What cuts say of the inside of a slot: when its requests arrived, and how fast the device was.

A slot of a minute says how many requests arrived, not when; a burst of three seconds is spread over it. Raw
cuts, which are stored for two days, say it by the second or so. A replay of stored slots (``stored``) can be
given them:

* Arrivals of a slot are spread as those of its cuts: Poisson within each cut. How many there are stays the
  slot's affair. A slot of which cuts are missing is left as it was.
* The device is fitted again, to the cuts of its backend instead of slots. A slot with a burst has the latency
  of the burst at a rate far below it, which would make every device slow. So would the cuts of a slot in
  which those of another stream of the backend are missing: they are left out.

What is shorter than a cut is not seen. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from sla_server.simulate.run import Plan
from sla_server.simulate.stored import (
    RESOLUTION,
    FittedDevice,
    Floats,
    Ints,
    Part,
    SlotParts,
    StoredFeed,
    device_note,
    fit,
)

COMPLETE_RATIO: Final = 0.98  # of a slot's arrivals that its cuts must have
LEAST_BINS: Final = 30  # of cuts, for a fit
LEAST_IOS: Final = 5  # of a bin that says something of the device
Cuts = Mapping[str, Ints]
"""Columns of shape (rows,): start_us, duration_us, stream_id, arrived, reads, writes, read_bytes,
write_bytes, svc_sum_us, inflight; a row a stream and cut."""


def slots_of(plan: Plan) -> tuple[set[int], list[int]]:
    """Streams of a plan, and begins (us) of the slots that it replays."""
    feeds = [feed for feed in plan.feeds if isinstance(feed, StoredFeed) and feed.stream_id >= 0]
    seconds = {second for feed in feeds for second in feed.rates}
    begins = [plan.start_unix_us + second * 1_000_000 for second in sorted(seconds)]
    return {feed.stream_id for feed in feeds}, begins


def with_cuts(plan: Plan, cuts: Cuts, *, fits: bool) -> Plan:
    """The plan, with arrivals and devices as these cuts say; without any the plan as it is.

    Args:
        plan: of ``stored_plan``.
        cuts: of its streams, those that start in its slots.
        fits: whether the devices are fitted again: only where the plan has all streams of its backends.
    """
    if not len(cuts["start_us"]):
        return plan
    parts = _parts_by_slot(plan, cuts)
    feeds = []
    seen, slots = set[int](), set[int]()
    for feed in plan.feeds:
        if isinstance(feed, StoredFeed):
            within: Mapping[int, Sequence[Part]] = parts.get(feed.stream_id, {})
            slots.update(feed.rates)
            seen.update(second for second in within if second in feed.rates)
            feed = dataclasses.replace(feed, within=within)
        feeds.append(feed)
    if not seen:
        return plan
    length_s = float(np.median(cuts["duration_us"])) / 1e6
    notes = [note for note in plan.notes if not note.startswith(RESOLUTION)]
    rest = "" if len(seen) == len(slots) else " In the others they are drawn at random."
    said = (
        f"{RESOLUTION} {length_s:.1f} s in {len(seen)} of {len(slots)} slots: arrivals are spread as in the "
        f"raw cuts, which are stored for two days.{rest} What is shorter is missing."
    )
    devices = dict(plan.devices)
    for name in sorted(devices) if fits else ():
        found = _fitted_to_cuts(plan, name, cuts, round(length_s * 1e6), parts)
        if found is not None:
            devices[name] = found.model
            notes = [note for note in notes if not note.startswith(device_note(name))]
            notes.append(
                f"{device_note(name)} is fitted to cuts, {found.slots} times of {length_s:.1f} s: half of "
                f"their mean latencies differ by at most {found.error_ratio:.0%} from the model's."
            )
    return dataclasses.replace(plan, feeds=feeds, devices=devices, notes=[said, *notes])


def _parts_by_slot(plan: Plan, cuts: Cuts) -> dict[int, SlotParts]:
    """By stream the parts of its slots, of slots whose cuts are all there."""
    feeds = {feed.stream_id: feed for feed in plan.feeds if isinstance(feed, StoredFeed)}
    slot_s = next((feed.slot_s for feed in feeds.values()), 60)
    slot = _slot(plan, cuts, slot_s)
    order = np.lexsort((cuts["start_us"], slot, cuts["stream_id"]))
    stream, slot, arrived = (column[order] for column in (cuts["stream_id"], slot, cuts["arrived"]))
    edges = np.flatnonzero((np.diff(stream) != 0) | (np.diff(slot) != 0)) + 1
    first = np.concatenate(([0], edges))
    total = np.add.reduceat(arrived, first)
    expected = np.array(
        [
            feeds[number].rates.get(second, (np.inf,))[0] if number in feeds else np.inf
            for number, second in zip(stream[first].tolist(), slot[first].tolist(), strict=True)
        ]
    )
    is_whole = (total > 0) & (total >= COMPLETE_RATIO * expected * slot_s)
    rows = np.diff(first, append=len(order))
    used = np.repeat(is_whole, rows)
    order, slot = order[used], slot[used]
    parts = np.empty((len(order), 3))
    parts[:, 0] = (cuts["start_us"][order] - plan.start_unix_us) / 1e6
    # A cut that reaches into the next slot counts for its own.
    ends = np.minimum(parts[:, 0] + np.maximum(cuts["duration_us"][order], 1) / 1e6, slot + slot_s)
    parts[:, 1] = np.maximum(ends - parts[:, 0], 1e-3)
    parts[:, 2] = arrived[used] / np.repeat(total[is_whole], rows[is_whole])
    return _by_stream(stream[first[is_whole]], slot, rows[is_whole], parts)


def _by_stream(stream: Ints, slot: Ints, rows: Ints, parts: Floats) -> dict[int, SlotParts]:
    """Of each stream its slots; ``stream`` and ``rows`` have one element a slot, ``slot`` one a part."""
    ends = np.concatenate(([0], np.cumsum(rows)))
    seconds = slot[ends[:-1]]
    names, first = np.unique(stream, return_index=True)
    bounds = pairwise([*first.tolist(), len(stream)])
    return {
        name: SlotParts(seconds[a:b], ends[a : b + 1] - ends[a], parts[ends[a] : ends[b]])
        for name, (a, b) in zip(names.tolist(), bounds, strict=True)
    }


def _slot(plan: Plan, cuts: Cuts, slot_s: int) -> Ints:
    """The second of the slot in which each cut starts; shape (rows,)."""
    slot: Ints = (cuts["start_us"] - plan.start_unix_us) // (slot_s * 1_000_000) * slot_s
    return slot


def _fitted_to_cuts(
    plan: Plan, backend: str, cuts: Cuts, bin_us: int, parts: Mapping[int, SlotParts]
) -> FittedDevice | None:
    """A device that explains the cuts of a backend, added up in bins of their usual length.

    Only slots count of which the cuts of all its streams are there (``parts``).
    """
    feeds = [feed for feed in plan.feeds if isinstance(feed, StoredFeed) and feed.stream.backend == backend]
    lacking = {
        second for feed in feeds for second in feed.rates if second not in parts.get(feed.stream_id, {})
    }
    whole = {second for feed in feeds for second in feed.rates} - lacking
    mine = np.isin(cuts["stream_id"], [feed.stream_id for feed in feeds])
    mine &= np.isin(_slot(plan, cuts, feeds[0].slot_s if feeds else 60), sorted(whole))
    if not mine.any() or bin_us <= 0:
        return None
    _, place = np.unique((cuts["start_us"][mine] + bin_us // 2) // bin_us, return_inverse=True)

    def summed(*names: str) -> Floats:
        together = sum((cuts[name][mine] for name in names), np.zeros(1))
        found: Floats = np.bincount(place, weights=together).astype(np.float64)
        return found

    ios, service_us, under_way = summed("reads", "writes"), summed("svc_sum_us"), summed("inflight")
    useful = (ios >= LEAST_IOS) & (service_us > 0)
    if int(useful.sum()) < LEAST_BINS:
        return None
    size_kib = float(summed("read_bytes", "write_bytes").sum() / max(ios.sum(), 1) / 1024)
    rate, latency_s = ios[useful] / (bin_us / 1e6), service_us[useful] / ios[useful] / 1e6
    # What was under way at the end of a cut, and at least what its mean latency asks for (Little's law).
    most = np.maximum(np.maximum(under_way[useful], rate * latency_s), 1.0)
    return fit(rate, latency_s, most, size_kib, None)
