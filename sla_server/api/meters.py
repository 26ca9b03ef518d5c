"""Metrics of this part about itself, in Prometheus' text form (a registry of our own, no global state)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from pmdaemon.mailbox.figures import FILL_METRIC, METRICS, samples
from sla_server.api.calls import Calls
from sla_server.api.live import LiveView


class MailboxCollector(Collector):
    """Figures of this part's mailbox, read when asked. ``stats`` as of ``pmdaemon.mailbox.Mailbox``."""

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


class Meters:
    """Thread: any; prometheus_client locks inside."""

    def __init__(self, live: LiveView, calls: Calls, mailbox: MailboxCollector | None = None) -> None:
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
            ("sla_api_operations_pending", "Changes without an answer yet.", lambda: calls.pending),
            (
                "sla_api_snapshot_age_seconds",
                "Age of the newest live snapshot; -1 before the first.",
                lambda: -1.0 if (age_s := live.age_s()) is None else age_s,
            ),
        )
        for name, about, value in gauges:
            Gauge(name, about, registry=self._registry).set_function(value)

        if mailbox is not None:
            self._registry.register(mailbox)

    def text(self) -> str:
        """All metrics."""
        return generate_latest(self._registry).decode()
