"""The tables, portable between PostgreSQL and SQLite. docs/formats/sql.md says what each column means.

Invariants: every primary key is the natural key that RECORD upserts by; every other column is nullable or
has a server default, so that a partial row can be upserted; times are int64 microseconds UTC (``*_us``),
counters int64, JSON is text. Time-series tables are partitioned on PostgreSQL (``partitions``). A change
here needs a migration under ``sql/versions`` (a test compares the two).
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    text,
    true,
)

from pmdaemon.wire.cut import OUTSTANDING_COLUMNS

metadata: Final = MetaData()
HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US

COUNTERS: Final = (
    "arrived",
    "reads",
    "writes",
    "read_bytes",
    "write_bytes",
    "others",
    "errors",
    "lat_sum_us",
    "svc_sum_us",
    "delay_sum_us",
    "cost_milli",
)
"""Columns of a cut that are summed into rollups and hours, by the same names."""
FAILED: Final = ("failed", "failed_reads", "failed_writes")
"""I/Os completed with an error, as agents since release 0.2 count them by kind; summed into rollups."""
PLACED: Final = ("sequential", "placed")
"""I/Os that arrived and began where the one before of their connection and kind had ended; and all that
arrived of which that is known. Summed into rollups; both are 0 where the agent does not count it."""
LATE_SUMS: Final = (
    "counted",
    "missed",
    "overdue",
    "settled",
    "failed",
    "failed_missed",
    "settled_failed",
    "settled_failed_sure",
)
"""Sums of ``rollup_missed``: I/Os compared with a limit, and what completions alone hide (``wire.cut``).

