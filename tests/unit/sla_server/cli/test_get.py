from __future__ import annotations

import io
import json
import re
import time
from typing import Any

import pytest

from sla_server.cli import formatting
from sla_server.cli.formatting import build
from sla_server.cli.get import GetRequest, _path_of
from sla_server.cli.tables import (
    KINDS,
    by_objective,
    clock_of,
    hold_of,
    late_ios_of,
    now_of,
    promise,
    what_of,
    why_of,
)
from sla_server.db.queries.backend_load import BackendLoad
from sla_server.db.queries.volume_clients import VolumeClients
from tests.support import api
from tests.support.api import EPISODE, NOW_US, FakeSource, throttle
from tests.support.cli import Terminal, name_of


@pytest.mark.parametrize("kind", list(KINDS))
def test_tables_fit_eighty_columns(sla: Terminal, kind: str) -> None:
    done = sla("get", kind, *name_of(kind))
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) >= 3
    assert max(len(line) for line in lines) <= 80
    assert KINDS[kind].columns[0].title in lines[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_json_is_what_the_api_says(sla: Terminal, kind: str) -> None:
    rows = json.loads(sla("get", kind, *name_of(kind), "-o", "json").output)
    assert isinstance(rows, list)
    assert rows


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_to_list_says_what_to_do(sla: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "periods":
        monkeypatch.setattr("sla_server.api.handlers.read.agreed_periods", lambda *_: [])
    names = dict.fromkeys(
        ("maintenance", "calendars", "volumelabels", "recipients", "routes", "silences"), "documents"
    )
    names |= {"slas": "agreements", "rates": "rollup_history", "trend": "events", "hours": "slice_hours"}
    names |= {"loads": "of_backend", "clients": "of_clients", "promises": "agreement_names"}
    name = names.get(kind, "slice_sums" if kind == "periods" else kind)
    if kind == "nodes":
        sla.context.metrics.folder = None
    else:
        nothing = {"loads": BackendLoad([], []), "clients": VolumeClients([]), "promises": {}}.get(kind, [])
        monkeypatch.setattr(sla.source, name, lambda *_args, **_kwargs: nothing)
    sla.context.live.put({"at_us": NOW_US})
    if kind == "trend":
        sla.context.live._trend.clear()  # as at the start: no method forgets what was seen
    said = sla("get", kind, *name_of(kind)).output
    assert " ".join(said.split()) == KINDS[kind].empty
    assert max(map(len, said.splitlines())) <= 80


def test_volumes_show_exact_counts_and_live_values(sla: Terminal) -> None:
    row = next(line for line in sla("get", "volumes").output.splitlines() if line.startswith("erp-db"))
    assert row.split() == ["erp-db", "disk-0", "80", "9.20ms", "14.7ms", "-", "60,215"]
    shown = sla("get", "volumes", "-o", "wide").output.splitlines()
    row = next(line for line in shown if line.startswith("erp-db"))
    assert "TOTAL READS  TOTAL WRITES  TOTAL ERRORS" in shown[0]
    assert row.split("48,211")[1].split()[:2] == ["12,004", "0"]


def test_slas_show_one_row_an_objective(sla: Terminal) -> None:
    row = next(line for line in sla("get", "slas").output.splitlines() if line.startswith("erp-gold"))
    assert row.split() == ["erp-gold/latency", "kept", "p95", "12.0ms", "99.21%", "63%", "-"]
    assert by_objective([{"name": "a", "live": []}]) == [{"name": "a", "state": None}]
    two = by_objective([{"name": "a", "live": [{"objective": "x"}, {"objective": "y"}]}])
    assert [row["objective"] for row in two] == ["x", "y"]


def test_what_is_not_judged_says_what_it_is(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = {"neighbour": [], "fast": [{"name": "rate", "indicator": {"metric": "iops"}}]}
    rows = [{"name": name, "spec": {"spec": {"objectives": list_}}} for name, list_ in agreed.items()]
    latency = [{"name": "latency", "indicator": {"metric": "latency"}}]
    rows.append({"name": "unseen", "spec": {"spec": {"objectives": latency}}})
    monkeypatch.setattr(sla.source, "agreements", lambda *_: rows)
    lines = {line.split()[0]: line.split()[1:3] for line in sla("get", "slas").output.splitlines()[2:]}
    assert lines["neighbour"] == ["no", "objective"]
    assert lines["fast/rate"][0] == lines["unseen/latency"][0] == "unknown"  # services have not said yet


def test_an_objective_that_control_leaves_alone_shows_what_its_newest_slice_had() -> None:
    shown = {"percentile": None, "threshold_us": None, "latency_us": None}
    rate = {**shown, "metric": "iops", "promised": 1000.0, "measured": 950.2}
    assert (now_of(rate), promise(rate)) == ("950 IOPS", "≥ 1,000 IOPS")
    flow = {**shown, "metric": "throughput", "promised": 2e8, "measured": 1.5e8, "inexact": True}
    assert (now_of(flow), promise(flow)) == ("≤150.0MB/s", "≥ 200.0MB/s")
    mean = {**shown, "metric": "mean_latency", "threshold_us": 5000, "measured": 4100.0}
    assert (now_of(mean), promise(mean)) == ("4.10ms", "mean 5.00ms")
    outage = {**shown, "metric": "availability", "threshold_us": 5_000_000, "measured": 900_000}
    assert (now_of(outage), promise(outage)) == ("900ms", "stall 5.0s")
    live = {"metric": "availability", "percentile": 99.0, "latency_us": 12_000, "stall_us": 40_000}
    assert now_of(live) == "40.0ms", "the latency is no matter of this promise"


def test_slices_say_why_they_are_not_good_and_how_sure_that_is(sla: Terminal) -> None:
    lines = sla("get", "slices", "erp-gold").output.splitlines()
    assert " ".join(line.split("100.0%")[-1].strip() for line in lines[2:4]) == "slow, inexact, revised 1x"
    assert why_of({"state": "no_data", "reason": "cuts-lost"}) == "cuts-lost"
    assert why_of({"state": "good", "reason": "", "revision": 0}) == "-"
    assert [line for line in lines if "BAD" in line]


def test_slices_of_an_objective_and_of_an_episode(sla: Terminal) -> None:
    sla("get", "slices", "erp-gold/latency", "-o", "json")
    assert sla.source.asked[-2][:3] == ("slices", "erp-gold", "latency")
    shown = sla("get", "episodes").output.split()[-1]
    rows = json.loads(sla("get", "slices", "erp-gold", "--episode", shown, "-o", "json").output)
    opened_us, closed_us = EPISODE["opened_us"], EPISODE["closed_us"]
    assert all(opened_us - 60_000_000 < row["start_us"] < closed_us for row in rows)
    assert rows == sorted(rows, key=lambda row: -row["start_us"])


def two_objectives(name: str, version: int | None = None) -> dict[str, Any]:
    """The agreement of the rig with a second objective."""
    row = FakeSource()._agreement(name)
    (first,) = row["spec"]["spec"]["objectives"]
    row["spec"]["spec"]["objectives"] = [first, {**first, "name": "latency-99"}]
    return row


@pytest.mark.parametrize("kind", ["slices", "periods"])
def test_all_objectives_are_listed_or_the_one_that_is_named(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sla.source, "agreement", two_objectives)
    lines = sla("get", kind, "erp-gold").output.splitlines()
    assert [line for line in lines if line.startswith("erp-gold/")] == [
        "erp-gold/latency",
        "erp-gold/latency-99",
    ]
    assert lines[-1] == "Times are of Europe/Berlin."
    assert max(map(len, lines)) <= 80
    rows = json.loads(sla("get", kind, "erp-gold", "-o", "json").output)
    assert list(dict.fromkeys(row["objective"] for row in rows)) == ["latency", "latency-99"]
    for words in (["erp-gold/latency-99"], ["erp-gold", "--objective", "latency-99"]):
        rows = json.loads(sla("get", kind, *words, "-o", "json").output)
        assert {row["objective"] for row in rows} == {"latency-99"}
    assert sla("get", kind, "erp-gold/latency", "--objective", "latency-99").exit_code == 2


def test_days_are_those_of_the_agreements_zone_or_of_the_one_asked_for(sla: Terminal) -> None:
    def days(*more: str) -> list[str]:
        return sla("get", "periods", "erp-gold", *more).output.splitlines()[2].split()[:2]

    assert days() == ["2027-01-01", "now"]  # midnight in Berlin, still December in UTC
    assert days("--tz", "UTC") == ["2026-12-31", "now"]
    sliced = sla("get", "slices", "erp-gold", "--tz", "Asia/Kathmandu").output.splitlines()
    assert sliced[-1] == "Times are of Asia/Kathmandu."
    assert sla("get", "events", "--tz", "UTC").output.splitlines()[-1] == "Times are of UTC."
    wrong = sla("get", "events", "--tz", "Berlin")
    assert (wrong.exit_code, "--tz 'Berlin' is not a time zone" in wrong.stderr) == (2, True)


def test_a_time_of_long_ago_has_its_year() -> None:
    at_us = time.time_ns() // 1000 - 300 * 86_400_000_000
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", formatting.when(at_us))


def test_periods_count_what_is_ours_by_the_policy(sla: Terminal) -> None:
    row = sla("get", "periods", "erp-gold").output.splitlines()[2].split()
    assert row[2:] == ["98.50%", "99.9%", "63%", "985", "14", "1", "14"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("slices",), "slices are those of one agreement, and none is named"),
        (("events", "--episode", "x"), "--episode has no use with events"),
    ],
)
def test_names_where_they_belong(sla: Terminal, words: tuple[str, ...], problem: str) -> None:
    done = sla("get", *words)
    assert done.exit_code == 2
    assert problem in done.output
    assert "(" not in done.output, "a sentence, not a pair of them"


def test_a_cap_is_shown_in_the_unit_that_it_has(sla: Terminal) -> None:
    snapshot = sla.context.live.newest().snapshot
    none = {"cap_cost_per_s": None, "cap_ops_per_s": None, "cap_bytes_per_s": None, "cap_group": ""}
    for caps, words in (
        ({"cap_ops_per_s": 20.0}, ["20 IOPS"]),
        ({"cap_bytes_per_s": 5e6}, ["5.0MB/s"]),
        ({"cap_cost_per_s": 290.0, "cap_ops_per_s": 400.0}, ["290", "weighted", "400 IOPS"]),
        ({"cap_group": "tier"}, ["group tier"]),
        ({}, ["-"]),
    ):
        rows = [{**row, **none, **caps} for row in snapshot["volumes"]]
        sla.context.live.put({**snapshot, "volumes": rows})
        for shown in (sla("get", "volumes").output, sla("top", "--once").output):
            assert all(each in shown for each in words), shown
            assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


def test_a_throttle_shows_what_holds_and_what_was_asked_for(sla: Terminal) -> None:
    snapshot = sla.context.live.newest().snapshot
    asked = {"source": "manual", "cost_per_s": None, "ops_per_s": 20.0}
    floor = "the floor of its agreement"
    lifted = {**snapshot["throttles"][0], **asked, "lifted_to": {"ops_per_s": 50.0}, "floor": floor}
    sla.context.live.put({**snapshot, "throttles": [lifted]})
    stored = throttle(source="manual", cost_per_s=None, ops_per_s=20.0, text="too loud")
    sla.source.__dict__["throttles"] = lambda *_args, **_options: [stored]
    for shown in (sla("get", "throttles").output, sla("top", "--once").output):
        words = " ".join(shown.split())
        assert "50 IOPS" in words, shown
        assert "(asked:" in words
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert formatting.enforced({**stored, "live": lifted}) == "50 IOPS (asked: 20 IOPS)"
    assert formatting.why_enforced({**stored, "live": lifted}) == f"too loud ({floor} holds)"
    assert formatting.enforced({**stored, "live": None}) == "20 IOPS"


def test_long_names_fold_and_numbers_are_never_cut() -> None:
    row: dict[str, Any] = {
        "volume": "a-very-long-volume-name-that-someone-chose-because-they-could",
        "backend": "another-long-name",
        "reads": 123_456_789_012,
        "writes": 123_456_789_012,
        "live": {"iops": 123_456, "p95_us": 123_456, "p99_us": 1_234_567, "cap_cost_per_s": 99_999},
    }
    from rich.console import Console

    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(build(KINDS["volumes"].columns, [row], NOW_US))
    text = captured.get()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("246,913,578,024") == 1
    assert "…" not in text


def test_missing_values_are_dashes() -> None:
    for columns in (kind.columns for kind in KINDS.values()):
        for column in columns:
            assert str(column.value({}, NOW_US)) in ("-", "", "unknown"), column.title


def test_limit(sla: Terminal) -> None:
    assert len(json.loads(sla("get", "events", "--limit", "3", "-o", "json").output)) == 3


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"),
        (0, "0us"),
        (994, "994us"),
        (995, "0.99ms"),
        (9_200, "9.20ms"),
        (15_100, "15.1ms"),
        (2_500_000, "2.5s"),
    ],
)
def test_latencies(us: int | None, text: str) -> None:
    assert formatting.latency(us) == text


