"""The back-test job on a stored history: what it notes, and that it changes nothing. Without Spark."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from sqlalchemy import insert

from pmdaemon.wire.cut import IO_KINDS
from sla_server import config as configuration
from sla_server.cli import server
from sla_server.db import migrate, schema
from sla_server.db.engine import begin, make_engine
from sla_server.db.policies import open_policies
from sla_server.jobs import only_one
from sla_server.policy_jobs import back_test_job, grouped, job
from sla_server.policy_jobs.compute import Found
from sla_server.schedule import MODULES, arguments_of
from tests.integration.sla_server.db.conftest import Database
from tests.support.agreements import ERP, in_force
from tests.support.fleet_history import fill

MINUTE_US = 60_000_000
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


def store_a_burst(config: configuration.ResolvedConfig, from_us: int) -> None:
    """Three minutes: a batch load is greedy in the second one, and the ERP beside it misses its promise."""
    slots, missed = [], []
    for minute, batch_iops in enumerate((10, 180, 10)):
        at_us, is_busy = from_us + minute * MINUTE_US, batch_iops > 100
        for stream_id, iops in ((1, 20), (2, batch_iops)):
            ios, sum_us = iops * 60, iops * 60 * (40_000 if is_busy else 6_000)
            slots.append(
                {"slot_us": at_us, "stream_id": stream_id, "arrived": ios, "reads": ios, "writes": 0,
                 "read_bytes": ios * 4096, "lat_sum_us": sum_us, "svc_sum_us": sum_us, "hist": b"",
                 "inflight_max": 32 if is_busy else 2, "covered_us": MINUTE_US}
            )  # fmt: skip
        missed.append(
            {"slot_us": at_us, "stream_id": 1, "io": IO_KINDS["any"], "threshold_us": 20_000,
             "counted": 1200, "missed": 900 if is_busy else 0}
        )  # fmt: skip
    spec = json.dumps(in_force(ERP).agreement.spec_json())
    agreement = {
        "name": "gold",
        "version": 1,
        "document": ERP,
        "spec": spec,
        "priority": "gold",
        "applied_us": 1,
    }
    streams = [
        {"stream_id": number, "gateway_id": "g", "volume": volume, "client": "c", "backend": "disk"}
        for number, volume in enumerate(("erp", "batch"), 1)
    ]
    engine = make_engine(config.database, config.data_dir)
    migrate.upgrade(engine)
    with begin(engine) as connection:
        for table, rows in (
            (schema.streams, streams), (schema.rollups, slots), (schema.rollup_missed, missed),
            (schema.agreements, [agreement]),
        ):  # fmt: skip
            connection.execute(insert(table), rows)
    engine.dispose()


def test_what_is_stored_is_replayed_with_the_policy_in_force_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy caps the greedy volume, and the replay shows fewer bad seconds for it."""
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    config = configuration.load(None)
    store_a_burst(config, NOW_US - 10 * MINUTE_US)
    with closing(open_policies(config.database, tmp_path)) as store:
        store.publish(
            ({"volume": "batch", "hour_of_week": hour, "cost_per_s": 40.0} for hour in range(168)),
            job={},
            report={},
            published_by="test",
            state="in-force",
        )
        found = back_test_job.run(config, "me", NOW_US)
        (tested,) = store.reader.jobs()
    assert found["reason"].startswith("it helps"), found
    assert [row["backend"] for row in found["backends"]] == ["disk"]
    assert found["none"]["ios"] > found["new"]["ios"] > 0
    assert found["none"]["bad_s"] > found["new"]["bad_s"]
    assert found["new"]["held_back"] > 0
    assert "held back or not made: " in back_test_job.describe(found)
    assert (tested["state"], tested["rows"], tested["text"]) == ("done", found["new"]["ios"], found["reason"])


def found_with(hours: Iterable[int]) -> Found:
    """What Spark would find: the greedy volume is capped in these hours."""
    rows = [
        {"volume": "batch", "hour_of_week": hour, "cost_per_s": 40.0, "demand_p50": 1.0, "demand_p95": 180.0}
        for hour in hours
    ]
    table = pa.Table.from_pylist(rows, schema=grouped.CAPS)
    return Found(table.append_column("burst_s", pa.nulls(len(rows), pa.float64())), [], [])


def test_a_run_publishes_what_helps_and_stores_what_does_not_as_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Back-test, transaction and exit status are real; what Spark finds is given."""
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    config = configuration.load(None)
    store_a_burst(config, NOW_US - 10 * MINUTE_US)

    def run(hours: Iterable[int]) -> Any:
        answer = (found_with(hours), []), {"peak_mib": {"the driver": 1}, "spark_start_s": 0.0}
        monkeypatch.setattr(job, "on_statistics", lambda *_: answer)
        return CliRunner().invoke(job.main, ["--as-of", str(NOW_US)])

    helps, useless = run(range(168)), run([5])
    assert (helps.exit_code, useless.exit_code) == (0, 81), helps.output + capfd.readouterr().err
    assert "policy version 1 published" in helps.stdout
    assert "and 158 more: sla policy show 1" in helps.stdout
    assert "policy version 2 not published" in useless.stdout
    with closing(open_policies(config.database, tmp_path)) as store:
        second, first = store.reader.policies()
        runs = store.reader.jobs()
    assert (first["state"], second["state"]) == ("published", "rejected")
    assert first["report"]["back_test"]["reason"].startswith("it helps")
    assert second["report"]["back_test"]["reason"].startswith("it does not help")
    assert [(row["state"], row["version"], row["exit_status"]) for row in runs] == [
        ("not-published", 2, 81), ("done", 1, 0),
    ]  # fmt: skip
    assert runs[0]["text"] == second["report"]["back_test"]["reason"]


def test_a_job_is_run_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the command, so that signals and exit status are the job's."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _program, command: became.append(command))
    for name in MODULES:
        CliRunner().invoke(server.cli, ["jobs", "run", "--config", "c.toml", name, "-o", "json"])
        assert became.pop()[1:] == [*arguments_of(name), "--config", "c.toml", "-o", "json"]
    CliRunner().invoke(server.cli, ["jobs", "run", "demand", "capacity"])
    assert became.pop()[1:] == arguments_of("demand", "capacity"), "one start of Spark"
    for words in (["no-such"], ["policy", "no-such"], ["--", "-o", "json"]):
        assert CliRunner().invoke(server.cli, ["jobs", "run", *words]).exit_code == 2
    assert not became


def test_several_jobs_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, though one fails: the next may do without it. The status is that of the first failure."""
    ran: list[list[str]] = []
    statuses = {MODULES["policy"]: 81, MODULES["report"]: 70}

    def run(command: list[str], **_how: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[2:])
        return subprocess.CompletedProcess(command, statuses.get(command[2], 0))

    monkeypatch.setattr(subprocess, "run", run)
    done = CliRunner().invoke(server.cli, ["jobs", "run", "--config", "c.toml", "all"])
    assert done.exit_code == 81
    assert [words[0] for words in ran] == list(dict.fromkeys(MODULES.values()))
    assert ran[1] == [
        *arguments_of("cost-model", "capacity", "demand", "attribution")[1:],
        "--config",
        "c.toml",
    ]


def test_a_second_run_ends_with_79(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    with only_one(tmp_path / "data" / "back-test-job" / "lock", "back-test"):
        (tmp_path / "data" / "sla.db").touch()
        assert CliRunner().invoke(back_test_job.main, ["--config", str(path)]).exit_code == 79
    assert "another back-test job is running" in capfd.readouterr().err
