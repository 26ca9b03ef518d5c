"""What ``sla simulate`` promises nothing for, what it leaves out, and what it takes for no number."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.agreements import calendar_text
from tests.support.simulate import AGREEMENT, GREEDY, QUICK, run

OPEN_ON_SUNDAY = '  service_hours: {calendar: business, days: [sun], from: "00:00", to: "24:00"}\n'


def test_nothing_is_promised_outside_service_hours(slas, tmp_path):
    (slas / "gold.yaml").write_text(AGREEMENT.replace("30s", "5s") + OPEN_ON_SUNDAY)
    closed = run("--slas", slas, *QUICK, *GREEDY)
    rows = re.findall(
        r"^gold/latency +\w+ +p95 12.0ms +\S+ +(\d+) +(\d+) +(\S+)", closed.stdout, re.MULTILINE
    )
    assert rows == [("0", "0", "-")] * 3
    text = "gold/latency: nothing is promised in 12 of its 12 seconds with I/O (outside service hours);"
    assert text in " ".join(closed.stdout.split())
    assert "the simulation begins Monday 00:00 UTC" in " ".join(closed.stdout.split())
    assert not re.search(r"enforce: big kept", closed.stdout), "no neighbour is slowed down for it"
    sunday = run("--slas", slas, *QUICK, *GREEDY, "--hour", 6 * 24, "-o", "json")
    off = json.loads(sunday.stdout)["modes"][0]["agreements"][0]
    assert (off["judged_s"], off["excluded_s"]) == (12, 0)


def test_a_calendar_beside_the_agreements_is_used_and_one_that_is_missing_is_named(slas):
    (slas / "gold.yaml").write_text(AGREEMENT + "  service_hours: {calendar: bank}\n")
    missing = run("--slas", slas, *QUICK)
    assert missing.exit_code == 65
    assert "agreement gold names the calendar bank, which is not in it" in missing.stderr
    (slas / "bank.yml").write_text(calendar_text("bank"))
    assert "outside service hours" in " ".join(run("--slas", slas, *QUICK).stdout.split())


OTHERS = """\
  - name: mean
    indicator: {metric: mean_latency}
    demand_curve: [{value_ms: 3}]
    applicability: {min_ios_per_slice: 10}
    budgeting: {method: timeslices, slice: 5s, target: 0.99}
  - name: rate
    indicator: {metric: iops}
    promised_iops: 50
    budgeting: {method: timeslices, slice: 5s, target: 0.99}
  - name: bytes
    indicator: {metric: throughput}
    promised_mbps: 0.2
    budgeting: {method: timeslices, slice: 5s, target: 0.99}
  - name: there
    indicator: {metric: availability}
    outage: 5s
    budgeting: {method: timeslices, slice: 5s, target: 0.99}
"""


def test_all_indicators_are_simulated(slas):
    (slas / "gold.yaml").write_text(AGREEMENT.replace("30s", "5s") + OTHERS)
    done = run("--slas", slas, *QUICK, *GREEDY, "--mode", "off")
    rows = re.findall(r"^gold/(\w+) +off +(\S+ \S+(?: of \S+ s)?)", done.stdout, re.MULTILINE)
    assert [(name, promised) for name, promised in rows if name != "latency"] == [
        ("bytes", "0.2 MB/s"),
        ("mean", "mean 3"),
        ("rate", "50 IOPS"),
        ("there", "no stall of 5 s"),
    ]
    found = json.loads(run("--slas", slas, *QUICK, *GREEDY, "-o", "json").stdout)
    by_name = {each["objective"]: each for each in found["modes"][0]["agreements"]}
    assert by_name["mean"]["bad_s"] >= 8, "the neighbour makes it slow from second 2 on"
    assert [by_name[name]["bad_s"] for name in ("rate", "bytes", "there")] == [0, 0, 0]
    assert by_name["rate"]["measured"] == pytest.approx(60, rel=0.2)
    assert [by_name[name]["unit"] for name in ("mean", "rate", "bytes", "there")] == [
        "ms",
        "IOPS",
        "MB/s",
        "s",
    ]
    enforced = {each["objective"]: each for each in found["modes"][2]["agreements"]}
    assert enforced["mean"]["bad_s"] < by_name["mean"]["bad_s"], "what helps the percentile helps the mean"
    page = run("--slas", slas, *QUICK, "-o", "html").stdout
    assert page.count("<svg") == 6, "each promise, and the volume"
    assert "gold/there: longest time without a completion, s" in page


def test_a_mean_alone_is_simulated_too_and_nothing_is_promised_outside_service_hours(slas):
    mean = AGREEMENT.replace("{metric: latency, percentile: 95}", "{metric: mean_latency}")
    (slas / "gold.yaml").write_text(mean.replace("30s", "5s") + OPEN_ON_SUNDAY)
    found = json.loads(run("--slas", slas, *QUICK, "--mode", "off", "-o", "json").stdout)
    (row,) = found["modes"][0]["agreements"]
    assert (row["judged_s"], row["excluded_s"], row["slices"]) == (0, 12, {"excluded": 2})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x"])
@pytest.mark.parametrize("option", ["--poll", "--lag", "--budget-left", "--stretch"])
def test_what_is_no_number_is_refused(slas, option, value):
    done = run("--slas", slas, *QUICK, option, value)
    assert done.exit_code == 2
    assert f"{value!r} is not a number from " in done.stderr
    assert option in done.stderr


def test_of_very_many_promises_those_with_bad_seconds_are_shown(slas):
    text = (slas / "gold.yaml").read_text()
    for number in range(30):
        (slas / f"a{number:02}.yaml").write_text(text.replace("name: gold}", f"name: a{number:02}}}"))
    (slas / "gold.yaml").write_text(text.replace("value_ms: 12", "value_ms: 1"))
    done = run("--slas", slas, "--duration", "5s", "--load", "volume=gold,iops=60", "--mode", "off")
    rows = re.findall(r"^(\w+)/latency +off", done.stdout, re.MULTILINE)
    assert (len(rows), rows[-1]) == (20, "gold")
    assert "11 further promises, with fewer bad seconds: -o csv has all" in done.stdout
