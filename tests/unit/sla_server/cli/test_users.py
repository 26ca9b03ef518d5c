"""``sla user`` and ``sla token`` against the API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import api
from tests.support.cli import Terminal

PASSWORD = "eight tall flamingos\n"


def test_an_account_from_begin_to_end(sla: Terminal) -> None:
    made = sla("user", "add", "bob", "--role", "viewer", "--password-stdin", text=PASSWORD)
    assert (made.exit_code, made.output) == (0, "bob: viewer\n")
    assert "bob" in sla("user", "list").output
    assert sla("user", "change", "bob", "--role", "operator").exit_code == 0
    assert "disabled" in sla("user", "disable", "bob").output
    assert "disabled" in sla("user", "list").output
    assert sla("user", "enable", "bob").exit_code == 0
    assert "ended" in sla("user", "passwd", "bob", "--password-stdin", text=PASSWORD).output
    assert "(0 sessions)" in sla("user", "sign-out", "bob").output
    assert "deleted" in sla("user", "delete", "bob").output
    assert "bob" not in sla("user", "list", "-o", "json").output
    actions = [item["body"]["action"] for item in sla.mailbox.recorded]
    assert actions == [
        *("user-add", "user-change", "user-change", "user-change", "user-password"),
        *("sessions-end", "user-delete"),
    ]
    assert PASSWORD.strip() not in str(sla.mailbox.recorded)


def test_sessions_are_listed_and_ended(sla: Terminal) -> None:
    listed = sla("user", "sessions").output
    assert "5e55" in listed
    assert "127.0.0.1" in listed
    assert sla("user", "sign-out", "5e55", "--session").exit_code == 0
    assert "No browser is signed in" in sla("user", "sessions").output


def test_a_token_is_printed_alone_on_the_output(sla: Terminal) -> None:
    made = sla("token", "create", "deploy", "--role", "viewer", "-q")
    assert made.exit_code == 0
    assert made.output.startswith("sla_")
    assert len(made.output.split()) == 1
    listed = sla("token", "list").output
    assert "deploy" in listed
    assert made.output.strip() not in listed
    assert "revoked" in sla("token", "revoke", "deploy").output
    assert "deploy" not in sla("token", "list").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("user", "add", "bob", "--role", "viewer"), "--password-stdin"),
        (("user", "change", "bob"), "give --role or --labels"),
        (("user", "delete", "nobody"), "no account 'nobody'"),
        (("token", "revoke", "nothing"), "no API token 'nothing'"),
    ],
)
def test_mistakes_are_said(sla: Terminal, arguments: tuple[str, ...], words: str) -> None:
    done = sla(*arguments)
    assert done.exit_code != 0
    assert words in done.output
    assert sla.mailbox.recorded == []


def test_a_wrong_token_is_explained(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_TOKEN", "sla_" + "x" * 43)
    done = sla("user", "list")
    assert done.exit_code != 0
    assert "has expired" in done.output
    assert api.TOKEN not in done.output


def test_the_log_is_verified_and_exported(sla: Terminal, tmp_path: Path) -> None:
    done = sla("audit", "verify")
    assert done.exit_code == 0, done.output
    head = done.output.split("head ")[1].strip()
    copy = tmp_path / "audit.jsonl"
    assert sla("audit", "export", "-f", str(copy)).exit_code == 0
    assert len(copy.read_text().splitlines()) == 5
    assert sla("audit", "verify", "-f", str(copy), "--head", head).exit_code == 0
    sla.source.access.chain[2]["who"] = "nobody"
    wrong = sla("audit", "verify")
    assert wrong.exit_code == 1
    assert "row 3" in wrong.output
    del sla.source.access.chain[3:]
    assert "rows are missing" in sla("audit", "verify", "--head", head).output
    assert sla("audit", "verify", "--head", "5").exit_code == 2


def test_what_the_authority_does_is_in_the_audit_log(
    sla: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review, finding 13: after ``ca init``, ``token`` and ``revoke`` it was empty."""
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path / "data"))
    assert sla("ca", "init").exit_code == 0
    assert sla("ca", "token", "gw-a", "-q").exit_code == 0
    assert sla("ca", "revoke", "gw-a").exit_code == 0
    noted = [(item["body"]["action"], item["body"]["subject"]) for item in sla.mailbox.recorded]
    assert noted == [("ca-init", "authority"), ("ca-token", "gw-a"), ("ca-revoke", "gw-a")]
    assert all(item["who"].startswith("local") for item in sla.mailbox.recorded)
    sla.source.away = True
    sla.mailbox.full = True
    done = sla("ca", "token", "gw-b", "-q")
    assert done.exit_code == 0
    assert "not in the audit log" in done.stderr
