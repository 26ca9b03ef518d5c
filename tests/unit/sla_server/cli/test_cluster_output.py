"""What programs send through the cluster, and what nodes log, as it reaches the terminal of an operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sla_server.cli import cluster_dmq, cluster_log
from sla_server.cli.main import cli
from sla_server.cluster.dead_messages import DeadMessage
from sla_server.cluster.log_spool import LogRecord

TITLE = "\x1b]0;pwned\x07"


def test_no_dead_message_reaches_the_terminal_as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {f"A{TITLE}": f"b{TITLE}"}
    message = DeadMessage(7, "2027-01-15", "bills", f"expired{TITLE}", f"x{TITLE}", headers, TITLE.encode())
    monkeypatch.setattr(cluster_dmq, "ask", lambda _work: message)
    done = CliRunner().invoke(cli, ["cluster", "dmq", "show", "7"])
    assert done.exit_code == 0, done.output
    assert done.output.count("pwned") == 5
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


def test_lines_of_a_message_stay_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    message = DeadMessage(7, "2027-01-15", "bills", "expired", "x", {}, "first\nsecond ü".encode())
    monkeypatch.setattr(cluster_dmq, "ask", lambda _work: message)
    done = CliRunner().invoke(cli, ["cluster", "dmq", "show", "7"])
    assert done.output.endswith("\nfirst\nsecond ü\n")


def test_no_log_line_reaches_the_terminal_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    record = LogRecord(1, f"n1{TITLE}", 1, "info", f"event=x name={TITLE}")
    cluster_log._print(record, is_late=False, output="table")
    assert "\x1b" not in (out := capsys.readouterr().out)
    assert out.count("pwned") == 2


def test_a_node_that_invites_itself_is_shown_how_to_renew_its_certificate(tmp_path: Path) -> None:
    config, file = tmp_path / "server.toml", tmp_path / "own"
    config.write_text(
        f'data_dir = "{tmp_path}/data"\n[cluster]\nnode = "n1"\n[[cluster.peers]]\nname = "n2"\n'
        'listen = "127.0.0.1:1"\nroutes = "127.0.0.1:2"\n'
    )
    for command, said in (
        (["init"], "for n2: sla cluster invite n2"),
        (["invite", "n1", str(file)], f"Here: sla cluster join --again {file}; then restart the node"),
        (["join", "--again", str(file)], "n1 is a member"),
    ):
        done = CliRunner().invoke(cli, ["--config", str(config), "cluster", *command])
        assert (done.exit_code, said in done.output) == (0, True), done.output
