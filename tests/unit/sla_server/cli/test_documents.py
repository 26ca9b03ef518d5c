"""diff, history, describe, validate, schema, admit, export and import, at 80 columns."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sla_server.agreements.load import load_documents
from sla_server.cli.documents import join_documents
from tests.support.agreements import FULL, calendar_text, maintenance_text, simple
from tests.support.api import NOW_US, document_text
from tests.support.cli import Terminal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(FULL)
    return path


def widest(text: str) -> int:
    return max(len(line) for line in text.splitlines())


def test_diff_shows_what_went_and_what_came(sla: Terminal, file: Path) -> None:
    file.write_text(FULL.replace("0.995}", "0.999}").replace("[vol-17]", "[vol-17, vol-18]"))
    done = sla("diff", "-f", str(file))
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "--- erp-gold version 2, in force",
        "+++ erp-gold in the file",
        "@@ spec.scope.volumes",
        "+  vol-18",
        "@@ spec.objectives[latency].budgeting.target",
        "-  0.995",
        "+  0.999",
    ]
    assert sla("diff", "-f", str(file), "--exit-code").exit_code == 1
    (found,) = json.loads(sla("diff", "-f", str(file), "-o", "json").output)
    assert found["changes"][1] == {
        "field": "spec.objectives[latency].budgeting.target", "before": 0.995, "after": 0.999,
    }  # fmt: skip
    assert sla.asked == [], "a difference changes nothing"


def test_diff_of_what_is_equal_and_of_what_is_new(sla: Terminal, file: Path) -> None:
    file.write_text("---\n".join([FULL, simple("new"), calendar_text("bank"), maintenance_text("later")]))
    done = sla("diff", "-f", str(file), "--exit-code")
    assert done.output.splitlines() == [
        "erp-gold: no difference to version 2, which is in force",
        "new: new; nothing of this name is in force",
        "Calendar bank: no difference to version 1, which is in force",
        "Maintenance later: new; nothing of this name is in force",
    ]
    assert done.exit_code == 1


def test_diff_needs_a_server_that_answers(sla: Terminal, file: Path) -> None:
    sla.source.away = True
    assert sla("diff", "-f", str(file)).exit_code == 1


def test_history_of_other_kinds(sla: Terminal) -> None:
    (line, first) = sla("history", "--kind", "Route", "all").output.splitlines()
    assert line.endswith(" by ann, in force")
    assert first == "  the first version"
    for words in (("route", "all"), ("routes", "all"), ("route/all",), ("Route", "all", "--kind", "Route")):
        assert sla("history", *words).output.splitlines() == [line, first], words
    gone = sla("history", "--kind", "Route", "gone")
    assert (gone.exit_code, "no Route 'gone' was ever applied" in gone.stderr) == (1, True)


def test_history_says_since_when_by_whom_and_what(sla: Terminal) -> None:
    lines = sla("history", "erp-gold").output.splitlines()
    assert lines[0].startswith("version 2 from ")
    assert lines[0].endswith(" by token, in force")
    assert lines[1] == "  spec.objectives[latency].budgeting.target: 0.99 -> 0.995"
    assert (lines[2].startswith("version 1 from "), lines[3]) == (True, "  the first version")
    assert len(json.loads(sla("history", "erp-gold", "-o", "json").output)) == 2
    assert sla("history", "erp-gold", "--limit", "1").output.endswith("and 1 older: give a higher --limit\n")
    assert "was ever applied" in sla("history", "none").output


def test_history_takes_a_kind_as_get_and_describe_do(sla: Terminal) -> None:
    """It was refused with the words of a parser: got unexpected extra argument."""
    plain = sla("history", "erp-gold").output
    for words in (("sla", "erp-gold"), ("agreement", "erp-gold"), ("sla/erp-gold",), ("SLA", "erp-gold")):
        assert sla("history", *words).output == plain, words
    for words, says in (
        (
            ("volume", "batch"),
            "Kinds are sla, maintenance, calendar, volumelabels, recipient, route,",
        ),
        (("erp-gold", "erp-silver"), "sla history is of one document: [KIND] NAME."),
        (("sla", "a", "b"), "sla history is of one document: [KIND] NAME."),
        (("route", "all", "--kind", "SLA"), "route all is no SLA: give the kind once"),
    ):
        refused = sla("history", *words)
        assert (refused.exit_code, says in " ".join(refused.stderr.split())) == (2, True), refused.stderr


def test_history_of_a_deletion_and_of_long_values(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sla.source.agreement_versions("erp-gold")
    rows[0]["ended_us"] -= 5_000_000
    rows[0]["spec"]["spec"]["scope"]["volumes"] = [f"volume-{i}" for i in range(40)]
    monkeypatch.setattr(sla.source, "agreement_versions", lambda _name: rows)
    output = sla("history", "erp-gold").output
    assert "then it was deleted" in output
    assert widest(output) <= 80


def test_describe_is_a_document_that_can_be_applied_again(sla: Terminal) -> None:
    output = sla("describe", "sla", "erp-gold").output
    (loaded,) = load_documents(output, 60)
    assert loaded.document == load_documents(FULL, 60)[0].document
    comments = [line for line in output.splitlines() if line.startswith("# ")]
    assert comments[0] == "# erp-gold version 2 of 2: in force"
    assert comments[2:5] == [
        "# now: latency: kept, 9.20ms of p95 12.0ms promised",
        "# period 2027-01-01 to 2027-02-01 (Europe/Berlin), so far: credit 25.0%",
        "#   latency: kept 98.50% of 99.50% promised, 15 of 1,000 slices bad",
    ]
    assert len(comments) == 7, "the agreement is two periods old"
    assert max(map(len, comments)) <= 80


def test_describe_before_anything_was_judged_says_so(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dash in a sentence reads as a kept promise of nothing."""
    monkeypatch.setattr(type(sla.source), "slice_sums", lambda *_: [])
    comments = [line for line in sla("describe", "sla", "erp-gold").output.splitlines() if line[0] == "#"]
    assert "#   latency: nothing judged yet, 99.50% promised" in comments


