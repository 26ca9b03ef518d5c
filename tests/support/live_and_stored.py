"""The same I/O through the agent's accounting into live control and into slices, to compare what they say.

``Both`` has one volume, a stream for each of its clients, and an objective of every indicator. A script does
to the streams (``streams.History``) what happens in a second; a second ends with a cut of each gateway. The
clients may be at several gateways and data planes, of which some fall silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from gateway_agent.nbd.limits import KIND_READ
from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, Cut, missed_array, rows_array
from pmdaemon.wire.names import stream_id
from sla_server.agreements.rules import rule_of
from sla_server.agreements.slices import SliceVerdict, verdicts_of
from sla_server.agreements.verdicts import DueSlices, judge_slices
from sla_server.db.histogram_codec import TOTAL_BUCKETS
from sla_server.db.ingest.accumulator import IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.ingest.planes import planes_text
from sla_server.db.schema import LATE_SUMS
from sla_server.services.control.simulation import UNIX_0_US
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.track import JudgedStream
from tests.support.agreements import in_force
from tests.support.judged import inputs_of
from tests.support.streams import MS, History
from tests.support.worlds import A, Feeder, controller

SLICE_S: Final = 20
LIMIT_MS: Final = 12
OUTAGE_S: Final = 5
VOLUME: Final = "vol-1"
_BASE_US: Final = UNIX_0_US // (SLICE_S * 1_000_000) * SLICE_S * 1_000_000
_INDICATORS: Final = {
    "latency": "{metric: latency, percentile: 95}",
    "mean_latency": "{metric: mean_latency}",
    "iops": "{metric: iops}\n    promised_iops: 50",
    "throughput": "{metric: throughput}\n    promised_mbps: 0.025",
    "availability": f"{{metric: availability}}\n    outage: {OUTAGE_S}s",
}
Script = Callable[[Sequence[History], int], None]


def agreement_text(errors: str = "bad", up_to_iops: str = ".inf", clause: str = "", io: str = "any") -> str:
    """An objective of every indicator, by its name; ``clause``: of its applicability."""
    curve = f"    demand_curve: [{{up_to_iops: {up_to_iops}, value_ms: {LIMIT_MS}}}]\n"
    objectives = "".join(
        f"  - name: {name}\n    indicator: {indicator}\n{curve if 'latency' in name else ''}"
        f"    applicability: {{min_ios_per_slice: 1{clause}}}\n    errors: {errors}\n"
        f"    budgeting: {{slice: {SLICE_S}s, target: 0.9}}\n"
        for name, indicator in _INDICATORS.items()
    )
    return f"""\
