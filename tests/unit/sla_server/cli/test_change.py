from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from pmdaemon.wire.messages.api import ServiceResponse
from sla_server.agreements.limits import CALL_BYTES, MAX_DOCUMENTS
from sla_server.cli import client as client_module
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import duration_s
from tests.support.cli import Terminal, replace_sleep

APPLIED = {
    "applied": [
        {"name": "erp-gold", "version": 3, "changed": True},
        {"name": "b", "version": 1, "changed": False},
    ]
}


def test_apply_a_file(sla: Terminal, tmp_path: Path) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, APPLIED)
    path = tmp_path / "agreement.yaml"
    path.write_text("kind: SLA\n")
    done = sla("apply", "-f", str(path))
    assert done.output == "erp-gold: in force as version 3\nb: no change, in force as version 1\n"
    assert sla.asked == [("apply", {"documents": "kind: SLA\n", "dry_run": False})]


def test_apply_from_standard_input_without_changing(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {**APPLIED, "warnings": ["iops is stored, not judged"]})
    done = sla("apply", "-f", "-", "--dry-run", text="kind: SLA\n")
    assert done.stdout.splitlines() == [
        "erp-gold: would be in force as version 3",
        "b: no change, stays in force as version 1",
        "The documents are valid. Nothing was changed (--dry-run).",
    ]
    assert "not judged" in done.stderr
    assert sla.asked[0][1]["dry_run"] is True


def test_errors_of_a_document_are_listed_with_their_lines(sla: Terminal) -> None:
    errors = [{"line": 7, "field": "spec.priority", "problem": "'golden' is unknown", "fix": "use gold"}]
    sla.mailbox.answer = lambda _header: (False, 422, {"errors": errors})
    done = sla("apply", "-f", "-", text="kind: SLA")
    assert done.exit_code == 1
    assert "line 7: spec.priority: 'golden' is unknown (use gold)" in done.stderr


def test_a_missing_file(sla: Terminal) -> None:
    done = sla("apply", "-f", "none.yaml")
    assert done.exit_code == 2
    assert "none.yaml cannot be read" in done.stderr
    assert sla.asked == []


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b" \n\n", "is empty"), (b"a: \xff", "is not UTF-8 text")]
)
def test_a_file_without_an_agreement_is_named(
    sla: Terminal, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "agreement.yaml"
    path.write_bytes(content)
    done = sla("apply", "-f", str(path))
    assert done.exit_code == 2
    assert f"{path} {words}" in done.stderr
    assert sla.asked == []


def test_documents_larger_than_the_server_takes(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    # The HTTP server says this itself, as plain text, before the application sees the request.
    refusal = httpx.MockTransport(lambda _request: httpx.Response(413, text="Request Entity Too Large"))
    monkeypatch.setattr(sla, "transport", refusal)
    done = sla("apply", "-f", "-", text="kind: SLA\n")
    assert done.exit_code == 1
    assert "[api] max_body_bytes" in done.stderr


def test_delete(sla: Terminal) -> None:
    assert sla("delete", "sla", "erp-gold").exit_code == 0
    assert sla.asked[-1] == ("delete", {"name": "erp-gold"})


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        (["--iops", "100"], {"iops": 100.0}),
        (["--mbps", "2.5"], {"bytes_per_s": 2.5e6}),
        (["--cost", "50"], {"cost_per_s": 50.0}),
    ],
)
def test_throttle_set(sla: Terminal, options: list[str], rate: dict[str, float]) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"throttle_id": "t-9"})
    done = sla("throttle", "set", "batch", *options, "--for", "10m", "--reason", "backup")
    unit = {"iops": "IOPS", "bytes_per_s": "MB/s", "cost_per_s": "weighted IOPS"}[next(iter(rate))]
    assert done.output.startswith("batch: at most ")
    assert done.output.endswith(f" {unit} for 10m (throttle t-9)\n")
    assert sla.asked == [
        ("throttle_set", {"volume": "batch", **rate, "reason": "backup", "duration_s": 600.0})
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--reason", "x"],
        ["--iops", "1", "--cost", "1", "--reason", "x"],
        ["--iops", "0", "--reason", "x"],
        ["--iops", "1"],
        ["--iops", "1", "--reason", "x", "--for", "soon"],
    ],
)
def test_throttles_that_make_no_sense(sla: Terminal, options: list[str]) -> None:
    assert sla("throttle", "set", "batch", *options).exit_code == 2
    assert sla.asked == []