The last two: settled ones that failed, at most and at least; a cut does not tell which of them did."""


def _key(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text("''"))


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default=false())


def _big(name: str) -> Column[Any]:
    return Column(name, BigInteger)


def _float(name: str) -> Column[Any]:
    return Column(name, Float(53))


meta = Table("meta", metadata, _key("key", Text), _text("value"))
ALIVE_KEY: Final = "alive_us"
"""Key of ``meta``: when the server was last seen to be up, by its own clock."""

gateways = Table(
    "gateways",
    metadata,
    _key("gateway_id", Text),
    *(_text(name) for name in ("name", "state", "reason", "address", "software", "epoch")),
    *(_count(name) for name in ("first_seen_us", "last_seen_us")),
    _big("last_cut_us"),
    *(_count(name) for name in ("clock_offset_us", "dropped_cuts")),
)

gateway_list = Table(
    "gateway_list",
    metadata,
    _key("address", Text),
    _text("name"),
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
)

backends = Table(
    "backends", metadata, _key("backend", Text), _float("capacity_cost_per_s"), _count("first_seen_us")
)

volumes = Table(
    "volumes",
    metadata,
    _key("volume", Text),
    _text("backend"),
    _count("size_bytes"),
    _flag("read_only"),
    _count("first_seen_us"),
    _text("labels"),
)

STREAM_SUMS: Final = ("reads", "writes", "read_bytes", "write_bytes", "errors", "missed_any", "cuts")
streams = Table(
    "streams",
    metadata,
    _key("stream_id", BigInteger),
    *(_text(name) for name in ("gateway_id", "volume", "client", "backend")),
    _count("first_seen_us"),
    *(_count(name) for name in STREAM_SUMS),
    _big("last_us"),
    _text("planes"),
    Index("streams_volume", "volume"),
)

volume_owners = Table(
    "volume_owners",
    metadata,
    _key("volume", Text),
    _key("gateway_id", Text),
    *(_text(name) for name in ("name", "state", "backend", "shown_backend", "decided_by")),
    *(_count(name) for name in ("first_seen_us", "changed_us", "left_out", "version")),
    Index("volume_owners_version", "version"),
)

rollups = Table(
    "rollups",
    metadata,
    _key("slot_us", BigInteger),
    _key("stream_id", BigInteger),
    *(_count(name) for name in COUNTERS),
    *(_count(name) for name in ("covered_us", "held_max", "inflight_max")),
    Column("hist", LargeBinary, nullable=False),
    *(_count(name) for name in (*FAILED, *OUTSTANDING_COLUMNS, "spread_us", "told_us", "caps_us", *PLACED)),
    postgresql_partition_by="RANGE (slot_us)",
)

rollup_missed = Table(
    "rollup_missed",
    metadata,
    _key("slot_us", BigInteger),
    _key("stream_id", BigInteger),
    _key("io", Integer),
    _key("threshold_us", BigInteger),
    *(_count(name) for name in LATE_SUMS),
    postgresql_partition_by="RANGE (slot_us)",
)

rollup_hours = Table(
    "rollup_hours",
    metadata,
    _key("hour_us", BigInteger),
    _key("stream_id", BigInteger),
    *(_count(name) for name in COUNTERS),
    *(_count(name) for name in ("covered_us", "held_max", "inflight_max", "caps_us")),
    Column("hist", LargeBinary, nullable=False),
    postgresql_partition_by="RANGE (hour_us)",
)

coverage = Table(
    "coverage",
    metadata,
    _key("slot_us", BigInteger),
    _key("gateway_id", Text),
    *(_count(name) for name in ("covered_us", "cuts", "gap_cuts", "gap_ios")),
    postgresql_partition_by="RANGE (slot_us)",
)

late_cuts = Table(
    "late_cuts", metadata, _key("slot_us", BigInteger), _key("gateway_id", Text), _count("noted_us")
)

plane_gaps = Table(
    "plane_gaps",
    metadata,
    _key("slot_us", BigInteger),
    _key("gateway_id", Text),
    _key("plane", Text),
    _count("missing_us"),
)

outages = Table("outages", metadata, _key("from_us", BigInteger), _count("to_us"))

progress = Table("progress", metadata, _key("gateway_id", Text), _count("corrected_us"))

ingest_watermark = Table(
    "ingest_watermark",
    metadata,
    _key("gateway_id", Text),
    _key("epoch", Text),
    _count("seq"),
    _count("updated_us"),
    _count("fence"),
)

consumed = Table("consumed", metadata, _key("queue", Text), _count("queue_seq"))

fences = Table(
    "fences",
    metadata,
    _key("name", Text),
    _count("fence"),
    *(_text(name) for name in ("server", "queue")),
    _count("since_us"),
)

manifest = Table(
    "manifest",
    metadata,
    _key("path", Text),
    _text("kind"),
    *(_count(name) for name in ("created_us", "min_us", "max_us", "rows", "cuts", "bytes")),
    _text("sha256"),
    _big("replaced_us"),
)

agreements = Table(
    "agreements",
    metadata,
    _key("name", Text),
    _key("version", Integer),
    *(_text(name) for name in ("document", "spec", "priority")),
    _count("applied_us"),
    _text("applied_by"),
    _big("ended_us"),
)

documents = Table(
    "documents",
    metadata,
    _key("kind", Text),
    _key("name", Text),
    _key("version", Integer),
    *(_text(name) for name in ("document", "spec")),
    _count("applied_us"),
    _text("applied_by"),
    _big("ended_us"),
)

slices = Table(
    "slices",
    metadata,
    _key("name", Text),
    _key("objective", Text),
    _key("start_us", BigInteger),
    _key("revision", Integer),
    Column("version", Integer, nullable=False, server_default=text("0")),
    _count("length_us"),
    _text("state"),
    *(_count(name) for name in ("n", "missed")),
    _float("offered_iops"),
    _big("threshold_us"),
    _float("coverage_ratio"),
    _flag("inexact"),
    _flag("ours"),
    _count("judged_us"),
    _text("reason"),
    _float("measured"),
    _count("failed"),
    Index("slices_start", "start_us"),
)

episodes = Table(
    "episodes",
    metadata,
    _key("episode_id", Text),
    *(_text(name) for name in ("name", "objective")),
    _count("opened_us"),
    _big("closed_us"),
    _float("worst_u"),
    _count("slices_bad"),
    Index("episodes_opened", "opened_us"),
)

throttles = Table(
    "throttles",
    metadata,
    _key("throttle_id", Text),
    *(_text(name) for name in ("volume", "backend", "source")),
    *(_float(name) for name in ("cost_per_s", "ops_per_s", "bytes_per_s")),
    *(_text(name) for name in ("reason", "text", "victim", "who", "state")),
    _big("gen"),  # none: observed only, no gateway was ever sent it
    *(_big(name) for name in ("requested_us", "confirmed_us", "seen_us", "released_us", "expires_us")),
    *(_float(name) for name in ("loop_start", "loop_ceiling")),
    _text("client"),  # none: the whole volume
    *(_text(name) for name in ("group_name", "members")),  # none: no group
    *(_float(name) for name in ("burst_s", "peak_ops_per_s")),
    Index("throttles_requested", "requested_us"),
    Index("throttles_volume", "volume", "requested_us"),
    Index("throttles_victim", "victim", "requested_us"),
)

decisions = Table(
    "decisions",
    metadata,
    _key("decision_id", Text),
    _count("at_us"),
    *(_text(name) for name in ("kind", "reason", "mode", "backend", "volume", "victim", "text", "figures")),
    *(_big(name) for name in ("confirmed_us", "seen_us")),
    Index("decisions_at", "at_us"),
    Index("decisions_backend", "backend", "at_us"),
    Index("decisions_volume", "volume", "at_us"),
    Index("decisions_victim", "victim", "at_us"),
)

events = Table(
    "events",
    metadata,
    _key("event_id", Text),
    _count("at_us"),
    *(_text(name) for name in ("kind", "severity", "element", "subject", "text", "details")),
    Index("events_at", "at_us", "event_id"),
    Index("events_subject", "subject", "at_us"),
)

deliveries = Table(
    "deliveries",
    metadata,
    _key("recipient", Text),
    _key("delivery_id", Text),
    _text("event_id"),
    _count("number"),
    _text("state"),
    _count("attempts"),
    _text("answer"),
    _count("at_us"),
    Index("deliveries_event", "event_id"),
    Index("deliveries_at", "at_us"),
)

processes = Table(
    "processes",
    metadata,
    _key("name", Text),
    _text("state"),
    _big("pid"),
    *(_count(name) for name in ("restarts", "since_us")),
    _text("reason"),
)

audit = Table(
    "audit",
    metadata,
    _key("audit_id", Text),
    _count("at_us"),
    *(_text(name) for name in ("who", "action", "subject", "before", "after")),
    _big("seq"),  # null until it is chained, in the transaction that stores it (audit_chain)
    _text("digest"),
    Index("audit_at", "at_us", "audit_id"),
    Index("audit_action", "action", "at_us"),
    Index("audit_seq", "seq", unique=True),
)

accounts = Table(
    "accounts",
    metadata,
    _key("name", Text),
    *(_text(name) for name in ("role", "password", "labels", "state")),
    *(_count(name) for name in ("created_us", "changed_us", "sessions_from_us")),
    _text("identity"),
)

api_tokens = Table(
    "api_tokens",
    metadata,
    _key("token_id", Text),
    *(_text(name) for name in ("name", "digest", "role", "labels", "created_by")),
    *(_count(name) for name in ("created_us", "changed_us", "expires_us")),
    _big("revoked_us"),
)

sessions = Table(
    "sessions",
    metadata,
    _key("session_id", Text),
    *(_text(name) for name in ("account", "role", "labels", "made_by", "address", "browser")),
    *(_count(name) for name in ("created_us", "changed_us", "expires_us")),
    _big("ended_us"),
)

policies = Table(
    "policies",
    metadata,
    _key("version", Integer),
    _count("created_us"),
    *(_text(name) for name in ("state", "job", "report", "published_by")),
)

policy_caps = Table(
    "policy_caps",
    metadata,
    _key("version", Integer),
    _key("volume", Text),
    _key("hour_of_week", Integer),
    *(_float(name) for name in ("cost_per_s", "demand_p50", "demand_p95", "burst_s")),
)

pools = Table(
    "pools",
    metadata,
    _key("owner", Text),  # a gateway_id, or "server"
    _key("pool", Text),
    *(_text(name) for name in ("owner_name", "kind", "backend")),
    *(_count(name) for name in ("size_bytes", "used_bytes", "provisioned_bytes", "volume_count", "read_us")),
    _float("other_ratio"),
    _text("level"),
    _count("level_us"),
    *(_text(name) for name in ("conditions", "forecast")),
    _count("first_seen_us"),
)

pool_volumes = Table(
    "pool_volumes",
    metadata,
    *(_key(name, Text) for name in ("owner", "pool", "name")),
    _count("size_bytes"),
    _big("used_bytes"),
    _text("volume"),
    Column("in_use", Boolean),
    _count("first_seen_us"),
    *(_big(name) for name in ("unused_since_us", "gone_us")),
)

pool_days = Table(
    "pool_days",
    metadata,
    *(_key(name, Text) for name in ("owner", "pool")),
    _key("day_us", BigInteger),
    *(_count(name) for name in ("size_bytes", "used_bytes", "least_bytes", "most_bytes", "readings")),
)

pool_actions = Table(
    "pool_actions",
    metadata,
    _key("action_id", Text),
    _count("at_us"),
    *(_text(name) for name in ("owner", "pool", "action", "state", "text")),
    Index("pool_actions_pool", "owner", "pool", "at_us"),
)

jobs = Table(
    "jobs",
    metadata,
    _key("job_id", Text),
    *(_text(name) for name in ("kind", "state", "who", "text")),
    _count("started_us"),
    *(_big(name) for name in ("ended_us", "exit_status", "rows", "version")),
    Index("jobs_started", "started_us", "job_id"),
)

job_results = Table(
    "job_results",
    metadata,
    _key("kind", Text),
    _key("part", Integer),
    *(_count(name) for name in ("end_us", "made_us", "rows")),
    _text("basis"),
    Column("body", LargeBinary, nullable=False),
)

reports = Table(
    "reports",
    metadata,
    _key("number", Integer),
    *(_text(name) for name in ("report_id", "name", "period", "revises")),
    Column("revision", Integer, nullable=False, server_default=text("0")),
    *(_count(name) for name in ("from_us", "to_us", "issued_us")),
    _text("issued_by"),
    _flag("is_preliminary"),
    *(_text(name) for name in ("digest", "previous", "summary", "body")),
    Index("reports_id", "report_id", unique=True),
    Index("reports_name", "name", "from_us"),
)
"""Issued reports: rows are inserted and never change; triggers refuse it (``sql/versions/0019``)."""

approvals = Table(
    "approvals",
    metadata,
    _key("approval_id", Text),
    *(_text(name) for name in ("op", "body", "basis", "digest", "text", "state")),
    *(_text(name) for name in ("requested_by", "requested_as", "decided_by", "answer")),
    *(_count(name) for name in ("requested_us", "expires_us", "changed_us")),
    _big("decided_us"),
    Index("approvals_requested", "requested_us", "approval_id"),
)
"""Changes that wait, or waited, for a second person."""

REJECTED: Final = "rejected"
REJECTED_PINNED: Final = "rejected-pinned"
"""Of a policy that the back-test is against, and of the same while an operator pins it."""
POLICY_PINNED: Final = ("pinned", REJECTED_PINNED)
POLICY_IN_FORCE: Final = ("in-force", *POLICY_PINNED)
"""States of the one policy in force: until a newer one is published, or until it is unpinned."""
POLICY_USABLE: Final = ("published", "superseded", "in-force", "pinned")
"""States of policies of which the newest may be in force; others are "rolled-back" and those rejected."""

JSON_COLUMNS: Final = {
    "agreements": ("spec",),
    "documents": ("spec",),
    "decisions": ("figures",),
    "events": ("details",),
    "audit": ("before", "after"),
    "policies": ("job", "report"),
    "pools": ("conditions", "forecast"),
    "reports": ("summary",),
}
"""Text columns that hold JSON: encoded when written, decoded when read."""

RECORDABLE: Final = frozenset(
    (
        "agreements",
        "documents",
        "slices",
        "episodes",
        "throttles",
        "decisions",
        "events",
        "deliveries",
        "processes",
        "audit",
        "policies",
        "gateway_list",
        "gateways",
        "volume_owners",
        "pools",
        "pool_volumes",
        "pool_days",
        "pool_actions",
        "accounts",
        "api_tokens",
        "sessions",
        "approvals",
    )
)
"""Tables that RECORD may write; of ``policies`` only ``state``, of ``gateways`` only that one is lost."""


def natural_key(table: Table) -> tuple[str, ...]:
    """Names of the columns that identify a row."""
    return tuple(column.name for column in table.primary_key.columns)


def time_of(table: Table) -> Column[Any]:
    """The column by which rows of a table of statistics or of slices lie in time; it has an index."""
    return slices.c.start_us if table is slices else next(iter(table.primary_key.columns))
