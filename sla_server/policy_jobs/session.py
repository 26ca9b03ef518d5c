"""Builds the Spark session; the only place that knows where Spark runs.

``master`` comes from configuration: ``local[*]``, ``spark://``, ``yarn``, ``k8s://`` or, with ``sc://``, a
Spark Connect server. Environment that a user's shell may carry for another Spark is scrubbed, so that the
job runs against the installed package.
"""

from __future__ import annotations

import os
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
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("sla-policy")
    if master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    os.environ["JAVA_HOME"] = str(java_home(work_dir))
    cores = os.cpu_count() or 2
    session: SparkSession = (
        builder.master(master)
        .config("spark.driver.memory", driver_memory)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        # Twice the cores: the rollups are small, 200 (Spark's default) would be nearly all overhead.
        .config("spark.sql.shuffle.partitions", str(2 * cores))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.sql.warehouse.dir", str(work_dir / "warehouse"))
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    return session


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
