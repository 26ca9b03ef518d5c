"""Metrics of what the server is there for: agreements, volumes, throttles, backends, gateways, processes.

Collectors read the live view when asked, so nothing is kept between two scrapes; while the view is stale they
are silent, as what was so then is not so now. Exact counts of volumes come from SQL, at most once in
``COUNTS_NS``: a scrape that finds no database goes without them.

Cardinality is bounded: of each kind at most ``api.metrics_rows_max`` rows have series, the first by name, so
that series do not come and go with the load; ``sla_metrics_left_out`` says how many have none. Totals by
state are always complete. Labels have names that people chose; none has an id that is made for each thing
(of a throttle, an event, an episode). A label that would be empty is left out.

Units are seconds, bytes, ratios and I/Os; rates end with ``_per_second``. Of the states of a promise only the
one it is in has a series, with the value 1, as Prometheus does it for alerts.

Thread: ``collect`` from any; the lock guards the counts that are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, Protocol

import psutil
import structlog
from prometheus_client import Metric
from prometheus_client.registry import Collector

from pmdaemon.errors import SlaError
from sla_server.api.live_view import LiveView
from sla_server.rows import Row

COUNTS_NS: Final = 10_000_000_000  # scrapes of several Prometheus servers share one query
log = structlog.get_logger("api-metrics")


class CountsSource(Protocol):
    """What is asked of SQL."""

    def volumes(self) -> list[Row]:
        """Volumes with exact sums, by name."""

    def processes(self) -> list[Row]:
        """The server's processes, with their pids."""