apiVersion: storage-sla/v1
kind: SLA
metadata: {{name: both}}
spec:
  scope: {{volumes: [{VOLUME}], io: {io}}}
  priority: gold
  objectives:
{objectives}"""


class Both:
    """See the module.

    Attributes:
        is_open: by objective, whether its episode was open at the end of each second.
        states: the live state, likewise.
        silent: gateways and data planes that say nothing.
    """

    def __init__(
        self,
        clients: Sequence[str] = ("c",),
        text: str | None = None,
        sources: Sequence[tuple[str, str]] = (),
    ) -> None:
        """``sources``: gateway and data plane of each client; by default one gateway that names no plane."""
        item = in_force(text or agreement_text(), rollup_s=SLICE_S)
        self.promises = {promise.objective: promise for promise in item.all_promises}
        self._clauses = {each.name: each.applicability for each in item.agreement.judged}
        limits = tuple((io, us) for io in (0, 1, 2) for us in (LIMIT_MS * 1000, OUTAGE_S * 1_000_000))
        self.streams = [History(sessions=1, limits=limits) for _ in clients]
        self._sources = list(sources) or [(A, "")] * len(clients)
        self._gateways = list(dict.fromkeys(gateway for gateway, _ in self._sources))
        self._ids = [
            stream_id(of[0], VOLUME, client) for of, client in zip(self._sources, clients, strict=True)
        ]
        self._marks = {
            gateway: {p: 1 for g, p in self._sources if g == gateway} for gateway in self._gateways
        }
        self.silent: set[str] = set()
        self._seconds = 0
        made = controller(list(self.promises.values()), mode="observe")
        names = [f"{VOLUME}/{client}" for client in clients]
        of_gateways = [
            (name, tuple(each for of, each in zip(self._sources, names, strict=True) if of[0] == name))
            for name in self._gateways
        ]
        self.feeder = Feeder(made, *of_gateways)
        self.is_open: dict[str, list[bool]] = {name: [] for name in self.promises}
        self.states: dict[str, list[str]] = {name: [] for name in self.promises}
        self._cuts: list[Cut] = []

    def run(self, script: Script, seconds: int) -> None:
        """Let seconds pass in which ``script`` does what happens in each of them."""
        for _ in range(seconds):
            began_ns = [stream.now_ns for stream in self.streams]
            script(self.streams, self._seconds)
            for stream, ns in zip(self.streams, began_ns, strict=True):
                assert stream.now_ns <= ns + 1000 * MS
                stream.now_ns = ns + 1000 * MS
            self._end_second()

    def _end_second(self) -> None:
        feeder = self.feeder
        feeder.second += 1
        self._seconds += 1
        recv_us = _BASE_US + self._seconds * 1_000_000
        for gateway in self._gateways:
            if gateway not in self.silent:
                made = self._cut(gateway)
                self._cuts.append(made)
                feeder.controller.add_cut(made, recv_us, 0, False, feeder.now_ns)
        feeder.controller.tick(feeder.now_ns, recv_us)
        for (_, name), state in feeder.controller.live.items():
            self.is_open[name].append(state.violating)
            self.states[name].append(state.state)

    def _cut(self, gateway: str) -> Cut:
        rows, hist, missed, planes = list[list[int]](), list[tuple[int, int, int]](), [], list[str]()
        for number, stream, (of, plane) in zip(self._ids, self.streams, self._sources, strict=True):
            taken = stream.stream.take(stream.now_ns) if of == gateway and plane not in self.silent else None
            if taken is None:
                continue
            row = [*taken.row]
            row[COL["stream_id"]] = number
            buckets = np.flatnonzero(taken.hist).tolist()
            hist += [(len(rows), bucket, int(taken.hist[bucket])) for bucket in buckets]
            missed += [(len(rows), *entry) for entry in taken.missed]
            rows.append(row)
            planes.append(plane)
        return Cut(
            gateway,
            1,
            self._seconds,
            _BASE_US + (self._seconds - 1) * 1_000_000,
            1_000_000,
            0,
            1,
            rows_array(rows) if rows else np.zeros((len(COLUMNS), 0), dtype=np.int64),
            np.array(hist, dtype=HIST_DTYPE),
            missed_array(missed),
            extra=self._header(gateway, planes),
        )

    def _header(self, gateway: str, planes: Sequence[str]) -> dict[str, object]:
        """What it says of data planes; ``planes``: of each row."""
        marks = self._marks[gateway]
        if "" in marks:
            return {}
        inside = [name for name in marks if name not in self.silent]
        marks |= dict.fromkeys(inside, self._seconds + 1)
        found: dict[str, object] = {"dp": dict(marks)}
        if len(inside) > 1:
            rows = {name: np.array([plane == name for plane in planes], np.bool_) for name in inside}
            found["of"] = {
                name: np.packbits(is_of, bitorder="little").tobytes() for name, is_of in rows.items()
            }
        return found

    def slices(self) -> dict[str, list[SliceVerdict]]:
        """By objective, how the slices that have ended are judged."""
        window = IngestWindow(SLICE_S * 1_000_000)
        items = [IngestedCut(cut, 0, cut.start_unix_us + cut.duration_us) for cut in self._cuts]
        window.absorb(DecodedBatch(1, 1, cuts=items))
        rows = []
        for slot_us, accumulator in sorted(window.slots.items()):
            numbers, columns = window.slot_columns(slot_us)
            for at, dense in enumerate(accumulator.hist_of(numbers)):
                half = TOTAL_BUCKETS // 2
                row = {name: int(values[at]) for name, values in columns.items()}
                rows.append({**row, "hist_read": dense[:half], "hist_write": dense[half:]})
        names = ("slot_us", "stream_id", "io", "threshold_us", *LATE_SUMS)
        found = window.missed_columns()
        entries = zip(*(found[name].tolist() for name in names), strict=True)
        coverage = [
            {"slot_us": slot_us, "gateway_id": name, "covered_us": sums[0], "gap_cuts": 0, "gap_ios": 0}
            for (slot_us, name), sums in window.coverage.items()
        ]
        gaps = [
            {"slot_us": slot_us, "gateway_id": name, "plane": plane, "missing_us": us}
            for (slot_us, name, plane), us in window.plane_gaps.items()
        ]
        planes = {number: planes_text(found) for number, found in window.stream_planes.items()}
        limits = [dict(zip(names, entry, strict=True)) for entry in entries]
        table = SliceRows(inputs_of(rows, limits, coverage, gaps, planes))
        count = self._seconds // SLICE_S
        length_us = np.full(count, SLICE_S * 1_000_000)
        start_us = _BASE_US + np.arange(count) * SLICE_S * 1_000_000
        streams = tuple(
            JudgedStream(number, of, 0, VOLUME)
            for number, (of, _) in zip(self._ids, self._sources, strict=True)
        )
        observed = [
            [us for _, us in table.sources(streams, self._gateways, begin, begin + SLICE_S * 1_000_000)]
            for begin in start_us.tolist()
        ]
        pairs = table.pairs([streams] * count, start_us, start_us + length_us)
        nothing = np.full(count, -1)
        return {
            name: verdicts_of(
                judge_slices(
                    table.table,
                    DueSlices(
                        [rule_of(promise, self._clauses[name])] * count,
                        length_us,
                        np.zeros(count, np.bool_),
                        np.array([min(each) for each in observed]),
                        np.array([max(each) for each in observed]),
                        nothing,
                        *pairs,
                    ),
                )
            )
            for name, promise in self.promises.items()
        }


def serve(stream: History, ios: int = 100, ms: float = 2.0, kind: int = KIND_READ, how: str = "done") -> None:
    """I/Os one behind the other, within the next second."""
    for _ in range(ios):
        number = stream.arrive(kind)
        stream.pass_ms(ms)
        stream.complete(number, how)
        stream.pass_ms(max(950 / ios - ms, 0))
