"""Two servers over one database and one archive, by turns: who has lost its fence writes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, event, select, text, update

from pmdaemon.runtime.clock import Deadline
from sla_server.db import schema
from sla_server.db.archive.store import LocalFiles
from sla_server.db.backup import _Unfiled
from sla_server.db.engine import begin, make_engine, translated
from sla_server.db.errors import DatabaseUnavailable, FenceLost, NotAlone, OtherCluster, QueueCopied
from sla_server.db.fence import FENCE_LOCK, NOT_ALONE, Fence, OthersWatch, check_alone, take_alone
from sla_server.db.policies import open_policies
from sla_server.db.queries.reader import SqlReader
from tests.support.database import Rig, archived, identity
from tests.support.samples import (
    assert_database_holds,
    cuts_message,
    gateway_message,
    make_cut,
    record_message,
    streams_message,
)


class Servers:
    """Each with a queue of its own in ``n1``, ``n2``; a database and an archive for both."""

    def __init__(self, database: Any, tmp_path: Path) -> None:
        self._database = database
        self._path = tmp_path
        self._open: list[Rig] = []

    def start(self, name: str, fence: int) -> Rig:
        config = self._database.config.model_copy(
            update={"queue_dir": self._path / name, "parquet_dir": self._path / "parquet"}
        )
        rig = Rig(config, self._database.data_dir, fence=Fence(fence, name))
        self._open.append(rig)
        return rig

    def queue_dir(self, name: str) -> Path:
        return self._path / name

    def stop(self, rig: Rig) -> None:
        self._open.remove(rig)
        rig.close()

    def close(self) -> None:
        for rig in self._open:
            rig.close()


@pytest.fixture
def servers(database: Any, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(database, tmp_path)
    yield made
    made.close()


def _watermarks(rig: Rig) -> list[tuple[int, int]]:
    """(seq, fence) of all epochs."""
    table = schema.ingest_watermark
    with rig.engine.connect() as connection:
        return [(int(row[0]), int(row[1])) for row in connection.execute(select(table.c.seq, table.c.fence))]


def _unfiled_cuts(rig: Rig, queue_dir: Path) -> int:
    """What a backup takes from the queue beside the files; the rest of one would only take time here."""
    with rig.engine.connect() as connection:
        cursors = {row[0]: row[1] for row in connection.execute(select(schema.consumed))}
    unfiled = _Unfiled(queue_dir)
    unfiled.take(cursors)
    head = unfiled.write(LocalFiles(queue_dir / "copies"), rig.clock)
    assert head is not None
    return int(head["row"]["cuts"])


def test_a_server_that_has_lost_its_fence_writes_nothing_and_what_it_had_counts_once(
    servers: Servers,
) -> None:
    cuts = [make_cut(seq) for seq in range(1, 10)]
    first = servers.start("n1", 5)
    first.feed(gateway_message(), streams_message(), *(cuts_message([item]) for item in cuts[:3]))
    assert _watermarks(first) == [(3, 5)]
    first.queue.append_many([cuts_message([item]) for item in cuts[3:5]])  # not acknowledged: not in SQL

    second = servers.start("n2", 6)
    for refused in (first.writer.step, lambda: first.drain(final=True)):
        with pytest.raises(FenceLost, match="server n2 writes to this database since its fence 6"):
            refused()
    with pytest.raises(FenceLost):
        Fence(5, "n1").take(first.engine, first.queue.queue_id, first.queue.synced_seq, 0)
    second.feed(*(cuts_message([item]) for item in cuts[3:7]))
    second.drain(final=True)
    assert _watermarks(second) == [(7, 6)]
    servers.stop(first)
    servers.stop(second)

    again = servers.start("n1", 7)
    assert again.queue.refused
    again.feed(*(cuts_message([item]) for item in cuts[7:]))
    assert _unfiled_cuts(again, servers.queue_dir("n1")) == len(cuts[:3]) + len(cuts[7:])
    again.drain(final=True)
    assert _watermarks(again) == [(9, 7)]
    assert_database_holds(again.reader, cuts)
    assert sorted(archived(again)) == identity(cuts)
    servers.stop(again)
    assert servers.start("n1", 8).queue.refused == ()  # the files have passed it


def test_what_another_server_has_stored_is_no_gap_to_the_one_that_comes_again(servers: Servers) -> None:
    cuts = [make_cut(seq) for seq in range(1, 8)]
    first = servers.start("n1", 5)
    first.feed(gateway_message(), streams_message(), *(cuts_message([item]) for item in cuts[:3]))
    servers.stop(first)
    second = servers.start("n2", 6)
    second.feed(*(cuts_message([item]) for item in cuts[3:6]))
    servers.stop(second)
    again = servers.start("n1", 7)  # its queue still has cut 3: the next one does not follow that
    again.feed(cuts_message([cuts[6]]))
    assert_database_holds(again.reader, cuts)
    with again.engine.connect() as connection:
        unseen = select(schema.coverage.c.gap_ios)
        assert {int(row[0]) for row in connection.execute(unseen)} == {0}


def test_the_last_one_that_wrote_keeps_what_it_had_when_it_comes_again(servers: Servers) -> None:
    cuts = [make_cut(seq) for seq in range(1, 4)]
    first = servers.start("n1", 5)
    first.feed(gateway_message(), streams_message(), cuts_message(cuts[:1]))
    first.queue.append_many([cuts_message(cuts[1:])])
    servers.stop(first)
    again = servers.start("n1", 9)  # the lease had lapsed, and no other server has had it
    again.drain(final=True)
    assert_database_holds(again.reader, cuts)
    assert sorted(archived(again)) == identity(cuts)


def test_rows_of_a_former_term_are_refused_with_its_cuts(servers: Servers) -> None:
    first = servers.start("n1", 5)
    row = {"name": "services", "state": "running", "pid": 7}
    first.queue.append_many([record_message([("processes", row)])])
    servers.stop(servers.start("n2", 6))
    servers.stop(first)
    again = servers.start("n1", 7)
    again.drain(final=True)
    with again.engine.connect() as connection:
        assert list(connection.execute(select(schema.processes))) == []


def _taken(engine: Any, fence: Fence, queue_id: str) -> None:
    """Take it, as often as the process does that waits for the database."""
    deadline = Deadline(60)
    while True:
        try:
            fence.take(engine, queue_id, 0, 0)
        except DatabaseUnavailable:
            assert not deadline.passed
        else:
            return


@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.db)], indirect=True)
def test_a_transaction_whose_machine_is_gone_holds_no_takeover_up(database: Any, tmp_path: Path) -> None:
    former, engine = make_engine(database.config, tmp_path), make_engine(database.config, tmp_path)
    fence = Fence(5, "n1", lease_s=2)
    fence.take(former, "q1", 0, 0)
    fence.guard(former)
    with former.connect() as connection:
        connection.execute(select(schema.meta))  # and not a word more: power was lost, no end is sent
        _taken(engine, Fence(6, "n2"), "q2")
        with pytest.raises(DatabaseUnavailable), translated(former):
            connection.execute(select(schema.meta))
        connection.invalidate()
    former.dispose()
    engine.dispose()


@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.db)], indirect=True)
def test_of_two_that_are_the_first_ever_the_higher_fence_stays(database: Any, tmp_path: Path) -> None:
    config = database.config.model_copy(update={"lock_timeout_s": 0.1})
    late, engine = make_engine(config, tmp_path), make_engine(config, tmp_path)
    taken: list[str] = []

    @event.listens_for(late, "before_cursor_execute")
    def _another_is_quicker(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if statement.startswith("INSERT INTO fences") and not taken:
            taken.append("tried")
            with contextlib.suppress(DatabaseUnavailable):  # it has to wait, and comes again
                Fence(6, "n2").take(engine, "q2", 0, 0)
                taken.append("taken")

    with contextlib.suppress(FenceLost):
        Fence(5, "n1").take(late, "q1", 0, 0)
    if "taken" not in taken:
        Fence(6, "n2").take(engine, "q2", 0, 0)
    with engine.connect() as connection:
        assert [
            tuple(row) for row in connection.execute(select(schema.fences.c.fence, schema.fences.c.server))
        ] == [(6, "n2")]
    late.dispose()
    engine.dispose()


def test_a_job_of_a_server_that_has_lost_its_fence_stores_nothing(database: Any, tmp_path: Path) -> None:
    engine = make_engine(database.config, tmp_path)
    Fence(5, "n1").take(engine, "q1", 0, 0)
    store = open_policies(database.config, database.data_dir, Fence(5, "n1"))
    job_id = store.begin_job("policy", "test")
    Fence(6, "n2").take(engine, "q2", 0, 0)
    with pytest.raises(FenceLost, match="server n2 writes to this database"):
        store.publish([], job={}, report={}, published_by="test")
    with pytest.raises(FenceLost):
        store.end_job(job_id, "done", 0)
    store.close()
    assert SqlReader(engine).policies() == []
    engine.dispose()


def test_a_server_whose_file_says_that_it_is_alone_does_not_write_beside_others(
    database: Any, tmp_path: Path
) -> None:
    config = database.config
    engine = make_engine(config, tmp_path)
    check_alone(engine)
    alone = open_policies(config, database.data_dir)
    alone.end_job(alone.begin_job("policy", "test"), "done", 0)
    alone.close()
    Fence(5, "n1").take(engine, "q1", 0, 0)
    with pytest.raises(NotAlone, match="that of node n1 acted last") as caught:
        check_alone(engine)
    assert caught.value.exit_status == 78  # the server gives up at its start, and says why
    alone = open_policies(config, database.data_dir)
    for _ in range(2):  # not once only
        with pytest.raises(NotAlone):
            alone.begin_job("policy", "test")
    alone.close()
    engine.dispose()


def _leave_others(engine: Any) -> None:
    """As the text of ``NotAlone`` says."""
    with begin(engine) as connection:
        connection.execute(update(schema.fences).where(schema.fences.c.name == "gateways").values(fence=0))


def test_whoever_goes_on_alone_or_comes_after_it_refuses_what_others_have_had(
    database: Any, tmp_path: Path
) -> None:
    engine = make_engine(database.config, tmp_path)
    assert take_alone(engine, "q2", 4).refused == ()  # never one of several
    Fence(5, "n1").take(engine, "q1", 0, 0)
    with pytest.raises(NotAlone):
        take_alone(engine, "q2", 4)
    _leave_others(engine)
    for _ in range(2):
        former = take_alone(engine, "q2", 4)
        assert (former.refused, former.newest_seq) == (((0, 4),), 4)
    assert take_alone(engine, "q2", 6).refused == ((0, 4),)  # what it has got since is its own
    assert Fence(6, "n1").take(engine, "q1", 7, 0).refused == ((0, 7),)
    _leave_others(engine)
    take_alone(engine, "q2", 6)
    # One of several again: what came while it was alone, 7 and 8, is its own.
    assert Fence(7, "n2").take(engine, "q2", 8, 0).refused == ((0, 4), (4, 6))
    engine.dispose()


def test_a_server_that_runs_alone_notices_that_another_one_has_begun_to_act(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[dict[str, Any]] = []
    monkeypatch.setattr("sla_server.db.fence.raise_event", raised.append)
    engine = make_engine(database.config, tmp_path)
    watch = OthersWatch(engine)
    watch.check(1)
    assert (watch.problem, raised) == (None, [])
    Fence(5, "n1").take(engine, "q1", 0, 0)
    for now_us in (2, 3):
        watch.check(now_us)
        assert watch.problem is not None
        assert (watch.problem.what, watch.problem.since_us) == (NOT_ALONE, 2)
        assert "that of node n1 acted last" in watch.problem.reason
    assert [(row["kind"], row["severity"]) for row in raised] == [(NOT_ALONE, "critical")]  # once
    _leave_others(engine)
    watch.check(4)
    assert watch.problem is None
    Fence(6, "n2").take(engine, "q2", 0, 0)
    watch.check(5)
    assert len(raised) == 2
    assert raised[0]["event_id"] != raised[1]["event_id"]
    engine.dispose()


def test_the_lease_of_a_database_is_that_of_one_cluster(database: Any, tmp_path: Path) -> None:
    """Two nodes were given `cluster init` instead of one `init` and one `join`."""
    engine = make_engine(database.config, tmp_path)
    first, other = Fence(5, "n1", cluster="c1"), Fence(9, "n2", cluster="c2")
    first.take(engine, "q1", 0, 1)
    for refused in (other, Fence(3, "n2", cluster="c2")):  # by its clock it may be the lower one
        for ask in (refused.check, lambda engine, each=refused: each.take(engine, "q2", 0, 2)):
            with pytest.raises(OtherCluster, match="sla cluster invite n2") as caught:
                ask(engine)
            assert (caught.value.exit_status, caught.value.server) == (78, "n1")
    first.check(engine)
    Fence(7, "n3", cluster="c1").take(engine, "q3", 0, 3)  # a node that has joined
    Fence(8, "n4").take(engine, "q4", 0, 4)  # whose node is of a former release, and does not say
    with begin(engine) as connection:
        connection.execute(delete(schema.fences).where(schema.fences.c.name == "cluster"))
    other.take(engine, "q2", 0, 5)  # the first cluster was lost with all its nodes
    with pytest.raises(OtherCluster):
        Fence(10, "n1", cluster="c1").take(engine, "q1", 0, 6)
    engine.dispose()


def test_a_new_queue_within_a_term_is_the_one_that_writes_from_then_on(database: Any, tmp_path: Path) -> None:
    """As after its disk was replaced; else each later start refused what its own queue holds."""
    engine = make_engine(database.config, tmp_path)
    Fence(5, "n1").take(engine, "q1", 0, 0)
    assert Fence(5, "n1").take(engine, "q2", 0, 0).refused == ()
    assert Fence(5, "n1").take(engine, "q2", 9, 0).refused == ()
    engine.dispose()


def test_a_machine_that_was_copied_with_its_queue_does_not_act_with_it(database: Any, tmp_path: Path) -> None:
    """Cursors go by the queue's id: each of both would pass what only the other one has."""
    engine = make_engine(database.config, tmp_path)
    Fence(5, "n1").take(engine, "q1", 8, 0)
    for _ in range(2):
        with pytest.raises(QueueCopied, match="copy of that of node n1") as caught:
            Fence(6, "n2").take(engine, "q1", 5, 0)
        assert caught.value.exit_status == 78
    Fence(7, "n2").take(engine, "q2", 0, 0)  # its own, made again
    Fence(8, "n1").take(engine, "q1", 8, 0)
    engine.dispose()


@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.db)], indirect=True)
def test_a_machine_that_dies_as_it_takes_the_fence_holds_nobody_up(database: Any, tmp_path: Path) -> None:
    dying, engine = make_engine(database.config, tmp_path), make_engine(database.config, tmp_path)
    fence = Fence(5, "n1", lease_s=2)
    fence.limit(dying)
    with dying.connect() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": FENCE_LOCK})
        _taken(engine, Fence(6, "n2"), "q2")
        connection.invalidate()
    dying.dispose()
    engine.dispose()
