"""Reports in both databases: issued once, revised, chained, and never changed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from sla_server import jobs
from sla_server.config import load
from sla_server.db.engine import begin, make_engine
from sla_server.db.errors import DbError
from sla_server.db.ingest.transaction import mark_alive
from sla_server.db.queries.reports import RUN_COLUMNS, SINGLE, ReportQueries
from sla_server.db.reports import NO_REPORT, ReportStore
from sla_server.db.schema import agreements, audit, slices
from sla_server.errors import JobRunning
from sla_server.jobs import only_one
from sla_server.policy_jobs.report_inputs_job import SUMS
from sla_server.policy_jobs.stored_results import encoded
from sla_server.reports import job
from sla_server.reports.compute import compute_report
from sla_server.reports.errors import NothingToReport, NotYetFinal, SumsDiffer
from sla_server.reports.inputs import read_inputs
from sla_server.reports.issue import due_periods, issue
from sla_server.reports.job import describe, issue_due, run
from sla_server.reports.sums import SUMS_JOB, SumsCheck
from sla_server.reports.verify import taken_away, verify_chain, verify_report
from sla_server.services.reports import SINCE_US, announcement
from tests.support.agreements import simple
from tests.support.reports import DAY_US, MINUTE_US, at_us, slice_row, version_row

DAY = at_us("2026-10-03")
AFTER = at_us("2026-10-06")
DAILY = simple(extra="  window: {type: calendar, period: day}\n")


def put(engine: Any, table: Any, rows: list[dict[str, Any]]) -> None:
    names = {column.name for column in table.c}
    with begin(engine) as connection:
        connection.execute(
            table.insert(), [{key: value for key, value in row.items() if key in names} for row in rows]
        )


@pytest.fixture
def store(database: Any) -> Iterator[ReportStore]:
    """Two days of the agreement ``gold``, of which the second has three bad minutes."""
    engine = make_engine(database.config, database.data_dir)
    row = version_row(DAILY, 1, DAY - DAY_US, document=DAILY)
    put(engine, agreements, [{**row, "spec": json.dumps(row["spec"])}])
    bad = {1500, 1501, 1700}
    put(engine, slices, [
        slice_row(DAY + minute * MINUTE_US, "bad" if minute in bad else "good") for minute in range(2880)
    ])  # fmt: skip
    made = ReportStore(engine)
    yield made
    made.close()


def issued(store: ReportStore, period: str = "2026-10-03", now_us: int = AFTER, **more: Any) -> Any:
    return issue(store, "gold", period, "ann", now_us, **more)


def checked(store: ReportStore, report_id: str) -> list[tuple[str, str]]:
    row = store.reader.reports.issued_report(report_id)
    assert row is not None
    before = store.reader.reports.issued_report(str(row["number"] - 1))
    return [(each.meaning, each.where) for each in verify_report(store.reader, row, before).findings]


def test_reports_are_a_chain_and_each_is_what_the_slices_give(store: ReportStore) -> None:
    first, second = issued(store), issued(store, "2026-10-04", AFTER + DAY_US)
    assert (first["number"], first["previous"], first["report_id"]) == (1, NO_REPORT, "gold-2026-10-03")
    assert (second["number"], second["previous"]) == (2, first["digest"])
    assert second["summary"]["objectives"][0]["compliance"] == 1437 / 1440
    assert [found.is_good for found in verify_chain(store.reader)] == [True, True]
    assert checked(store, "gold-2026-10-03") == []
    assert checked(store, "2") == []


def test_reports_are_found_by_agreements_and_agreements_by_having_ended(store: ReportStore) -> None:
    first = issued(store)
    asked = store.reader.reports
    assert [row["number"] for row in asked.issued(5, None, None, ["gold", "other"])] == [1]
    assert [row["number"] for row in asked.issued(5, match="OL", period="2026-1")] == [1]
    assert asked.issued(5, match="o_d") == asked.issued(5, period="2025") == [], "% and _ are letters"
    assert asked.issued(5, None, None, ["other"]) == asked.issued(5, None, None, []) == []
    assert asked.report_bodies([1, 2]) == {1: first["body"]}
    assert asked.ended_agreements() == []
    engine = store.reader._engine
    with begin(engine) as connection:
        connection.execute(agreements.update().values(ended_us=AFTER))
    (row,) = asked.ended_agreements()
    assert (row["name"], row["spec"]["metadata"]["name"]) == ("gold", "gold")
    again = version_row(DAILY, 2, AFTER + DAY_US, document=DAILY)
    put(engine, agreements, [{**again, "spec": json.dumps(again["spec"])}])
    assert asked.ended_agreements() == [], "it is in force again"


def test_a_report_that_says_the_same_is_not_issued_again_and_a_revision_says_what_changed(
    store: ReportStore,
) -> None:
    first = issued(store)
    assert issued(store, now_us=AFTER + DAY_US) is None
    late = AFTER + DAY_US
    put(store._engine, slices, [slice_row(DAY, "bad", revision=1, judged_us=late)])
    assert checked(store, first["report_id"]) == [("superseded", "slices")]
    second = issued(store, now_us=late)
    assert (second["report_id"], second["revises"]) == ("gold-2026-10-03-r1", "gold-2026-10-03")
    body = json.loads(second["body"])
    changed = {each["field"]: (each["before"], each["after"]) for each in body["revised"]}
    assert changed["objectives[latency].slices.bad"] == (0, 1)
    assert body["content"]["objectives"][0]["slices"]["bad"] == 1
    stored = store.reader.reports.issued_report(first["report_id"])
    assert stored is not None
    assert stored["body"] == first["body"]
    assert checked(store, second["report_id"]) == []


def sums_of_the_job(store: ReportStore, made_us: int = AFTER) -> None:
    """As ``report_inputs_job`` stores them; that Spark counts as SQL does is in ``test_job``."""
    rows = [
        {"name": "gold", "objective": "latency", "period": text, **row}
        for text, from_us in (("2026-10-03", DAY), ("2026-10-04", DAY + DAY_US))
        for row in store.reader.slice_sums("gold", "latency", from_us, from_us + DAY_US)
    ]
    table = pa.Table.from_pylist(
        [{**row, "ours": bool(row["ours"]), "inexact": bool(row["inexact"])} for row in rows], schema=SUMS
    )
    store.jobs.results.replace(SUMS_JOB, made_us, "", encoded(table))


def test_a_report_is_compared_with_the_sums_of_the_job_before_it_is_issued(store: ReportStore) -> None:
    alone = SumsCheck.of(store.reader)
    assert issued(store, sums=alone) is not None, "without them it is issued as before"
    assert (alone.as_dict(), alone.words) == ({"compared": 0, "outdated": 0, "without": 1}, "")
    sums_of_the_job(store)
    sums = SumsCheck.of(store.reader)
    assert issued(store, "2026-10-04", AFTER + DAY_US, sums=sums) is not None
    assert sums.words == "1 with the sums of report-inputs"
    put(store._engine, slices, [slice_row(DAY, "bad", revision=1, judged_us=AFTER + DAY_US)])
    assert issued(store, now_us=AFTER + DAY_US, sums=sums)["revision"] == 1
    assert sums.as_dict() == {"compared": 1, "outdated": 1, "without": 0}
    assert "judged since" in sums.words


def test_a_report_that_is_alone_with_its_sums_is_not_issued(
    store: ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_of_the_job(store)
    read = store.reader.reports.slices_as_of

    # A defect in how a report reads its slices: it misses the last one.
    def missing(*args: Any, **more: Any) -> list[dict[str, Any]]:
        *rows, last = read(*args, **more)
        return [*rows, {**last, "slices": last["slices"] - 1}]

    monkeypatch.setattr(store.reader.reports, "slices_as_of", missing)
    with pytest.raises(SumsDiffer, match="1,439 slices of objective latency, and 1,440 are stored"):
        issued(store, sums=SumsCheck.of(store.reader))
    assert store.reader.reports.issued_periods("gold") == set()


def test_sums_from_before_the_end_of_a_period_say_nothing_of_it(store: ReportStore) -> None:
    sums_of_the_job(store, DAY + DAY_US - 1)
    sums = SumsCheck.of(store.reader)
    assert issued(store, sums=sums) is not None
    assert sums.as_dict() == {"compared": 0, "outdated": 0, "without": 1}


def test_one_row_of_each_slice_is_read_however_often_it_was_judged(store: ReportStore) -> None:
    def read(as_of_us: int, limit: int = 100) -> list[tuple[int, int]]:
        rows = store.reader.reports.slices_as_of("gold", "latency", DAY, DAY + DAY_US, as_of_us, limit)
        return [(row["start_us"], row["revision"]) for row in rows]

    put(store._engine, slices, [
        slice_row(DAY + minute * MINUTE_US, revision=revision, judged_us=AFTER + revision)
        for minute in (0, 1) for revision in range(1, 40)
    ])  # fmt: skip
    assert len(read(AFTER + 99, 5000)) == 1440
    assert len(read(AFTER + 99, 2)) == 2
    assert read(AFTER + 99, 5000)[:3] == [(DAY, 39), (DAY + MINUTE_US, 39), (DAY + 2 * MINUTE_US, 0)]
    assert read(AFTER + 7, 5000)[:2] == [(DAY, 7), (DAY + MINUTE_US, 7)]
    assert read(AFTER, 5000)[0] == (DAY, 0)
    counted = [
        store.reader.reports.revised_after("gold", "latency", DAY, DAY + DAY_US, AFTER + at) for at in (7, 39)
    ]
    assert counted == [2, 0]
    assert store.reader.reports.judged_until(AFTER) == DAY + 2 * DAY_US
    assert store.reader.reports.judged_until(AFTER, ("gold", "latency")) == DAY + 2 * DAY_US
    assert store.reader.reports.judged_until(AFTER, ("gold", "other")) == 0
    assert store.reader.reports.judged_until(DAY) == 0


def test_the_server_s_mark_that_it_was_up_is_read(store: ReportStore, database: Any) -> None:
    assert store.reader.reports.alive_until() == 0
    engine = make_engine(database.config, database.data_dir)
    mark_alive(engine, AFTER)
    engine.dispose()
    assert store.reader.reports.alive_until() == AFTER


def test_a_row_of_an_issued_report_cannot_be_changed_or_taken_away(store: ReportStore) -> None:
    issued(store)
    for statement in ("UPDATE reports SET body = ''", "DELETE FROM reports"):
        with pytest.raises(DbError), begin(store._engine) as connection:
            connection.execute(text(statement))
    assert [found.is_good for found in verify_chain(store.reader)] == [True]


def test_what_was_tampered_with_is_named(store: ReportStore) -> None:
    for period in ("2026-10-02", "2026-10-03", "2026-10-04"):
        issued(store, period, AFTER + DAY_US)
    with begin(store._engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("ALTER TABLE reports DISABLE TRIGGER reports_never_change"))
        else:
            connection.execute(text("DROP TRIGGER reports_never_update"))
            connection.execute(text("DROP TRIGGER reports_never_delete"))
        connection.execute(text("DELETE FROM reports WHERE number = 1"))
        body = connection.execute(text("SELECT body FROM reports WHERE number = 3")).scalar_one()
        changed = {"body": body.replace('"bad":3,', '"bad":0,')}
        connection.execute(text("UPDATE reports SET body = :body WHERE number = 3"), changed)
    found = {each.report_id: [one.where for one in each.findings] for each in verify_chain(store.reader)}
    assert found == {"gold-2026-10-03": ["number"], "gold-2026-10-04": ["digest"]}
    wheres = dict(reversed(each) for each in checked(store, "gold-2026-10-04"))
    assert wheres["digest"] == "broken"
    assert wheres["objectives[latency].slices.bad"] == "differs"
    with begin(store._engine) as connection:
        connection.execute(text("UPDATE slices SET state = 'good' WHERE state = 'bad' AND start_us < :at"),
                           {"at": DAY + 1501 * MINUTE_US})  # fmt: skip
    assert ("differs", "objectives[latency].slices.good") in checked(store, "gold-2026-10-04")


def test_the_last_report_that_was_taken_away_is_named(store: ReportStore) -> None:
    for period in ("2026-10-03", "2026-10-04"):
        issued(store, period, AFTER + DAY_US)
    for row in store.reader.reports.unannounced(0, AFTER - SINCE_US, 50):
        (_, audited), _ = announcement(row)
        put(store._engine, audit, [{**audited, "before": "", "after": json.dumps(audited["after"])}])
    assert list(taken_away(store.reader)) == []
    with begin(store._engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("ALTER TABLE reports DISABLE TRIGGER reports_never_change"))
        else:
            connection.execute(text("DROP TRIGGER reports_never_delete"))
        connection.execute(text("DELETE FROM reports WHERE number = 2"))
    assert [found.is_good for found in verify_chain(store.reader)] == [True], "what is left is a chain"
    (gone,) = taken_away(store.reader)
    assert (gone.report_id, gone.is_good) == ("gold-2026-10-04", False)
    assert gone.findings[0].text == "it was issued as number 2, and is no longer there"


def test_what_is_due_is_issued_once_and_not_before_late_data_can_come(store: ReportStore) -> None:
    assert list(due_periods(store.reader, "own", DAY + 3 * DAY_US - 1)) == [("gold", "2026-10-02")]
    assert list(due_periods(store.reader, "own", DAY + 3 * DAY_US)) == [
        ("gold", "2026-10-02"), ("gold", "2026-10-03"),
    ]  # fmt: skip
    rows, refused = issue_due(store, "own", "schedule", DAY + 3 * DAY_US)
    assert ([row["report_id"] for row in rows], refused) == (["gold-2026-10-02", "gold-2026-10-03"], [])
    assert issue_due(store, "own", "schedule", DAY + 3 * DAY_US) == ([], [])
    assert list(due_periods(store.reader, "month", DAY + 3 * DAY_US)) == []
    with pytest.raises(NotYetFinal, match="--preliminary"):
        issued(store, "2026-10-04", DAY + 3 * DAY_US)
    assert issued(store, "2026-10-04", DAY + 3 * DAY_US, may_be_preliminary=True)["is_preliminary"]
    (final,), _ = issue_due(store, "own", "schedule", DAY + 4 * DAY_US)
    assert (final["report_id"], final["revises"]) == ("gold-2026-10-04-r1", "gold-2026-10-04")
    assert not final["is_preliminary"]
    assert issue_due(store, "own", "schedule", DAY + 4 * DAY_US) == ([], [])


def test_each_is_announced_once(store: ReportStore) -> None:
    issued(store)
    (row,) = store.reader.reports.unannounced(0, AFTER - SINCE_US, 50)
    rows = announcement(row, "https://sla.example/")
    (_, audited), (_, event) = rows
    assert event["text"].startswith("the report of gold for 2026-10-03 was issued as gold-2026-10-03: ")
    assert event["details"]["link"] == "https://sla.example/reports/gold-2026-10-03"
    assert announcement(row, "https://sla.example/") == rows
    put(store._engine, audit, [{**audited, "before": "", "after": json.dumps(audited["after"])}])
    assert store.reader.reports.unannounced(0, AFTER - SINCE_US, 50) == []
    assert checked(store, "gold-2026-10-03") == []


def test_the_job_issues_what_is_due_and_notes_its_run(
    store: ReportStore, database: Any, tmp_path: Path
) -> None:
    config = load(None).model_copy(update={"data_dir": database.data_dir, "database": database.config})
    config.reports.period = "own"
    result = run(config, "ann", AFTER)
    assert [row["report_id"] for row in result["issued"]] == ["gold-2026-10-02", "gold-2026-10-03"]
    assert describe(result).startswith("gold-2026-10-02 issued as number 1: latency not judged")
    again = run(config, "ann", AFTER)
    assert describe(again).startswith("nothing to issue")
    (second, first) = store.reader.jobs()
    assert (first["kind"], first["state"], first["text"], first["rows"]) == (
        "reports", "done", "2 reports issued", 2,
    )  # fmt: skip
    assert second["rows"] == 0
    with pytest.raises(NothingToReport):
        run(config, "ann", AFTER, agreement="nobody")
    assert store.reader.jobs(1)[0]["state"] == "failed"
    with only_one(database.data_dir / "report-job" / "lock", "report"), pytest.raises(JobRunning):
        run(config, "ann", AFTER)


def test_a_job_that_is_stopped_notes_it_and_ends_as_one(
    store: ReportStore, database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(None).model_copy(update={"data_dir": database.data_dir, "database": database.config})
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(jobs.configuration, "load", lambda _path: config)
    # The handler runs before the next step of Python.
    monkeypatch.setattr(job, "issue_due", lambda *_args: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, lambda *_: None)  # without the job's own handler it would end the tests
    try:
        assert CliRunner().invoke(job.main, []).exit_code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    (noted,) = store.reader.jobs()
    assert (noted["state"], noted["text"], noted["exit_status"]) == ("failed", "it was stopped", 143)


def test_the_configuration_has_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "sla.toml"
    path.write_text('[reports]\nschedule = "03:00"\nperiod = "own"\n')
    assert load(path).reports.schedule == "03:00"


@pytest.mark.parametrize(
    "parts",
    [
        [(b"no table", 1)],
        encoded(pa.table({"name": ["gold"], "objective": ["latency"], "period": ["2026-10-03"]})),
    ],
    ids=["damaged", "columns of another release"],
)
def test_sums_that_cannot_be_read_are_none(store: ReportStore, parts: list[tuple[bytes, int]]) -> None:
    store.jobs.results.replace(SUMS_JOB, AFTER, "", parts)
    sums = SumsCheck.of(store.reader)
    assert issued(store, sums=sums) is not None
    assert sums.as_dict() == {"compared": 0, "outdated": 0, "without": 1}


STATES = ("good", "good", "good", "good", "bad", "no_data", "not_applicable", "excluded")


def mixed(seed: int) -> list[dict[str, Any]]:
    """Slices of every state in runs of some, with holes, revisions, other versions, lengths and reasons."""
    chosen = random.Random(seed)
    rows, at = [], DAY
    for _ in range(60):
        state, version = chosen.choice(STATES), chosen.choice((1, 1, 1, 2))
        length_us = chosen.choice((MINUTE_US, MINUTE_US, 5 * MINUTE_US))
        more = {
            "version": version,
            "length_us": length_us,
            "objective": "mixed",
            "ours": chosen.random() < 0.2,
        }
        more |= {"inexact": chosen.random() < 0.1, "reason": chosen.choice(("", "slow", "few-ios"))}
        for _ in range(chosen.choice((1, 2, 30))):
            rows.append(slice_row(at, state, **more))
            if chosen.random() < 0.05:
                again = chosen.choice(STATES)
                rows.append({**slice_row(at, again, **more), "revision": 1, "judged_us": at + DAY_US})
            at += length_us
        at += chosen.choice((0, 0, 0, 7 * MINUTE_US))
    return rows


def one_by_one(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The slices of a run."""
    starts = (row["start_us"] + number * row["length_us"] for number in range(row["slices"]))
    return [{**row, "start_us": start_us, "slices": 1} for start_us in starts]


