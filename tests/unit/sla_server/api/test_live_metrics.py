"""Metrics of agreements, volumes, throttles, backends, gateways and processes."""

from __future__ import annotations

import os

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from sla_server.api.live_metrics import LiveCollector
from sla_server.api.live_view import STATE_FRESH_NS, LiveView
from tests.support.api import FakeSource, snapshot

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(text: str) -> Found:
    """All samples of an exposition, in which none may come twice."""
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(web: FlaskClient) -> Found:
    return scraped(web.get("/api/v1/metrics").text)


def value(found: Found, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def names(found: Found) -> set[str]:
    return {name for name, _ in found}


def collected(view: LiveView, source: FakeSource | None = None, rows_max: int = 100) -> Found:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in LiveCollector(view, source, rows_max).collect()
        for sample in family.samples
    }


def test_an_agreement_has_its_figures_in_base_units(web: FlaskClient, context: AppContext) -> None:
    whole = snapshot()
    whole["slas"][0] |= {"target": 0.99, "burn_1h": 2.5, "alerts": ["fast"], "good_s": 600, "bad_s": 60}
    context.live.put(whole)
    found = scrape(web)
    gold = {"agreement": "erp-gold", "objective": "latency"}
    assert value(found, "sla_objective_state", **gold, state="ok") == 1
    assert value(found, "sla_objective_compliance_ratio", **gold) == 0.9921
    assert value(found, "sla_objective_coverage_ratio", **gold) == 0.998
    assert value(found, "sla_objective_target_ratio", **gold) == 0.99
    assert value(found, "sla_objective_error_budget_remaining_ratio", **gold) == 0.63
    assert value(found, "sla_objective_error_budget_remaining_seconds", **gold) == 8160
    assert value(found, "sla_objective_burn_rate", **gold) == 2.5
    assert value(found, "sla_objective_burn_alert", **gold, alert="fast") == 1
    assert value(found, "sla_objective_judged_seconds_total", **gold, verdict="bad") == 60
    assert value(found, "sla_objective_judged_seconds_total", **gold, verdict="good") == 600
    assert value(found, "sla_objective_latency_seconds", **gold) == 0.0092
    assert value(found, "sla_objective_threshold_seconds", **gold) == 0.012
    idle = {"agreement": "scratch", "objective": "latency"}
    assert value(found, "sla_objective_state", **idle, state="idle") == 1
    assert value(found, "sla_objective_compliance_ratio", **idle) is None, "nothing was judged"


