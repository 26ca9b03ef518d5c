"""The server's configuration as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sla_server.config import ServerConfig, load, resolve
from sla_server.db import schema
from sla_server.db.arrow import arrow_schema
from sla_server.policy_jobs.transforms import MISSED_COLUMNS, SLOT_COLUMNS


def test_the_control_loop_counts_in_the_intervals_of_the_poller() -> None:
    config = ServerConfig.model_validate({"pmdaemon": {"interval_s": 0.5}})
    assert resolve(config).services.control.poll_interval_s == 0.5


def test_an_interval_set_on_purpose_is_kept() -> None:
    raw = {"pmdaemon": {"interval_s": 0.5}, "services": {"control": {"poll_interval_s": 1.0}}}
    assert resolve(ServerConfig.model_validate(raw)).services.control.poll_interval_s == 1.0


def test_directories_become_absolute_and_a_runtime_directory_belongs_to_its_data(tmp_path: Path) -> None:
    first = resolve(ServerConfig(data_dir=tmp_path / "a"))
    second = resolve(ServerConfig(data_dir=tmp_path / "b"))
    assert first.data_dir.is_absolute()
    assert first.runtime_dir != second.runtime_dir


def test_what_the_policy_job_learns_of_is_kept_as_long_as_its_window() -> None:
    """Minutes with histogram, late I/Os, how long a cap held some back, and the depth of the queue."""
    config = ServerConfig()
    window_days, files = config.policy.window_days, config.database.files
    assert files.rollups_max_age_days >= window_days
    assert files.hours_max_age_days >= window_days
    assert config.policy.back_test_days <= window_days
    kept = set(arrow_schema(schema.rollups).names)
    assert {"hist", "caps_us", "inflight_max", "held_max", *SLOT_COLUMNS} <= kept
    assert {"threshold_us", "counted", "missed", *MISSED_COLUMNS} <= set(
        arrow_schema(schema.rollup_missed).names
    )


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('data_dir = "x"\n[services]\nmode = "enforce"\n')
    assert load(path).services.mode == "enforce"


@pytest.mark.parametrize("interval_s", [10.0, 12.5])
def test_polls_that_come_after_the_lease_has_ended_are_refused(interval_s: float) -> None:
    services = {"control": {"lease_s": 10.0}}
    with pytest.raises(ValidationError) as refused:
        ServerConfig.model_validate({"pmdaemon": {"interval_s": interval_s}, "services": services})
    said = f"pmdaemon.interval_s = {interval_s:g} is not below services.control.lease_s = 10"
    assert said in str(refused.value)
    ServerConfig.model_validate({"pmdaemon": {"interval_s": 9.9}, "services": services})