def test_describe_an_older_version(sla: Terminal) -> None:
    output = sla("describe", "sla", "erp-gold", "--version", "1").output
    assert load_documents(output, 60)[0].agreement.judged[0].budgeting.target == 0.99
    assert "version 1 of 2: ended " in output
    assert "period" not in output.partition("apiVersion")[0]
    missing = sla("describe", "sla", "erp-gold", "--version", "7")
    assert (missing.exit_code, "has no version 7" in missing.stderr) == (1, True)
    everything = json.loads(sla("describe", "sla", "erp-gold", "-o", "json").output)
    assert everything["credits"]["items"][0]["credit"] == 0.25


def test_validate_needs_no_server(sla: Terminal, file: Path) -> None:
    sla.source.away = True
    file.write_text(
        "---\n".join(
            [simple("a", extra="  service_hours: {calendar: shop}\n"), calendar_text(), maintenance_text()]
        )
    )
    done = sla("validate", "-f", str(file))
    assert done.stdout.splitlines() == ["a: valid SLA", "bank: valid Calendar", "move: valid Maintenance"]
    assert "note: a: calendar shop is not in this file" in done.stderr
    assert (done.exit_code, sla.source.asked) == (0, [])


def test_validate_says_what_apply_says(sla: Terminal, file: Path) -> None:
    file.write_text(simple("a") + "---\n" + simple("b", target=99.5))
    done = sla("validate", "-f", str(file))
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "sla: 1 problem in the documents",
        "  line 25: b: spec.objectives[0].budgeting.target: should be less than 1 (the value is 99.5) "
        "(Write 0.995 for 99.5 %)",
    ]


def of_no_promise(name: str) -> str:
    """The shortest agreement: 200 of them are read in a fifth of a second."""
    return document_text("SLA", name, "{scope: {volumes: [v]}, priority: best-effort}")


def test_validate_counts_the_lines_of_a_long_file(sla: Terminal, file: Path) -> None:
    documents = [of_no_promise(f"s{i}") for i in range(250)]
    documents[240] = simple("s240", priority="tin")
    file.write_text("---\n".join(documents))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "priority: tin" in text)
    assert f"  line {line}: s240: spec.priority" in sla("validate", "-f", str(file)).stderr


def test_validate_finds_a_name_twice_in_different_parts_of_a_file_as_apply_does(
    sla: Terminal, file: Path
) -> None:
    documents = [of_no_promise(f"s{i}") for i in range(250)] + [simple("s7", target=0.5)]
    file.write_text("---\n".join(documents))
    done = sla("validate", "-f", str(file))
    lines = [
        n for n, text in enumerate(file.read_text().splitlines(), 1) if text == "apiVersion: storage-sla/v1"
    ]
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "sla: 1 problem in the documents",
        f"  line {lines[250]}: s7: metadata.name: the SLA document at line {lines[7]} has this name already "
        "(Give each document of a kind its own name)",
    ]


