"""The [database] table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import load, show
from sla_server.db.archive.store import UrlFiles
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine, where
from sla_server.db.errors import DatabaseUnavailable, FilesUnavailable, SchemaTooNew


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


def test_no_secret_of_a_url_is_shown_anywhere():
    url = "postgresql+psycopg://sla@db.example/sla?password=hunter2&connect_timeout=3"
    config = DatabaseConfig(url=url, reader_url=url, files={"url": "ftp://sla:hunter2@host/x?token=hunter2"})
    assert "hunter2" not in show(config)
    assert show(config).count("connect_timeout=3") == 2
    engine = make_engine(config, Path())
    assert "hunter2" not in where(engine)
    files = UrlFiles("memory://x?secret_key=hunter2", Path())
    for error in (
        DatabaseUnavailable(url, f'connection to "{url}" failed'),
        SchemaTooNew(url, "9", "5"),
        FilesUnavailable(files.address, f"OSError: {url}"),
    ):
        assert "hunter2" not in str(error)
        assert "hunter2" not in files.address
