"""The result as CSV, JSON, HTML and sentences."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from sla_server.simulate.device import DeviceModel
from sla_server.simulate.figures import figures_of
from sla_server.simulate.loads import Load
from sla_server.simulate.page import as_html
from sla_server.simulate.report import COLUMNS, Result, as_csv, as_json, headline, verdicts
from sla_server.simulate.run import MODES, GeneratedFeed, Plan, run_mode
from sla_server.simulate.setup import Contract
from tests.support.worlds import promise, volume_class


@pytest.fixture(scope="module")
def result() -> Result:
    loads = (Load(volume="gold", iops=60, gateway="A"), Load(volume="big", depth=16, gateway="B", from_s=2))
    plan = Plan(
        Contract([promise(slice_s=5), promise("none")], [volume_class()]),
        [GeneratedFeed(load) for load in (loads[0], loads[1].model_copy(update={"volume": "a&b"}))],
        {"disk": DeviceModel(spread=0)},
        [(0.0, 12.0)],
        title="a <test>",
        notes=("read this",),
    )
    found = []
    for mode in MODES:
        found.append(figures_of(plan, run_mode(plan, mode), found[0] if found else None))
    return Result(plan, found)


def test_csv_has_a_row_for_each_mode_and_name(result):
    rows = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert tuple(rows[0]) == COLUMNS
    keys = [(row["mode"], row["what"], row["name"]) for row in rows]
    names = [
        ("agreement", "gold/latency"),
        ("agreement", "none/latency"),
        ("volume", "a&b"),
        ("volume", "gold"),
    ]
    assert keys == [(mode, *name) for mode in MODES for name in names]
    assert rows[0]["thresholds_ms"] == "12"
    assert rows[1]["latency_ms"] == ""
    assert rows[2]["bad_s"] == ""
    assert float(rows[-1]["kept_ratio"]) == pytest.approx(1.0, abs=0.1)


def test_json_is_the_same_in_names_and_figures(result):
    tree = json.loads(json.dumps(as_json(result)))
    assert [each["mode"] for each in tree["modes"]] == list(MODES)
    enforce = tree["modes"][2]
    assert enforce["agreements"][0]["bad_s"] == result.modes[2].promises[0].bad_s
    assert enforce["volumes"][0]["caps"][0]["cost_per_s"] == result.modes[2].volumes[0].caps[0][1]
    assert tree["modes"][1]["would_throttle"] == [{"volume": "a&b", "victim": "gold/latency", "times": 1}]
    assert tree["devices"]["disk"]["servers"] == 1


def test_the_page_is_self_contained_and_shows_names_as_text(result):
    page = as_html(result)
    assert "a &lt;test&gt;" in page
    assert "a&amp;b" in page
    assert "read this" in page
    assert page.count("<svg") == 3, "of none/latency there is nothing to draw"
    assert not re.search(r"https?:|<script|<link|@import|src=", page)
    assert "nan" not in page


def test_sentences_compare_the_modes(result):
    lines = verdicts(result)
    assert lines[0] == "none/latency: no I/O in its scope; volumes are a&b, gold"
    assert lines[1] == "observe would have begun to slow down a&b for gold/latency once"
    assert re.fullmatch(r"enforce: gold/latency had \d bad seconds of 12, and 10 without control", lines[2])
    assert any(re.search(r"a&b kept \d+% of its throughput; its cap turned", line) for line in lines)
    assert headline(result)[0] == "a <test>: 12 s, seed 1"


def test_events_of_the_control_are_said_in_words(result):
    """With the newest one's reason; a kind alone says nothing of what to change."""
    told = [replace(each, events={}) for each in result.modes]
    said = {"unattributed": "nobody to slow down: no other volume uses this backend"}
    for texts, words in (
        (said, said["unattributed"]),
        ({}, "A promise is at risk and no neighbour explains it"),
    ):
        told[2] = replace(told[2], events={"unattributed": 2}, texts=texts)
        found = verdicts(Result(result.plan, told))[-1]
        assert found == f"enforce: {words} (event unattributed, 2 times)"


def test_the_newest_text_of_each_kind_of_event_is_kept(result):
    for each in result.modes:
        assert each.texts.keys() == each.events.keys()
    assert result.modes[2].texts["throttle-set"].startswith("gold/latency at ")