def test_volumes_throttles_backends_and_gateways(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    found = scrape(web)
    batch = {"volume": "batch", "backend": "disk-0"}
    assert value(found, "sla_volume_ios_total", **batch, operation="read") == 981_223
    assert value(found, "sla_volume_bytes_total", **batch, operation="read") == 4096
    assert value(found, "sla_volume_latency_seconds", **batch, percentile="95") == 0.131
    assert value(found, "sla_volume_held_ios", **batch) == 24
    assert value(found, "sla_volume_cap_cost_per_second", **batch) == 290
    assert value(found, "sla_volume_cap_ios_per_second", **batch) is None
    info = {"state": "seen", "reason": "victim-at-risk", "agreement": "erp-gold", "objective": "latency"}
    assert value(found, "sla_throttle_info", **batch, source="control", **info) == 1
    assert value(found, "sla_throttle_limit_cost_per_second", **batch, source="control") == 290
    assert value(found, "sla_backend_cost_per_second", backend="disk-0") == 371
    assert value(found, "sla_backend_phase", backend="disk-0", phase="hold") == 1
    assert value(found, "sla_backend_faulty", backend="disk-0") == 0
    assert value(found, "sla_gateway_up", gateway="gateway-a", gateway_id="g-1") == 1
    assert value(found, "sla_server_enforcing") == 1
    assert value(found, "sla_server_ready") == 1


def test_of_each_kind_so_many_have_series_and_the_rest_is_counted() -> None:
    view = LiveView(FakeClock(), streams_max=1, stale_after_s=5)
    whole = snapshot()
    extra = [["zz", f"o{n}", "ok", 1.0, 1.0, 1.0, 9.0, 0.9, 0.0, [], 60, 0] for n in range(3)]
    totals = {"slas": {"ok": 6}, "volumes": 5, "throttles": 4, "backends": 1, "gateways": {"up": 2}}
    view.put({**whole, "others": extra, "totals": totals})
    found = collected(view, FakeSource(), rows_max=2)
    shown = {dict(labels)["agreement"] for name, labels in found if name == "sla_objective_state"}
    assert shown == {"erp-gold", "reports"}, "the first by name, whatever their states"
    assert value(found, "sla_metrics_left_out", kind="objectives") == 4
    assert value(found, "sla_metrics_left_out", kind="objectives-live") == 4
    assert value(found, "sla_metrics_left_out", kind="volumes") == 3
    assert value(found, "sla_metrics_left_out", kind="throttles") == 3
    assert value(found, "sla_metrics_left_out", kind="backends") == 0
    assert value(found, "sla_objectives", state="ok") == 6, "totals are complete"
    assert value(found, "sla_throttles") == 4
    none = collected(view, FakeSource(), rows_max=0)
    assert not {name for name in names(none) if "objective_" in name or "volume_" in name}
    assert value(none, "sla_metrics_left_out", kind="objectives") == 6


def test_a_stale_view_has_no_values_but_says_so(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    context.live.put(snapshot())
    clock.advance(60)
    found = scrape(web)
    assert value(found, "sla_server_ready") == 0
    assert not {
        name for name in names(found) if name.startswith(("sla_objective", "sla_volume", "sla_throttle"))
    }
    assert value(found, "sla_process_up", process="services") == 1, "SQL says so"


def test_without_a_database_all_but_exact_counts_is_there(
    web: FlaskClient, context: AppContext, source: FakeSource
) -> None:
    context.live.put(snapshot())
    source.away = True
    found = names(scrape(web))
    assert "sla_volume_ios_total" not in found
    assert "sla_process_up" not in found
    assert {"sla_volume_latency_seconds", "sla_objective_compliance_ratio"} <= found


def test_exact_counts_are_asked_for_once_in_a_while() -> None:
    clock, source = FakeClock(), FakeSource()
    view = LiveView(clock, streams_max=1, stale_after_s=60)
    view.put(snapshot())
    collector = LiveCollector(view, source, 10, clock.monotonic_ns)
    for _ in range(3):
        list(collector.collect())
        clock.advance(5)
    assert [asked for asked, *_ in source.asked if asked == "volumes"] == ["volumes"] * 2


def test_throttles_of_one_target_are_one_series(web: FlaskClient, context: AppContext) -> None:
    whole = snapshot()
    first = whole["throttles"][0] | {"source": "manual", "victim": "", "reason": "manual"}
    rows = [
        {**first, "throttle_id": "t-2", "ops_per_s": 90.0, "cost_per_s": None, "since_us": 3_000_000},
        {**first, "throttle_id": "t-3", "ops_per_s": 50.0, "cost_per_s": None, "since_us": 4_000_000},
        {**first, "throttle_id": "t-4", "client": "10.0.0.9", "ops_per_s": 7.0, "cost_per_s": None},
    ]
    context.live.put({**whole, "throttles": rows})
    found = scrape(web)
    target = {"volume": "batch", "backend": "disk-0", "source": "manual"}
    assert value(found, "sla_throttle_limit_ios_per_second", **target) == 50, "the strictest holds"
    assert value(found, "sla_throttle_start_timestamp_seconds", **target) == 3
    assert value(found, "sla_throttle_limit_ios_per_second", **target, client="10.0.0.9") == 7
    assert value(found, "sla_throttles") == 3


def test_odd_names_and_rows_break_no_scrape(web: FlaskClient, context: AppContext) -> None:
    odd = 'a"b\\c\nd'
    rows = [{"volume": odd, "backend": None, "p50_us": None, "held": "x"}, {"volume": None}]
    slas = [{"name": odd, "objective": odd, "state": odd, "alerts": None, "compliance": "x"}]
    context.live.put({**snapshot(), "volumes": rows, "slas": slas, "throttles": [{}], "totals": 5})
    found = scrape(web)
    assert value(found, "sla_objective_state", agreement=odd, objective=odd, state=odd) == 1


def test_processes_have_what_the_kernel_says_of_them() -> None:
    view, source = LiveView(FakeClock(), streams_max=1, stale_after_s=5), FakeSource()
    rows = [
        {"name": "appserver", "state": "running", "restarts": 2, "pid": os.getpid()},
        {"name": "services", "state": "backoff", "restarts": 3, "pid": os.getpid()},
        {"name": "gone", "state": "running", "restarts": 0, "pid": 1 << 30},
    ]
    source.processes = lambda: rows  # type: ignore[method-assign]
    found = collected(view, source)
    assert value(found, "sla_process_restarts_total", process="appserver") == 2
    assert value(found, "sla_process_up", process="services") == 0
    assert (value(found, "sla_process_resident_memory_bytes", process="appserver") or 0) > 1 << 20
    assert value(found, "sla_process_resident_memory_bytes", process="services") is None
    assert value(found, "sla_process_resident_memory_bytes", process="gone") is None


def test_a_promise_that_changes_between_the_lists_never_counts_backwards() -> None:
    """It was among the rows with a look at each snapshot; now it takes turns with the others."""
    clock = FakeClock()
    view = LiveView(clock, streams_max=1, stale_after_s=1e9)
    totals = {"slas": {"ok": 900}}
    row = ["a", "x", "ok", 1.0, 1.0, 1.0, 9.0, 0.9, 0.0, [], 600, 60]
    view.put({**snapshot(), "slas": [], "others": [row], "totals": totals})
    entry = {"name": "a", "objective": "x", "state": "violating", "good_s": 660, "bad_s": 120}
    view.put({**snapshot(), "slas": [entry], "others": [], "totals": totals})
    view.put({**snapshot(), "slas": [], "others": [], "totals": totals})
    labels = {"agreement": "a", "objective": "x", "verdict": "bad"}
    assert value(collected(view), "sla_objective_judged_seconds_total", **labels) == 120
    clock.advance(STATE_FRESH_NS / 1e9 + 1)
    assert value(collected(view), "sla_objective_judged_seconds_total", **labels) is None, "it has ended"


def test_a_promise_that_ended_is_gone_where_all_come_each_time() -> None:
    view = LiveView(FakeClock(), streams_max=1, stale_after_s=5)
    both = [{"name": name, "objective": "x", "state": "ok"} for name in ("a", "b")]
    view.put({**snapshot(), "slas": both, "others": [], "totals": {"slas": {"ok": 2}}})
    view.put({**snapshot(), "slas": both[:1], "others": [], "totals": {"slas": {"ok": 1}}})
    assert view.others().keys() == {("a", "x")}