def test_throttle_set_by_force_says_what_breaks_and_what_holds(sla: Terminal) -> None:
    answer = {"throttle_id": "t-9", "holds": "500 IOPS", "breaks": ["erp-gold/latency (p95 within 12.0 ms)"]}
    sla.mailbox.answer = lambda _header: (True, 200, answer)
    done = sla("throttle", "set", "erp-db", "--iops", "10", "--reason", "copy", "--force")
    assert done.stdout.startswith("erp-db: at most 500 IOPS until ")
    assert sla.asked[0][1]["force"] is True
    assert done.stderr.splitlines() == [
        "note: that is the floor of its agreement; 10 IOPS is below it",
        "note: this breaks erp-gold/latency (p95 within 12.0 ms)",
    ]


def test_one_client_of_a_volume(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"throttle_id": "t-9"})
    done = sla("throttle", "set", "batch", "--client", "host-a", "--iops", "20", "--reason", "backup")
    until = "until 'sla throttle release batch --client host-a'"
    assert done.output == f"client host-a of batch: at most 20 IOPS {until} (throttle t-9)\n"
    assert sla.asked[0][1]["client"] == "host-a"
    sla.mailbox.answer = lambda _header: (True, 200, {"released": ["t-9"]})
    done = sla("throttle", "release", "batch", "--client", "host-a")
    assert done.output == "client host-a of batch: released 1 throttle\n"
    wanted = {"volume": "batch", "throttle_id": None, "client": "host-a"}
    assert sla.asked[1] == ("throttle_release", wanted)


def test_a_client_over_all_its_volumes(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"throttle_id": "t-9"})
    done = sla("throttle", "set", "--client", "host-a", "--iops", "20", "--burst", "2", "--reason", "backup")
    until = "until 'sla throttle release --client host-a'"
    assert done.output == f"client host-a: at most 20 IOPS {until} (throttle t-9)\n"
    body = {"client": "host-a", "iops": 20.0, "burst_s": 2.0, "reason": "backup", "duration_s": None}
    assert sla.asked[0] == ("throttle_set", body)
    sla.mailbox.answer = lambda _header: (True, 200, {"released": ["t-9"]})
    done = sla("throttle", "release", "--client", "host-a")
    assert done.output == "client host-a: released 1 throttle\n"
    assert sla.asked[1] == ("throttle_release", {"throttle_id": None, "client": "host-a"})


def test_a_group_of_volumes(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"throttle_id": "t-9"})
    words = ("erp", "web=2.5", "--group", "night", "--mbps", "100", "--burst", "2", "--reason", "copy")
    done = sla("throttle", "set", *words)
    until = "until 'sla throttle release --group night'"
    assert done.output == f"group night: at most 100 MB/s {until} (throttle t-9)\n"
    body = {"group": "night", "volumes": {"erp": 1.0, "web": 2.5}, "bytes_per_s": 1e8, "burst_s": 2.0}
    assert sla.asked[0] == ("throttle_set", {**body, "reason": "copy", "duration_s": None})
    sla.mailbox.answer = lambda _header: (True, 200, {"released": ["t-9"]})
    done = sla("throttle", "release", "--group", "night")
    assert done.output == "group night: released 1 throttle\n"
    assert sla.asked[1] == ("throttle_release", {"group": "night", "throttle_id": None})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("set", "a", "b", "--iops", "5"), "share a rate as a group: give one VOLUME, or --group NAME"),
        (("set", "--iops", "5"), "nothing to throttle is named"),
        (("set", "--group", "g", "--iops", "5"), "--group g needs its volumes: sla throttle set --group g"),
        (("set", "a", "a=2", "--group", "g", "--iops", "5"), "--group g names a volume twice"),
        (("set", "a=much", "--group", "g", "--iops", "5"), "weight of a is 'much'; write VOLUME=NUMBER"),
        (
            ("set", "a=0", "--group", "g", "--iops", "5"),
            "weight of a is 0; a weight is above 0, 1000 at most",
        ),
        (("set", "a", "--client", "c", "--group", "g", "--iops", "5"), "leave out --group, or --client"),
        (("set", "a", "--iops", "5", "--burst", "400"), "'--burst': '400' is not a number from 0.001 to 300"),
        (("release",), "give either VOLUME or --group"),
        (("release", "a", "--group", "g"), "give either VOLUME or --group"),
        (("release", "--group", "g", "--client", "c"), "or --client alone"),
        (("set", "--client", "c", "--group", "g", "--iops", "5"), "leave out --group, or --client"),
    ],
)
def test_groups_that_make_no_sense(sla: Terminal, words: tuple[str, ...], says: str) -> None:
    done = sla("throttle", *words, *(("--reason", "x") if words[0] == "set" else ()))
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())
    assert sla.asked == []


