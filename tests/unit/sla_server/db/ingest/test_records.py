"""Checking RECORD rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire.messages.stored import storable
from sla_server.db import schema
from sla_server.db.errors import BadRecord
from sla_server.db.ingest.records import check_row


def test_every_recordable_table_exists_and_takes_its_key():
    for name in schema.RECORDABLE:
        table = schema.metadata.tables[name]
        row = {key: table.c[key].type.python_type(1) for key in schema.natural_key(table)}
        more = {"policies": {"state": "x"}, "gateways": {"state": "lost", "reason": "", "last_seen_us": 1}}
        assert check_row(name, {**row, **more.get(name, {})})[0] == name


def test_values_are_brought_to_their_columns_type():
    _, row = check_row(
        "slices",
        {
            "name": "a\0",
            "objective": "b",
            "start_us": 5.0,
            "revision": 1,
            "inexact": 1,
            "offered_iops": 3,
            "coverage_ratio": float("nan"),
            "threshold_us": None,
        },
    )
    assert row == {
        "name": "a\ufffd",
        "objective": "b",
        "start_us": 5,
        "revision": 1,
        "inexact": True,
        "offered_iops": 3.0,
        "coverage_ratio": None,
        "threshold_us": None,
    }
    assert type(row["start_us"]) is int
    assert type(row["offered_iops"]) is float


def test_json_columns_take_text_maps_and_nothing():
    for value, stored in (({"a": 1}, '{"a": 1}'), ([1], "[1]"), ('{"b": 2}', '{"b": 2}'), (None, "")):
        assert check_row("events", {"event_id": "e", "details": value})[1]["details"] == stored


@pytest.mark.parametrize(
    ("table", "row", "problem"),
    [
        (7, {}, "RECORD writes only"),
        ("streams", {"stream_id": 1}, "RECORD writes only"),
        ("gateways", {"gateway_id": "g"}, "sets only `state: lost`"),
        (
            "gateways",
            {"gateway_id": "g", "state": "up", "reason": "", "last_seen_us": 1},
            "sets only `state: lost`",
        ),
        ("events", ["event_id"], "expected a map"),
        ("events", {"event_id": None}, "missing"),
        ("events", {"event_id": "e", "at_us": None}, "must not be null"),
        ("events", {"event_id": "e", "at_us": 1.5}, "whole number"),
        ("events", {"event_id": "e", "at_us": float("inf")}, "whole number"),
        ("events", {"event_id": "e", "at_us": True}, "takes int"),
        ("events", {"event_id": "e", "text": b"x"}, "takes str"),
        ("slices", {"name": "a", "objective": "b", "start_us": 1, "revision": 1 << 31}, "whole number"),
        ("slices", {"name": "a", "objective": "b", "start_us": 1, "revision": 1, "ours": "no"}, "takes bool"),
        ("throttles", {"throttle_id": "t", "cost_per_s": "5"}, "takes float"),
        (
            "audit",
            {"audit_id": "a", "action": "audit-pruned", "subject": "5"},
            "says not that rows have left",
        ),
    ],
)
def test_mistakes_are_named(table, row, problem):
    with pytest.raises(BadRecord, match=problem) as caught:
        check_row(table, row)
    assert "docs/formats/sql.md" in str(caught.value)


@given(st.text())
def test_clean_text_can_be_stored_anywhere(text):
    cleaned = storable(text + "\0\ud800")
    assert "\0" not in cleaned
    cleaned.encode()


def test_a_throttle_that_was_only_observed_has_no_generation():
    # The control loop in observe mode stores what it would have done; no gateway was told, so none has a gen.
    row = {"throttle_id": "t", "volume": "batch", "source": "control", "state": "observed", "gen": None}
    assert check_row("throttles", row)[1]["gen"] is None
