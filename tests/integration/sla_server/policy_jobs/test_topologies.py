"""One job, one policy: on threads, processes, a cluster, over Spark Connect; from SQLite and PostgreSQL.

Each run is the command as a timer starts it, one by ``spark-submit``, on a small fleet whose statistics are
partly in SQL and partly in files. Master, workers and Connect server are those of the installed pyspark
package. The run that the others are compared with has the settings that the job takes for many rows, the
others those for few (``session.FEW``).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from sla_server.db.policies import open_policies
from sla_server.policy_jobs.session import FOR_FEW, JAVA_FOR_FEW, java_home
from tests.integration.sla_server.db.conftest import Database, new_database
from tests.integration.sla_server.db.conftest import migrated_file as migrated_file
from tests.integration.sla_server.db.conftest import migrated_template as migrated_template
from tests.integration.sla_server.db.conftest import postgres as postgres
from tests.support.fleet_history import fill
from tests.support.ports import free_port

PYSPARK = Path(find_spec("pyspark").submodule_search_locations[0])  # type: ignore[union-attr, index]
GENEROUS_S = 300.0
FOR_MANY = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.shuffle.partitions": "4",
}
"""Spark's own settings but for the partitions, which are those of the job on two cores."""


@dataclass
class Fleet:
    """The same statistics in both databases, and what ``local[2]`` made of them as of many rows."""

    sqlite: Database
    postgresql: Database
    expected: dict[str, Any]
    now_us: int