@pytest.mark.parametrize(
    ("ratio", "digits", "text"),
    [(1.0, 2, "100.00%"), (0.99996, 2, "99.99%"), (0.57, 0, "57%"), (None, 1, "-")],
)
def test_ratios_are_rounded_down(ratio: float | None, digits: int, text: str) -> None:
    assert formatting.percent(ratio, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (89, "89s"), (90, "2m"), (7200, "2h"), (200_000, "2d")]
)
def test_spans(seconds: float, text: str) -> None:
    assert formatting.span(seconds) == text


def test_events_name_their_subject_once() -> None:
    assert what_of({"subject": "batch", "text": "month end"}) == "batch: month end"
    assert what_of({"subject": "batch", "text": "batch from 451 to 225"}) == "batch from 451 to 225"
    assert what_of({"subject": "batch"}) == "batch"


def test_headings_are_never_folded() -> None:
    rows = [
        {"name": "batch-best-effort", "state": "no-objective"},
        {
            "name": "erp-gold",
            "objective": "latency",
            "state": "violating",
            "latency_us": 1e6,
            "percentile": 99.9,
        }
        | {"threshold_us": 12_500, "compliance": 1.0, "coverage": 1.0, "budget_remaining": 1.0},
    ]
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        console.print(build(KINDS["slas"].columns, rows, NOW_US))
    lines = captured.get().splitlines()
    titles = " ".join(column.title for column in KINDS["slas"].columns if not column.wide)
    assert " ".join(lines[0].split()) == titles
    assert len(lines) == 4  # heading, rule and a line a row: ordinary names do not fold


