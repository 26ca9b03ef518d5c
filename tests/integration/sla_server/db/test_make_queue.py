"""The ingest queue of a server that has never acted is made while it stands by."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server import config as configuration
from sla_server.db.errors import DbError
from sla_server.db.ingest.queue import IngestQueue
from sla_server.db.process import directory_lock, make_queue


def _config(folder: Path) -> configuration.ResolvedConfig:
    server = {"data_dir": folder / "data", "database": {"queue_bytes": 16 << 20}}
    return configuration.resolve(configuration.ServerConfig.model_validate(server))


def test_it_is_made_once_and_the_one_that_acts_finds_it(tmp_path: Path) -> None:
    config = _config(tmp_path)
    make_queue(config)
    queue = IngestQueue(config.database.resolved_queue_dir(config.data_dir), 16 << 20)
    made = queue.queue_id
    queue.close()
    with directory_lock(config.data_dir):  # a database manager runs: it has its queue, and is left alone
        make_queue(config)
    queue = IngestQueue(config.database.resolved_queue_dir(config.data_dir), 16 << 20)
    assert queue.queue_id == made
    queue.close()


def test_it_is_not_made_beside_a_database_manager(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with directory_lock(config.data_dir), pytest.raises(DbError, match="another database manager"):
        make_queue(config)