def run_job(
    database: Database,
    master: str,
    now_us: int,
    spark: Mapping[str, str] = MappingProxyType({}),
    program: Sequence[str] = (sys.executable, "-m", "sla_server.policy_jobs.job"),
) -> dict[str, Any]:
    """Run the command; returns what it published that does not depend on when and where it ran.

    ``program``: that starts it; ``spark-submit`` has a master of its own, the file then names another one.
    """
    in_file = "local[7]" if "--master" in program else master
    config = database.data_dir / "server.toml"
    further = "".join(f'"{name}" = "{value}"\n' for name, value in spark.items())
    config.write_text(
        f'data_dir = "{database.data_dir}"\nruntime_dir = "{database.data_dir}/run"\n'
        f'[database]\nurl = "{database.config.url}"\n[policy]\nmaster = "{in_file}"\ndriver_memory = "1g"\n'
        'publish = "always"\nback_test_ios = 1000\n'
        f"[policy.spark]\n{further}"
    )
    done = subprocess.run(
        [
            *program,
            *("--config", str(config), "-o", "json", "--as-of", str(now_us)),
        ],
        env=spark_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    log = database.data_dir / "policy-job" / "spark.log"
    said = done.stdout[-4000:] + done.stderr
    assert done.returncode == 0, said + (log.read_text()[-4000:] if log.exists() else "")
    result = json.loads(done.stdout.splitlines()[-1])  # spark-submit has stderr in it, too
    assert result["job"]["master"] == master
    assert 0 < result["job"]["peak_mib"]["the driver"] < 1024
    with closing(open_policies(database.config, database.data_dir)) as store:
        caps = store.reader.policy_caps(result["version"], limit=100_000)
    return {
        "capacity": result["capacity"],
        "cost_model": result["cost_model"],
        "harms": result["harms"],
        "bursts": result["bursts"],
        "caps": [{key: value for key, value in row.items() if key != "version"} for row in caps],
        "rollups": result["job"]["rollups"],
    }


def spark_environment() -> dict[str, str]:
    return {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(PYSPARK),
    }


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    now_us = time.time_ns() // 1000
    made = {}
    for kind in ("sqlite", "postgresql"):
        made[kind] = new_database(request, kind, tmp_path_factory.mktemp(kind))
        fill(made[kind], now_us)
    expected = run_job(made["sqlite"], "local[2]", now_us, FOR_MANY)
    return Fleet(made["sqlite"], made["postgresql"], expected, now_us)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts programs of Spark; returns the file with what each says. They end with the test."""
    started: list[psutil.Popen] = []
    environment = {**spark_environment(), "JAVA_HOME": str(java_home(tmp_path))}
    environment |= {
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_LOCAL_DIRS": str(tmp_path),
        "SPARK_WORKER_DIR": str(tmp_path),
        "SPARK_DAEMON_JAVA_OPTS": JAVA_FOR_FEW,
        "SPARK_LAUNCHER_OPTS": JAVA_FOR_FEW,  # of the Java that only finds out how to start one
    }

    def start(*command: str) -> Path:
        log = tmp_path / f"{len(started)}.log"
        with log.open("wb") as file:
            started.append(psutil.Popen(command, env=environment, stdout=file, stderr=file))
        return log

    yield start
    for process in started:
        family = [*process.children(recursive=True), process]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # an executor ends with its driver
                each.kill()
        process.wait(GENEROUS_S)  # its children are no longer this process's, and are only looked at
        deadline = time.monotonic() + GENEROUS_S
        while any(runs(each) for each in family):
            assert time.monotonic() < deadline, family
            time.sleep(0.1)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; in a container without an init nothing takes note of the end of an orphan."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"no {text!r} in {log.read_text(errors='replace')[-4000:]}"
        time.sleep(0.2)


def test_the_fleet_has_something_to_find(fleet: Fleet) -> None:
    found = fleet.expected
    assert {(row["backend"], row["sla"]) for row in found["capacity"]} == {
        ("array-1", "gold"),
        ("array-2", "gold"),
        ("array-1", "silver"),
    }
    assert all(row["cost_per_s"] for row in found["capacity"])
    assert all(row["cost_bytes"] and row["cost_write"] for row in found["cost_model"])
    assert {row["backend"] for row in found["harms"]} == {"array-1", "array-2"}
    assert found["bursts"]
    capped = {row["volume"] for row in found["caps"] if row["cost_per_s"] is not None}
    assert capped
    assert capped <= {"batch-1", "batch-2", "web-2"}, "a promised volume is never capped"
    assert {row["volume"] for row in found["caps"]} == {
        f"{name}-{place}" for name in ("erp", "web", "batch") for place in (1, 2)
    }


def test_spark_submit_with_executors_in_processes_of_their_own(fleet: Fleet, tmp_path: Path) -> None:
    """What cannot be sent to another process, or is not installed there, fails here. Rows of PostgreSQL.

    The job takes the Spark of ``spark-submit``: its master, and not the one of the file.
    """
    master, script = "local-cluster[2,1,1024]", find_spec("sla_server.policy_jobs.job").origin  # type: ignore[union-attr]
    of_java = {"JAVA_HOME": str(java_home(tmp_path)), "SPARK_LOCAL_DIRS": str(tmp_path)}
    submit = (
        *(
            "env",
            *(f"{name}={value}" for name, value in of_java.items()),
            str(PYSPARK / "bin" / "spark-submit"),
        ),
        *("--master", master, "--driver-memory", "1g", "--conf", "spark.ui.enabled=false"),
        *("--driver-java-options", JAVA_FOR_FEW, "--conf", f"spark.executor.extraJavaOptions={JAVA_FOR_FEW}"),
        str(script),
    )
    assert run_job(fleet.postgresql, master, fleet.now_us, program=submit) == fleet.expected


def test_a_standalone_cluster_with_two_workers(fleet: Fleet, processes: Callable[..., Path]) -> None:
    program, master, page = str(PYSPARK / "bin" / "spark-class"), free_port(), free_port()
    address = f"spark://127.0.0.1:{master}"
    main = "org.apache.spark.deploy.master.Master"
    log = processes(program, main, "--host", "127.0.0.1", "--port", str(master), "--webui-port", str(page))
    wait_for("I have been elected leader", log)
    worker = (
        "org.apache.spark.deploy.worker.Worker",
        "--host",
        "127.0.0.1",
        "--cores",
        "1",
        "--memory",
        "1g",
    )
    workers = [
        processes(program, *worker, "--webui-port", str(port), address) for port in (free_port(), free_port())
    ]
    for log in workers:
        wait_for("Successfully registered with master", log)
    assert run_job(fleet.postgresql, address, fleet.now_us) == fleet.expected


def test_a_spark_connect_server(fleet: Fleet, processes: Callable[..., Path]) -> None:
    """The client has no Java and no session of the classic kind: nothing may ask for one."""
    port = free_port()
    log = processes(
        str(PYSPARK / "bin" / "spark-submit"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", "local[2]", "--driver-memory", "1g", "--driver-java-options", JAVA_FOR_FEW),
        *("--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false"),
        *(part for name, value in FOR_FEW.items() for part in ("--conf", f"{name}={value}")),
        "spark-internal",  # the client leaves settings to the server
    )
    wait_for("Spark Connect server started", log)
    assert run_job(fleet.postgresql, f"sc://127.0.0.1:{port}", fleet.now_us) == fleet.expected