def test_validate_knows_the_rollup_interval_of_the_configuration(
    sla: Terminal, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(simple("a", slice_text="30s"))
    refused = sla("validate", "-f", str(file))
    assert "the slice, 30s, is not a multiple of the server's rollup interval, 60 s" in refused.stderr
    assert sla("validate", "-f", str(file), "--rollup-s", "10").exit_code == 0
    config = file.with_name("sla.toml")
    config.write_text("[database]\nrollup_s = 15\n")
    monkeypatch.setattr(sla, "config", config)
    assert sla("validate", "-f", str(file)).exit_code == 0
    config.write_text("[database]\nrollup_s = 0\n")
    wrong = sla("validate", "-f", str(file))
    assert (wrong.exit_code, "database.rollup_s is 0" in wrong.stderr) == (2, True)


def test_the_schema_is_printed_offline(sla: Terminal) -> None:
    assert len(json.loads(sla("schema").output)["oneOf"]) == 7
    assert json.loads(sla("schema", "Calendar").output)["title"] == "CalendarDocument"
    assert sla.source.asked == []


def test_admit_answers_with_figures(sla: Terminal, file: Path) -> None:
    file.write_text(simple("new", volumes="batch", value_ms=20))
    done = sla("admit", "-f", str(file))
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "yes",
        "disk-0: yes",
        "  capacity 700 weighted IOPS (policy 3, erp-gold/latency)",
        "  promised 50, these would add 500",
        "  150 left",
    ]
    file.write_text(simple("new", volumes="batch", value_ms=20).replace("500,", "5000,"))
    done = sla("admit", "-f", str(file))
    assert (done.exit_code, done.output.splitlines()[0]) == (1, "no")
    assert "too much" in done.output
    file.write_text(simple("new", volumes="nowhere"))
    done = sla("admit", "-f", str(file))
    assert (done.exit_code, done.output.splitlines()[0]) == (1, "unknown")
    assert widest(done.output) <= 80
    file.write_text(simple("new", target=9))
    assert "1 problem in the documents" in sla("admit", "-f", str(file)).stderr
    file.write_text(calendar_text())
    assert "holds no agreement" in sla("admit", "-f", str(file)).stderr


def test_an_agreement_goes_to_openslo_and_back(sla: Terminal, file: Path) -> None:
    exported = sla("export", "--openslo", "erp-gold")
    assert "not mapped: erp-gold: penalties" in exported.stderr
    file.write_text(exported.stdout)
    imported = sla("import", "--openslo", str(file))
    (loaded,) = load_documents(imported.stdout, 60)
    assert (
        loaded.agreement.judged[0].demand_curve
        == load_documents(FULL, 60)[0].agreement.judged[0].demand_curve
    )
    assert sla("export", "erp-gold").exit_code == 2, "the form has to be named"


@pytest.mark.parametrize(
    "text", ["a: [", "just text", "kind: SLO", "- 1\n", "a: &a [*a]\n", "x: !!python/none 1\n"]
)
def test_what_is_no_openslo_is_refused(sla: Terminal, file: Path, text: str) -> None:
    file.write_text(text)
    done = sla("import", "--openslo", str(file))
    assert (done.exit_code, "cannot be imported" in done.stderr) == (2, True)


def test_aliases_that_expand_to_a_million_values_are_not_written_out(sla: Terminal, file: Path) -> None:
    levels = ["  - &x0 [lol]\n"]
    levels += [f"  - &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 7)]
    slo = "apiVersion: openslo/v1\nkind: SLO\nmetadata: {name: a}\nspec:\n  budgetingMethod: *x6\n"
    file.write_text(f"levels:\n{''.join(levels)}{slo}")
    done = sla("import", "--openslo", str(file))
    assert (done.exit_code, "more than 100,000 values" in done.stderr) == (2, True)
    assert len(done.output) < 1000


def test_documents_are_joined_so_that_they_can_be_applied() -> None:
    text = join_documents([simple("a"), "---\n" + simple("b"), "%YAML 1.2\n---\n" + simple("c")])
    assert [item.document.name for item in load_documents(text, 60)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "op", "body"),
    [
        (["maintenance", "end", "disks"], "end_document", {"kind": "Maintenance", "name": "disks"}),
        (["delete", "calendar", "bank"], "end_document", {"kind": "Calendar", "name": "bank"}),
        (["delete", "recipient", "mail"], "end_document", {"kind": "Recipient", "name": "mail"}),
        (["delete", "route", "all"], "end_document", {"kind": "Route", "name": "all"}),
        (["silence", "end", "now"], "end_document", {"kind": "Silence", "name": "now"}),
    ],
)
def test_documents_are_ended(sla: Terminal, arguments: list[str], op: str, body: dict[str, Any]) -> None:
    assert sla(*arguments).output == f"{body['name']}: ended\n"
    assert sla.asked == [(op, body)]


