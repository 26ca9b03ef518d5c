"""``services`` at fleet scale, without a database: the part of ``make bench-control`` in its own process.

4,000 gateways of 16 streams, an agreement a stream, 100 gateways a backend, a cut and four ticks a second.
Cuts are synthetic (40 to 200 I/Os, 14 latency buckets a stream) and quiet unless said otherwise; *at risk*
has every promise near its threshold, with nobody to slow down. The judge reads from tables in memory; the
time they take is left out. Prints one JSON object; with ``--judge`` what judging costs alone, CPU seconds for
one slice of each of the 64,000 objectives, also where each has a curve of two steps.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import uuid
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import psutil

from pmdaemon.runtime.gc_tuning import GcTuning
from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, IO_ANY, MISSED_DTYPE, Cut
from pmdaemon.wire.histogram import BUCKETS, DELAY, SERVICE
from pmdaemon.wire.names import stream_id
from sla_server.agreements.document import Agreement
from sla_server.agreements.promise import CurveStep, InForce, Priority, Promise, VolumeClass
from sla_server.rows import Row
from sla_server.services.control.controller import Controller
from sla_server.services.control.settings import ControlSettings
from sla_server.services.judging.judge import Judge
from sla_server.services.snapshot import Shown, snapshot_frame
from tests.support.judged import inputs_of

GATEWAYS: Final = 4_000
STREAMS: Final = 16
ON_BACKEND: Final = 100
SECONDS: Final = 8
WARM_S: Final = 3
JUDGED_S: Final = 125
TEMPLATES: Final = 200
UNIX_US: Final = 1_798_761_600_000_000
MINUTE_US: Final = 60_000_000
LIMIT_US: Final = 12_000
QUIET_BUCKET: Final = 20
NEAR_BUCKET: Final = 30
Template = tuple[Any, Any, Any]


def promised(volume: str) -> Promise:
    """p95 <= 12 ms for one volume."""
    curve = (CurveStep(math.inf, LIMIT_US),)
    name, everyone = (volume,), ("*",)
    return Promise(
        volume, 1, "latency", Priority.GOLD, name, everyone, "any", 95.0, curve, 0.995, 60, 50.0, 0.0
    )


class Fleet:
    """Names, cuts and a controller that knows all of them."""

    def __init__(self, promises: int, first_bucket: int, gateways: int = GATEWAYS) -> None:
        rng = np.random.default_rng(1)
        self.ids = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f"g{g}")) for g in range(gateways)]
        self.names = [[f"v-{g}-{s}" for s in range(STREAMS)] for g in range(gateways)]
        self._streams = [
            np.array([stream_id(gateway, v, "client") for v in names])
            for gateway, names in zip(self.ids, self.names, strict=True)
        ]
        self._templates = [self._template(rng, first_bucket) for _ in range(min(gateways, TEMPLATES))]
        gold = [name for names in self.names for name in names[:promises]]
        self.controller = Controller(ControlSettings())
        classes = [VolumeClass(name, Priority.GOLD, (name,)) for name in gold]
        self.controller.set_agreements([promised(name) for name in gold], classes)
        self.controller.set_mode("enforce")
        for number, gateway in enumerate(self.ids):
            self._announce(number, gateway)

    def _announce(self, number: int, gateway: str) -> None:
        backend = f"b{number // ON_BACKEND}"
        exports = [{"volume": v, "backend": backend} for v in self.names[number]]
        self.controller.gateway_up(gateway, f"g{number}", exports, 1)
        streams = zip(self._streams[number].tolist(), self.names[number], strict=True)
        rows = [{"id": i, "volume": v, "client": "client", "backend": backend} for i, v in streams]
        self.controller.add_streams(gateway, rows)

    @staticmethod
    def _template(rng: np.random.Generator, first_bucket: int) -> Template:
        counters = np.zeros((len(COLUMNS), STREAMS), np.int64)
        hist, missed = [], []
        for row in range(STREAMS):
            ios = int(rng.integers(40, 200))
            for name in ("arrived", "reads"):
                counters[COL[name], row] = ios
            counters[COL["read_bytes"], row], counters[COL["cost_milli"], row] = ios * 4096, ios * 1062
            buckets = np.sort(rng.choice(np.arange(first_bucket, first_bucket + 20), 14, replace=False))
            counts = np.bincount(rng.integers(0, 14, ios), minlength=14)
            found = [(int(b), int(n)) for b, n in zip(buckets, counts, strict=True) if n]
            hist += [(row, b, n) for b, n in found]
            hist += [(row, SERVICE + b // 2, n) for b, n in found]
            hist.append((row, DELAY, ios))
            missed.append((row, IO_ANY, LIMIT_US, ios, 0))
        return counters, np.array(hist, HIST_DTYPE), np.array(missed, MISSED_DTYPE)

    def cut(self, number: int, second: int) -> Cut:
        """One gateway's cut of a second."""
        counters, hist, missed = self._templates[number % len(self._templates)]
        counters = counters.copy()
        counters[COL["stream_id"]] = self._streams[number]
        start_us = UNIX_US + (second - 1) * 1_000_000
        return Cut(self.ids[number], 7, second, start_us, 1_000_000, 0, 1, counters, hist, missed)

    def second(self, second: int) -> float:
        """CPU seconds of the controller for a second of cuts and four ticks."""
        quarter, used = -(-len(self.ids) // 4), 0.0
        for part in range(4):
            numbers = range(part * quarter, min((part + 1) * quarter, len(self.ids)))
            cuts = [self.cut(number, second) for number in numbers]
            now_ns, unix_us = second * 10**9 + part * 250_000_000, UNIX_US + second * 1_000_000
            started = time.process_time()
            for cut in cuts:
                self.controller.add_cut(cut, unix_us, 0, False, now_ns)
            self.controller.tick(now_ns, unix_us)
            used += time.process_time() - started
        return used

    def cut_cpu_us(self) -> float:
        """Median over some seconds, after a few to settle."""
        found = [self.second(second) for second in range(1, SECONDS + 1)]
        return statistics.median(found[WARM_S:]) / len(self.ids) * 1e6


class Tables:
    """What the judge reads, made up in memory; ``spent_s``: CPU that went into it. See ``services.store``."""

    def __init__(self, gateways: int) -> None:
        self._gateways = gateways
        self._rows = [
            {"stream_id": n, "gateway_id": f"g{n // STREAMS}", "volume": f"v{n}", "client": "c",
             "backend": "b", "first_seen_us": 0}
            for n in range(gateways * STREAMS)
        ]  # fmt: skip
        self._hist = np.zeros(BUCKETS, np.int64)
        self._hist[QUIET_BUCKET] = 600
        self._none = np.zeros(BUCKETS, np.int64)
        self.now_us = 0
        self.spent_s = 0.0
        self.most_rows = 0

    def stream_count(self) -> int:
        """See ``Store``."""
        return len(self._rows)

    def streams(self) -> list[Row]:
        """See ``Store``."""
        return self._rows

    def progress(self) -> dict[str, int]:
        """See ``Store``."""
        return {f"g{number}": self.now_us - 2_000_000 for number in range(self._gateways)}

    def slices(self, name: str, objective: str, from_us: int, to_us: int) -> list[Row]:
        """See ``Store``."""
        return []

    def slice_inputs(
        self, stream_ids: Collection[int], gateway_ids: Collection[str], from_us: int, to_us: int
    ) -> Any:
        """See ``Store``."""
        started = time.process_time()
        first = -(-from_us // MINUTE_US) * MINUTE_US
        slots = [s for s in range(first, to_us, MINUTE_US) if s + MINUTE_US <= self.now_us]
        rows: list[Row] = []
        missed: list[Row] = []
        coverage: list[Row] = []
        for slot_us in slots:
            for stream in stream_ids:
                row = {"slot_us": slot_us, "stream_id": stream}
                rows.append(
                    {**row, "arrived": 600, "reads": 600, "read_bytes": 600 * 4096, "hist_read": self._hist,
                     "hist_write": self._none, "lat_sum_us": 600 * 2_000, "covered_us": MINUTE_US}
                )  # fmt: skip
                missed.append({**row, "io": 0, "threshold_us": LIMIT_US, "counted": 600, "missed": 3})
            for gateway in gateway_ids:
                covered: Row = {"slot_us": slot_us, "gateway_id": gateway}
                coverage.append({**covered, "covered_us": MINUTE_US, "cuts": 60, "gap_cuts": 0, "gap_ios": 0})
        found = inputs_of(rows, missed, coverage)
        self.most_rows = max(self.most_rows, len(rows))
        self.spent_s += time.process_time() - started
        return found

    def outages(self, from_us: int, to_us: int) -> list[Row]:
        """See ``Store``."""
        return []

    def late_cuts(self, after_us: int, from_us: int) -> list[Row]:
        """See ``Store``."""
        return []


def agreements(count: int, steps: int = 1) -> list[InForce]:
    """An agreement of p95 <= 12 ms for each of the volumes; of two steps the first holds."""
    curve: list[Row] = [{"value_ms": 12}]
    if steps > 1:
        curve = [{"up_to_iops": 1_000, "value_ms": 12}, {"value_ms": 20}]
    items = []
    for number in range(count):
        scope = {"clients": ["*"], "volumes": [f"v{number}"], "io": "any"}
        objective = {
            "name": "latency",
            "indicator": {"metric": "latency", "percentile": 95},
            "demand_curve": curve,
            "budgeting": {"method": "timeslices", "slice": "1m", "target": 0.995},
        }
        spec = {"scope": scope, "priority": "gold", "objectives": [objective],
                "parties": {"provider": "p", "customer": "c"}}  # fmt: skip
        document = {
            "apiVersion": "storage-sla/v1",
            "kind": "SLA",
            "metadata": {"name": f"a{number}"},
            "spec": spec,
        }
        items.append(InForce(Agreement.model_validate(document), 1, UNIX_US))
    return items


def judging(gateways: int, steps: int = 1) -> dict[str, float]:
    """CPU of the judge a second of the day, over two minutes, and what it holds."""
    items, tables = agreements(gateways * STREAMS, steps), Tables(gateways)
    judge = Judge(tables, 30.0)  # type: ignore[arg-type]  # only what the judge asks
    judge.set_agreements(items, UNIX_US)
    collector, judged, used_s, worst_s = GcTuning(), 0, 0.0, 0.0
    for second in range(1, JUDGED_S + 1):
        tables.now_us = UNIX_US + second * 1_000_000
        before, spent = time.process_time(), tables.spent_s
        collector.tick(second * 10**9)
        found = judge.run(tables.now_us)
        took = time.process_time() - before - (tables.spent_s - spent)
        judged += sum(table == "slices" for table, _ in found.rows)
        if second > 5:
            used_s, worst_s = used_s + took, max(worst_s, took)
    assert judged >= gateways * STREAMS, "the judge fell behind"
    return {
        "judge_cores": used_s / (JUDGED_S - 5),
        "judge_worst_pass_s": worst_s,
        "judge_most_rows": tables.most_rows,
        "judged": judged,
    }


def slice_cpu_s(steps: int) -> float:
    """CPU seconds of the judge for one slice of every objective, its waiting for the next included."""
    found = judging(GATEWAYS, steps)
    return found["judge_cores"] * (JUDGED_S - 5) * GATEWAYS * STREAMS / found["judged"]


def rss_mb() -> float:
    """Resident memory of this process."""
    return float(psutil.Process().memory_info().rss / 1e6)


def measure() -> dict[str, float]:
    """All figures of the fleet."""
    empty_mb = rss_mb()
    found: dict[str, float] = {}
    fleet = Fleet(STREAMS, QUIET_BUCKET)
    found["fleet_cut_cpu_us"] = fleet.cut_cpu_us()
    started = time.process_time()
    view = fleet.controller.snapshot(UNIX_US)
    frame = snapshot_frame(Shown([], UNIX_US).compose(view, "enforce", {}, None, UNIX_US))
    found["view_cores"] = time.process_time() - started
    found["view_bytes"] = len(frame)
    found["brain_mb"] = rss_mb() - empty_mb
    found |= judging(GATEWAYS)
    found["fleet_mb"] = rss_mb() - empty_mb
    del fleet
    found["cut_cpu_us"] = Fleet(4, QUIET_BUCKET, 1_000).cut_cpu_us()
    found["risk_cut_cpu_us"] = Fleet(STREAMS, NEAR_BUCKET).cut_cpu_us()
    found["fleet_cores"] = found["fleet_cut_cpu_us"] * GATEWAYS / 1e6 + found["view_cores"]
    return found


if __name__ == "__main__":
    if "--judge" in sys.argv[1:]:
        alone = {"judge_slice_cpu_s": slice_cpu_s(1), "judge_steps_slice_cpu_s": slice_cpu_s(2)}
        print(json.dumps(alone))
    else:
        print(json.dumps(measure()))
