"""What jobs of single steps store and note, as far as no Spark is needed for that."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from sqlalchemy import insert

from sla_server import config as configuration
from sla_server.db import migrate, schema
from sla_server.db.engine import begin, make_engine
from sla_server.db.policies import open_policies
from sla_server.db.queries.job_results import table_of
from sla_server.db.schema import DAY_US
from sla_server.jobs import only_one
from sla_server.policy_jobs import report_inputs_job, space_job, step_job, stored_results
from sla_server.reports.inputs import find_period, versions_of
from sla_server.services.store import SqlReads
from tests.support.agreements import in_force, simple
from tests.support.histories import known_history

NOW_US = 20_800 * DAY_US
GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> configuration.ResolvedConfig:
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    found = configuration.load(None)
    engine = make_engine(found.database, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    return found


def fill(config: configuration.ResolvedConfig, table: Any, rows: list[dict[str, Any]]) -> None:
    engine = make_engine(config.database, config.data_dir)
    with begin(engine) as connection:
        connection.execute(insert(table), rows)
    engine.dispose()


def test_the_space_job_forecasts_all_pools_from_what_is_stored(config: configuration.ResolvedConfig) -> None:
    """One grows by 2 GiB a day, one stays, one is not read any more; the day that goes on does not count."""
    days = [
        {
            "owner": owner,
            "pool": pool,
            "day_us": NOW_US - back * DAY_US,
            "size_bytes": 100 * GIB,
            "used_bytes": (40 + (20 - back) * growth) * GIB,
        }
        for owner, pool, growth in (("g1", "flat", 0), ("g2", "grows", 2))
        for back in range(20, -1, -1)
    ]
    old = [{**row, "pool": "gone", "day_us": row["day_us"] - 30 * DAY_US} for row in days[21:]]
    fill(config, schema.pool_days, days + old)
    fill(config, schema.pools, [{"owner": "g2", "pool": "grows", "owner_name": "gateway-2"}])
    found = space_job.run(config, "me", NOW_US)
    grows, flat = found["pools"]
    assert (grows["owner_name"], grows["pool"], flat["pool"]) == ("gateway-2", "grows", "flat")
    assert grows["slope_bytes_per_day"] == pytest.approx(2 * GIB)
    assert grows["full_us"] == pytest.approx(NOW_US + 10 * DAY_US, abs=DAY_US)
    assert grows["earliest_us"] <= grows["full_us"] <= grows["latest_us"]
    assert flat["full_us"] is None
    assert flat["reason"] in space_job.describe(found)
    assert "gateway-2/grows: full in 11 days (11 to 11), by 20 days" in space_job.describe(found)
    with closing(open_policies(config.database, config.data_dir)) as store:
        head = store.results.head("space")
        (row,) = store.reader.jobs()
        assert json.loads(store.results.bodies("space")[0]) == found["pools"]
        assert SqlReads(store.reader).space_results() == (NOW_US, found["pools"]), "so services take it"
    assert head is not None
    assert (head.end_us, head.rows) == (NOW_US, 2)
    assert (row["kind"], row["state"], row["rows"]) == ("space", "done", 40)
    assert row["text"] == "2 pools, of which 1 will be full on a known day"


def test_report_inputs_are_of_each_agreement_s_periods_and_those_of_the_reports() -> None:
    windows = {"monthly": "month", "weekly": "week"}
    rows = [
        {"name": name, "version": 1, "applied_us": 1, "ended_us": None,
         "spec": in_force(
             simple(name, extra=f"  window: {{type: calendar, period: {period}, tz: UTC}}\n")
         ).agreement.spec_json()}
        for name, period in windows.items()
    ]  # fmt: skip
    spec = in_force(simple("over")).agreement.spec_json()
    over = [
        {"name": "over", "version": 1, "applied_us": 1, "ended_us": NOW_US - 400 * DAY_US, "spec": spec}
    ]  # what it promised is in reports since; its slices would be read with all those that came later
    spans = report_inputs_job.spans_of(rows[:1] + over + rows[1:], "month", NOW_US).to_pylist()
    assert [(span["name"], span["period"]) for span in spans] == [
        ("monthly", "2026-11"), ("monthly", "2026-12"),
        ("weekly", "2026-11"), ("weekly", "2026-12"), ("weekly", "2026-W49"), ("weekly", "2026-W50"),
    ], "the one that goes on and the one before, each once"  # fmt: skip
    assert all(span["from_us"] < span["to_us"] for span in spans)


def test_the_period_before_is_that_of_the_report_also_if_the_time_zone_has_changed_since() -> None:
    before, after = (
        in_force(
            simple("gold", extra=f"  window: {{type: calendar, period: month, tz: {zone}}}\n")
        ).agreement.spec_json()
        for zone in ("Asia/Tokyo", "UTC")
    )
    changed_us = NOW_US - DAY_US
    rows = [
        {"name": "gold", "version": 1, "applied_us": 1, "ended_us": changed_us, "spec": before},
        {"name": "gold", "version": 2, "applied_us": changed_us, "ended_us": None, "spec": after},
    ]
    spans = report_inputs_job.spans_of(rows, "own", NOW_US).to_pylist()
    versions = versions_of(rows, (), NOW_US)
    for span in spans:
        period = find_period(versions, span["period"], NOW_US)
        assert (span["from_us"], span["to_us"]) == (period.from_us, period.to_us)
    assert [span["period"] for span in spans] == ["2026-11", "2026-12"]


def test_without_a_slice_spark_is_not_started(
    config: configuration.ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(report_inputs_job, "on_spark")
    agreement = {
        "name": "gold",
        "version": 1,
        "document": simple("gold"),
        "spec": json.dumps(in_force(simple("gold")).agreement.spec_json()),
        "priority": "gold",
        "applied_us": 1,
    }
    fill(config, schema.agreements, [agreement])
    done = CliRunner().invoke(report_inputs_job.main, ["-o", "json"])
    assert json.loads(done.stdout) == {"slices": 0, "sums": [], "periods": []}
    with closing(open_policies(config.database, config.data_dir)) as store:
        stored = table_of(store.results.bodies("report-inputs"))
        (row,) = store.reader.jobs()
    assert stored.schema.equals(report_inputs_job.SUMS)
    assert (row["kind"], row["state"], row["rows"]) == ("report-inputs", "done", 0)


def test_steps_are_locked_noted_and_stored_each_by_itself(
    config: configuration.ResolvedConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the order in which they use each other; Spark's part is in ``test_job``."""
    table = pa.table({"backend": ["disk"], "volume": ["v"], "hour_of_week": [3], "p50": [1.0], "p95": [2.0]})
    steps = dict.fromkeys(step_job.STEPS, lambda _frames: table)
    monkeypatch.setattr(step_job, "STEPS", steps | {"attribution": lambda _frames: 1 / 0})
    read = known_history().inputs
    dirs: list[Path] = []

    def on_statistics(
        _config: Any, _store: Any, job_dir: Path, _now_us: int, begun: Any, action: Any
    ) -> tuple[Any, dict[str, Any]]:
        dirs.append(job_dir)
        begun(7)
        return action(None, None, read), {}

    monkeypatch.setattr(step_job, "on_statistics", on_statistics)
    with only_one(config.data_dir / "demand-job" / "lock", "demand"):
        told = CliRunner().invoke(step_job.main, ["demand", "cost-model"])
    assert told.exit_code == 79
    assert "another demand job is running" in capfd.readouterr().err
    found = step_job.run(config, "me", ["demand", "cost-model"], NOW_US)
    assert list(found) == ["cost-model", "demand"]
    with pytest.raises(ZeroDivisionError):
        step_job.run(config, "me", ["attribution", "demand"], NOW_US + 1)
    assert dirs == [config.data_dir / "cost-model-job", config.data_dir / "demand-job"]
    with closing(open_policies(config.database, config.data_dir)) as store:
        rows = [(row["kind"], row["state"], row["rows"]) for row in store.reader.jobs()]
        heads = [store.results.head(kind) for kind in ("cost-model", "demand", "attribution")]
        fresh = stored_results.fresh(store.results, steps, read, config.policy, NOW_US + 2)
    assert sorted(rows) == [
        ("attribution", "failed", 7), ("cost-model", "done", 7), ("demand", "done", 7), ("demand", "done", 7),
    ], "of the run that was refused there is none"  # fmt: skip
    assert [head and head.end_us for head in heads] == [NOW_US, NOW_US + 1, None]
    assert fresh == {"cost-model": table, "demand": table}
