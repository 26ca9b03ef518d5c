"""Tables of ``sla get`` about the system: backends, streams, clients, rates, loads, trend, processes.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rich.text import Text

from sla_server.cli import formatting
from sla_server.cli.formatting import Column, TableKind
from sla_server.explanation.evidence import decided
from sla_server.rows import Row

ZONE: Final = "_zone"
"""Key of a row to be shown whose times are of another zone than this machine's."""
PHASES: Final = {
    "idle": "idle",
    "decrease": "slowing neighbours down",
    "hold": "neighbours held back",
    "increase": "giving back in steps",
}
"""What control does on a backend; of the page: format.js."""
FAULTS: Final = {"hangs": "hangs", "fails": "fails I/Os"}


def spec_of(row: Row) -> Row:
    """``spec`` of the document in a row."""
    return (row.get("spec") or {}).get("spec") or {}


def plain(key: str) -> Callable[[Row, int], str]:
    """The value under a key as it is."""
    return lambda row, _now_us: str(row.get(key) if row.get(key) not in (None, "") else formatting.DASH)


def at(key: str) -> Callable[[Row, int], str]:
    """The time under a key, in the row's zone."""
    return lambda row, _now_us: formatting.when(row.get(key), row.get(ZONE))


def counted(title: str, key: str, *, wide: bool = False) -> Column:
    """A whole number."""
    return Column(title, lambda row, _now_us: formatting.count(row.get(key)), number=True, wide=wide)


def latency(title: str, key: str) -> Column:
    """A latency."""
    return Column(title, lambda row, _now_us: formatting.latency(row.get(key)), number=True)


def live(row: Row, key: str) -> Any:
    """A value of the live view in a row."""
    return (row.get("live") or {}).get(key)


def live_count(title: str, key: str, *, wide: bool = False) -> Column:
    """A whole number of the live view."""
    return Column(title, lambda row, _now_us: formatting.count(live(row, key)), number=True, wide=wide)


def _phase(row: Row) -> Text:
    fault = str(live(row, "fault") or "")
    if fault:
        return Text(FAULTS.get(fault, fault), formatting.BAD)
    phase = str(live(row, "phase") or formatting.DASH)
    return Text(PHASES.get(phase, phase), formatting.WARN if phase in ("decrease", "hold") else "")


def _share_of_capacity(row: Row) -> str:
    load, capacity = live(row, "cost_per_s"), row.get("capacity_cost_per_s")
    return formatting.DASH if load is None or not capacity else formatting.percent(load / capacity, 0)


def _process_state(row: Row) -> Text:
    state = str(row.get("state") or formatting.DASH)
    return Text(state, formatting.GOOD if state == "running" else formatting.BAD)


def _node_state(row: Row) -> Text:
    state = str(row.get("state") or formatting.DASH)
    return Text(state, formatting.BAD if state in ("away", "unknown") else formatting.GOOD)


def _lease(row: Row) -> str:
    """How long it holds without a renewal, and how long ago it was heard of."""
    if row.get("lease_s") is None:
        return formatting.DASH
    heard = "" if row.get("heard_s") is None else f", {row['heard_s']:.0f} s ago"
    return f"{row['lease_s']:g} s{heard}"


def _server_of(row: Row) -> str:
    """Which of several servers decided it."""
    return str((row.get("figures") or {}).get("server") or formatting.DASH)


def _helped(row: Row) -> str:
    return ", ".join(live(row, "victims") or ()) or formatting.DASH


def _length(row: Row) -> str:
    return formatting.span(row["length_us"] / 1e6) if row.get("length_us") else formatting.DASH


def _parts(row: Row) -> str:
    """Volumes that used most of a backend, and how much of its load each was."""
    all_of_it = row.get("cost_per_s") or 0.0
    used = [(name, rate) for name, rate in (row.get("by_volume") or {}).items() if rate]
    return ", ".join(f"{name} {formatting.percent(rate / all_of_it, 0)}" for name, rate in used[:3]) or (
        formatting.DASH
    )


