"""Metrics of the application server, in Prometheus' text form (a registry of its own, no global state).

Other parts write theirs to files ``*.prom`` in the runtime directory, whole and renamed, as
``pmdaemon.poller.metrics`` does each second; they are added unchanged while they are fresh. An old
file says that its part is gone: its age is shown, its figures are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from pmdaemon.mailbox.inspect import FILL_METRIC, METRICS, samples
from sla_server.api.live_metrics import CountsSource, LiveCollector
from sla_server.api.live_view import LiveView
from sla_server.api.operations import Operations

FRESH_S: Final = 15.0  # written each second; a scrape interval is 15 s by custom
FILE_MAX_BYTES: Final = 4 << 20  # 256 pairs are some 600 KB


class MailboxCollector(Collector):
    """Figures of this process's mailbox, read when asked. ``stats`` as of ``pmdaemon.mailbox.Mailbox``."""

    def __init__(self, participant: str, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._participant = participant
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """One family a metric."""
        about = dict([*METRICS.values(), FILL_METRIC])
        families: dict[str, Metric] = {}
        for metric, labels, value in samples(self._participant, self._stats()):
            total = metric.endswith("_total")
            family = families.setdefault(
                metric, Metric(metric.removesuffix("_total"), about[metric], "counter" if total else "gauge")
            )
            family.add_sample(metric, labels, value)
        return families.values()


class ProblemCollector(Collector):
    """What is in trouble, as the page shows it; absent while nothing is."""

    def __init__(self, live: LiveView) -> None:
        self._live = live

    def collect(self) -> Iterable[Metric]:
        """One family."""
        family = Metric("sla_problem", "1 for what is in trouble just now, see /api/v1/health.", "gauge")
        if self._live.is_stale():
            rows = [{"process": "services", "what": "services"}, *self._live.reported_problems()]
        else:
            rows = self._live.newest().snapshot["problems"]
        for process, what in sorted({(str(row.get("process")), str(row.get("what"))) for row in rows}):
            family.add_sample("sla_problem", {"process": process, "what": what}, 1.0)
        return [family]


class FeedForwardCollector(Collector):
    """Caps set before bursts that are expected, as services counts them; absent while nothing is live."""

    GAUGES: Final = {
        "watched": "Backends whose load is watched for bursts that recur.",
        "recurring": "Of them those with a clear pattern.",
        "off": "Of them those where caps ahead of bursts are switched off by evidence.",
    }
    COUNTERS: Final = {
        "looks": "Looks for a pattern, one a bin of each backend watched.",
        "clear": "Looks that found one.",
        "expected": "Bursts expected.",
        "came": "Bursts expected that came.",
        "missed": "Bursts expected that did not come.",
        "ahead": "Bursts with caps set before them.",
        "left_alone": "Bursts left alone, for comparison.",
        "bad_ahead": "Bad windows in bursts with caps set before them.",
        "bad_alone": "Bad windows in bursts left alone.",
        "switched_off": "Times that evidence switched it off for a backend.",
        "discarded": "Times that evidence was discarded: other storage, promises or mode, or a fault.",
    }

    def __init__(self, live: LiveView) -> None:
        self._live = live

    def collect(self) -> Iterable[Metric]:
        """One family a figure; counters begin again with services."""
        found = {} if self._live.is_stale() else self._live.newest().snapshot.get("feed_forward")
        figures = found if isinstance(found, dict) else {}
        families = []
        for kind, names in (("gauge", self.GAUGES), ("counter", self.COUNTERS)):
            for name, about in names.items():
                if isinstance(figures.get(name), int):
                    family = Metric(f"sla_feed_forward_{name}", about, kind)
                    sample = family.name + ("_total" if kind == "counter" else "")
                    family.add_sample(sample, {}, float(figures[name]))
                    families.append(family)
        return families


class Metrics:
    """Thread: any; prometheus_client locks inside.

    Attributes:
        folder: where other parts write their metrics; None while there is none.

    Args:
        live: what agreements, volumes, throttles and so on are shown of.
        operations: changes under way.
        mailbox: of this process.
        source: exact counts and pids.
        rows_max: rows of a kind that have series (``api.metrics_rows_max``).
    """

    def __init__(
        self,
        live: LiveView,
        operations: Operations,
        mailbox: MailboxCollector | None = None,
        source: CountsSource | None = None,
        rows_max: int = 0,
    ) -> None:
        self.folder: Path | None = None
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "sla_api_requests",
            "Requests answered, by operation and status.",
            ["operation", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "sla_api_request_seconds",
            "Time from request to the start of its answer, without live streams.",
            buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 5.0),
            registry=self._registry,
        )
        self.streams_refused = Counter(
            "sla_api_live_streams_refused",
            "Live streams refused for want of a place.",
            registry=self._registry,
        )
        gauges = (
            ("sla_api_live_streams", "Live streams open.", lambda: live.streams),
            ("sla_api_operations_pending", "Changes without an answer yet.", lambda: operations.pending),
            (
                "sla_api_snapshot_age_seconds",
                "Age of the newest live snapshot; -1 before the first.",
                lambda: -1.0 if (age_s := live.age_s()) is None else age_s,
            ),
        )
        for name, about, value in gauges:
            Gauge(name, about, registry=self._registry).set_function(value)

        self._registry.register(ProblemCollector(live))
        self._registry.register(FeedForwardCollector(live))
        self._registry.register(LiveCollector(live, source, rows_max))
        if mailbox is not None:
            self._registry.register(mailbox)

    def text(self) -> str:
        """All metrics: those of this process, and the fresh files of the other parts."""
        ages: list[str] = []
        others: list[str] = []
        for part, age_s, content in self._files():
            ages.append(f'sla_metrics_age_seconds{{part="{part}"}} {age_s:.1f}\n')
            others.append(content if age_s <= FRESH_S else "")
        if ages:
            head = (
                "# HELP sla_metrics_age_seconds Since a part wrote its metrics; absent while it never has.\n"
            )
            ages.insert(0, head + "# TYPE sla_metrics_age_seconds gauge\n")
        return "".join((generate_latest(self._registry).decode(), *ages, *others))

    def _files(self) -> Iterator[tuple[str, float, str]]:
        """(part, age in seconds, content) of each file; what vanishes meanwhile is left out."""
        for path in sorted(self.folder.glob("*.prom")) if self.folder is not None else ():
            try:
                age_s = max(0.0, time.time() - path.stat().st_mtime)
                with path.open(encoding="utf-8", errors="replace") as file:
                    yield path.stem, age_s, file.read(FILE_MAX_BYTES)
            except OSError:
                continue
