"""``make bench-query``: every page query on PostgreSQL with 30 days of 1,000 streams. Target: 200 ms.

A private server is filled with what the product keeps in SQL after 30 days (``query_data``): single rollups
of 48 hours, hours, judged slices, events and so on of 30 days. Then each GET route of the API that asks SQL
is called through the whole application (SQL, sums, JSON, ETag), pages interleaved, medians of 5 rounds; the
first call of each is in the raw samples. The server's own cache is warm after the first round, as it is on a
page that people watch. Some 3 GB of temporary disk, gone afterwards.
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import structlog
from flask.testing import FlaskClient

import dashboard
from benchmarks import harness, query_data
from pmdaemon.runtime.clock import FakeClock
from sla_server.api.access import Access
from sla_server.api.accounts import Directory
from sla_server.api.config import ApiConfig
from sla_server.api.context import AppContext
from sla_server.api.live_view import LiveView
from sla_server.api.metrics import Metrics
from sla_server.api.operations import Operations
from sla_server.api.route import PREFIX
from sla_server.api.routes import ROUTES
from sla_server.api.scope import Scopes
from sla_server.api.security import Guard, Logins
from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import SqlReader, open_reader
from tests.support.postgres import PostgresServer

ROUNDS = 5
TOKEN = "benchmark"  # noqa: S105 - nobody can reach this application
NO_SQL = {"health", "mode", "live", "schema", "trend", "stream", "operation"}
NO_SQL |= {"session_state", "metrics", "openapi", "undelivered"}
NO_SQL |= {"document_versions"}  # it asks what calendars and maintenance ask
NO_SQL |= {"alive", "ready", "nodes"}
NO_SQL |= {"report", "report_verification"}  # one row by its key; and what sla_report asks
NO_SQL |= {"sizes"}  # of the support bundle: it counts rows, so many of each table at most
"""GET routes that are answered without the database, or by the question of another page."""
DAY_US = query_data.DAY_US
END_US = query_data.END_US
SERVER = {
    "shared_buffers": "512MB",
    "max_wal_size": "1GB",
    "fsync": "off",  # only loading writes
    "autovacuum": "off",
}


def pages(world: query_data.World) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Name -> (operation, path, query) of every page measured."""
    volume, sla, version = world.volume(7), "sla-007", world.policies
    month = {"from_us": END_US - world.days * DAY_US, "to_us": END_US}
    two_days = {"from_us": END_US - 2 * DAY_US, "to_us": END_US}
    deep = f"{END_US - world.days * DAY_US // 2}:x"
    plain: dict[str, tuple[str, str, dict[str, Any]]] = {
        name: (name, f"/{name}", {})
        for name in ("gateways", "volumes", "totals", "backends", "slas", "throttles", "events", "audit")
    }
    return plain | {
        "volume": ("volume", f"/volumes/{volume}", {}),
        "sla": ("sla", f"/slas/{sla}", {}),
        "promises": ("promises", "/promises", {}),
        "volumes_page": ("volumes", "/volumes", {"sort": "busiest", "limit": 50}),
        "backend": ("backend", "/backends/disk-0", {}),
        "load_hour": ("backend_history", "/backends/disk-0/history", {}),
        "load_48h": ("backend_history", "/backends/disk-0/history", two_days),
        "load_30d": ("backend_history", "/backends/disk-0/history", month),
        "decisions": ("decisions", "/decisions", {"volume": volume, **month}),
        "sla_versions": ("sla_versions", f"/slas/{sla}/versions", {}),
        "sla_credits": ("sla_credits", f"/slas/{sla}/credits", {}),
        "maintenance": ("maintenance", "/maintenance", {}),
        "calendars": ("calendars", "/calendars", {}),
        "volume_labels": ("volume_labels", "/volume-labels", {}),
        "recipients": ("recipients", "/recipients", {}),
        "notification_routes": ("notification_routes", "/routes", {}),
        "silences": ("silences", "/silences", {"past": 1}),
        "inbox": ("inbox", "/inbox", {}),
        "inbox_open": ("inbox", "/inbox", {"open": 1}),
        "event": ("event", f"/events/{query_data.FIRST_ID}", {}),
        "gateway_list": ("gateway_list", "/gateway-list", {}),
        "volume_owners": ("volume_owners", "/volume-owners", {}),
        "volume_owners_pending": ("volume_owners", "/volume-owners", {"state": "pending"}),
        "why_volume": ("why", f"/why/{volume}", {"kind": "volume"}),
        "why_sla": ("why", f"/why/{sla}", {"kind": "sla"}),
        "why_then": ("why", f"/why/{volume}", {"kind": "volume", "at_us": END_US - DAY_US // 2}),
        "policies": ("policies", "/policies", {}),
        "policy": ("policy", f"/policies/{version}", {}),
        "policy_volume": ("policy_volume", f"/policies/{version}/volumes/{volume}", {}),
        "policy_volumes": ("policy_volumes", f"/policies/{version}/volumes", {}),
        "policy_harms": ("policy_harms", f"/policies/{version}/harms", {}),
        "policy_diff": ("policy_diff", f"/policies/{version}/diff/{version - 1}", {}),
        "jobs": ("jobs", "/jobs", {}),
        "sla_report": ("sla_report", f"/slas/{sla}/report", {"period": "this"}),
        "reports": ("reports", "/reports", {}),
        "report_chain": ("report_chain", "/report-chain", {}),
        "users": ("users", "/users", {}),
        "tokens": ("tokens", "/tokens", {}),
        "sessions": ("sessions", "/sessions", {}),
        "approvals": ("approvals", "/approvals", {}),
        "approvals_all": ("approvals", "/approvals", {"all": 1}),
        "audit_chain": ("audit_chain", "/audit/chain", {}),
        "pools": ("pools", "/pools", {}),
        "pool": ("pool", "/pools/server/pool-0", {}),
        "processes": ("processes", "/processes", {}),
        "throttles_in_force": ("throttles", "/throttles", {"in_force": 1}),
        "throttles_1000": ("throttles", "/throttles", {"limit": 1000}),
        "history_hour": ("history", f"/volumes/{volume}/history", {}),
        "history_48h": ("history", f"/volumes/{volume}/history", two_days),
        "history_30d": ("history", f"/volumes/{volume}/history", month),
        "clients_30d": ("clients", f"/volumes/{volume}/clients", month),
        "slices_day": ("slices", f"/slas/{sla}/slices", {}),
        "slice_hours": ("slice_hours", f"/slas/{sla}/hours", {}),
        "slices_30d": ("slices", f"/slas/{sla}/slices", month),
        "periods": ("periods", f"/slas/{sla}/periods", {}),
        "episodes": ("episodes", "/episodes", {"name": sla}),
        "events_1000": ("events", "/events", {"limit": 1000}),
        "events_deep": ("events", "/events", {"before": deep}),
        "audit_deep": ("audit", "/audit", {"before": deep}),
        "caps_hour": ("policy_caps", f"/policies/{version}/caps", {"hour": 5}),
        "caps_all": ("policy_caps", f"/policies/{version}/caps", {}),
    }


GROUPS = {
    "lists_ms": (
        "gateways",
        "volumes",
        "volumes_page",
        "volume",
        "totals",
        "backends",
        "slas",
        "backend",
        "sla",
        "promises",
        "decisions",
        "throttles",
        "throttles_in_force",
        "throttles_1000",
        "events",
        "events_1000",
        "events_deep",
        "audit",
        "audit_deep",
        "policies",
        "policy",
        "policy_volume",
        "policy_harms",
        "jobs",
        "reports",
        "report_chain",
        "users",
        "tokens",
        "sessions",
        "approvals",
        "approvals_all",
        "audit_chain",
        "pools",
        "pool",
        "processes",
        "recipients",
        "notification_routes",
        "silences",
        "inbox",
        "inbox_open",
        "event",
        "gateway_list",
        "volume_owners",
        "volume_owners_pending",
        "sla_versions",
        "maintenance",
        "calendars",
        "volume_labels",
        "why_volume",
        "why_sla",
        "why_then",
        "episodes",
    ),
    "history_hour_ms": ("history_hour", "load_hour"),
    "history_48h_ms": ("history_48h", "load_48h"),
    "history_30d_ms": ("history_30d", "load_30d", "clients_30d"),
    "slices_day_ms": ("slices_day",),
    "slices_30d_ms": ("slices_30d", "slice_hours", "periods", "sla_credits", "sla_report"),
    "caps_ms": ("caps_hour", "caps_all", "policy_volumes", "policy_diff"),
}
"""Goal -> its pages; the slowest counts."""


def client(source: SqlReader, port: int = 8411) -> FlaskClient:
    """The whole application over this source, with an empty live view and a clock that stays at END_US."""
    clock = FakeClock(unix_us=END_US)
    config = ApiConfig()
    live = LiveView(clock, streams_max=1, stale_after_s=config.stale_after_s)
    operations = Operations(lambda _message: None, clock, wait_s=0.01)
    directory = Directory(source.access, clock, config.oidc.token_days)
    parts = AppContext(
        config=config,
        token=TOKEN,
        source=source,
        live=live,
        operations=operations,
        guard=Guard(TOKEN, config.allowed_hosts, directory),
        logins=Logins(clock),
        scopes=Scopes(source, clock),
        access=Access(directory, operations, clock, config=config),
        metrics=Metrics(live, operations),
        clock=clock,
        address=f"http://127.0.0.1:{port}/",
    )
    return dashboard.create_app(parts).test_client()


def ask(web: FlaskClient, page: tuple[str, str, dict[str, Any]]) -> tuple[float, int]:
    """(milliseconds, bytes) of one answer, which must be 200."""
    _operation, path, query = page
    started_ns = time.perf_counter_ns()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = web.get(PREFIX + path, query_string=query, base_url="http://127.0.0.1:8411", headers=headers)
    took_ms = (time.perf_counter_ns() - started_ns) / 1e6
    if answer.status_code != 200:
        raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
    return took_ms, len(answer.data)


def check_complete(measured: Mapping[str, tuple[str, str, dict[str, Any]]]) -> None:
    """A new GET route must be measured or named in NO_SQL."""
    asked = {operation for operation, _path, _query in measured.values()} | NO_SQL
    missing = {route.operation for route in ROUTES if route.method == "GET"} - asked
    grouped = {name for names in GROUPS.values() for name in names}
    if missing or grouped != set(measured):
        raise SystemExit(
            f"not measured: {missing or grouped ^ set(measured)}; add them to benchmarks/query.py"
        )


@contextmanager
def filled(world: query_data.World) -> Iterator[tuple[FlaskClient, dict[str, Any]]]:
    """The application over a filled server, and what was loaded."""
    server = PostgresServer(SERVER)
    try:
        config = DatabaseConfig(url=server.create("bench"))
        query_data.prepare(config.url, world)
        print("loading 30 days of 1,000 streams, about two minutes", flush=True)
        started_s = time.monotonic()
        rows = query_data.load(f"host={server.directory} user=postgres dbname=bench", world)
        loaded = {"rows": rows, "load_s": time.monotonic() - started_s}
        with closing(open_reader(config, Path())) as reader:
            web = client(reader)
            gc.collect()
            gc.freeze()  # as the application server's own process is made (pmdaemon.runtime.template)
            yield web, loaded
    finally:
        server.remove()


def measure(web: FlaskClient, world: query_data.World, loaded: dict[str, Any]) -> harness.Sample:
    """Ask every page in turn."""
    measured = pages(world)
    samples: dict[str, list[float]] = {name: [] for name in measured}
    sizes: dict[str, int] = {}
    for _ in range(ROUNDS + 1):
        for name, page in measured.items():
            took_ms, sizes[name] = ask(web, page)
            samples[name].append(took_ms)
    medians = {name: statistics.median(values[1:]) for name, values in samples.items()}
    values = {goal: max(medians[name] for name in names) for goal, names in GROUPS.items()}
    raw = {"ms": samples, "medians_ms": medians, "bytes": sizes, **loaded}
    return harness.Sample(values, raw=raw, peers={"psql": harness.version_of("psql")})


def main() -> int:
    """Load once, measure."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    world = query_data.World()
    check_complete(pages(world))
    with filled(world) as (web, loaded):
        return harness.run("query", lambda: measure(web, world, loaded))


if __name__ == "__main__":
    sys.exit(main())
