"""Documents: what is accepted, and that every mistake is found at its line with a way out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from dateutil.rrule import rrulestr

from sla_server.agreements import recurrence
from sla_server.agreements.document import Agreement, LatencyObjective
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import load_documents
from sla_server.agreements.zones import is_readable
from tests.support.agreements import FULL, agreement, maintenance_text, simple


def problems_of(text: str, rollup_s: int = 60) -> list[DocumentProblem]:
    with pytest.raises(AgreementsRefused) as caught:
        load_documents(text, rollup_s)
    return caught.value.problems


def test_the_documented_example_is_accepted_and_survives_json() -> None:
    (loaded,) = load_documents(FULL, 60)
    spec = loaded.agreement.spec_json()
    assert Agreement.from_spec(json.loads(json.dumps(spec))) == loaded.agreement
    assert spec["spec"]["objectives"][0]["budgeting"]["slice"] == "1m"
    assert loaded.text == FULL
    assert loaded.agreement.judged[0].demand_curve[1].threshold_us == 8000


def test_several_documents_keep_their_own_text_and_lines() -> None:
    text = "# first\n---\n" + simple("one") + "---\n" + simple("two")
    first, second = load_documents(text, 60)
    assert (first.agreement.name, second.agreement.name) == ("one", "two")
    assert "two" not in first.text
    assert agreement(second.text) == second.agreement
    assert second.line == text.split("\n").index("metadata: {name: two}") - 1


CASES = [
    ("percentile: 95", "percentile: 49", "spec.objectives[0].indicator.percentile", 12),
    ("percentile: 95", "percentile: 99.999", "spec.objectives[0].indicator.percentile", 12),
    ("percentile: 95", 'percentile: "95"', "spec.objectives[0].indicator.percentile", 12),
    ("metric: latency", "metric: latncy", "spec.objectives[0].indicator.metric", 12),
    ("up_to_iops: 6000", "up_to_iops: 3000", "spec.objectives[0].demand_curve[1].up_to_iops", 15),
    ("value_ms: 8", "value_ms: 4", "spec.objectives[0].demand_curve[1].value_ms", 15),
    ("value_ms: 8", "value_ms: 0", "spec.objectives[0].demand_curve[1].value_ms", 15),
    ("slice: 1m", "slice: 7m", "spec.objectives[0].budgeting.slice", 17),
    ("slice: 1m", "slice: 90", "spec.objectives[0].budgeting.slice", 17),
    ("slice: 1m", "slice: 30s", "spec.objectives[0].budgeting.slice", 17),
    ("target: 0.995", "target: 1", "spec.objectives[0].budgeting.target", 17),
    ("priority: gold", "priority: golden", "spec.priority", 7),
    ("priority: gold", "prio: gold", "spec.priority", 4),
    ("io: any", "io: any, wat: 1", "spec.scope.wat", 6),
    ("volumes: [vol-17]", "volumes: []", "spec.scope.volumes", 6),
    ("volumes: [vol-17]", "volumes: ['a b']", "spec.scope.volumes[0]", 6),
    ("volumes: [vol-17]", "volumes: [{app: erp}]", "spec.scope.volumes[0]", 6),
    ("name: erp-gold", "name: -x", "metadata.name", 3),
    ("Europe/Berlin", "Europe/Berlim", "spec.window.tz", 19),
    ("Europe/Berlin", "../../etc/passwd", "spec.window.tz", 19),
    ("period: month", "period: fortnight", "spec.window.period", 19),
    ("type: calendar", "type: calender", "spec.window", 19),
    ("credit: 0.25", "credit: 0.05", "spec.penalties[1].credit", 22),
    ("below: 0.99,", "below: 0.999,", "spec.penalties[1].below", 22),
    ("credit_cap: 0.50", "credit_cap: 0", "spec.credit_cap", 23),
    ("max_iops: 20000", "max_iops: 400", "spec.cap.max_iops", 9),
    ("burst_s: 60", "", "spec.cap.burst_iops", 9),
    ("floor_iops: 500", "floor_iops: 0", "spec.guarantee.floor_iops", 8),
    ("calendar: business", "calendar: lunar base", "spec.service_hours.calendar", 20),
    ("calendar: business", "calendar: lunar, tz: UTC", "spec.service_hours", 20),
    ("kind: SLA", "kind: Sla", "kind", 2),
    ("calendar: business", 'calendar: business, from: "18:00", to: "08:00"', "spec.service_hours", 20),
    ("notice: 7d", "notice: 7 days", "spec.maintenance.notice", 21),
]


@pytest.mark.parametrize(
    ("old", "new", "field", "line"), CASES, ids=[f"{c[2]}-{i}" for i, c in enumerate(CASES)]
)
def test_a_mistake_is_found_where_it_is(old: str, new: str, field: str, line: int) -> None:
    assert old in FULL
    found = problems_of(FULL.replace(old, new, 1))
    assert (field, line) in [(problem.field, problem.line) for problem in found]
    assert all(problem.problem for problem in found)
    assert all(problem.document == "erp-gold" for problem in found if new != "name: -x")


def test_a_client_with_a_name_that_no_message_takes_is_refused_with_the_limit() -> None:
    for client, count in (("c" * 128, 0), ("c" * 129, 1)):
        text = FULL.replace("clients: [host-a]", f"clients: [{client}]", 1)
        assert text != FULL
        if not count:
            assert load_documents(text, 60)
            continue
        (found,) = problems_of(text)
        assert (found.field, "1 to 128 characters" in found.fix) == ("spec.scope.clients[0]", True)


def test_all_mistakes_of_all_documents_are_reported_at_once() -> None:
    bad = simple("a").replace("percentile: 95.0", "percentile: 5").replace("slice: 1m", "slice: x")
    found = problems_of(bad + "---\n" + simple("b", priority="tin"))
    assert [problem.document for problem in found] == ["a", "a", "b"]
    assert found[2].line > found[1].line > found[0].line


def test_a_misspelt_key_is_answered_with_the_right_one() -> None:
    found = problems_of(FULL.replace("priority:", "priorty:"))
    assert any("priority" in problem.fix for problem in found if problem.field == "spec.priorty")


def test_two_documents_of_one_name_are_refused() -> None:
    (found,) = problems_of(simple("a") + "---\n" + simple("a"))
    assert found.field == "metadata.name"


def test_two_objectives_of_one_name_are_refused() -> None:
    text = simple("a")
    objective = text[text.index("  - name:") :]
    (found,) = problems_of(text + objective)
    assert "latency" in found.problem


MAINTENANCE = (
    '  maintenance: {{windows: [{{start: "2026-03-01T02:00", '
    "duration: 2h, {}reason: disks, author: ann}}]}}\n"
)


@pytest.mark.parametrize(
    "rule",
    ["FREQ=MONTHLY;BYDAY=1SU", "FREQ=WEEKLY;UNTIL=20270101T000000", "FREQ=DAILY;COUNT=3"],
)
def test_a_recurrence_rule_is_accepted(rule: str) -> None:
    assert (
        agreement(simple(extra=MAINTENANCE.format(f"rrule: {rule}, "))).spec.maintenance.windows[0].rrule
        == rule
    )


@pytest.mark.parametrize(
    "rule",
    ["FREQ=SOMETIMES", "hello", "FREQ=WEEKLY;UNTIL=20270101T000000Z", "FREQ=SECONDLY", "FREQ=HOURLY",
     "FREQ=DAILY;UNTIL=20200101T000000"],
)  # fmt: skip
def test_a_wrong_recurrence_rule_is_refused(rule: str) -> None:
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f"rrule: {rule}, ")))
    assert "maintenance.windows[0]" in found.field


@pytest.mark.parametrize("interval", ["0", "00", "-1", "+0", "x", ""])
def test_a_rule_that_would_be_searched_for_ever_is_refused_unsearched(interval: str) -> None:
    rule = f"rrule: FREQ=DAILY;INTERVAL={interval}, "
    (found,) = problems_of(simple(extra=MAINTENANCE.format(rule)))
    assert "INTERVAL" in found.problem


def test_a_rule_with_the_name_of_its_property_is_refused_with_what_to_leave_out() -> None:
    (found,) = problems_of(simple(extra=MAINTENANCE.format('rrule: "RRULE:FREQ=WEEKLY", ')))
    assert "begins with 'RRULE:'" in found.problem
    assert found.fix == "Write 'FREQ=WEEKLY' alone"


def test_a_number_with_a_comma_is_two_keys_to_yaml() -> None:
    (found,) = problems_of(simple().replace("up_to_iops: 500", "up_to_iops: 3,000"))
    assert found.problem == "a number with a comma is two values to YAML"


@pytest.mark.parametrize("rule", ["RDATE:20270101T000000", "DTSTART:19970902T090000\\nRRULE:FREQ=DAILY"])
def test_a_rule_brings_no_dates_of_its_own(rule: str) -> None:
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", ')))
    assert "more than one rule" in found.problem


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("duration: 2h", "duration: 999999w"),
        ("2026-03-01T02:00", "9999-12-31T23:00"),
        ("2026-03-01T02:00", "0001-01-01T00:00"),
    ],
)
def test_maintenance_stays_within_what_the_calendar_can_count(old: str, new: str) -> None:
    text = simple(extra=MAINTENANCE.format(""))
    assert old in text
    assert problems_of(text.replace(old, new))


@pytest.mark.parametrize("at", ["08:00+02:00", "08:00Z", "08:00:30"])
def test_a_time_of_day_has_neither_offset_nor_seconds(at: str) -> None:
    hours = f'  service_hours: {{calendar: business, from: "{at}", to: "{at.replace("08", "10")}"}}\n'
    assert {found.field for found in problems_of(simple(extra=hours))} == {
        "spec.service_hours.from",
        "spec.service_hours.to",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min_ios_per_slice: 100", f"min_ios_per_slice: {1 << 64}"),
        ("max_mean_io_kib: 32", "max_mean_io_kib: .inf"),
    ],
)
def test_a_number_that_no_message_or_column_holds_is_refused(old: str, new: str) -> None:
    (found,) = problems_of(FULL.replace(old, new))
    assert "should be at most" in found.problem


def test_a_very_long_value_is_told_in_short() -> None:
    (digits,) = problems_of(FULL.replace("floor_iops: 500", "floor_iops: 0x" + "f" * 5000))
    (text,) = problems_of(FULL.replace("priority: gold", f"priority: {'g' * 5000}"))
    assert "very long number" in digits.problem
    assert len(text.problem) < 200


def test_maintenance_needs_an_end_that_is_after_its_start() -> None:
    text = simple(extra=MAINTENANCE.format(""))
    assert agreement(text)
    assert problems_of(text.replace("duration: 2h, ", ""))
    assert problems_of(text.replace("duration: 2h, ", 'end: "2026-03-01T01:00", '))


@pytest.mark.parametrize(
    ("text", "line"),
    [("", 0), ("---\n---\n", 0), ("- 1\n", 1), ("a: [1\n", 2), ("a: 1\na: 2\n", 2), ("\n\n- 1\n", 3),
     ("a: !!python/object/apply:os.getpid []\n", 1), ("key: " + "[" * 5000, 1), ("a: \x00", 0),
     ("a: !!bool x\n", 0), ("a: &a\n  <<: *a\n", 0)],
)  # fmt: skip
def test_what_is_no_document_is_refused_and_nothing_else_happens(text: str, line: int) -> None:
    found = problems_of(text)
    assert found
    if line:
        assert found[0].line == line


def test_anchors_cannot_make_a_small_text_huge() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 9))
    found = problems_of("l0: &l0 [x]\n" + levels)
    assert "values" in found[0].problem


def test_too_large_a_text_is_refused() -> None:
    assert "256 KiB" in problems_of("#" * (256 << 10) + "\na: 1")[0].problem
    assert (
        "24 KiB"
        in problems_of(simple() + "# " + "x" * 30_000 + "\nkind: SLA\n".replace("kind: SLA", ""))[0].problem
    )


@pytest.mark.parametrize(
    ("metric", "keys"),
    [
        ("mean_latency", "demand_curve: [{value_ms: 3}]"),
        ("iops", "promised_iops: 1000"),
        ("throughput", "promised_mbps: 200"),
        ("availability", "outage: 30s"),
    ],
)
def test_all_indicators_are_judged(metric: str, keys: str) -> None:
    objective = f"  - {{name: other, indicator: {{metric: {metric}}}, {keys}, budgeting: {{target: 0.99}}}}\n"
    found = agreement(simple() + objective)
    assert [item.name for item in found.spec.objectives] == ["latency", "other"]
    assert [item.name for item in found.judged] == ["latency", "other"]
    assert problems_of(simple() + objective.replace(keys, "nothing: 1"))


def test_an_agreement_without_objectives_is_a_class_of_neighbour() -> None:
    text = simple(priority="best-effort")
    text = text[: text.index("  objectives:")]
    assert agreement(text).judged == []


@pytest.mark.parametrize("frequency", ["HOURLY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY"])
@pytest.mark.parametrize("more", ["", ";COUNT=3", ";UNTIL=20270601T000000"])
def test_a_rule_that_never_happens_is_looked_for_in_the_last_centuries_only(
    monkeypatch: pytest.MonkeyPatch, frequency: str, more: str
) -> None:
    """The search of the library ends with the year 9999, so it has to begin late."""
    begins: list[int] = []

    def noted(rule: str, **options: Any) -> Any:
        begins.append(options["dtstart"].year)
        return rrulestr(rule, **options)

    monkeypatch.setattr(recurrence, "rrulestr", noted)
    rule = f"FREQ={frequency};BYMONTH=2;BYMONTHDAY=30{more}"
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", ')))
    assert "never happens" in found.problem
    assert begins
    assert min(begins) >= 9999 - 400


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO",
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;COUNT=1",
        "FREQ=HOURLY;INTERVAL=12;BYMONTH=2;BYMONTHDAY=29;UNTIL=20400101T000000",
    ],
)
def test_a_rule_that_seldom_happens_is_taken(rule: str) -> None:
    (window,) = agreement(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", '))).spec.maintenance.windows
    assert window.rrule == rule


def test_a_rule_that_ends_before_it_happens_is_refused() -> None:
    rule = "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;UNTIL=20270601T000000"
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", ')))
    assert "never happens" in found.problem


@pytest.mark.parametrize("indent", ["   ", " "])
@pytest.mark.parametrize("before", ["", "\n\n", "# a comment\n"])
def test_an_indented_document_is_the_same_document(indent: str, before: str) -> None:
    text = before + "".join(f"{indent}{line}\n" for line in simple("one").splitlines())
    (loaded,) = load_documents(text, 60)
    assert loaded.agreement == agreement(simple("one"))
    assert agreement(loaded.text) == loaded.agreement, "the stored text can be applied again"
    assert loaded.line == before.count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("target: 0.995", "target: 99.5", "Write 0.995 for 99.5 %"),
        ("target: 0.995", 'target: "99.5 %"', "Write 0.995 for 99.5 %"),
        ("target: 0.995", "target: 1", "Write 0.999 for 99.9 %: a target of 1 leaves no error budget"),
        ("percentile: 95", "percentile: 0.95", "Write 95: percentiles are in percent"),
        ("value_ms: 5}", "value_ms: 5ms}", "Write 5: the unit is part of the key's name"),
        ("volumes: [vol-17]", "volumes: vol-17", "Write it in brackets: [vol-17]"),
        ("volumes: [vol-17]", "volumes: []", "Name at least one"),
        ("metric: latency", "metric: latencies", "Use one of latency, mean_latency, iops,"),
        ("priority: gold", "priorty: gold", "Did you mean priority?"),
        ("priority: gold", "priority: gold\n  percentile: 5", "percentile belongs elsewhere in the document"),
        ("priority: gold", "priority: gold\n  priority: silver", "Keep one of the two"),
    ],
)
def test_a_usual_mistake_is_met_by_what_was_meant(old: str, new: str, fix: str) -> None:
    problems = problems_of(FULL.replace(old, new, 1))
    assert any(found.fix.startswith(fix) for found in problems), problems
    for found in problems:
        key = found.field.rpartition(".")[2]
        assert f"Did you mean {key}?" not in found.fix


@pytest.mark.parametrize(
    ("spec", "field", "fix"),
    [
        (
            "webhook: {ulr: 'https://a.example'}",
            "spec.webhook.ulr",
            "Did you mean url? Possible here: bearer_file, ca_file, headers, secret_file, url, url_file",
        ),
        (
            "webhok: {url: 'https://a.example'}",
            "spec.webhok",
            "Did you mean webhook? Possible here: alertmanager, apprise, batch, command, fallback, file, "
            "heartbeat, inbox, per_minute, smtp, syslog, timeout, webhook",
        ),
        (
            "inbox: {server: a}",
            "spec.inbox.server",
            "server belongs elsewhere in the document: see docs/operations/recipients.md",
        ),
        (
            "smtp: {colour: red}",
            "spec.smtp.colour",
            "Remove it, or see docs/operations/recipients.md. Possible",
        ),
    ],
)
def test_a_key_that_a_recipient_does_not_have_is_met_by_those_it_has(spec: str, field: str, fix: str) -> None:
    text = f"apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {{name: a}}\nspec: {{{spec}}}\n"
    found = next(each for each in problems_of(text) if each.field == field)
    assert found.fix.startswith(fix)


BLOCK = """\
    demand_curve:
    - up_to_iops: 500
      value_ms: 12.0
