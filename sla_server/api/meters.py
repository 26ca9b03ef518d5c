"""Metrics of this part about itself, in Prometheus' text form (a registry of our own, no global state)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sla_server.api.calls import Calls
from sla_server.api.live import LiveView


class Meters:
    """Thread: any; prometheus_client locks inside."""

    def __init__(self, live: LiveView, calls: Calls) -> None:
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

    def text(self) -> str:
        """All metrics."""
        return generate_latest(self._registry).decode()