def test_times_of_today_have_no_date() -> None:
    now_us = time.time_ns() // 1000
    assert re.fullmatch(r"\d\d:\d\d:\d\d", formatting.when(now_us))
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d", formatting.when(now_us - 3 * 86_400_000_000))


@pytest.mark.parametrize(
    ("offset_us", "shown"),
    [(None, "-"), (0, "<1ms"), (-999, "<1ms"), (-1500, "+2ms"), (250_000, "-250ms"), (-2_340_000, "+2.3s")],
)
def test_clock_of_a_gateway(offset_us: int | None, shown: str) -> None:
    assert formatting.skew(offset_us) == shown
    assert clock_of({"clock_offset_us": offset_us, "last_cut_us": 1}) == shown
    assert clock_of({"clock_offset_us": offset_us, "last_cut_us": None}) == "-", "nothing is known yet"


def test_throttles_show_what_they_held_for_too_long(sla: Terminal) -> None:
    assert hold_of({"live": None}) == hold_of({"live": {"mean_hold_us": 0, "worst_hold_us": 0}}) == "-"
    assert hold_of({"live": {"mean_hold_us": 812, "worst_hold_us": 45_000}}) == "812us \u226445.0ms"
    assert late_ios_of({"live": None}).plain == formatting.DASH
    assert late_ios_of({"live": {"late_ios": 0, "longest_hold_us": 0}}).plain == formatting.DASH
    assert late_ios_of({"live": {"late_ios": 12, "longest_hold_us": 33_400_000}}).plain == "12 (\u2264 33.4s)"
    snapshot = sla.context.live.newest().snapshot
    sla.context.live.put(
        {**snapshot, "throttles": [{**snapshot["throttles"][0], "late_ios": 7, "longest_hold_us": 6_000_000}]}
    )
    assert "7 (\u2264 6.0s)" in sla("get", "throttles").output