"""


def in_blocks(old: str, new: str) -> str:
    """The small agreement with its curve in block style, and one value of it changed."""
    text = simple().replace("    demand_curve: [{up_to_iops: 500, value_ms: 12.0}]\n", BLOCK)
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "written", "fix"),
    [
        ("up_to_iops: 500", "3,000", "Write 3000"),
        ("up_to_iops: 500", "3 000", "Write 3000"),
        ("up_to_iops: 500", "3.000.000", "Write 3000000"),
        ("up_to_iops: 500", "\uff13\uff10\uff10\uff10", "Write 3000"),
        ("up_to_iops: 500", '"3000"', "Write 3000 without quotes"),
        ("up_to_iops: 500", "3k", "Write 3000: the unit is part of the key's name"),
        ("up_to_iops: 500", "many", "Write digits alone, with a point before decimals"),
        ("value_ms: 12.0", "5 ms", "Write 5: the unit is part of the key's name"),
        ("value_ms: 12.0", "1 s", "Write 1000: the unit is part of the key's name"),
        ("value_ms: 12.0", "3,5", "Write 3.5"),
        ("target: 0.9", '"0,995"', "Write 0.995"),
        ("target: 0.9", '"99,5 %"', "Write 0.995 for 99.5 %"),
        ("percentile: 95.0", '"99,9"', "Write 99.9"),
        ("slice: 1m", "5 min", "Write 5m"),
    ],
)
def test_a_number_as_people_write_it_is_refused_with_field_value_and_what_to_write(
    old: str, written: str, fix: str
) -> None:
    key = old.partition(":")[0]
    (found,) = problems_of(in_blocks(old, f"{key}: {written}"))
    assert found.field.endswith(key)
    assert repr(written.strip('"')) in found.problem
    assert found.fix == fix


@pytest.mark.parametrize("written", ["1_000", "1000.0", "1e3", "+1000"])
def test_other_spellings_of_a_number_mean_what_they_say(written: str) -> None:
    (objective,) = agreement(in_blocks("up_to_iops: 500", f"up_to_iops: {written}")).spec.objectives
    assert isinstance(objective, LatencyObjective)
    assert objective.demand_curve[0].up_to_iops == 1000


def test_the_refused_key_itself_is_never_suggested() -> None:
    text = FULL.replace("metric: latency, percentile: 95", "metric: iops")
    found = {item.field: item.fix for item in problems_of(text)}
    assert found["spec.objectives[0].demand_curve"].startswith("demand_curve belongs elsewhere")


def test_an_anchor_within_itself_is_refused_in_words() -> None:
    with pytest.raises(AgreementsRefused, match="an anchor contains its own alias"):
        load_documents("&a\nfoo: *a\n", 60)


@pytest.mark.parametrize(
    ("rule", "problem", "fix"),
    [
        ("", "the rule is empty", "Write for example FREQ=WEEKLY;BYDAY=SU"),
        ("FREQ=DAILY;", "'FREQ=DAILY;' has an empty part", "Remove the semicolon"),
        ("FREQ=DAILY;;BYDAY=MO", "has an empty part", "Remove the semicolon"),
        ("hello", "'hello' is no part of a recurrence rule: it has no '='", "Write for example"),
        ("INTERVAL=2", "'INTERVAL=2' does not say how often", "Add FREQ: one of YEARLY"),
        ("FREQ=DAILY;FOO=1", "a recurrence rule has no 'FOO'", "Use FREQ, INTERVAL"),
        ("FREQ=WEEKLY;BYDAY=XX", "BYDAY cannot be 'XX'", "Give days such as MO,TU"),
        ("FREQ=DAILY;COUNT=abc", "COUNT cannot be 'abc'", "Give a whole number from 1"),
        (
            "FREQ=DAILY;UNTIL=20300101T000000Z",
            "UNTIL cannot be '20300101T000000Z'",
            "Give a local time without Z",
        ),
        ("FREQ=DAILY;COUNT=0", "COUNT is 0, the least is 1", "Give how often"),
        ("FREQ=HOURLY", "'FREQ=HOURLY' repeats after 1h, and one lasts 2h", "Use a longer interval"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said_in_words_at_its_own_key(rule: str, problem: str, fix: str) -> None:
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", ')))
    assert problem in found.problem
    assert found.fix.startswith(fix)
    assert found.field == "spec.maintenance.windows[0].rrule"


PYTHON_WORDS = re.compile(
    r"\b(None|True|False|dict|dictionary|instance|tuple|unpack|datetime|ordereddict|Error)\b"
)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("percentile: 95}", "percentile: true}", "should be a number (the value is true)"),
        (
            "indicator: {metric: latency, percentile: 95}",
            "indicator: latency",
            "should be a map of keys and values",
        ),
        (
            "window: {type: calendar, period: month, tz: Europe/Berlin}",
            "window: [calendar]",
            "should be a map",
        ),
        ("labels: {customer: acme}", "labels: {customer: 1}", "should be text (the value is 1)"),
        ("volumes: [vol-17]", "volumes: null", "should be a list (the value is null)"),
        ("volumes: [vol-17]", "volumes: !!set {a}", 'should be a list (the value is ["a"])'),
        ("name: erp-gold", "name: 2026-01-01", "is not a name"),
        ("priority: gold", "? [a, b]\n  : 2\n  priority: gold", "there is no such key here"),
        ("priority: gold", "? {a: b}\n  : 2\n  priority: gold", "there is no such key here"),
        ("priority: gold", "~: 2\n  priority: gold", "there is no such key here"),
        ("value_ms: 8", "value_ms: .nan", "(the value is .nan)"),
        ("provider: storage-team", f"provider: {'x' * 201}", "has 201 characters, at most 200 are possible"),
        ("provider: storage-team", 'provider: ""', "is empty"),
        ("apiVersion: storage-sla/v1", "apiVersion: storage-sla/v2", "'storage-sla/v2' is not possible here"),
        ("volumes: [vol-17]", "volumes: [*]", "this is not YAML"),
        ("floor_iops: 500", "floor_iops: !!bool x", "'x' does not fit the tag"),
        ("floor_iops: 500", "floor_iops: " + "9" * 5000, "a number has thousands of digits"),
    ],
)
def test_messages_have_no_words_of_python(old: str, new: str, problem: str) -> None:
    assert old in FULL
    found = problems_of(FULL.replace(old, new, 1))
    assert any(problem in each.problem for each in found), found
    for each in found:
        assert not PYTHON_WORDS.search(str(each)), each


@pytest.mark.parametrize(
    ("times", "field", "problem"),
    [
        ('end: "2026-03-01T01:00"', "end", "2026-03-01T01:00:00 is not after the start, 2026-03-01T02:00:00"),
        ('end: "2028-03-01T01:00"', "end", "maintenance of 730 days is longer than 400 days"),
        ("duration: 401d", "duration", "maintenance of 401 days is longer than 400 days"),
    ],
)
def test_times_of_maintenance_are_refused_at_their_key(times: str, field: str, problem: str) -> None:
    (found,) = problems_of(simple(extra=MAINTENANCE.format("").replace("duration: 2h", times)))
    assert (found.field, found.problem) == (f"spec.maintenance.windows[0].{field}", problem)


VALUE_AND_LIMIT = [
    # (in FULL, instead of it, field, line, value, limit)
    ("max_iops: 20000", "max_iops: 400", "spec.cap.max_iops", 9, "400", "500"),
    ("burst_iops: 30000", "burst_iops: 10000", "spec.cap.burst_iops", 9, "10000", "20000"),
    ("up_to_iops: 6000", "up_to_iops: 2000", "spec.objectives[0].demand_curve[1].up_to_iops", 15, "2000",
     "3000"),
    ("value_ms: 8", "value_ms: 4", "spec.objectives[0].demand_curve[1].value_ms", 15, "4", "5"),
    ("below: 0.99,", "below: 0.999,", "spec.penalties[1].below", 22, "0.999", "0.995"),
    ("credit: 0.25", "credit: 0.05", "spec.penalties[1].credit", 22, "0.05", "0.1"),
    ("slice: 1m", "slice: 7m", "spec.objectives[0].budgeting.slice", 17, "7m", "1d"),
    ("percentile: 95", "percentile: 100", "spec.objectives[0].indicator.percentile", 12, "100", "99.99"),
    ("calendar: business", 'calendar: business, from: "18:00", to: "08:00"', "spec.service_hours", 20,
     "18:00", "08:00"),
    ("window: {type: calendar, period: month, tz: Europe/Berlin}", "window: {type: rolling, duration: 500d}",
     "spec.window.duration", 19, "500d", "400d"),
    ("window: {type: calendar, period: month, tz: Europe/Berlin}", "window: {type: rolling, duration: 1s}",
     "spec.window.duration", 19, "1s", "1m"),
    ("slice: 1m", "slice: 1d", "spec.objectives[0].budgeting.slice", 17, "1d", "1m"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "field", "line", "value", "limit"), VALUE_AND_LIMIT)
def test_a_mistake_is_said_with_field_value_and_limit(
    old: str, new: str, field: str, line: int, value: str, limit: str
) -> None:
    (found,) = problems_of(FULL.replace(old, new, 1))
    assert (found.field, found.line) == (field, line)
    words = re.findall(r"[\w:.]*\w", f"{found.problem} {found.fix}")
    assert value in words
    assert limit in words
    assert found.fix or "should be" in found.problem


@pytest.mark.parametrize("zone", ["right/Europe/Berlin", "posix/UTC", "localtime", "posixrules", "Factory"])
def test_a_zone_that_is_not_of_iana_is_refused_and_read_where_it_is_stored(zone: str) -> None:
    text = FULL.replace("Europe/Berlin", zone)
    (found,) = problems_of(text)
    assert found.problem == f"{zone!r} is not a time zone"
    assert "IANA" in found.fix
    if is_readable(zone):  # not every machine has them
        stored = json.dumps(agreement(FULL).spec_json()).replace("Europe/Berlin", zone)
        assert Agreement.from_spec(json.loads(stored)).spec.time_zone == zone


def test_a_window_shorter_than_its_slice_that_is_stored_is_read() -> None:
    stored = agreement(FULL).spec_json()
    stored["spec"]["window"] = {"type": "rolling", "duration": "1s"}
    assert Agreement.from_spec(stored).spec.window.type == "rolling"


def test_slices_that_begin_in_no_service_hours_are_read_where_they_are_stored() -> None:
    """They were taken, and every one of them was excluded: nothing was ever judged."""
    stored = agreement(FULL).spec_json()
    stored["spec"]["objectives"][0]["budgeting"]["slice"] = "1d"
    assert Agreement.from_spec(stored).spec.objectives[0].budgeting.slice_s == 86_400


@pytest.mark.parametrize(
    ("when", "value"),
    [
        ("start: 2026-02-30T02:00:00, duration: 1h", "2026-02-30T02:00:00"),
        ("start: 2026-02-01T02:00, end: 2026-13-01", "2026-13-01"),
        ('start: "2026-02-30T02:00", duration: 1h', "2026-02-30T02:00"),
    ],
)
def test_a_date_that_does_not_exist_is_named_at_its_line(when: str, value: str) -> None:
    (found,) = problems_of("# a comment\n" + maintenance_text(when=when))
    assert found.problem == f"{value!r} does not exist: no such day, hour or minute"
    assert (found.line, bool(found.fix)) == (5, True)


def test_an_until_before_the_start_is_said_with_both() -> None:
    rule = "FREQ=DAILY;UNTIL=20200101T000000"
    (found,) = problems_of(simple(extra=MAINTENANCE.format(f'rrule: "{rule}", ')))
    assert found.problem == "UNTIL, 2020-01-01T00:00, is before the start, 2026-03-01T02:00"