def follows(former: dict[str, Any] | None, row: dict[str, Any]) -> bool:
    """Whether a slice is alike and begins where the former one ends."""
    return former is not None and {**former, "start_us": former["start_us"] + former["length_us"]} == row


@pytest.mark.parametrize("seed", range(4))
def test_slices_read_as_runs_are_those_read_one_by_one(store: ReportStore, seed: int) -> None:
    rows = mixed(seed)
    put(store._engine, slices, rows)
    asked = store.reader.reports
    end_us = max(row["start_us"] for row in rows)
    assert (
        asked.slices_as_of("gold", "mixed", end_us + DAY_US, end_us + 2 * DAY_US, AFTER, 9, whole=False) == []
    )
    assert asked.report_objectives("gold", DAY, end_us) == ["latency", "mixed"]
    assert asked.report_objectives("gold", DAY + 40 * DAY_US, DAY + 41 * DAY_US) == []
    for from_us, to_us, as_of_us in (
        (DAY, end_us + 1, AFTER * 2),
        (DAY + 95 * MINUTE_US, end_us, DAY + DAY_US),
    ):
        where = "gold", "mixed", from_us, to_us, as_of_us, 100_000
        whole = asked.slices_as_of(*where)
        assert {row["slices"] for row in whole} == {1}
        expected = [
            row if row["state"] in SINGLE else {name: row[name] for name in (*RUN_COLUMNS, "slices")}
            for row in whole
        ]
        found = asked.slices_as_of(*where, whole=False)
        assert [one for row in found for one in one_by_one(row)] == expected
        assert len(found) == sum(
            one["state"] in SINGLE or not follows(former, one)
            for former, one in zip([None, *expected], expected, strict=False)
        ), "no run goes on in the next row"


def test_a_report_reads_runs_of_slices_and_a_check_every_one(store: ReportStore) -> None:
    """What a month's report takes is nearly all its 43,200 slices, so it is counted."""
    read: list[int] = []

    def rows(statement: Any) -> list[dict[str, Any]]:
        found = store.reader._rows(statement)
        read.append(len(found))
        return found

    store.reader.reports = ReportQueries(rows)
    found = compute_report(read_inputs(store.reader, "gold", "2026-10-04", AFTER))
    (objective,) = found.objectives
    assert (objective.slices.good, objective.slices.bad) == (1437, 3)
    assert sum(read) <= 20, "of 1,440 slices the three bad ones, and where a run of good ones begins or ends"
    assert len(read) <= 12, "statements"
    read.clear()
    read_inputs(store.reader, "gold", "2026-10-04", AFTER, to_verify=True)
    assert sum(read) > 1440
