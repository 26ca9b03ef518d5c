"""Whether a real PostgreSQL is reached: refused, silent, a password that is wrong, another cluster's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server import config as configuration
from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import begin, make_engine
from sla_server.db.reach import DatabaseReach, reach_of
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgres import PostgresServer

LIMIT_S = 60.0


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[CuttingProxy]:
    made = CuttingProxy(postgres.directory / ".s.PGSQL.5432")
    yield made
    made.close()


def _reach(folder: Path, url: str) -> DatabaseReach:
    values: dict[str, Any] = {"data_dir": folder, "runtime_dir": folder, "database": {"url": url}}
    config = configuration.resolve(configuration.ServerConfig.model_validate(values))
    return reach_of(config, SystemClock().monotonic_ns)


def _through(proxy: CuttingProxy, database: str, user: str = "postgres") -> str:
    return f"postgresql+psycopg://{user}@127.0.0.1:{proxy.port}/{database}"


def test_what_is_found_in_it(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.create("reach_found")
    reach = _reach(tmp_path, url)
    reach.probe()
    assert (reach.state().away_s, reach.state().found.cluster) == (0.0, "")  # it has no schema yet
    engine = make_engine(DatabaseConfig(url=url), tmp_path)
    migrate.upgrade(engine)
    reach.probe()
    assert reach.state().found.cluster == ""
    with begin(engine) as connection:
        connection.execute(
            text(
                "INSERT INTO fences (name, fence, server, queue, since_us) VALUES ('cluster', 0, '', 'c1', 0)"
            )
        )
    reach.probe()
    assert (reach.state().found.cluster, reach.state().found.problem) == ("c1", "")
    with begin(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    reach.probe()
    assert "9999" in reach.state().found.problem
    engine.dispose()


def test_a_connection_that_is_cut_or_refused_and_a_role_that_may_not_log_in_are_away(
    postgres: PostgresServer, proxy: CuttingProxy, tmp_path: Path
) -> None:
    postgres.create("reach_refused")
    postgres.execute("CREATE ROLE visitor LOGIN")
    reach = _reach(tmp_path, _through(proxy, "reach_refused", "visitor"))
    reach.probe()
    assert reach.state().reached_s > 0
    proxy.refuse(True)
    reach.probe()
    assert (reach.state().away_s > 0, reach.state().reached_s, bool(reach.state().problem)) == (
        True,
        0.0,
        True,
    )
    proxy.refuse(False)
    reach.probe()
    assert (reach.state().away_s, reach.state().problem) == (0.0, "")
    postgres.execute("ALTER ROLE visitor NOLOGIN")
    reach.probe()
    assert "visitor" in reach.state().problem
    assert reach.state().away_s > 0


def test_one_that_is_silent_is_away_while_it_is_and_reached_when_it_speaks_again(
    postgres: PostgresServer, proxy: CuttingProxy, tmp_path: Path
) -> None:
    postgres.create("reach_silent")
    reach = _reach(tmp_path, _through(proxy, "reach_silent"))
    reach.probe()
    proxy.stall(True)
    checking = threading.Thread(target=reach.probe)
    checking.start()
    deadline = Deadline(LIMIT_S)
    while reach.state().away_s == 0.0:  # it does not end, or by the limit of a connection
        assert not deadline.passed
        checking.join(0.1)
    assert reach.state().reached_s == 0.0
    proxy.stall(False)
    checking.join(LIMIT_S)
    assert not checking.is_alive()
    reach.probe()
    assert reach.state().away_s == 0.0


def test_a_replica_that_takes_no_writes_is_away(postgres: PostgresServer, tmp_path: Path) -> None:
    """A real one takes half a minute to make; the question is answered by a function of the same name."""
    url = postgres.create("reach_replica")
    engine = make_engine(DatabaseConfig(url=url), tmp_path)
    with begin(engine) as connection:
        connection.execute(
            text("CREATE FUNCTION public.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true'")
        )
        connection.execute(text("ALTER DATABASE reach_replica SET search_path = public, pg_catalog"))
    engine.dispose()
    reach = _reach(tmp_path, url)
    reach.probe()
    assert "it is a replica, and takes no writes" in reach.state().problem
