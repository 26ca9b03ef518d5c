"""OpenSLO: what maps both ways, and what is listed as not mapped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sla_server.agreements import openslo
from sla_server.agreements.document import Agreement, AgreementSpec
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.openslo import from_openslo, to_openslo
from tests.support.agreements import FULL, agreement, simple


def slo(**changed: Any) -> dict[str, Any]:
    """An SLO of another system: good and all requests."""
    query = {"metricSource": {"type": "SomeSystem", "spec": {"query": "x"}}}
    spec = {
        "service": "shop",
        "indicator": {"spec": {"ratioMetric": {"good": query, "total": query}}},
        "timeWindow": [{"duration": "4w", "isRolling": True}],
        "budgetingMethod": "Timeslices",
        "objectives": [
            {"displayName": "Fast enough", "target": 0.99, "timeSliceTarget": 0.95, "timeSliceWindow": "5m"}
        ],
    }
    head = {"apiVersion": "openslo/v1", "kind": "SLO", "metadata": {"name": "shop-slo"}}
    return {**head, "spec": {**spec, **changed}}


def imported(*objects: Any) -> tuple[dict[str, Any], str]:
    found = from_openslo(objects)
    assert len(found.documents) == 1
    return found.documents[0], "\n".join(found.unmapped)


@pytest.mark.parametrize(
    "window", ["{type: rolling, duration: 4w}", "{type: calendar, period: quarter, tz: UTC}"]
)
def test_what_is_exported_is_read_back_the_same(window: str) -> None:
    text = simple(volumes='"db-*"', extra=f"  window: {window}\n").replace("gold}", "gold, labels: {a: b}}")
    before = agreement(text.replace("applicability: {min_ios_per_slice: 10}\n    ", ""))
    (exported,) = to_openslo(before).documents
    document, _ = imported(json.loads(json.dumps(exported)))
    after = Agreement.model_validate(document)
    assert after.judged == before.judged
    assert (after.spec.scope, after.spec.window) == (before.spec.scope, before.spec.window)
    assert after.metadata.labels == {"a": "b"}


def test_an_export_is_an_slo_with_time_slices_over_a_ratio() -> None:
    found = to_openslo(agreement(FULL))
    (document,) = found.documents
    (objective,) = document["spec"]["objectives"]
    assert (document["apiVersion"], document["kind"]) == ("openslo/v1", "SLO")
    assert document["spec"]["timeWindow"][0]["duration"] == "1M"
    assert objective == {
        "displayName": "latency", "target": 0.995, "timeSliceTarget": 0.95, "timeSliceWindow": "1m",
    }  # fmt: skip
    assert "erp-gold: penalties" in found.unmapped
    assert "erp-gold/latency: applicability.min_read_fraction" in found.unmapped
    rate = "  - {name: rate, indicator: {metric: iops}, promised_iops: 9, budgeting: {target: 0.9}}\n"
    assert "gold/rate: the whole objective (iops)" in to_openslo(agreement(simple() + rate)).unmapped


def test_an_import_leaves_empty_what_openslo_does_not_say() -> None:
    document, unmapped = imported(slo())
    (objective,) = document["spec"]["objectives"]
    assert (objective["name"], objective["indicator"]["percentile"]) == ("Fast-enough", 95)
    assert objective["budgeting"] == {"slice": "5m", "target": 0.99}
    assert document["spec"]["window"] == {"type": "rolling", "duration": "4w"}
    assert "scope.volumes is not in OpenSLO" in unmapped
    with pytest.raises(AgreementsRefused) as caught:
        load_documents(json.dumps(document), 60)
    assert {problem.field for problem in caught.value.problems} == {
        "spec.scope.volumes",
        "spec.objectives[0].demand_curve",
    }


def test_a_threshold_is_taken_as_milliseconds_and_said_so() -> None:
    metric = {"spec": {"thresholdMetric": {"metricSource": {"type": "Any", "spec": None}}}}
    objective = {"op": "lte", "value": 20, "targetPercent": 99.5}
    document, unmapped = imported(
        slo(indicator=metric, objectives=[objective], budgetingMethod="Occurrences")
    )
    (found,) = document["spec"]["objectives"]
    assert found["demand_curve"] == [{"value_ms": 20.0}]
    assert found["budgeting"] == {"slice": "1m", "target": 0.995}
    for part in ("milliseconds", "budgetingMethod Occurrences", "percentile 95 was set"):
        assert part in unmapped
    _, unmapped = imported(slo(indicator=metric, objectives=[{**objective, "op": "gte"}]))
    assert "op gte" in unmapped


def test_what_only_people_read_and_parts_of_composites_are_listed() -> None:
    objective = {"displayName": "a", "target": 0.9, "indicatorRef": "fast", "compositeWeight": 2}
    head = slo(objectives=[objective])
    head["metadata"]["displayName"] = "The shop"
    _, unmapped = imported(head)
    for part in ("metadata.displayName", "a: the SLI 'fast' is not in the file", "a: compositeWeight;"):
        assert part in unmapped


def test_a_referenced_indicator_is_found_in_the_file() -> None:
    sli = {"apiVersion": "openslo/v1", "kind": "SLI", "metadata": {"name": "fast"}, "spec": {}}
    sli["spec"] = to_openslo(agreement(FULL)).documents[0]["spec"]["indicator"]["spec"]
    document, _ = imported([slo(indicator=None, indicatorRef="fast"), sli])
    assert document["spec"]["scope"]["volumes"] == ["vol-17"]
    _, unmapped = imported(slo(indicator=None, indicatorRef="slow"))
    assert "the SLI 'slow' is not in the file" in unmapped


@pytest.mark.parametrize(
    ("window", "expected", "said"),
    [
        ({"duration": "1Q", "isRolling": True}, {"type": "rolling", "duration": "13w"}, "1Q"),
        ({"duration": "1w", "calendar": {"timeZone": "Asia/Tokyo", "startTime": "2024-01-01 00:00:00"}},
         {"type": "calendar", "period": "week", "tz": "Asia/Tokyo"}, ""),
        ({"duration": "2M", "calendar": {}}, {"type": "calendar", "period": None, "tz": "UTC"}, "2M"),
        ({"duration": "soon"}, {"type": "rolling", "duration": "30d"}, "soon"),
        (None, {"type": "rolling", "duration": "30d"}, "there is no timeWindow"),
    ],
)  # fmt: skip
def test_windows(window: Any, expected: dict[str, Any], said: str) -> None:
    document, unmapped = imported(slo(timeWindow=[window] if window else None))
    assert document["spec"]["window"] == expected
    assert said in unmapped


@pytest.mark.parametrize(
    ("duration", "start", "begins"),
    [
        ("1w", "2024-01-03 00:00:00", "on Monday"),  # a Wednesday
        ("1M", "2024-01-15 00:00:00", "first day"),
        ("1M", "2024-01-01 06:00:00", "first day"),
        ("1Q", "2024-02-01 00:00:00", "April"),
        ("1Y", "2024-04-01 00:00:00", "January 1"),
        ("1d", "2024-01-01 00:00:01", "midnight"),
        ("1d", "2024-01-01T00:00:00+02:00", "midnight"),
        ("1d", "in spring", "midnight"),
        ("1w", "2026-11-23 00:00:00", ""),
        ("1M", "2024-07-01", ""),
        ("1Q", "2024-07-01T00:00:00", ""),
        ("1Y", "2025-01-01 00:00:00", ""),
        ("1d", "2024-05-17 00:00:00", ""),
    ],
)
def test_periods_that_begin_at_another_time_than_ours_are_left_empty_and_said(
    duration: str, start: str, begins: str
) -> None:
    """Else every figure of the import would be one of other periods."""
    calendar = {"timeZone": "Asia/Tokyo", "startTime": start}
    document, unmapped = imported(slo(timeWindow=[{"duration": duration, "calendar": calendar}]))
    assert (document["spec"]["window"]["period"] is None) is bool(begins)
    if not begins:
        assert "startTime" not in unmapped
        return
    (line,) = [line for line in unmapped.splitlines() if "startTime" in line]
    assert f"timeWindow {duration} from startTime {start}: " in line
    assert begins in line
    assert line.endswith("window.period was left empty, fill it in")
    with pytest.raises(AgreementsRefused) as caught:
        load_documents(json.dumps(document), 60)
    (found,) = [problem for problem in caught.value.problems if problem.field == "spec.window.period"]
    assert found.problem == "null is not possible here"
    assert "'month'" in found.fix


def test_other_kinds_are_listed_and_no_slo_is_an_error() -> None:
    service = {"apiVersion": "openslo/v1", "kind": "Service", "metadata": {"name": "shop"}}
    assert "shop: the whole Service" in imported(slo(), service)[1]
    for nothing in ([], [service], ["text"], [None], [{**slo(), "apiVersion": "openslo/v9"}]):
        with pytest.raises(ValueError, match="no SLO"):
            from_openslo(nothing)


def test_odd_names_and_values_do_no_harm() -> None:
    odd = slo(objectives=[{"displayName": "a b!"}, {"displayName": "a-b"}, "x"], timeWindow="x")
    odd["metadata"] = {"name": "!!", "labels": {"k": ["1", "2"], "e": []}}
    document, unmapped = imported(odd)
    assert document["metadata"] == {"name": "imported", "labels": {"k": "1", "e": ""}}
    assert [each["name"] for each in document["spec"]["objectives"]] == ["a-b", "a-b-2"]
    assert "only its first value, 1" in unmapped


def test_control_is_kept_as_an_annotation_and_said() -> None:
    found = to_openslo(agreement(simple(extra="  control: observe\n")))
    (exported,) = found.documents
    assert exported["metadata"]["annotations"] == {"storage-sla/control": "observe"}
    assert "gold: control, but for annotation storage-sla/control, which sla import reads" in found.unmapped
    document, unmapped = imported(exported)
    assert (document["spec"]["control"], "annotation" in unmapped) == ("observe", False)
    exported["metadata"]["annotations"] = {"storage-sla/control": "off", "team": "a"}
    document, unmapped = imported(exported)
    assert "control" not in document["spec"]
    assert "annotation storage-sla/control" in unmapped
    assert "annotation team" in unmapped


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("erp-gold", "latency"),
        ("ERP_gold.v2@acme:1", "p95.reads"),
        ("g" * 128, "l" * 128),
        ("A-", "b_"),
    ],
)
def test_names_of_an_export_are_those_that_openslo_takes(name: str, objective: str) -> None:
    """Its own validator refuses all but RFC 1123 labels; capitals, dots, _ : @ were exported as they are."""
    text = simple(name).replace("- name: latency", f"- name: {objective}")
    (exported,) = to_openslo(agreement(text)).documents
    spec = exported["spec"]
    names = [exported["metadata"]["name"], spec["service"], spec["indicator"]["metadata"]["name"]]
    assert [re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", each) is not None for each in names] == [
        True
    ] * 3
    document, _ = imported(json.loads(json.dumps(exported)))
    assert document["metadata"]["name"] == f"{name}-{objective}"[:128].rstrip("_")


def test_a_name_that_openslo_does_not_take_is_said_and_kept_as_an_annotation() -> None:
    found = to_openslo(agreement(simple("ERP_gold")))
    assert found.documents[0]["metadata"]["annotations"] == {"storage-sla/name": "ERP_gold-latency"}
    assert [line for line in found.unmapped if "name" in line] == [
        "ERP_gold/latency: its name, but for annotation storage-sla/name, which sla import reads"
    ]
    assert not any("name" in line for line in to_openslo(agreement(simple("gold"))).unmapped)


def test_long_names_that_begin_alike_stay_apart() -> None:
    objective = (
        "  - {{name: {}, indicator: {{metric: latency, percentile: 95}}, demand_curve: [{{value_ms: 5}}], "
    )
    objective += "budgeting: {{target: 0.9}}}}\n"
    text = simple("g" * 100) + objective.format("other")
    names = [each["metadata"]["name"] for each in to_openslo(agreement(text)).documents]
    assert len(set(names)) == 2
    text = simple("gold") + objective.format("a_b") + objective.format("a.b")
    names = [each["metadata"]["name"] for each in to_openslo(agreement(text)).documents]
    assert len(set(names)) == 3


def test_a_label_whose_key_openslo_does_not_take_is_listed() -> None:
    text = simple().replace(
        "metadata: {name: gold}", 'metadata: {name: gold, labels: {"my key": x, team: erp}}'
    )
    found = to_openslo(agreement(text))
    assert found.documents[0]["metadata"]["labels"] == {"team": "erp"}
    assert "gold: label my key" in found.unmapped


def test_every_key_of_an_agreement_is_exported_or_listed() -> None:
    mapped = {"scope", "objectives", "window", "control"}
    assert mapped | set(openslo._NOT_EXPORTED) == set(AgreementSpec.model_fields)
