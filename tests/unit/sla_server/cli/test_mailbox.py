"""``sla mailbox dump``, human and JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pmdaemon.mailbox import attach
from sla_server.cli.main import cli
from tests.support.mailbox import make_mesh


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["mailbox", "dump", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_segments_of_the_runtime_directory_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    path = make_mesh(tmp_path / "main.mbx", "a", "b")
    with attach(path, "a") as a:
        a.post("b", b"x" * 512)
        text = run()
    assert "form lanes" in text
    assert "50%" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    (told,) = json.loads(run("-o", "json"))
    assert told["participants"][0]["slots"]["ready"] == 1
    assert told["routes"][0]["fill_ratio"] == 0.5


def test_names_and_headings_are_whole_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    path = make_mesh(tmp_path / "main.mbx", "supervisor", "appserver")
    with attach(path, "supervisor") as one:
        one.post("appserver", b"x")
        _first, *lines = run().splitlines()
    assert "supervisor" in "".join(lines)
    assert lines[0].split()[-3:] == ["READY", "TAKEN", "FREE"]
    assert max(map(len, lines)) <= 80


def test_the_configured_server_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "default"))
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "default").mkdir(mode=0o700)
    path = make_mesh(tmp_path / "own" / "main.mbx", "a", "b")
    make_mesh(tmp_path / "default" / "main.mbx", "c", "d")
    config = tmp_path / "server.toml"
    config.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/own"\n')
    monkeypatch.setenv("SLA_CONFIG", str(config))
    assert [told["path"] for told in json.loads(run("-o", "json"))] == [str(path)]


def test_a_missing_segment_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    result = CliRunner().invoke(cli, ["mailbox", "dump"])
    assert result.exit_code != 0
    assert "main.mbx" in result.output
    result = CliRunner().invoke(cli, ["mailbox", "dump", str(tmp_path / "none")])
    assert result.exit_code == 71


def test_a_doorbell_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO, which nobody has open: opening it as other files would wait for ever."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    path = make_mesh(tmp_path / "main.mbx", "a", "b")
    attach(path, "a").close()
    result = CliRunner().invoke(cli, ["mailbox", "dump", f"{path}.a.bell"])
    assert result.exit_code == 77
    assert "no regular file" in result.output