def test_throttle_release(sla: Terminal) -> None:
    sla.mailbox.answer = lambda _header: (True, 200, {"released": ["t-9"]})
    assert sla("throttle", "release", "batch").output == "batch: released 1 throttle\n"
    assert sla.asked == [("throttle_release", {"volume": "batch", "throttle_id": None})]
    sla.mailbox.answer = lambda _header: (
        False,
        404,
        {"errors": [{"line": 0, "field": "", "problem": "batch has no throttle", "fix": "See x"}]},
    )
    done = sla("throttle", "release", "batch")
    assert done.exit_code == 1
    assert done.stderr == "sla: batch has no throttle\n  See x\n"


def test_mode(sla: Terminal) -> None:
    assert sla("mode").output == "enforce\n"
    sla.mailbox.answer = lambda header: (True, 200, header["body"])
    assert sla("mode", "observe").output == "observe\n"
    assert sla("mode", "off").exit_code == 2
    assert sla("mode", "enforce", "--backend", "array-1").output == "enforce on backend array-1\n"
    assert sla.asked[-1] == ("mode", {"mode": "enforce", "backend": "array-1"})
    done = sla("mode", "inherit")
    assert (done.exit_code, "add --backend NAME" in done.stderr) == (2, True)


def test_login_prints_an_address(sla: Terminal) -> None:
    assert sla("login").output.startswith("http://127.0.0.1:8411/login?code=")


