"""The proof of the chaos run on real tables and files: silent when all is well, loud when anything is not."""

from __future__ import annotations

import shutil

import pytest
import sqlalchemy as sa

from benchmarks.chaos_proof import Gateway, prove
from gateway_agent.link.spool import Spool
from sla_server.db.engine import make_engine
from tests.support.database import Rig
from tests.support.samples import EPOCH, cuts_message, gateway, make_cut

SPOOL_BYTES = 64 << 10


@pytest.fixture
def stored(database):
    """Six cuts in two files, and the agent's word for them."""
    rig = Rig(database.config, database.data_dir)
    for first in (1, 4):
        rig.feed(cuts_message([make_cut(seq) for seq in range(first, first + 3)]))
        rig.drain(final=True)
    rig.close()
    spool = database.data_dir / "spool"
    Spool(spool, SPOOL_BYTES).close()
    log = database.data_dir / "agent.log"
    log.write_text("".join(f"event=cut-spooled epoch={EPOCH} seq={seq}\n" for seq in range(1, 7)))
    # Sample cuts carry no true cumulative counters.
    return database, Gateway(gateway(1), log, spool, SPOOL_BYTES, stepped=True)


def run(stored):
    database, agent = stored
    return prove(database.config, database.data_dir, [agent])


def change(stored, statement, **values):
    engine = make_engine(stored[0].config, stored[0].data_dir)
    with engine.begin() as connection:
        connection.execute(sa.text(statement), values)
    engine.dispose()


def a_path(stored):
    engine = make_engine(stored[0].config, stored[0].data_dir)
    with engine.connect() as connection:
        path = connection.execute(sa.text("select min(path) from manifest")).scalar_one()
    engine.dispose()
    return path


def test_nothing_is_wrong(stored):
    proof = run(stored)
    assert proof.problems == []
    assert (proof.made, proof.delivered, proof.held, proof.dropped) == (6, 6, 0, 0)


def test_a_cut_that_nobody_has_is_lost(stored):
    with stored[1].log.open("a") as log:
        log.write(f"event=cut-spooled epoch={EPOCH} seq=7\n")
    assert run(stored).lost == [(gateway(1), EPOCH, 7)]


def test_one_that_was_dropped_is_not_but_must_be_counted(stored):
    with stored[1].log.open("a") as log:
        log.write(f"event=cut-spooled epoch={EPOCH} seq=7\nevent=dropping-cuts cuts={EPOCH}:7-7\n")
    proof = run(stored)
    assert proof.lost == []
    assert any("1 cuts are missing, 0 were counted" in problem for problem in proof.problems)


def test_a_file_without_its_row_loses_its_cuts(stored):
    change(stored, "delete from manifest where path = :path", path=a_path(stored))
    assert len(run(stored).lost) == 3


def test_a_file_twice_doubles_its_cuts(stored):
    path, directory = a_path(stored), stored[0].config.resolved_parquet_dir(stored[0].data_dir)
    shutil.copy(directory / path, directory / "twice.parquet")
    change(stored, "insert into manifest (path, kind, cuts) values ('twice.parquet', 'cuts', 3)")
    assert len(run(stored).doubled) == 3


@pytest.mark.parametrize("table", ["rollups", "streams"])
def test_a_sum_that_is_off_by_one_is_found(stored, table):
    change(
        stored, f"update {table} set reads = reads + 1 where stream_id = (select min(stream_id) from {table})"
    )
    assert any(f"{table} has" in problem for problem in run(stored).problems)


def test_a_cut_counted_twice_in_sql_is_found(stored):
    change(stored, "update coverage set cuts = cuts + 1")
    assert any("cuts in SQL" in problem for problem in run(stored).problems)
