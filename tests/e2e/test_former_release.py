"""What a former release has left is opened by this one: server and agent, killed in the midst of their work.

``fixtures/former/make.py`` has made the directories with the programs of a former commit. Cuts that were in
the queue of the server and the spool of the agent are in no database yet. Nothing here depends on their age.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sla_server.db.migrate import known_revisions
from tests.e2e.test_counts import totals_in_sql
from tests.support.stage import Agent, Stage

FORMER = Path(__file__).parents[1] / "fixtures" / "former" / "7f53b3ee.tar.xz"
LAST_STEP = "0005"
KEPT = """\
[database.retention]
rollups_days = 30000.0
coverage_days = 30000.0
slices_days = 30000.0
audit_days = 30000.0
events_days = 30000.0
[database.files]
cuts_max_age_h = 1e6
rollups_after_h = 1e6
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with tarfile.open(FORMER) as packed:
        packed.extractall(tmp_path)
    with Stage(tmp_path, mode="enforce", extra_toml=KEPT) as running:
        yield running


def rows_of(stage: Stage, statement: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(f"file:{stage.folder}/data/sla.db?mode=ro", uri=True) as connection:
        return connection.execute(statement).fetchall()


def test_a_data_directory_and_a_spool_of_a_former_release_are_taken_over_whole(stage: Stage) -> None:
    expected: dict[str, int] = json.loads((stage.folder / "counts.json").read_text())
    token = (stage.folder / "data" / "api.token").read_text()
    assert rows_of(stage, "select version_num from alembic_version") == [(LAST_STEP,)]
    [(counted,)] = rows_of(stage, "select sum(reads + writes) from streams")
    assert isinstance(counted, int)
    assert 0 < counted < sum(expected.values()), "some I/Os are in queue and spool alone"
    [(slices,)] = rows_of(stage, "select count(*) from slices")

    stage.start_server()
    assert rows_of(stage, "select version_num from alembic_version") == [(known_revisions()[-1],)]
    for volume in expected:
        (stage.folder / f"{volume}.image").write_bytes(bytes(1 << 20))
    volumes = {volume: str(stage.folder / f"{volume}.image") for volume in expected}
    stage.start_agent(Agent("gateway-a", volumes))
    stage.wait(stage.gateways_up, "the gateway, by the identity that it had")

    def totals() -> dict[str, int]:
        return {row["volume"]: row["reads"] + row["writes"] for row in stage.get("volumes")["items"]}

    stage.wait(lambda: totals() == expected, f"{expected} I/Os, each counted once")
    for volume, ios in expected.items():
        assert sum(totals_in_sql(stage, volume)) == ios

    assert {row["name"] for row in stage.get("slas")["items"]} == {"erp-gold", "batch-best-effort"}
    [(kept,)] = rows_of(stage, "select count(*) from slices")
    assert isinstance(kept, int)
    assert isinstance(slices, int)
    assert kept >= slices > 0
    (held,) = stage.wait(lambda: stage.live().get("throttles"), "the throttle that was set by hand")
    assert (held["volume"], held["source"], held["text"]) == ("batch", "manual", "a former release")
    assert (stage.folder / "data" / "api.token").read_text() == token
    stage.sla("throttle", "release", "batch")
    assert stage.sla("storage", "verify", check=False).returncode == 0
    assert "nothing changed" in stage.sla("audit", "verify").stdout
    assert len(json.loads(stage.sla("get", "events", "-o", "json").stdout)) > 0
    kinds = {row["kind"] for row in stage.get("events?limit=200")["items"]}
    assert not kinds & {"cuts-lost", "spool-overflow", "document-unreadable", "process-died"}
