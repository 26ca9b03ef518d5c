"""The back-test job on a stored history: what it notes, and that it changes nothing. Without Spark."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from sla_server import config as configuration
from sla_server.cli import server
from sla_server.db import migrate
from sla_server.db.engine import make_engine
from sla_server.db.policies import open_policies
from sla_server.jobs import only_one
from sla_server.policy_jobs import back_test_job
from sla_server.schedule import MODULES, arguments_of
from tests.integration.sla_server.db.conftest import Database
from tests.support.fleet_history import fill

NOW_US = 1_795_996_800_000_000


def test_the_policy_in_force_is_tested_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("SLA__POLICY__BACK_TEST_IOS", "1000")
    config = configuration.load(None)
    engine = make_engine(config.database, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    assert back_test_job.run(config, "me", NOW_US) == {"version": None, "reason": "no policy is in force"}

    fill(Database(config.database, tmp_path, "sqlite"), NOW_US)
    cap = {"cost_per_s": 100.0, "demand_p50": 1.0, "demand_p95": 2.0}
    with closing(open_policies(config.database, tmp_path)) as store:
        version = store.publish(
            ({"volume": "batch-1", "hour_of_week": hour, **cap} for hour in range(168)),
            job={},
            report={},
            published_by="test",
            state="in-force",  # services notes it so when it puts one in force
        )
        found = back_test_job.run(config, "me", NOW_US)
        assert found["version"] == version
        assert found["reason"] == "nothing could be replayed", "a slot has more than 1,000 I/Os"
        assert "former" not in found, "it is compared with no policy alone"
        assert back_test_job.describe(found).startswith(f"policy version {version}, in force:")
        assert [row["version"] for row in store.reader.policies()] == [version]
        tested, first = store.reader.jobs()
    assert (tested["kind"], tested["state"], tested["version"]) == ("back-test", "done", version)
    assert (tested["rows"], tested["text"]) == (0, found["reason"])
    assert (first["rows"], first["text"], first["version"]) == (0, "no policy is in force", None)
    assert tested["ended_us"] >= tested["started_us"]


def test_a_job_is_run_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the command, so that signals and exit status are the job's."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _program, command: became.append(command))
    for name in MODULES:
        CliRunner().invoke(server.cli, ["jobs", "run", "--config", "c.toml", name, "-o", "json"])
        assert became.pop()[1:] == [*arguments_of(name), "--config", "c.toml", "-o", "json"]
    assert CliRunner().invoke(server.cli, ["jobs", "run", "no-such"]).exit_code == 2
    assert not became


def test_a_second_run_ends_with_79(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    with only_one(tmp_path / "data" / "back-test-job" / "lock", "back-test"):
        (tmp_path / "data" / "sla.db").touch()
        assert CliRunner().invoke(back_test_job.main, ["--config", str(path)]).exit_code == 79
    assert "another back-test job is running" in capfd.readouterr().err
