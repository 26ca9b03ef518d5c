"""Documents compared field by field."""

from __future__ import annotations

from sla_server.agreements.difference import MAX_BYTES, FieldChange, bounded, differences, unified
from tests.support.agreements import FULL, agreement, simple


def test_equal_documents_have_no_difference_whatever_is_written_out() -> None:
    written = simple().replace("budgeting: {", "no_data: bad_if_ours\n    budgeting: {method: timeslices, ")
    assert differences(agreement(simple()).spec_json(), agreement(written).spec_json()) == []


def test_fields_are_named_and_objectives_by_their_name() -> None:
    before, after = agreement(FULL), agreement(FULL.replace("0.995}", "0.999}").replace("[vol-17]", "[a, b]"))
    assert differences(before.spec_json(), after.spec_json()) == [
        FieldChange("spec.scope.volumes", ["vol-17"], ["a", "b"]),
        FieldChange("spec.objectives[latency].budgeting.target", 0.995, 0.999),
    ]


def test_what_comes_and_goes_has_no_value_on_the_other_side() -> None:
    before = agreement(FULL).spec_json()
    after = agreement(FULL.replace("    - {up_to_iops: 6000, value_ms: 8}\n", "")).spec_json()
    found = {change.field: (change.before, change.after) for change in differences(before, after)}
    assert found["spec.objectives[latency].demand_curve[1].value_ms"] == (8.0, None)
    assert differences(None, before)[0] == FieldChange("apiVersion", None, "storage-sla/v1")


def test_a_unified_difference_shows_what_went_and_what_came() -> None:
    changes = [
        FieldChange("a", ["x", "y"], ["y", "z"]),
        FieldChange("b", 1, None),
        FieldChange("c", [1, 2], [2, 1]),
    ]
    assert unified(changes, "old", "new") == [
        "--- old", "+++ new", "@@ a", "-  x", "+  z", "@@ b", "-  1", "@@ c", "   the order has changed",
    ]  # fmt: skip
    assert changes[1].line() == "b: 1 -> none"


def test_an_audit_row_holds_what_fits() -> None:
    changes = [FieldChange(f"f{i}", "x" * 1000, "y" * 1000) for i in range(20)]
    rows = bounded(changes)
    assert len(str(rows)) < MAX_BYTES + 1000
    assert rows[-1]["field"] == f"and {20 - len(rows) + 1} more fields"
    assert bounded(changes[:2]) == [change.as_dict() for change in changes[:2]]