@pytest.mark.parametrize(
    ("arguments", "scope"),
    [
        (["erp-*", "crm"], {"agreements": ["erp-*", "crm"]}),
        (["-l", "customer=acme, tier=1"], {"labels": {"customer": "acme", "tier": "1"}}),
        (["erp-*", "-l", "customer=acme"], {"agreements": ["erp-*"], "labels": {"customer": "acme"}}),
        (["--volume", "a", "--volume", "b"], {"volumes": ["a", "b"]}),
    ],
)
def test_maintenance_is_started_by_a_document(
    sla: Terminal, arguments: list[str], scope: dict[str, Any]
) -> None:
    sla.mailbox.answer = lambda header: (True, 200, {
        "applied": [{"kind": "Maintenance", "name": "now", "version": 1, "changed": True, "agreements": 2}],
        "warnings": ["now: less notice than was agreed with erp-gold"],
    })  # fmt: skip
    done = sla("maintenance", "start", *arguments, "--for", "2h", "--reason", 'new "disks"', "--name", "now")
    assert done.exit_code == 0, done.output
    assert "2 agreements in its scope" in done.stdout
    assert "sla maintenance end now" in done.stdout
    assert "note: now: less notice" in done.stderr
    ((op, body),) = sla.asked
    (loaded,) = load_documents(body["documents"], 60)
    spec = loaded.document.spec_json()["spec"]
    assert (op, body["dry_run"]) == ("apply", False)
    assert {key: value for key, value in spec["scope"].items() if value} == scope
    assert (spec["duration"], spec["reason"], spec["tz"]) == ("2h", 'new "disks"', "UTC")


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--volume", "b"], ["-l", "customer"], ["a", "--for", "soon"]]
)
def test_maintenance_that_makes_no_sense(sla: Terminal, arguments: list[str]) -> None:
    how_long = [] if "--for" in arguments else ["--for", "1h"]
    assert sla("maintenance", "start", *arguments, *how_long, "--reason", "x").exit_code == 2
    assert sla.asked == []


def test_lists_as_documents_and_by_label(sla: Terminal) -> None:
    for kind, names in (("slas", ["erp-gold"]), ("maintenance", ["disks"]), ("calendars", ["bank"])):
        text = sla("get", kind, "-o", "yaml").output
        assert [item.document.name for item in load_documents(text, 60)] == names
    assert sla("get", "slas", "-l", "customer=acme").output.count("erp-gold") == 1
    assert (
        sla("get", "slas", "-l", "customer=x").output == "No agreement in force has the labels customer=x.\n"
    )
    assert "is no label" in sla("get", "slas", "-l", "=").stderr
    assert sla("get", "backends", "-l", "a=b").exit_code == 2


def test_an_answer_about_maintenance_says_how_far_it_reaches(sla: Terminal, file: Path) -> None:
    applied = {"kind": "Maintenance", "name": "move", "version": 1, "changed": True, "agreements": 3}
    sla.mailbox.answer = lambda _header: (True, 200, {"applied": [applied], "warnings": []})
    file.write_text(maintenance_text())
    assert sla("apply", "-f", str(file)).output == (
        "Maintenance move: in force as version 1; agreements in its scope: 3\n"
    )


def test_history_since_a_time(sla: Terminal) -> None:
    since_us = NOW_US - 2 * 3_600_000_000
    moment = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(since_us // 1_000_000))
    clock = SimpleNamespace(time_ns=lambda: NOW_US * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sla_server.cli.documents.time", clock)
        rows = json.loads(sla("history", "erp-gold", "--since", moment, "-o", "json").output)
    assert [row["version"] for row in rows] == [2]
    assert len(json.loads(sla("history", "erp-gold", "-o", "json").output)) == 2