def _io_bytes(key: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: formatting.size(row.get(key))


KINDS: Final = {
    "backends": TableKind(
        "/backends",
        (
            Column("BACKEND", plain("backend")),
            Column("STATE", lambda row, _now_us: _phase(row)),
            live_count("WEIGHTED IOPS", "cost_per_s"),
            live_count("HELD TO", "cap_cost_per_s"),
            counted("CAPACITY", "capacity_cost_per_s"),
            Column("FULL", lambda row, _now_us: _share_of_capacity(row), number=True),
            Column("HELPS", lambda row, _now_us: _helped(row)),
            Column("FIRST SEEN", at("first_seen_us"), wide=True),
        ),
        "No backend is known yet. Start an agent beside the storage: gateway-agent run --config FILE",
        key="backend",
    ),
    "processes": TableKind(
        "/processes",
        (
            Column("PROCESS", plain("name")),
            Column("STATE", lambda row, _now_us: _process_state(row)),
            Column("PID", plain("pid"), number=True),
            counted("RESTARTS", "restarts"),
            Column("SINCE", at("since_us"), number=True),
            Column("REASON", plain("reason")),
        ),
        "No process has reported yet: sla-server status",
    ),
    "nodes": TableKind(
        "/nodes",
        (
            Column("NODE", plain("name")),
            Column("STATE", lambda row, _now_us: _node_state(row)),
            Column("SITE", plain("site")),
            counted("GATEWAYS", "gateways"),
            Column("SINCE", at("since_us"), number=True),
            Column("RELEASE", plain("release")),
            Column("PAGE", plain("page")),
            Column("LEASE", lambda row, _now_us: _lease(row), number=True, wide=True),
            Column("FENCE", plain("fence"), number=True, wide=True),
            Column("ENGINE", plain("version"), wide=True),
        ),
        "This server is no node of a cluster: docs/operations/cluster.md says how it becomes one",
    ),
    "streams": TableKind(
        "/volumes/{name}",
        (
            Column("CLIENT", plain("client")),
            Column("GATEWAY", plain("gateway_id"), wide=True),
            Column("BACKEND", plain("backend"), wide=True),
            counted("READS", "reads"),
            counted("WRITES", "writes"),
            Column("READ", _io_bytes("read_bytes"), number=True),
            Column("WRITTEN", _io_bytes("write_bytes"), number=True),
            counted("ERRORS", "errors"),
            counted("CUTS", "cuts", wide=True),
            Column("FIRST SEEN", at("first_seen_us"), number=True, wide=True),
            Column("LAST", at("last_us"), number=True),
            Column("STREAM", plain("stream_id"), wide=True),
        ),
        "Nothing is stored of its clients: none has used the volume yet.",
        of="VOLUME",
        key="client",
        rows="by_stream",
    ),
    "clients": TableKind(
        "/volumes/{name}/clients",
        (
            Column("CLIENT", plain("client")),
            counted("IOPS", "iops"),
            Column("RATE", lambda row, _now_us: formatting.rate(row.get("bytes_per_s")), number=True),
            counted("WEIGHTED", "cost_per_s"),
            latency("P50", "p50_us"),
            latency("P95", "p95_us"),
            latency("P99", "p99_us"),
            counted("ERRORS", "errors"),
            counted("READ IOPS", "read_iops", wide=True),
            counted("WRITE IOPS", "write_iops", wide=True),
            Column("LAST", at("last_us"), number=True, wide=True),
            counted("ONE READ OF", "read_every", wide=True),
        ),
        "No client used it in the last hour. For longer: --since; all there were: sla get streams VOLUME",
        of="VOLUME",
        key="client",
        time="last_us",
    ),
    "rates": TableKind(
        "/volumes/{name}/history",
        (
            Column("FROM", at("slot_us"), number=True),
            counted("IOPS", "iops"),
            Column("RATE", lambda row, _now_us: formatting.rate(row.get("bytes_per_s")), number=True),
            latency("P50", "p50_us"),
            latency("P95", "p95_us"),
            latency("P99", "p99_us"),
            counted("READS", "reads"),
            counted("WRITES", "writes"),
            counted("ERRORS", "errors"),
            Column(
                "HELD", lambda row, _now_us: formatting.count(row.get("held_max")), number=True, wide=True
            ),
            Column("LENGTH", lambda row, _now_us: _length(row), number=True, wide=True),
        ),
        "Nothing was stored of it in the last hour: no I/O, or its gateway was away. For longer: --since",
        of="VOLUME",
        key="slot_us",
        time="slot_us",
    ),
    "loads": TableKind(
        "/backends/{name}/history",
        (
            Column("FROM", at("slot_us"), number=True),
            counted("WEIGHTED IOPS", "cost_per_s"),
            counted("IOPS", "iops"),
            Column("RATE", lambda row, _now_us: formatting.rate(row.get("bytes_per_s")), number=True),
            Column("OF IT", lambda row, _now_us: _parts(row)),
            Column("LENGTH", lambda row, _now_us: _length(row), number=True, wide=True),
            counted("OTHERS", "others", wide=True),
            counted("ONE READ OF", "read_every", wide=True),
        ),
        "Nothing was stored of it in the last hour: no I/O, or its gateway was away. For longer: --since",
        of="BACKEND",
        key="slot_us",
        time="slot_us",
    ),
    "decisions": TableKind(
        "/decisions",
        (
            Column("TIME", at("at_us")),
            Column("TO KEEP", plain("victim")),
            Column("CONTROL", lambda row, _now_us: decided(row) if row.get("kind") else formatting.DASH),
            Column("KIND", plain("kind"), wide=True),
            Column("BACKEND", plain("backend"), wide=True),
            Column("SERVER", lambda row, _now_us: _server_of(row), wide=True),
            Column("CONFIRMED", at("confirmed_us"), number=True, wide=True),
            Column("SEEN", at("seen_us"), number=True, wide=True),
        ),
        "Nothing was decided in the last day: no promise was at risk. For longer: --since",
        key="decision_id",
        time="at_us",
        is_paged=True,
    ),
    "trend": TableKind(
        "/live/trend",
        (
            Column("TIME", at("at_us"), number=True),
            Column("AGREEMENT", plain("name")),
            latency("LATENCY", "latency_us"),
            latency("PROMISED", "threshold_us"),
            Column(
                "NEIGHBOURS",
                lambda row, _now_us: "slowed down" if row.get("throttled") else formatting.DASH,
            ),
        ),
        "No live value has come yet: sla-server status",
        time="at_us",
    ),
}


def trend_rows(answer: Row) -> list[Row]:
    """The columns of the last minutes as rows, the newest first."""
    times = answer.get("at_us") or []
    found = [
        {"at_us": at_us, "name": name, **{key: values[place] for key, values in columns.items()}}
        for name, columns in (answer.get("slas") or {}).items()
        for place, at_us in enumerate(times)
    ]
    return sorted(found, key=lambda row: (-row["at_us"], row["name"]))
