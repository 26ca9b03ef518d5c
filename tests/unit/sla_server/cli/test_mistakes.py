"""Mistakes that newcomers make, and what they are told: what is wrong, and what to write in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.cli import formatting
from sla_server.cli.main import folded
from tests.support.agreements import FULL
from tests.support.cli import Terminal

EDITS = {
    "target: 0.995": {
        "target: 99.5": "Write 0.995 for 99.5 %",
        "target: 99.5%": "Write 0.995 for 99.5 %",
        "target: 0.995}": "this is not YAML",
    },
    "percentile: 95": {"percentile: 0.95": "should be at least 50 (the value is 0.95) (Write 95"},
    "metric: latency": {
        "metric: latencies": "Use one of latency, mean_latency, iops, throughput, availability"
    },
    "priority: gold": {
        "priority: platinum": "Use one of 'gold', 'silver', 'bronze' or 'best-effort'",
        "priority: gold\n  priority: silver": "the key priority is there twice",
        "\tpriority: gold": "a tab cannot indent in YAML (Write spaces in its place)",
    },
    "kind: SLA": {"kind: Sla": "Use one of SLA, Maintenance"},
    "apiVersion: storage-sla/v1": {"apiVersion: v1": "Write storage-sla/v1"},
    "floor_iops: 500": {"floor_iops: -5": "should be at least 1 (the value is -5)"},
    "guarantee:": {"guaranty:": "Did you mean guarantee?"},
    "slice: 1m": {"slice: 60": "Write a whole number and a unit: 30s, 1m"},
    "period: month": {"period: fortnight": "Use one of 'day', 'week', 'month', 'quarter' or 'year'"},
    "tz: Europe/Berlin": {"tz: Berlin": "Use an IANA name such as UTC or Europe/Berlin"},
}
COMMANDS = {
    "get sla erp-glod": "Near it: erp-gold",
    "get promises erp-glod": "Near it: erp-gold",
    "get slices erp-glod": "Near it: erp-gold. 'sla get slas' lists those in force",
    "get hours erp-gold/none": "It has latency",
    "get hours": "sla get hours AGREEMENT",
    "get loads": "sla get loads BACKEND",
    "get loads disk-1": "Near it: disk-0. 'sla get backends' lists them",
    "describe backend disk9": "'sla get backends' lists them",
    "describe policy 9": "'sla get policies' lists the versions",
    "policy show abc": "'abc' is not a valid version number",
    "describe promise erp-gold": "of promises use: sla describe sla AGREEMENT",
    "get rates none": "no volume 'none' was ever seen",
    "get events --severity crit": "'crit' is none of its values",
    "get events --kind gateway-losst": "Did you mean gateway-lost",
    "get jobs --kind polici": "Use rollup",
    "get events --since yesterday": "or 10m (ago)",
    "get volumes --state ok": "they are for jobs, policies, promises",
    "get slices erp-gold --sort name": "they are for jobs, policies, promises",
    "get volume none": "no volume 'none' is listed",
    "why nope": "'sla get volumes' and 'sla get slas' list what there is",
    "show sla erp-gold": "Write: sla describe",
    "status": "The server has it: sla-server status",
    "get sla gold": "Near it: erp-gold",
    "describe erp-gold": "Write the kind first: sla describe KIND erp-gold",
    "delete erp-gold": "Write the kind first: sla delete KIND erp-gold",
    "apply gold.yaml": "Missing option '-f' / '--file'. Write it before the file: sla apply -f FILE",
    "diff gold.yaml": "Write it before the file: sla diff -f FILE",
    "top --once --state broken": "'broken' is not one of 'ok', 'at-risk'",
}


def changed() -> list[tuple[str, str, str]]:
    return [(before, after, said) for before, more in EDITS.items() for after, said in more.items()]


@pytest.mark.parametrize(("before", "after", "said"), changed())
def test_a_mistake_in_a_document_is_named_with_what_to_write(
    sla: Terminal, tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in FULL
    path = tmp_path / "gold.yaml"
    path.write_text(FULL.replace(before, after, 1))
    result = sla("validate", "-f", str(path))
    assert result.exit_code != 0
    assert said in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_on_the_command_line_is_named_with_what_to_write(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command == "get rates none":
        monkeypatch.setattr(sla.source, "rollup_history", lambda *_: [])
        monkeypatch.setattr(sla.source, "backend_of", lambda _volume: None)
    result = sla(*command.split())
    assert result.exit_code != 0
    assert COMMANDS[command] in " ".join(result.output.split())
    assert "/api/v1" not in result.output, "who types commands is told commands"


def test_a_state_is_named_as_tables_show_it(sla: Terminal) -> None:
    """What reads "kept" in a row is asked for as kept, too."""
    for words, code in (("kept", "ok"), ("KEPT", "ok"), ("no data", "no-data"), ("VIOLATED", "violating")):
        assert formatting.state_code(words) == code
        assert sla("top", "--once", "--state", words).exit_code == 0
        assert sla("get", "promises", "--state", f"{words},idle").exit_code == 0
    assert "erp-gold" in sla("get", "promises", "--state", "kept").output
    assert "erp-gold" in sla("top", "--once", "--only", "slas", "--state", "kept").output


def test_a_file_of_another_format_is_not_answered_in_words_of_a_parser(sla: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('name = "host-1"  # of this host\nstate_dir = "s"\n')
    said = sla("validate", "-f", str(path)).output
    assert "each line has the form key: value" in said
    assert "scalar" not in said


@pytest.mark.parametrize("group", ["describe", "policy", "report", "cluster", "token", "cluster mirror"])
def test_lists_of_commands_say_all_of_their_first_sentence(sla: Terminal, group: str) -> None:
    said = sla(*group.split(), "--help").output
    assert "Commands:" in said
    assert "..." not in said.partition("Commands:")[2]
    assert max(map(len, said.splitlines())) <= 80


def test_no_issued_report_is_nothing_to_verify(sla: Terminal) -> None:
    sla.source.stored_reports.issued_rows.clear()
    assert sla("report", "verify").output == "no report was issued yet: there is nothing to check\n"


def test_an_agreement_without_objectives_is_valid_and_said_to_promise_nothing(
    sla: Terminal, tmp_path: Path
) -> None:
    head, _, rest = FULL.partition("  objectives:\n")
    window = rest[rest.index("  window:") :]
    path = tmp_path / "none.yaml"
    path.write_text(head + window)
    result = sla("validate", "-f", str(path))
    assert result.exit_code == 0, result.output
    assert "it has no objectives: nothing is promised" in result.output


def test_long_lines_of_a_message_are_folded_between_words() -> None:
    text = "sla: 1 problem in the documents\n  line 13: erp-gold: " + "word " * 30 + "\n\nend"
    lines = folded(text, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "sla: 1 problem in the documents"
    assert lines[2].startswith("    word"), "under the first word of its line"
    assert lines[-2:] == ["", "end"]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert folded("x" * 200, 80) == "x" * 200, "a path or a name stays whole"