class Families:
    """Metric families under way; a sample without a value is left out."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(
        self,
        name: str,
        about: str,
        value: Any,
        labels: Mapping[str, Any] | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """One sample; ``name`` ends with ``_total`` if it is a counter."""
        if isinstance(value, bool | int | float):
            family = self.family(name, about)
            given = {key: str(text) for key, text in (labels or {}).items() if text not in (None, "")}
            family.add_sample(name, given, float(value) * scale)

    def family(self, name: str, about: str) -> Metric:
        """The family of this name, empty at first."""
        if name not in self._families:
            kind = "counter" if name.endswith("_total") else "gauge"
            self._families[name] = Metric(name.removesuffix("_total"), about, kind)
        return self._families[name]

    def all(self) -> Iterable[Metric]:
        """In the order of the first sample of each."""
        return self._families.values()


class LiveCollector(Collector):
    """All that is in the live view, with exact counts from SQL and what the kernel says of processes.

    Args:
        live: the newest snapshot.
        source: for counts of volumes and the pids of processes; None: without both.
        rows_max: of objectives, volumes, throttles, backends and gateways, each.
        now_ns: monotonic.
    """

    def __init__(
        self,
        live: LiveView,
        source: CountsSource | None,
        rows_max: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._live = live
        self._source = source
        self._rows_max = rows_max
        self._now_ns = now_ns
        self._lock = threading.Lock()  # guards the two below
        self._counts: list[Row] = []
        self._counted_ns: int | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not ask SQL when it is made."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families that have a sample."""
        found = Families()
        is_stale = self._live.is_stale()
        found.add("sla_server_info", "1; the label has the release.", 1, {"version": _release()})
        found.add("sla_server_ready", "1 while services report, so that what follows is known.", not is_stale)
        self._add_processes(found)
        if not is_stale:
            snapshot = self._live.newest().snapshot
            totals = snapshot.get("totals")
            totals = totals if isinstance(totals, dict) else {}
            _add_server(found, snapshot, totals)
            self._add_objectives(found, snapshot, totals)
            self._add_volumes(found, snapshot, totals)
            self._add_throttles(found, snapshot, totals)
            self._add_backends(found, snapshot, totals)
            self._add_gateways(found, snapshot, totals)
        return found.all()

    def _cut(self, found: Families, kind: str, rows: Sequence[Any], total: Any = None) -> Sequence[Any]:
        """The first rows, and how many have no series: those cut here, and those that no snapshot has."""
        shown = rows[: self._rows_max]
        known = max(len(rows), total) if isinstance(total, int) else len(rows)
        _add_left_out(found, kind, known - len(shown))
        return shown

    def _add_objectives(self, found: Families, snapshot: Row, totals: Row) -> None:
        states = _counts(totals.get("slas"))
        for state, count in states.items():
            found.add("sla_objectives", "Objectives in force, by state.", count, {"state": state})
        rows = sorted(self._live.others().items())
        for (agreement, objective), row in self._cut(found, "objectives", rows, sum(states.values())):
            _add_objective(found, {"agreement": agreement, "objective": objective}, row)
        shown = {key for key, _ in rows[: self._rows_max]}
        live = [row for row in snapshot["slas"] if (str(row.get("name")), str(row.get("objective"))) in shown]
        _add_left_out(found, "objectives-live", max(len(rows), sum(states.values())) - len(live))
        for row in live:
            labels = {"agreement": row.get("name"), "objective": row.get("objective")}
            if row.get("metric", "latency") in ("latency", "mean_latency"):
                about = "Latency of the newest windows, as the objective measures it."
                found.add("sla_objective_latency_seconds", about, row.get("latency_us"), labels, scale=1e-6)
            about = "Limit of latency (or of a stall) at the rate that is offered."
            found.add("sla_objective_threshold_seconds", about, row.get("threshold_us"), labels, scale=1e-6)
            about = "For how long nothing has completed though I/O is outstanding."
            found.add("sla_objective_stall_seconds", about, row.get("stall_us"), labels, scale=1e-6)

    def _add_volumes(self, found: Families, snapshot: Row, totals: Row) -> None:
        counts = self._volume_counts()
        live = {str(row.get("volume")): row for row in snapshot["volumes"]}
        names = sorted({str(row["volume"]) for row in counts} | live.keys())
        shown = set(self._cut(found, "volumes", names, totals.get("volumes")))
        for row in counts:
            if row["volume"] in shown:
                _add_volume_counts(found, row)
        for name in sorted(shown & live.keys()):
            _add_volume(found, live[name])
        _add_left_out(
            found, "volumes-live", max(totals.get("volumes", 0), len(names)) - len(shown & live.keys())
        )

    def _add_throttles(self, found: Families, snapshot: Row, totals: Row) -> None:
        merged: dict[tuple[str, ...], list[Row]] = {}
        for row in snapshot["throttles"]:
            merged.setdefault(tuple(str(row.get(key) or "") for key in THROTTLE_KEYS), []).append(row)
        total = totals.get("throttles", len(snapshot["throttles"]))
        found.add("sla_throttles", "Throttles that services have, those only observed among them.", total)
        rows = sorted(merged.items())
        for key, same in self._cut(found, "throttles", rows, len(rows) + total - len(snapshot["throttles"])):
            _add_throttle(found, dict(zip(THROTTLE_LABELS, key, strict=True)), same)

    def _add_backends(self, found: Families, snapshot: Row, totals: Row) -> None:
        rows = sorted(snapshot["backends"], key=lambda row: str(row.get("backend")))
        for row in self._cut(found, "backends", rows, totals.get("backends")):
            labels = {"backend": row.get("backend")}
            about = "Cost that passes now; 1 an I/O and 1 each 64 KiB unless the policy says otherwise."
            found.add("sla_backend_cost_per_second", about, row.get("cost_per_s"), labels)
            about = "Cost that its throttled volumes may use together; absent while none is throttled."
            found.add("sla_backend_cap_cost_per_second", about, row.get("cap_cost_per_s"), labels)
            phase = {**labels, "phase": row.get("phase")}
            found.add("sla_backend_phase", "1; the label has the phase of the control loop.", 1, phase)
            fault = row.get("fault")
            found.add("sla_backend_faulty", "1 while the storage hangs or fails.", bool(fault), labels)

    def _add_gateways(self, found: Families, snapshot: Row, totals: Row) -> None:
        states = _counts(totals.get("gateways")) or _by(snapshot["gateways"], "state")
        for state, count in states.items():
            found.add("sla_gateways", "Gateways known to services, by state.", count, {"state": state})
        rows = sorted(
            snapshot["gateways"], key=lambda row: (str(row.get("name")), str(row.get("gateway_id")))
        )
        for row in self._cut(found, "gateways", rows, sum(states.values())):
            labels = {
                "gateway": row.get("name") or row.get("gateway_id"),
                "gateway_id": row.get("gateway_id"),
            }
            found.add("sla_gateway_up", "1 while the gateway answers.", row.get("state") == "up", labels)
            about = "End of the newest cut, by the server's clock."
            name = "sla_gateway_last_cut_timestamp_seconds"
            found.add(name, about, row.get("last_cut_us"), labels, scale=1e-6)
            about = "Cuts that the agent dropped since services know it."
            found.add("sla_gateway_dropped_cuts_total", about, row.get("dropped_cuts"), labels)
            about = "Share of the newest cut in which a data plane waited for the processor."
            found.add("sla_gateway_starved_ratio", about, row.get("starved_ratio"), labels)
            about = "Share of the time in which tasks of the gateway's host waited for I/O."
            found.add("sla_gateway_io_waited_ratio", about, row.get("io_waited_ratio"), labels)
            about = "Clock of the gateway ahead of the server's."
            name = "sla_gateway_clock_offset_seconds"
            found.add(name, about, row.get("clock_offset_us"), labels, scale=1e-6)

    def _volume_counts(self) -> list[Row]:
        """Exact sums, kept for a while; none while SQL cannot be read, as old counts would say "no I/O"."""
        if self._source is None:
            return []
        with self._lock:
            now_ns = self._now_ns()
            if self._counted_ns is None or now_ns - self._counted_ns >= COUNTS_NS:
                try:
                    self._counts = self._source.volumes()
                except SlaError as exc:
                    log.warning("volumes-not-counted", error=str(exc))
                    self._counts = []
                self._counted_ns = now_ns
            return self._counts

    def _add_processes(self, found: Families) -> None:
        """What SQL knows of the processes, and what the kernel says of those that run on this machine."""
        try:
            rows = self._source.processes() if self._source is not None else []
        except SlaError:
            rows = []  # sla_problem says so
        for row in rows:
            labels = {"process": row.get("name")}
            is_running = row.get("state") == "running"
            found.add("sla_process_up", "1 while the process of the server runs.", is_running, labels)
            about = "Times that it was started again."
            found.add("sla_process_restarts_total", about, row.get("restarts"), labels)
            if is_running and isinstance(row.get("pid"), int):
                _add_usage(found, labels, row["pid"])


