"""The first schema.

Revision: 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "agreements",
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("document", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("spec", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("priority", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("applied_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("applied_by", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", "version"),
    )
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("who", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("action", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("subject", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("before", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("after", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("audit_id"),
    )
    op.create_index("audit_at", "audit", ["at_us", "audit_id"], unique=False)
    op.create_table(
        "backends",
        sa.Column("backend", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("capacity_cost_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("first_seen_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("backend"),
    )
    op.create_table(
        "consumed",
        sa.Column("queue", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("queue_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("queue"),
    )
    op.create_table(
        "coverage",
        sa.Column("slot_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("covered_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cuts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("gap_cuts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("slot_us", "gateway_id"),
    )
    op.create_table(
        "episodes",
        sa.Column("episode_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("objective", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("opened_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("closed_us", sa.BigInteger(), nullable=True),
        sa.Column("worst_u", sa.Float(precision=53), nullable=True),
        sa.Column("slices_bad", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("episode_id"),
    )
    op.create_index("episodes_opened", "episodes", ["opened_us"], unique=False)
    op.create_table(
        "events",
        sa.Column("event_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("kind", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("severity", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("element", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("subject", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("text", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("details", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("events_at", "events", ["at_us", "event_id"], unique=False)
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("address", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("software", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("epoch", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("first_seen_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_seen_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_cut_us", sa.BigInteger(), nullable=True),
        sa.Column("clock_offset_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("dropped_cuts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id"),
    )
    op.create_table(
        "ingest_watermark",
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id", "epoch"),
    )
    op.create_table(
        "manifest",
        sa.Column("path", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("created_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("min_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("rows", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cuts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("sha256", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("replaced_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("path"),
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "policies",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("created_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("job", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("report", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("published_by", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "policy_caps",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("volume", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("hour_of_week", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cost_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("demand_p50", sa.Float(precision=53), nullable=True),
        sa.Column("demand_p95", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("version", "volume", "hour_of_week"),
    )
    op.create_table(
        "processes",
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("restarts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("since_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "progress",
        sa.Column("gateway_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("corrected_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id"),
    )
    op.create_table(
        "rollup_hours",
        sa.Column("hour_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrived", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reads", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("writes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("write_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("others", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("errors", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lat_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("svc_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("delay_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost_milli", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("covered_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("held_max", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("inflight_max", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("caps_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("hist", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hour_us", "stream_id"),
    )
    op.create_table(
        "rollup_missed",
        sa.Column("slot_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("io", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("threshold_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("counted", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("missed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("slot_us", "stream_id", "io", "threshold_us"),
    )
    op.create_table(
        "rollups",
        sa.Column("slot_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrived", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reads", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("writes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("write_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("others", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("errors", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lat_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("svc_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("delay_sum_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost_milli", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("covered_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("held_max", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("inflight_max", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("hist", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("slot_us", "stream_id"),
    )
    op.create_table(
        "slices",
        sa.Column("name", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("objective", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("start_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("length_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("n", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("missed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("offered_iops", sa.Float(precision=53), nullable=True),
        sa.Column("threshold_us", sa.BigInteger(), nullable=True),
        sa.Column("coverage_ratio", sa.Float(precision=53), nullable=True),
        sa.Column("inexact", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("ours", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("judged_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("name", "objective", "start_us", "revision"),
    )
    op.create_table(
        "streams",
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gateway_id", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("volume", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("client", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("backend", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("first_seen_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reads", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("writes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("write_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("errors", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("missed_any", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cuts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("stream_id"),
    )
    op.create_index("streams_volume", "streams", ["volume"], unique=False)
    op.create_table(
        "threshold_sets",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("entries", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("created_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "throttles",
        sa.Column("throttle_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("volume", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("backend", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("source", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("cost_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("ops_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("bytes_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("text", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("victim", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("who", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("gen", sa.BigInteger(), nullable=True),
        sa.Column("requested_us", sa.BigInteger(), nullable=True),
        sa.Column("confirmed_us", sa.BigInteger(), nullable=True),
        sa.Column("seen_us", sa.BigInteger(), nullable=True),
        sa.Column("released_us", sa.BigInteger(), nullable=True),
        sa.Column("expires_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("throttle_id"),
    )
    op.create_index("throttles_requested", "throttles", ["requested_us"], unique=False)
    op.create_table(
        "volumes",
        sa.Column("volume", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("backend", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("read_only", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("first_seen_us", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("volume"),
    )
