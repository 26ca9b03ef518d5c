"""Stream rows for ``benchmarks.ingest``: a fleet of gateways, one cut a second each, in CUTS messages.

Contents follow from a seed. A stream's I/Os a second are log-normal over the fleet (median 60), its
latencies log-normal around a median of its own; a cut has some 410 bytes a stream on the wire, as DESIGN.md 5
expects. A gateway repeats ``VARIANTS`` sets of numbers in turn; its lifetime counters rise from cut to cut.
A Parquet row group holds about one second of the fleet, so no set of numbers meets itself within one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame, histogram, names
from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, MISSED_DTYPE, Cut
from pmdaemon.wire.kinds import Kind

T0_US: Final = 1_800_000_000_000_000  # a whole minute
EPOCH: Final = 0xF123_4567_89AB_CDEF
VARIANTS: Final = 4
MESSAGE_BYTES: Final = 256 << 10  # a pair posts at this size
THRESHOLDS_US: Final = (5_000, 8_000)
_CUMULATIVE: Final = [COL[name] for name in ("cum_reads", "cum_writes", "cum_read_bytes", "cum_write_bytes")]
_RATES: Final = [COL[name] for name in ("reads", "writes", "read_bytes", "write_bytes")]


@dataclass(frozen=True)
class Fleet:
    """Templates of every gateway's cuts.

    Attributes:
        templates: one list of ``VARIANTS`` cuts a gateway.
    """

    templates: list[list[Cut]]

    @property
    def rows_a_second(self) -> int:
        """Stream rows of one second of the fleet."""
        return sum(variants[0].rows for variants in self.templates)

    def announcements(self) -> Iterator[bytes]:
        """GATEWAY and STREAMS_SEEN of each gateway: what was announced by none is not stored."""
        for number, variants in enumerate(self.templates):
            gateway_id, ids = variants[0].gateway_id, variants[0].column("stream_id").tolist()
            shown = [{"volume": f"vol-{number}-{n}", "backend": "disk"} for n in range(len(ids))]
            exports = [{**each, "size_bytes": 1 << 30, "read_only": False, "source": "nbd"} for each in shown]
            header = {
                "gw": gateway_id,
                "name": f"gw-{number}",
                "state": "up",
                "reason": "",
                "address": "",
                "software": "",
                "ep": EPOCH,
                "at_us": T0_US,
                "offset_us": 0,
                "dropped": 0,
                "exports": exports,
            }
            yield frame.encode(Kind.GATEWAY, header)
            streams = [
                {"id": stream_id, "client": "host-a", **each}
                for stream_id, each in zip(ids, shown, strict=True)
            ]
            yield frame.encode(Kind.STREAMS_SEEN, {"gw": gateway_id, "streams": streams})

    def messages(self, seconds: range) -> Iterator[tuple[bytes, int]]:
        """(CUTS message, stream rows in it) for these seconds, oldest first; second 1 is seq 1."""
        batch: list[bytes] = []
        starts: list[int] = []
        rows = size = 0
        for second in seconds:
            for variants in self.templates:
                item = _at(variants[second % VARIANTS], second)
                raw = cuts.encode(item)
                if batch and size + len(raw) > MESSAGE_BYTES:
                    yield _message(batch, starts), rows
                    batch, starts, rows, size = [], [], 0, 0
                batch.append(raw)
                starts.append(item.start_unix_us)
                rows += item.rows
                size += len(raw)
        if batch:
            yield _message(batch, starts), rows


def fleet(gateways: int, streams: int, seed: int = 4) -> Fleet:
    """Templates for ``gateways`` x ``streams``."""
    templates = []
    for number in range(gateways):
        gateway_id = str(uuid.UUID(int=0xB000_0000 + number))
        rng = np.random.default_rng((seed, number))
        ids = [names.stream_id(gateway_id, f"vol-{number}-{n}", "host-a") for n in range(streams)]
        iops = rng.lognormal(np.log(60), 1.0, streams)
        median_us = rng.lognormal(np.log(700), 0.6, streams)
        made = [_template(gateway_id, ids, iops, median_us, rng) for _ in range(VARIANTS)]
        templates.append(made)
    return Fleet(templates)


def _message(batch: list[bytes], starts: list[int]) -> bytes:
    header = {
        "pair": 0,
        "n": len(batch),
        "recv_us": [start + 1_003_000 for start in starts],
        "offset_us": [1_500] * len(batch),
        "live": [True] * len(batch),
    }
    return frame.encode(Kind.CUTS, header, b"".join(batch))


def _at(template: Cut, second: int) -> Cut:
    counters = template.counters.copy()
    counters[_CUMULATIVE] += counters[_RATES] * second
    return replace(template, seq=second, start_unix_us=T0_US + second * 1_000_000, counters=counters)


def _template(
    gateway_id: str,
    ids: list[int],
    iops: npt.NDArray[Any],
    median_us: npt.NDArray[Any],
    rng: np.random.Generator,
) -> Cut:
    rows: list[list[int]] = []
    hist: list[tuple[int, int, int]] = []
    missed: list[tuple[int, int, int, int, int]] = []
    for row, stream_id in enumerate(ids):
        count = int(rng.poisson(iops[row]))
        latency_us = rng.lognormal(np.log(median_us[row]), 0.55, count)
        is_write = rng.random(count) < 0.35
        size = int(rng.choice((4096, 8192, 16384)))
        reads, writes = int((~is_write).sum()), int(is_write.sum())
        values = dict.fromkeys(COLUMNS, 0)
        values |= {
            "stream_id": stream_id,
            "arrived": count + int(rng.integers(0, 2)),
            "reads": reads,
            "writes": writes,
            "read_bytes": reads * size,
            "write_bytes": writes * size,
            "lat_sum_us": int(latency_us.sum()),
            "svc_sum_us": int(latency_us.sum() * 0.9),
            "cost_milli": count * 1062,
            "inflight": int(rng.integers(0, 4)) if count else 0,  # nothing hangs
            "cum_reads": 10_000_000 + reads * int(rng.integers(0, 100_000)),
            "cum_writes": 5_000_000 + writes * int(rng.integers(0, 100_000)),
            "cum_read_bytes": (10_000_000 + reads * 9_999) * size,
            "cum_write_bytes": (5_000_000 + writes * 9_999) * size,
        }
        rows.append([values[name] for name in COLUMNS])
        hist += _histogram(row, latency_us, is_write)
        missed += [
            (row, cuts.IO_ANY, limit, count, int((latency_us > limit).sum()))
            for limit in THRESHOLDS_US[: 1 + row % 2]
        ]
    return Cut(
        gateway_id=gateway_id,
        epoch=EPOCH,
        seq=1,
        start_unix_us=T0_US,
        duration_us=1_000_000,
        throttle_gen=0,
        threshold_version=1,
        counters=cuts.rows_array(rows),
        hist=np.array(hist, dtype=HIST_DTYPE),
        missed=np.array(missed, dtype=MISSED_DTYPE),
    )


def _histogram(
    row: int, latency_us: npt.NDArray[Any], is_write: npt.NDArray[np.bool_]
) -> list[tuple[int, int, int]]:
    fine = np.searchsorted(histogram.EDGES_NS, latency_us * 1000, side="right") - 1
    service = np.searchsorted(histogram.EDGES_NS, latency_us * 900, side="right") - 1 >> 1
    numbered = np.concatenate(
        (fine[~is_write], fine[is_write] + histogram.TOTAL_WRITE, service + histogram.SERVICE)
    )
    buckets, counts = np.unique(numbered, return_counts=True)
    return [(row, bucket, count) for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True)]
