"""What a recipient needs and does not find yet, said when its document is applied."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sla_server.agreements.load import load_documents
from sla_server.events.documents import RecipientDocument
from sla_server.events.recipients.config import NotifyConfig, NotifyDirectories
from sla_server.events.recipients.missing import missing


def notes(tmp_path: Path, spec: str) -> list[str]:
    head = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: oncall}\n"
    (loaded,) = load_documents(f"{head}spec: {{{spec}}}\n", 60)
    assert isinstance(loaded.document, RecipientDocument)
    return list(missing(loaded.document.spec, NotifyDirectories.of(NotifyConfig(), tmp_path)))


def test_a_secret_file_is_missed_until_it_can_be_used(tmp_path: Path) -> None:
    spec = "webhook: {url: 'https://a.example/x', secret_file: key, ca_file: ca.pem}"
    key, ca = tmp_path / "secrets" / "key", tmp_path / "secrets" / "ca.pem"
    said = notes(tmp_path, spec)
    assert [each.partition(": ")[0] for each in said] == ["webhook.ca_file", "webhook.secret_file"]
    assert str(ca) in said[0]
    assert str(key) in said[1]
    assert "chmod 600" in said[1]
    key.parent.mkdir()
    key.write_text("geheim")
    key.chmod(0o644)
    ca.write_text("certificates")
    (said_open,) = notes(tmp_path, spec)
    assert "is open to others (mode 0644)" in said_open
    assert "geheim" not in said_open
    key.chmod(0o600)
    assert notes(tmp_path, spec) == []


def test_a_file_with_the_address_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "address"
    path.parent.mkdir()
    path.write_text("geheim")
    path.chmod(0o600)
    (said,) = notes(tmp_path, "heartbeat: {url_file: address}")
    assert "holds no address" in said
    assert "geheim" not in said


def test_a_program_is_there_and_can_be_run(tmp_path: Path) -> None:
    path, spec = tmp_path / "commands" / "page", "command: {argv: [page, --now]}"
    (said,) = notes(tmp_path, spec)
    assert said.startswith(f"command.argv: {path} is not there")
    path.mkdir(parents=True)
    (said,) = notes(tmp_path, spec)
    assert "is no file" in said
    path.rmdir()
    path.write_text("#!/bin/sh\n")
    (said,) = notes(tmp_path, spec)
    assert f"is not executable. Run: chmod 755 {path}" in said
    path.chmod(0o755)
    assert notes(tmp_path, spec) == []


def test_a_socket_and_a_package_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = notes(tmp_path, f"syslog: {{unix: {tmp_path}/log}}")
    assert said.startswith(f"syslog.unix: {tmp_path}/log is no socket yet")
    monkeypatch.setitem(sys.modules, "apprise", None)  # as if it were not installed
    assert any("pip install" in each for each in notes(tmp_path, "apprise: {url_file: chat}"))


@pytest.mark.parametrize("spec", ["inbox: {}", "file: {path: out.jsonl}", "syslog: {server: log.example}"])
def test_what_needs_nothing_has_no_note(tmp_path: Path, spec: str) -> None:
    assert notes(tmp_path, spec) == []
