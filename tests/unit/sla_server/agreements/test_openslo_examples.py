"""Every form of the OpenSLO v1 specification, written down by ourselves, is imported, and the rest is listed.

``tests.support.openslo_examples`` tries the OpenSLO project's own examples, given a folder of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sla_server.agreements.document import Agreement
from sla_server.agreements.openslo import from_openslo, to_openslo
from tests.support import openslo_examples
from tests.support.agreements import agreement, simple
from tests.support.openslo_examples import OURS, Tried, examples, try_one


@pytest.fixture(scope="module")
def tried() -> dict[str, Tried]:
    return {name.removesuffix(".yaml"): try_one(name, objects) for name, objects in examples(OURS)}


def test_all_of_them_become_agreements(tried: dict[str, Tried]) -> None:
    names = {name: [each.name for each in found.agreements] for name, found in tried.items()}
    assert names == {
        "bad-and-raw": ["late-writes", "share-kept"],
        "composite": ["orders", "shop"],
        "other-kinds": ["restores"],
        "rolling-ratio": ["archive-reads"],
        "thresholds": ["db-latency", "db-rate", "db-nothing"],
    }


TOO_MUCH = "All: timeSliceTarget 1 is not from 0.5 to 0.9999; percentile 95 was set"
AVERAGED = "budgetingMethod RatioTimeslices; compliance is the share of good time slices"
OTHER_SOURCE = "the metric source of type SomeStore; gateways measure latency themselves"


@pytest.mark.parametrize(
    ("file", "name", "said"),
    [
        ("rolling-ratio", "archive-reads", "indicator.metadata.displayName"),
        ("rolling-ratio", "archive-reads", "label site: only its first value, north"),
        ("rolling-ratio", "archive-reads", "annotation example.org/dashboard"),
        ("rolling-ratio", "archive-reads", TOO_MUCH),
        ("bad-and-raw", "late-writes", OTHER_SOURCE),
        ("bad-and-raw", "share-kept", OTHER_SOURCE),
        ("bad-and-raw", "share-kept", AVERAGED),
        ("thresholds", "db-latency", OTHER_SOURCE),
        ("thresholds", "db-nothing", "the SLI 'not-here' is not in the file"),
        ("composite", "orders", "steps: compositeWeight; each objective has a budget of its own"),
        (
            "composite",
            "shop",
            "its indicators are about different volumes; scope.volumes was left empty, fill it in",
        ),
        ("other-kinds", "nobody-asks", "the whole SLI"),
        ("other-kinds", "unused", "the whole DataSource"),
        ("other-kinds", "newer", "apiVersion openslo/v2alpha; only openslo/v1 is read"),
        ("other-kinds", "tape", "the whole Service"),
        ("other-kinds", "pager", "the whole AlertPolicy"),
        ("other-kinds", "fast-burn", "the whole AlertCondition"),
        ("other-kinds", "on-duty", "the whole AlertNotificationTarget"),
    ],
)
def test_what_does_not_map_is_listed(tried: dict[str, Tried], file: str, name: str, said: str) -> None:
    assert f"{name}: {said}" in tried[file].unmapped


def test_what_others_refer_to_is_not_listed_as_left_out(tried: dict[str, Tried]) -> None:
    said = [line for file in ("thresholds", "composite") for line in tried[file].unmapped]
    assert not [line for line in said if ": the whole " in line]


def test_objectives_of_a_composite_have_their_own_curves(tried: dict[str, Tried]) -> None:
    orders, shop = tried["composite"].agreements
    steps, most = orders.judged
    assert [(step.up_to_iops, step.value_ms) for step in steps.demand_curve] == [(1000.0, 2.0), (None, 5.0)]
    assert [step.value_ms for step in most.demand_curve] == [1.0]
    scope = orders.spec.scope
    assert (scope.volumes, scope.clients, scope.io) == (["orders"], ["app-1"], "read")
    assert [each.demand_curve[0].value_ms for each in shop.judged] == [3.0, 4.0]


def test_an_agreement_about_labels_is_not_one_about_all_volumes() -> None:
    text = simple().replace("scope: {", "scope: {volume_labels: tier=gold, ")
    before = agreement(text)
    assert before.spec.scope.volume_labels == "tier=gold"
    (document,) = from_openslo(json.loads(json.dumps(to_openslo(before).documents))).documents
    assert Agreement.model_validate(document).spec.scope == before.spec.scope


def test_an_slo_without_objectives_says_so() -> None:
    empty = {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": "e"},
        "spec": {"objectives": None},
    }
    assert "e: it has no objectives: as it is, nothing is promised" in from_openslo([empty]).unmapped


def test_the_command_tries_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (OURS / "rolling-ratio.yaml").read_text()
    (tmp_path / "page.md").write_text(f"Words.\n\n```yaml\n{text}```\n\n```yaml\nspec: [a, ...\n```\n")
    monkeypatch.setattr("sys.argv", ["openslo_examples", str(tmp_path)])
    assert openslo_examples.main() == 0
    assert "page.md (1): archive-reads" in capsys.readouterr().out
    (tmp_path / "wrong.yaml").write_text(text.replace("target: 0.9,", "target: 9,"))
    assert openslo_examples.main() == 1
    assert "wrong.yaml: FAILED: AgreementsRefused" in capsys.readouterr().out