def test_the_reason_of_a_throttle_has_room_at_80_columns(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = throttle(throttle_id="t-2", source="policy", reason="agreed-cap", victim="", cost_per_s=None)
    agreed |= {"text": "cap of agreement erp-silver", "ops_per_s": 400.0}
    rows = [throttle(), agreed]
    monkeypatch.setattr(sla.source, "throttles", lambda *_args, **_options: rows)
    head, _, *lines = sla("get", "throttles").output.splitlines()
    assert head.split() == ["THROTTLED", "AT", "MOST", "STATE", "BY", "SINCE", "REASON"]
    assert 80 - head.index("REASON") >= 28
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 8
    (of_agreement,) = [line for line in lines if "400 IOPS" in line]
    assert of_agreement.split()[4] == "agreement", "no policy computed it"
    rows[0] = throttle(client="host-b")
    assert "/host-b" in sla("get", "throttles").output


@pytest.mark.parametrize("kind", ["volumes", "slas"])
def test_limit_holds_for_lists_that_come_whole(sla: Terminal, kind: str) -> None:
    sla.source.__dict__["agreements"] = lambda *_: [{**FakeSource._agreement(name)} for name in ("a", "b")]
    everything = json.loads(sla("get", kind, *name_of(kind), "-o", "json").output)
    assert len(everything) > 1
    assert json.loads(sla("get", kind, "--limit", "1", "-o", "json").output) == everything[:1]
    assert f"and {len(everything) - 1} more" in sla("get", kind, "--limit", "1").output


def test_how_long_a_gateways_host_waited_for_io_is_shown_where_it_is_known(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored,) = sla.source.gateways()
    other = {**stored, "gateway_id": "g-2", "name": "gateway-b", "address": "[2001:db8::17:4]:50112"}
    lost = {**stored, "gateway_id": "g-3", "name": "a-gateway-with-a-long-name", "state": "recovered"}
    monkeypatch.setattr(sla.source, "gateways", lambda: [stored, other, {**lost, "dropped_cuts": 123_456}])
    lines = sla("get", "gateways").output.splitlines()
    assert max(map(len, lines)) <= 80
    place = lines[0].index("I/O WAIT")
    cells = {line.split()[0]: line[place - 1 : place + 8].strip() for line in lines[2:] if line[0] == "g"}
    assert cells == {"gateway-a": "13%", "gateway-b": "-"}
    live = api.snapshot()
    sla.context.live.put({**live, "gateways": [{**g, "io_waited_ratio": None} for g in live["gateways"]]})
    assert "I/O WAIT" not in sla("get", "gateways").output, "an agent of before, or a kernel without it"


def ago(seconds: int) -> str:
    """That long before the rig's now, as --since takes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(NOW_US // 1_000_000 - seconds))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's time is now."""
    from types import SimpleNamespace

    clock = SimpleNamespace(time_ns=lambda: NOW_US * 1000)
    monkeypatch.setattr("sla_server.cli.get.time", clock)


@pytest.mark.usefixtures("now")
def test_since_ends_a_list_at_a_time_over_all_pages(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sla_server.cli.get._MOST_LISTED", 4)
    rows = json.loads(sla("get", "events", "--since", ago(10), "-o", "json").output)
    assert [row["event_id"] for row in rows] == [f"e{number:04}" for number in range(11)]
    assert [asked[1] for asked in sla.source.asked if asked[0] == "events"] == [4, 4, 4]
    assert len(json.loads(sla("get", "events", "--since", "10s", "--limit", "3", "-o", "json").output)) == 3


@pytest.mark.usefixtures("now")
def test_since_of_other_kinds(sla: Terminal) -> None:
    for kind in ("slices", "rates"):
        sla("get", kind, *name_of(kind), "--since", ago(600), "-o", "json")
        (asked,) = [one for one in sla.source.asked if one[0] in ("slices", "rollup_history")][-1:]
        assert NOW_US - 600_000_000 in asked
    assert json.loads(sla("get", "episodes", "--since", ago(60), "-o", "json").output) == []
    assert len(json.loads(sla("get", "episodes", "--since", ago(600), "-o", "json").output)) == 1
    said = sla("get", "episodes", "--since", ago(60)).output
    assert said == "No episode fits the time asked for.\n"
    wrong = sla("get", "volumes", "--since", "2h")
    assert (wrong.exit_code, "--since has no use with volumes" in wrong.stderr) == (2, True)
    assert "--since: 'soon' is no time" in sla("get", "events", "--since", "soon").stderr


def test_events_are_filtered_by_the_server(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def inbox(limit: int = 100, before: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        asked.append(wanted)
        return api.events(2)

    monkeypatch.setattr(sla.source, "inbox", inbox)
    words = ("--severity", "warning", "--kind", "throttle*", "--about", "batch", "--open")
    assert sla("get", "events", *words).exit_code == 0
    assert asked[0].items() >= {"kind": "throttle*", "subject": "batch", "only_open": True}.items()
    assert asked[0]["severities"] == ["warning"]
    assert sla("get", "volumes", "--about", "x").exit_code == 2
    assert sla("get", "volumes", "--open").exit_code == 2


@pytest.mark.parametrize("kind", ["slas", "episodes", "throttles"])
def test_labels_of_agreements_select(sla: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sla.source, "throttles", lambda *_args, **_options: [throttle()])
    for labels, count in (("customer=acme", 1), ("customer in (acme, x),!zone", 1), ("customer!=acme", 0)):
        rows = json.loads(sla("get", kind, "-l", labels, "-o", "json").output)
        assert len(rows) == count, labels
    wrong = sla("get", kind, "-l", "a in b")
    assert (wrong.exit_code, "write key=value, key!=value, key in (a,b)" in wrong.stderr) == (2, True)


def test_several_names_with_or_without_their_kind(sla: Terminal) -> None:
    def volumes(*words: str) -> list[str]:
        return [row["volume"] for row in json.loads(sla("get", *words, "-o", "json").output)]

    assert volumes("volumes", "batch", "erp-db") == ["batch", "erp-db"]
    assert volumes("volume/batch") == ["batch"]
    assert volumes("volumes", *sla("get", "volumes", "-o", "name").output.split()) == ["erp-db", "batch"]
    assert sla("get", "volumes", "batch", "none").exit_code == 1


def test_the_trend_of_promises(sla: Terminal) -> None:
    rows = json.loads(sla("get", "trend", "-o", "json").output)
    assert {row["name"] for row in rows} == {"erp-gold/latency", "reports/latency", "scratch/latency"}
    (gold,) = json.loads(sla("get", "trend", "erp-gold", "-o", "json").output)
    assert (gold["latency_us"], gold["threshold_us"], gold["throttled"]) == (9_200, 12_000, True)
    assert json.loads(sla("get", "trend", "erp-gold/other", "-o", "json").output) == []


def test_colours_are_for_terminals_and_not_if_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class TerminalStream(io.StringIO):
        def isatty(self) -> bool:
            return True

    row = {"name": "a", "objective": "b", "state": "violating"}
    for variables, coloured in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        for name in ("NO_COLOR", "TERM", "FORCE_COLOR", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        stream = TerminalStream()
        monkeypatch.setattr("sys.stdout", stream)
        formatting.console().print(build(KINDS["slas"].columns, [row], NOW_US))
        assert ("\x1b[31m" in stream.getvalue() or "\x1b[1;31m" in stream.getvalue()) is coloured


@pytest.mark.usefixtures("now")
def test_decisions_are_of_a_volume_of_kinds_and_since_a_time(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = sla("get", "decisions").output
    assert "throttled batch from 581 weighted IOPS to 290 weighted IOPS, because" in " ".join(shown.split())
    (cap,) = json.loads(sla("get", "decisions", "batch", "-o", "json").output)
    assert (cap["kind"], cap["confirmed_us"]) == ("cap-set", NOW_US - 41_000_000)
    sla("get", "decisions", "batch", "--kind", "cap-set,cap-changed", "--limit", "7")
    asked = [each[1] for each in sla.source.asked if each[0] == "decisions"][-1]
    assert (asked["volume"], asked["kinds"]) == ("batch", ["cap-set", "cap-changed"])
    assert asked["limit"] == 7
    since = GetRequest("decisions", ("batch",), since_us=NOW_US - 5_000_000)
    assert _path_of(since, wants_documents=False) == ("/decisions", {"volume": "batch"})
    assert since.spans() == [{"from_us": since.since_us}]
    pages = {
        None: [{"decision_id": f"d{n}", "at_us": NOW_US - n, "volume": "batch"} for n in range(1000)],
        f"{NOW_US - 999}:d999:batch": [{"decision_id": "last", "at_us": NOW_US - 1000, "volume": "batch"}],
    }
    monkeypatch.setattr(sla.source, "decisions", lambda **asked: pages[asked["before"]])
    found = json.loads(sla("get", "decisions", "--since", ago(600), "-o", "json").output)
    assert len(found) == 1001, "over all pages"
    two = sla("get", "decisions", "batch", "erp-db")
    assert (two.exit_code, "of all volumes, or of one" in two.stderr) == (2, True)


def test_promises_say_for_whom_and_since_when_the_worst_first(sla: Terminal) -> None:
    sla.context.live.put(api.snapshot(slas=[{**api.snapshot()["slas"][0], "state": "violating"}]))
    head, _rule, row = sla("get", "promises").output.splitlines()
    assert head.split() == ["PROMISE", "STATE", "SINCE", "CUSTOMER", "NOW", "PROMISED"]
    assert row.split()[:2] == ["erp-gold/latency", "VIOLATED"]
    assert formatting.when(EPISODE["opened_us"]) in row, "since the violation opened"
    assert " acme " in row
    assert len(row) <= 80
    (found,) = json.loads(sla("get", "promises", "erp-gold/latency", "-o", "json").output)
    assert (found["customer"], found["volume_count"]) == ("acme", 1)
    assert sla("get", "promises", "--state", "idle").output.startswith("No promise fits")
    assert "no promise 'erp-silver' is listed" in sla("get", "promises", "erp-silver").output
    assert "trouble, name" in sla("get", "promises", "--sort", "worst").output


def test_a_promise_that_fits_no_filter_is_not_shown_and_a_limit_does_not_hide_it(sla: Terminal) -> None:
    row = api.snapshot()["slas"][0]
    states = {"iops": "violating", "latency": "ok"}
    rows = [{**row, "objective": objective, "state": state} for objective, state in states.items()]
    sla.context.live.put(api.snapshot(slas=rows))
    assert "erp-gold/latency" in sla("get", "promises", "erp-gold/latency", "--limit", "1").output
    for asked in (("erp-gold", "--state", "idle"), ("erp-gold/latency", "--state", "violating")):
        assert sla("get", "promises", *asked).output.startswith("No promise fits the filters")
    said = sla("get", "slas", "erp-gold", "--labels", "no=such").output
    assert said == "No agreement in force has the labels no=such.\n"
    said = sla("get", "promises", "erp-golt", "--state", "idle").output
    assert said.splitlines()[1].strip() == "Near it: erp-gold"


def test_many_promises_come_page_by_page_or_as_many_as_are_wanted(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sla_server.cli.get._MOST_LISTED", 2)
    names = {f"s{number}": "gold" for number in range(5)}
    monkeypatch.setattr(sla.source, "agreement_names", lambda: names)
    rows = [{**api.snapshot()["slas"][0], "name": name} for name in names]
    sla.context.live.put(api.snapshot(slas=rows))
    assert len(json.loads(sla("get", "promises", "-o", "json").output)) == 5
    assert len(json.loads(sla("get", "promises", "--limit", "3", "-o", "json").output)) == 3


@pytest.mark.usefixtures("now")
def test_clients_of_a_volume_have_rates_and_latencies_of_a_time(sla: Terminal) -> None:
    head, _rule, *rows = sla("get", "clients", "batch").output.splitlines()
    assert head.split() == ["CLIENT", "IOPS", "RATE", "WEIGHTED", "P50", "P95", "P99", "ERRORS"]
    assert [row.split()[:2] for row in rows] == [["127.0.0.1", "272"], ["10.0.0.31", "8"]]
    done = sla("get", "clients", "batch", "--since", ago(86_400), "--limit", "1", "-o", "json")
    (asked,) = [one for one in sla.source.asked if one[0] == "of_clients"][-1:]
    assert (asked[1], asked[4], len(json.loads(done.output))) == ("batch", 1, 1)
    assert round((asked[3] - asked[2]) / 1e6) in range(86_399, 86_402)
    refused = sla("get", "clients", "batch", "--since", ago(40 * 86_400))
    assert (refused.exit_code, "31 days at most" in refused.output) == (2, True)


def test_loads_say_who_had_how_much_of_a_backend(sla: Terminal) -> None:
    head, _rule, newest, *rows = sla("get", "loads", "disk-0").output.splitlines()
    assert head.split() == ["FROM", "WEIGHTED", "IOPS", "IOPS", "RATE", "OF", "IT"]
    assert newest.endswith("batch 88%, erp-db 11%")
    assert len(rows) == 59
    assert "loads are those of one backend" in sla("get", "loads").output
    assert (
        "No such backend" in sla("get", "loads", "none").output
        or "no backend" in sla("get", "loads", "none").output
    )


def test_hours_are_those_of_the_period_that_goes_on(sla: Terminal) -> None:
    lines = sla("get", "hours", "erp-gold", "--limit", "1000").output.splitlines()
    assert lines[0].split() == ["HOUR", "GOOD", "BAD", "NO", "DATA", "NOT", "DUE", "EXCLUDED", "BAD", "TIME"]
    assert any(line.split()[-6:] == ["45", "15", "0", "0", "0", "15m"] for line in lines), "a bad quarter"
    assert lines[-1] == "Times are of Europe/Berlin."