THROTTLE_KEYS: Final = ("volume", "client", "group_name", "backend", "source")
THROTTLE_LABELS: Final = ("volume", "client", "group", "backend", "source")


def _release() -> str:
    return version("storage-sla-server")


def _counts(found: Any) -> dict[str, int]:
    """Name to count, of a part of the snapshot's totals."""
    return {str(key): count for key, count in found.items()} if isinstance(found, dict) else {}


def _by(rows: Iterable[Row], key: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[str(row.get(key))] = found.get(str(row.get(key)), 0) + 1
    return found


def _add_left_out(found: Families, kind: str, count: int) -> None:
    about = "Rows without series, for want of api.metrics_rows_max; -live: of services.live_rows."
    found.add("sla_metrics_left_out", about, count, {"kind": kind})


def _add_server(found: Families, snapshot: Row, totals: Row) -> None:
    enforces = snapshot["mode"] == "enforce"
    found.add("sla_server_enforcing", "1 while throttles are set, 0 while only observed.", enforces)
    found.add("sla_volumes", "Volumes known to services.", totals.get("volumes"))
    found.add("sla_backends", "Backends known to services.", totals.get("backends"))
    for row in snapshot["processes"]:
        fullness = (row.get("pressure") or {}).get("fullness") or {}
        for queue, ratio in sorted(fullness.items()):
            about = "Share in use of a queue or mailbox that data pass."
            labels = {"process": row.get("name"), "queue": queue}
            found.add("sla_queue_fill_ratio", about, ratio, labels)


def _add_objective(found: Families, labels: Mapping[str, Any], row: Row) -> None:
    about = "1; the label has the state that the objective is in."
    found.add("sla_objective_state", about, 1, {**labels, "state": row["state"]})
    for name, about, key, scale in (
        ("target_ratio", "Share of the time that is promised to be good.", "target", 1.0),
        ("compliance_ratio", "Share of the period's eligible time that was good.", "compliance", 1.0),
        ("coverage_ratio", "Share of the period's judged time that was measured.", "coverage", 1.0),
        (
            "error_budget_remaining_ratio",
            "Share of the period's error budget that is left; negative: overspent.",
            "budget_remaining",
            1.0,
        ),
        (
            "error_budget_remaining_seconds",
            "Bad time that the period still allows.",
            "budget_minutes_left",
            60.0,
        ),
        (
            "burn_rate",
            "Speed at which the budget was spent in the last hour; 1 spends it all.",
            "burn_1h",
            1.0,
        ),
    ):
        found.add(f"sla_objective_{name}", about, row.get(key), labels, scale=scale)
    about = "Time judged since services began, by verdict; late revisions are not in it."
    for verdict in ("good", "bad"):
        name, value = "sla_objective_judged_seconds_total", row.get(f"{verdict}_s")
        found.add(name, about, value, {**labels, "verdict": verdict})
    about = "1 for each burn-rate alert of the server that is active: fast, medium, slow, consecutive."
    for alert in row.get("alerts") or ():
        found.add("sla_objective_burn_alert", about, 1, {**labels, "alert": alert})


def _add_volume_counts(found: Families, row: Row) -> None:
    for operation, ios, size in (("read", "reads", "read_bytes"), ("write", "writes", "write_bytes")):
        labels = {"volume": row["volume"], "backend": row.get("backend"), "operation": operation}
        about = "I/Os completed, exact, by volume; from SQL."
        found.add("sla_volume_ios_total", about, row.get(ios), labels)
        about = "Bytes read and written, exact, by volume; from SQL."
        found.add("sla_volume_bytes_total", about, row.get(size), labels)
    labels = {"volume": row["volume"], "backend": row.get("backend")}
    found.add("sla_volume_errors_total", "I/Os that failed.", row.get("errors"), labels)


def _add_volume(found: Families, row: Row) -> None:
    labels = {"volume": row.get("volume"), "backend": row.get("backend")}
    about = "Latency over the last cuts: upper edges of histogram buckets."
    for percentile, key in (("50", "p50_us"), ("95", "p95_us"), ("99", "p99_us")):
        which = {**labels, "percentile": percentile}
        found.add("sla_volume_latency_seconds", about, row.get(key), which, scale=1e-6)
    about = "95th percentile of the storage's part of the latency, over the last cuts."
    found.add("sla_volume_service_p95_seconds", about, row.get("service_p95_us"), labels, scale=1e-6)
    about = "Mean time that caps held an I/O back, over the last cuts."
    found.add("sla_volume_hold_seconds", about, row.get("delay_us"), labels, scale=1e-6)
    found.add("sla_volume_held_ios", "I/Os held back by caps now.", row.get("held"), labels)
    found.add("sla_volume_inflight_ios", "I/Os at the storage now.", row.get("inflight"), labels)
    for name, key in (("ios", "ops"), ("bytes", "bytes"), ("cost", "cost")):
        about = "Cap in force; absent while there is none."
        found.add(f"sla_volume_cap_{name}_per_second", about, row.get(f"cap_{key}_per_s"), labels)


def _add_throttle(found: Families, labels: Mapping[str, str], same: Sequence[Row]) -> None:
    """One target and source; of several throttles (by hand) the strictest rate and the first begin."""
    for row in {(str(row.get("state")), str(row.get("reason"))): row for row in same}.values():
        agreement, _, objective = str(row.get("victim") or "").partition("/")
        more = {"state": row.get("state"), "reason": row.get("reason")}
        about = "1; the labels say what is throttled, for which promise and why."
        whom = {"agreement": agreement, "objective": objective}
        found.add("sla_throttle_info", about, 1, {**labels, **more, **whom})
    for name, key in (("ios", "ops_per_s"), ("bytes", "bytes_per_s"), ("cost", "cost_per_s")):
        rates = [rate for row in same if isinstance(rate := row.get(key), int | float)]
        about = "Rate that the throttle asks for."
        found.add(f"sla_throttle_limit_{name}_per_second", about, min(rates, default=None), labels)
    holds = [hold for row in same if isinstance(hold := row.get("mean_hold_us"), int | float)]
    about = "Mean time that it held an I/O back, over the last cuts."
    found.add("sla_throttle_hold_seconds", about, max(holds, default=None), labels, scale=1e-6)
    begins = [at_us for row in same if isinstance(at_us := row.get("since_us"), int)]
    about = "When it was asked for."
    found.add("sla_throttle_start_timestamp_seconds", about, min(begins, default=None), labels, scale=1e-6)


def _add_usage(found: Families, labels: Mapping[str, Any], pid: int) -> None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory, start_s = process.cpu_times(), process.memory_info(), process.create_time()
    except psutil.Error:
        return  # it has ended, or it is another user's
    about = "Processor time of the process itself, without its children."
    found.add("sla_process_cpu_seconds_total", about, times.user + times.system, labels)
    found.add("sla_process_resident_memory_bytes", "Resident memory of the process.", memory.rss, labels)
    found.add("sla_process_start_timestamp_seconds", "When the process was started.", start_s, labels)