def test_a_change_that_is_answered_late(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sla.mailbox.answer = None

    def services_comes_back(_seconds: float) -> None:
        header = {"req": sla.mailbox.posted[0]["req"], "ok": True, "code": 200, "body": {"mode": "observe"}}
        sla.context.operations.answer(ServiceResponse.parse(header))

    replace_sleep(monkeypatch, client_module, services_comes_back)
    assert sla("mode", "observe").output == "observe\n"


def test_a_change_that_is_never_answered(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    sla.mailbox.answer = None
    monkeypatch.setattr(client_module, "PENDING_LIMIT_S", 0.0)
    done = sla("mode", "observe")
    assert done.exit_code == 75
    assert "/api/v1/operations/" in done.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "m", "10 minutes", "-5m", "1w", "90", "1.5"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(BadUsage):
        duration_s(text)


def document(name: str) -> str:
    return f"kind: SLA\nmetadata: {{name: {name}}}\ntext: |\n  --- not here\n---x: nor here\n"


def names_in(text: str) -> list[str]:
    return re.findall(r"name: ([a-z0-9-]+)", text)


class Documents:
    """Answers like services: what is named in the text is applied; ``bad`` is refused when applied."""

    def __init__(self, bad: str = "", dry: bool = True) -> None:
        self.bad, self.dry = bad, dry
        self.applied: list[str] = []

    def __call__(self, header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
        text, dry_run = header["body"]["documents"], header["body"]["dry_run"]
        names = names_in(text)
        assert len(text) <= CALL_BYTES
        assert len(names) <= MAX_DOCUMENTS
        if self.bad in names and dry_run == self.dry:
            line = next(n for n, row in enumerate(text.splitlines(), 1) if f"name: {self.bad}}}" in row)
            return False, 422, {"errors": [{"line": line, "field": "spec", "problem": "is missing"}]}
        self.applied += [] if dry_run else names
        begins = (n for n, row in enumerate(text.splitlines(), 1) if row.startswith("kind:"))
        rows = [{"name": name, "version": 1, "changed": True, "line": next(begins)} for name in names]
        return True, 200, {"applied": rows, "warnings": [f"{names[0]}: told"]}


def test_a_file_of_4000_agreements_is_checked_and_then_applied_in_parts(sla: Terminal) -> None:
    names = [f"erp-{number}" for number in range(4000)]
    text = "---\n".join(document(name) for name in names)
    services = sla.mailbox.answer = Documents()
    done = sla("apply", "-f", "-", text=text)
    assert done.exit_code == 0, done.output
    assert services.applied == names
    flags = [body["dry_run"] for _, body in sla.asked]
    assert flags == [True] * (len(flags) // 2) + [False] * (len(flags) // 2)
    assert "".join(body["documents"] for _, body in sla.asked[: len(flags) // 2]) == text
    assert done.stdout.splitlines() == [f"{name}: in force as version 1" for name in names]
    assert "checked 4,000 documents" in done.stderr
    assert "applied 4,000 documents" in done.stderr
    services.applied.clear()
    assert sla("apply", "-f", "-", "--dry-run", text=text).exit_code == 0
    assert services.applied == []


@pytest.mark.parametrize("dry", [True, False])
def test_a_mistake_far_down_is_reported_with_its_line_in_the_file(sla: Terminal, dry: bool) -> None:
    names = [f"erp-{number}" for number in range(500)]
    text = "---\n".join(document(name) for name in names)
    services = sla.mailbox.answer = Documents("erp-450", dry=dry)
    done = sla("apply", "-f", "-", text=text)
    assert done.exit_code == 1
    line = text.splitlines().index("metadata: {name: erp-450}") + 1
    assert f"line {line}: spec: is missing" in done.stderr
    assert services.applied == ([] if dry else names[:400])
    assert ("400 documents before line 2400 are in force" in done.stderr) == (not dry)


def test_a_name_that_occurs_twice_in_a_long_file_is_refused_before_anything_is_applied(sla: Terminal) -> None:
    names = [f"erp-{number}" for number in range(300)] + ["erp-7"]
    services = sla.mailbox.answer = Documents()
    done = sla("apply", "-f", "-", text="---\n".join(document(name) for name in names))
    assert done.exit_code == 1
    problem = "erp-7: metadata.name: the SLA document at line 43 has this name already"
    assert f"  line {300 * 6 + 1}: {problem}" in done.stderr
    assert "Nothing of standard input was applied" in done.stderr
    assert services.applied == []


def test_a_calendar_in_an_earlier_part_of_a_long_file_is_known_to_the_later_ones(sla: Terminal) -> None:
    in_force: set[str] = set()
    problem = {"line": 3, "field": "spec.service_hours.calendar", "problem": "there is no calendar 'bank'"}

    def answer(header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
        names = names_in(header["body"]["documents"])
        if "bank" not in names and "bank" not in in_force:
            return False, 422, {"errors": [problem]}
        in_force.update([] if header["body"]["dry_run"] else names)
        rows = [{"name": name, "version": 1, "changed": True} for name in names]
        return (
            True,
            200,
            {"applied": [row | {"kind": "Calendar"} if row["name"] == "bank" else row for row in rows]},
        )

    sla.mailbox.answer = answer
    names = ["bank", *(f"erp-{number}" for number in range(300))]
    text = "---\n".join(document(name) for name in names)
    dry = sla("apply", "-f", "-", "--dry-run", text=text)
    assert (dry.exit_code, "1 agreement with a calendar of this file" in dry.stderr) == (0, True)
    assert in_force == set()
    assert sla("apply", "-f", "-", text=text).exit_code == 0
    assert in_force == set(names)
    problem["problem"] = "there is no calendar 'shop'"
    in_force.clear()
    assert "there is no calendar 'shop'" in sla("apply", "-f", "-", text=text).stderr


def test_the_mistakes_of_all_parts_of_a_long_file_are_reported_at_once(sla: Terminal) -> None:
    def answer(header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
        name = names_in(header["body"]["documents"])[0]
        error = {"line": 2, "field": "spec", "problem": "is missing", "document": name}
        return False, 422, {"errors": [error]}

    sla.mailbox.answer = answer
    done = sla("apply", "-f", "-", text="---\n".join(document(f"erp-{number}") for number in range(500)))
    assert [line.split(":")[0] for line in done.stderr.splitlines()[1:-1]] == [
        "  line 2", "  line 1201", "  line 2401",
    ]  # fmt: skip
    assert "sla: 3 problems in the documents" in done.stderr


def test_what_cannot_be_cut_goes_whole_and_the_server_says_the_limit(sla: Terminal) -> None:
    long = "text: " + "x" * CALL_BYTES
    for text in (long, f"%YAML 1.2\n---\n{long}\n---\nkind: SLA\n"):
        done = sla("apply", "-f", "-", text=text)
        assert done.exit_code == 1
        assert "one call takes 60000" in done.stderr
    assert sla.asked == []


def test_a_binary_file_is_called_no_text(sla: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(1 << 20))
    done = sla("apply", "-f", str(path))
    assert done.exit_code == 2
    assert f"{path} is no text" in done.stderr
    assert sla.asked == []


def test_gateways_are_added_and_removed(sla: Terminal) -> None:
    done = sla("gateways", "add", "10.0.0.9:7412", "--name", "host-9")
    assert done.exit_code == 0
    assert "sla gateways list" in done.output
    assert "only if the server has enabled = true in [pmdaemon.tls]" in done.stderr
    assert sla("gateways", "add", "127.0.0.1:7412", "--name", "own").stderr == ""
    del sla.mailbox.posted[-1]
    done = sla("gateways", "remove", "10.0.0.5:7412")
    assert done.output == "10.0.0.5:7412: not dialled any more\n"
    assert sla.asked == [
        ("gateway_list", {"address": "10.0.0.9:7412", "name": "host-9", "is_listed": True}),
        ("gateway_list", {"address": "10.0.0.5:7412", "name": "host-5", "is_listed": False}),
    ]


def test_a_gateways_address_in_brackets(sla: Terminal) -> None:
    sla("gateways", "add", "[fd00::5]:7412", "--name", "host-9")
    assert sla.asked[0][1]["address"] == "[fd00::5]:7412"


def test_a_wrong_gateway_address_is_reported_in_the_words_of_the_server(sla: Terminal) -> None:
    errors = [
        {"line": 0, "field": "", "problem": "address: 'host' is not an IP address", "fix": "Correct it"}
    ]
    sla.mailbox.answer = lambda _header: (False, 422, {"errors": errors})
    done = sla("gateways", "add", "host:1", "--name", "x")
    assert done.exit_code == 1
    assert "not an IP address" in done.stderr


def test_remove_what_is_not_listed(sla: Terminal) -> None:
    done = sla("gateways", "remove", "10.1.1.1:1")
    assert done.exit_code == 1
    assert "no gateway is listed" in done.stderr
    assert sla.asked == []


def test_list_says_what_is_wrong(sla: Terminal, tmp_path: Path) -> None:
    reported = [
        {
            "address": "10.0.0.4:1",
            "name": "own",
            "source": "configuration",
            "state": "connected",
            "reason": "",
        },
        {"address": "10.0.0.5:7412", "name": "host-5", "source": "list", "state": "connected", "reason": ""},
        {
            "address": "10.0.0.6:7412",
            "name": "host-6",
            "source": "list",
            "state": "waiting",
            "reason": "revoked: ...",
        },
    ]
    (tmp_path / "dialled.json").write_text(json.dumps(reported))
    sla.context.metrics.folder = tmp_path
    lines = sla("gateways", "list").output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[2] for line in lines if line.strip().startswith("10.")] == [
        "connected",
        "connected",
        "waiting",
    ]
    text = " ".join(" ".join(lines).split())
    assert "listed in the server's file" in text
    assert "revoked" in text
    assert "calls itself gateway-a" in text
    assert len(json.loads(sla("gateways", "list", "-o", "json").output)) == 3
