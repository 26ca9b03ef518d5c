"""The job as a command: its exit statuses, and where Spark's own words go. Nothing here starts Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JError
from pyspark.errors import PySparkRuntimeError

from sla_server import config as configuration
from sla_server import jobs
from sla_server.cli.main import cli
from sla_server.config import PolicyJobConfig
from sla_server.db import migrate
from sla_server.db.engine import make_engine
from sla_server.db.errors import DatabaseUnavailable, NoRightToPublish
from sla_server.db.policies import PolicyStore, open_policies
from sla_server.db.statistics import Files
from sla_server.errors import JobRunning
from sla_server.policy_jobs import errors, inputs, job, session, spark_run
from sla_server.policy_jobs.session import (
    FEW,
    FOR_FEW,
    FOR_SOME,
    JAVA_FOR_FEW,
    RESULTS,
    SOME,
    settings,
    stderr_to,
)


def test_what_spark_and_its_children_say_goes_to_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spark.log"
    path.write_text("of the run before\n")
    os.write(2, b"before\n")
    with stderr_to(path):
        os.write(2, b"WARN Utils: your hostname\n")
        subprocess.run(["sh", "-c", "echo WARNING: incubator modules >&2"], check=True)
    os.write(2, b"after\n")
    assert path.read_text() == "WARN Utils: your hostname\nWARNING: incubator modules\n"
    assert capfd.readouterr().err == "before\nafter\n"


def test_stderr_is_back_after_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), stderr_to(tmp_path / "spark.log"):
        raise ZeroDivisionError
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"


def test_every_failure_has_a_status_of_its_own() -> None:
    lock = Path("lock")
    failures = [errors.NoJava([]), errors.SparkFailed("x", lock), JobRunning(lock, "policy")]
    failures.append(errors.NothingToLearn(7))
    assert [jobs.status_of(error) for error in failures] == [69, 70, 79, 80]
    assert jobs.status_of(DatabaseUnavailable("sqlite:///x", "locked")) == 69


def test_a_second_run_says_so_and_ends_with_79(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    with jobs.only_one(tmp_path / "data" / "policy-job" / "lock", "policy"):
        (tmp_path / "data" / "sla.db").touch()
        told = CliRunner().invoke(job.main, ["--config", str(path)])
    assert told.exit_code == 79
    assert "another policy job is running" in capfd.readouterr().err


@pytest.mark.parametrize("ends", [errors.SparkFailed("no memory", Path("spark.log")), KeyboardInterrupt()])
def test_nothing_of_spark_is_left_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    scratch = tmp_path / "policy-job" / "scratch"
    (scratch / "spark-of-a-run-that-was-killed").mkdir(parents=True)
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    config = configuration.load(None)
    migrate.upgrade(make_engine(config.database, tmp_path))
    found: list[bool] = []

    def compute(*_: Any) -> NoReturn:
        found.append((scratch / "spark-of-a-run-that-was-killed").exists())
        (scratch / "spark-1" / "blockmgr").mkdir(parents=True)
        raise ends

    snapshot = SimpleNamespace(
        rows=lambda _table: 1, slot_files=Files(), hour_files=Files(), cut_files=[], close=lambda: None
    )
    monkeypatch.setattr(spark_run, "StatisticsSnapshot", lambda *_: snapshot)
    monkeypatch.setattr(inputs, "read", lambda *_: SimpleNamespace(bin_us=0))
    monkeypatch.setattr(spark_run, "on_spark", compute)
    with pytest.raises(type(ends)):
        job.run(config, "me")
    assert found == [False]
    assert not scratch.exists()
    with contextlib.closing(open_policies(config.database, tmp_path)) as store:
        (row,) = store.reader.jobs()
    assert (row["kind"], row["state"], row["who"], row["rows"]) == ("policy", "failed", "me", 2)
    assert row["exit_status"] == (70 if isinstance(ends, errors.SparkFailed) else 130)
    assert row["ended_us"] >= row["started_us"]


def test_a_run_that_the_server_stops_is_not_shown_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLA__DATA_DIR", str(tmp_path))
    config = configuration.load(None)
    migrate.upgrade(make_engine(config.database, tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    told_to_end: list[str] = []

    def compute(*_: Any) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("it was not stopped")

    snapshot = SimpleNamespace(
        rows=lambda _table: 1, slot_files=Files(), hour_files=Files(), cut_files=[], close=lambda: None
    )
    monkeypatch.setattr(spark_run, "StatisticsSnapshot", lambda *_: snapshot)
    monkeypatch.setattr(inputs, "read", lambda *_: SimpleNamespace(bin_us=0))
    monkeypatch.setattr(spark_run, "on_spark", compute)
    # The real one would end every Java of this process, and one is the session of the other tests.
    java = SimpleNamespace(kill=lambda: told_to_end.append("java"))
    monkeypatch.setattr(session, "_java_children", lambda: [java])
    assert CliRunner().invoke(job.main, []).exit_code == 128 + signal.SIGTERM
    assert told_to_end == ["java"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.alarm(0) == 0
    assert not (tmp_path / "policy-job" / "scratch").exists()
    with contextlib.closing(open_policies(config.database, tmp_path)) as store:
        (row,) = store.reader.jobs()
    assert (row["state"], row["exit_status"], row["text"]) == (
        "failed",
        128 + signal.SIGTERM,
        "it was stopped",
    )


def test_a_failure_of_spark_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gateway(*_: Any) -> NoReturn:
        raise PySparkRuntimeError("Java gateway process exited before sending its port number\nmore")

    monkeypatch.setattr(spark_run, "build_session", no_gateway)
    action: Any = None  # Spark fails before it is called
    with pytest.raises(errors.SparkFailed, match=r"its port number\. Its log is .*spark\.log") as caught:
        spark_run.on_spark(PolicyJobConfig(), tmp_path, action, tmp_path / "spark.log", 1)
    assert "more" not in str(caught.value)


def test_java_that_was_killed_is_a_failure_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> NoReturn:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(spark_run, "build_session", lambda *_: SimpleNamespace(stop=refused))
    with pytest.raises(errors.SparkFailed, match="its Java process has ended"):
        spark_run.on_spark(PolicyJobConfig(), tmp_path, refused, tmp_path / "spark.log", 1)


@pytest.mark.parametrize("ends", [SystemExit(143), KeyboardInterrupt()])
def test_a_job_that_is_stopped_is_no_failure_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    """Java may be gone, or busy, by the time that Spark is told to stop."""

    def stop() -> NoReturn:
        raise Py4JError("SparkSession does not exist in the JVM")

    def action(_spark: Any) -> NoReturn:
        raise ends

    monkeypatch.setattr(spark_run, "build_session", lambda *_: SimpleNamespace(stop=stop))
    with pytest.raises(type(ends)):
        spark_run.on_spark(PolicyJobConfig(), tmp_path, action, tmp_path / "spark.log", 1)


@pytest.mark.parametrize(
    ("master", "is_loopback"),
    [("local[*]", True), ("local-cluster[2,1,1024]", True), ("spark://host:7077", False), ("yarn", False)],
)
def test_executors_on_other_machines_can_call_the_driver(
    master: str, is_loopback: bool, tmp_path: Path
) -> None:
    given = settings(master, tmp_path, "2g")
    assert (given.get("spark.driver.host") == "127.0.0.1") is is_loopback
    assert ("spark.driver.bindAddress" in given) is is_loopback
    assert given["spark.driver.memory"] == "2g"


def test_of_few_rows_nothing_is_compiled_twice(tmp_path: Path) -> None:
    """On executors as well; what results depend on is the same."""
    few, many = settings("spark://host:7077", tmp_path, "2g", FEW - 1), settings("yarn", tmp_path, "2g", SOME)
    some = settings("spark://host:7077", tmp_path, "2g", FEW)
    assert FOR_FEW.items() <= few.items()
    assert not FOR_FEW.items() & many.items()
    assert RESULTS.items() <= few.items() & many.items()
    for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        assert JAVA_FOR_FEW in few[name]
        assert JAVA_FOR_FEW not in many.get(name, "")
        assert JAVA_FOR_FEW in some[name]
    assert not FOR_FEW.items() & some.items(), "queries are compiled all the same"
    assert FOR_SOME.items() <= some.items()
    assert not FOR_SOME.items() & many.items()
    assert "java.io.tmpdir" in few["spark.driver.extraJavaOptions"]


@pytest.mark.parametrize("kind", ["slot_files", "missed_files", "hour_files"])
def test_files_that_spark_has_no_connector_for_are_refused_before_any_work(kind: str) -> None:
    def load(path: str) -> NoReturn:
        raise PySparkRuntimeError(f"No FileSystem for scheme of {path}\nmore")

    reading = SimpleNamespace(format=lambda _form: SimpleNamespace(load=load))
    spark: Any = SimpleNamespace(read=reading)  # nothing else of it may be asked for
    files = dict.fromkeys(("slot_files", "missed_files", "hour_files"), Files())
    snapshot: Any = SimpleNamespace(**files | {kind: Files(["s3://bucket/rollups/a.parquet"], 1)})
    with pytest.raises(errors.FilesNotForSpark, match="No FileSystem for scheme of s3a://bucket") as refused:
        inputs.statistics(spark, snapshot)
    assert jobs.status_of(refused.value) == 69
    assert "more" not in str(refused.value)


def test_many_rows_are_summed_in_parts_that_fit_into_memory(tmp_path: Path) -> None:
    """Whatever number of cores the driver has: executors of a cluster have others."""
    usual = 2 * (os.cpu_count() or 2)
    for rows, parts in ((SOME, usual), (100_000_000, max(usual, 40)), (10**10, 4000)):
        given = settings("spark://host:7077", tmp_path, "2g", rows)
        assert given["spark.sql.shuffle.partitions"] == str(parts)


def test_the_right_to_publish_is_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sla.db").touch()

    def refuse(_store: PolicyStore) -> NoReturn:
        raise NoRightToPublish("db", ["policies"])

    monkeypatch.setattr(PolicyStore, "check_may_publish", refuse)
    told = CliRunner().invoke(job.main, ["--config", str(path)])
    assert told.exit_code == 77  # an empty SQLite file would be told as such: nothing was read
    assert "may not insert into policies. Run sql/roles.sql" in capfd.readouterr().err


def test_before_the_first_start_of_a_server_nothing_is_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    told = CliRunner().invoke(job.main, ["--config", str(path)])
    seen = CliRunner().invoke(cli, ["storage", "status", "--config", str(path)])
    assert (told.exit_code, seen.exit_code) == (69, 69)
    for words in (capfd.readouterr().err, seen.stderr):
        assert "no server has been started here yet" in words
        assert "sla-server start" in words
    assert list(tmp_path.iterdir()) == [path]
