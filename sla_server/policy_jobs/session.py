"""Builds the Spark session; the only place that knows where Spark runs.

``master`` comes from configuration: ``local[*]``, ``spark://``, ``yarn``, ``k8s://`` or, with ``sc://``, a
Spark Connect server. Environment that a user's shell may carry for another Spark is scrubbed, so that the
job runs against the installed package.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sla_server.policy_jobs.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS")


def build_session(master: str, work_dir: Path, driver_memory: str = "2g") -> SparkSession:
    """Start or join Spark.

    Raises:
        NoJava: a classic session is asked for and there is no usable Java.
    """
    for variable in _FOREIGN:
        os.environ.pop(variable, None)
    scratch = scratch_of(work_dir)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(scratch)  # of PySpark and the Python workers, as java.io.tmpdir is of Java
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("sla-policy")
    if master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    os.environ["JAVA_HOME"] = str(java_home(work_dir))
    os.environ["SLA_SPARK_DRIVER"] = str(os.getpid())  # Java ends with this process, see java_process
    builder = builder.master(master)
    for key, value in settings(master, work_dir, driver_memory).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def scratch_of(work_dir: Path) -> Path:
    """Where Spark, its Java and Python leave temporary files; the job removes it when it ends and starts."""
    return work_dir / "scratch"


def is_local(master: str) -> bool:
    """Whether executors run on this machine: ``local[...]``, ``local-cluster[...]``."""
    return master.startswith("local")


def settings(master: str, work_dir: Path, driver_memory: str) -> dict[str, str]:
    """What a classic session is started with."""
    temporary = f"-Djava.io.tmpdir={shlex.quote(str(scratch_of(work_dir)))}"
    found = {
        "spark.driver.extraJavaOptions": temporary,
        "spark.driver.memory": driver_memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # Twice the cores: the rollups are small, 200 (Spark's default) would be nearly all overhead.
        "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
    }
    if is_local(master):  # nobody else may call the driver; executors of a cluster must
        found |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        found |= {"spark.local.dir": str(scratch_of(work_dir)), "spark.executor.extraJavaOptions": temporary}
    return found


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Let everything that this process and its children write to stderr meanwhile go to a file, made anew.

    Spark's Java process, and the shell script that starts it, warn of a dozen things that no operator of
    ours can change; who sees them takes the job for broken. The descriptor is redirected, not ``sys.stderr``,
    because the children inherit it; a child that lives on keeps the file.

    Thread: while no other thread of this process writes to stderr.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
