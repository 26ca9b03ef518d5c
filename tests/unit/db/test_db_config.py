"""The [database] table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import load, show
from sla_server.db.config import DatabaseConfig


def test_everything_defaults_under_the_data_directory():
    config = DatabaseConfig()
    data_dir = Path("/srv/sla")
    assert config.resolved_url(data_dir) == "sqlite:////srv/sla/sla.db"
    assert config.resolved_queue_dir(data_dir) == data_dir / "queue"
    assert config.resolved_parquet_dir(data_dir) == data_dir / "parquet"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rollup_s": 7}, "does not divide 60"),
        ({"url": "mysql://localhost/x"}, "not supported"),
        ({"url": "postgresql://localhost/x"}, "use one of"),
        ({"url": "sqlite://"}, "needs a file"),
        ({"url": "here"}, "no URL"),
        ({"flush_interval": 1}, "no such key"),
    ],
)
def test_mistakes_are_named(values, problem):
    with pytest.raises(ConfigError, match=problem):
        load(DatabaseConfig, None, environment={}, overrides=values)


def test_shown_configuration_hides_the_password():
    url = "postgresql+psycopg://sla:hunter2@db.example/sla"
    config = DatabaseConfig(url=url)
    assert "hunter2" not in show(config)
    assert "sla:***@db.example" in show(config)
    assert config.resolved_url(Path()) == url
