"""Finding Java: the order, the refusals, the script that stands in."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.errors import JobRunning
from sla_server.jobs import only_one
from sla_server.policy_jobs import class_archive, make_class_archive, session
from sla_server.policy_jobs.errors import NoJava, SparkFailed


def fake_java(folder: Path, version: str, modules: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in -version) echo \'openjdk version "{version}"\' >&2;;\n'
        f'--list-modules) echo "{modules}";; esac\n'
    )
    program.chmod(0o700)
    return folder


def version_of(home: Path) -> int | None:
    told = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=True)
    return session.major_version(told.stderr)


def test_the_operators_java_home_comes_first(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21.0.1", "java.base jdk.incubator.vector")
    path = fake_java(tmp_path / "other", "17.0.1", "java.base jdk.incubator.vector") / "bin"
    assert (
        session.java_home(tmp_path, {"JAVA_HOME": str(home), "PATH": f"{path}:/bin"})
        == tmp_path / "java-home"
    )
    assert version_of(tmp_path / "java-home") == 21


def test_java_on_path_is_next(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.1", "java.base jdk.incubator.vector")
    assert version_of(session.java_home(tmp_path, {"PATH": f"{home}/bin:/bin"})) == 17


@pytest.mark.parametrize(
    ("version", "modules", "reason"),
    [
        ("11.0.2", "java.base jdk.incubator.vector", "is Java 11"),
        ("21.0.2", "java.base", "lacks the module"),
    ],
)
def test_an_unfit_java_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, modules: str, reason: str
) -> None:
    home = fake_java(tmp_path / "jdk", version, modules)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NoJava, match=reason) as caught:
        session.java_home(tmp_path, {"JAVA_HOME": str(home), "PATH": "/nonexistent"})
    assert "Install the 'policy' extra" in str(caught.value)


def test_the_stand_in_drops_only_the_one_option(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    program = real / "bin" / "java"
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "[$a]"; done\n')
    program.chmod(0o700)
    home = session.write_shim(real, tmp_path, "--add-modules=jdk.incubator.vector")
    done = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=other"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == ["[-Xmx1g]", "[a b]", "[--add-modules=other]"]


def test_without_any_java_the_wheel_stands_in(tmp_path: Path) -> None:
    home = session.java_home(tmp_path, {"PATH": "/nonexistent"})
    assert home.is_relative_to(tmp_path)
    done = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert (session.major_version(done.stderr) or 0) >= session.OLDEST


SLA = """
import sys
from sla_server.cli import policy
job = sys.argv.pop()
policy.command_of = lambda *_: [sys.executable, "-c", job]
from sla_server.cli.__main__ import main
main()
"""
JOB = """
import os, subprocess
os.environ["SLA_SPARK_DRIVER"] = str(os.getpid())
subprocess.run(["bash", "-c", 'exec "$0" "$@"', "{java}", "-Xmx1g"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_ends(tmp_path: Path, number: signal.Signals) -> None:
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    program = real / "bin" / "java"
    program.write_text(
        "#!/bin/sh\ntrap '' INT TERM\n"
        f"echo $$ >{tmp_path}/aside\nmv {tmp_path}/aside {tmp_path}/pid\nread x\n"
    )
    program.chmod(0o700)
    home = session.write_shim(real, tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-c", SLA, "policy", "run", JOB.format(java=home / "bin" / "java")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
        until((tmp_path / "pid").exists, log)
        pid = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{pid}/exe").exists()
        command.send_signal(number)
        status = command.wait(60)
        until(lambda: not is_alive(pid), log)
        assert command.stdin is not None
        command.stdin.close()
    assert status == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in log.read_text()
    assert ("interrupted; the policy in force stays" in log.read_text()) == (number == signal.SIGINT)


def test_a_driver_that_is_gone_starts_no_java(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "jdk", "21.0.1", "java.base")
    home = session.write_shim(real, tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    done = subprocess.run(
        [home / "bin" / "java", "-version"],
        env={**os.environ, "SLA_SPARK_DRIVER": str(gone.pid)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = Deadline(60)
    while not condition():
        assert not deadline.passed, log.read_text()
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def classes_of_spark(tmp_path: Path, options: str) -> tuple[int, int, subprocess.CompletedProcess[str]]:
    """How many classes a start of Spark's own program took from the archive and from files."""
    import pyspark

    log = tmp_path / "classes.log"
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_TOOL_OPTIONS"}
    environment |= {
        "JAVA_HOME": str(session.java_home(tmp_path)),
        "SPARK_SUBMIT_OPTS": f'{options} -Xlog:class+load:file="{log}"',
    }
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    read = [
        line for line in log.read_text().splitlines() if "org.apache.spark." in line and "source:" in line
    ]
    mapped = sum("shared objects file" in line for line in read)
    return mapped, len(read) - mapped, done


def test_spark_takes_its_classes_from_the_archive_of_the_installation(tmp_path: Path) -> None:
    options = class_archive.java_options()
    assert options, "deploy/setup.sh test makes it: python -m sla_server.policy_jobs.make_class_archive"
    mapped, _read, _ = classes_of_spark(tmp_path, options)
    assert mapped > 100, "those that this program has in common with a session"


def test_an_archive_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Of another Java or Spark, or damaged: no warning where others expect output of their own."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert class_archive.java_options(folder) == ""
    (folder / class_archive.NAME).write_bytes(b"of something else" * 1000)
    mapped, read, done = classes_of_spark(tmp_path, class_archive.java_options(folder))
    assert mapped == 0
    assert read > 0
    assert not re.search(r"shared|archive|\[warning|\[error", done.stdout + done.stderr), done


def test_the_driver_starts_from_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "java_options", lambda: "-XX:SharedArchiveFile=some")
    given = session.settings("spark://host:7077", tmp_path, "2g")
    assert "-XX:SharedArchiveFile=some" in given["spark.driver.extraJavaOptions"]
    executors = given.get("spark.executor.extraJavaOptions", "")
    assert "some" not in executors, "of another host, perhaps"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an archive that is there, with a Java that makes nothing."""
    home = fake_java(tmp_path / "jdk", "21.0.1", f"java.base@21\n{session.MODULE}")
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = tmp_path / "share"
    found.mkdir()
    (found / class_archive.NAME).write_text("of the release before")
    return found


def java_that_writes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, text: str | None, *, has_ended: bool
) -> None:
    """In the place of a start of Spark, with whose end Java writes."""

    def run(_work: Path, _log: Path, options: str) -> bool:
        aside = folder / "spark-classes.new"
        assert f'-XX:ArchiveClassesAtExit="{aside}"' in options
        if text is not None:
            aside.write_text(text)
        return has_ended

    monkeypatch.setattr(make_class_archive, "_run", run)


def test_an_archive_is_put_in_place_when_java_has_written_all_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java_that_writes(monkeypatch, folder, "whole", has_ended=True)
    assert make_class_archive.make_archive(folder).read_text() == "whole"
    assert sorted(each.name for each in folder.iterdir()) == [
        "lock",
        class_archive.NAME,
        make_class_archive.LOG,
    ]


def test_an_archive_has_its_name_when_it_is_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut would leave a part of it there, which Java maps and uses."""
    java_that_writes(monkeypatch, folder, "whole", has_ended=True)
    (folder / "java-classes.jsa").write_text("of Java's own classes")
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    make_class_archive.make_archive(folder)
    names = ("java-classes.jsa", "spark-classes.new", "")
    assert [Path(each) for each in synced] == [folder / name for name in names]


@pytest.mark.parametrize(("text", "has_ended"), [("ha", False), (None, True), (None, False)])
def test_what_java_has_not_written_to_its_end_is_never_used(
    text: str | None, has_ended: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java was killed, or the disk was full; before that another maker was killed while Java wrote."""
    (folder / "spark-classes.new").write_text("half of the maker's before")
    java_that_writes(monkeypatch, folder, text, has_ended=has_ended)
    with pytest.raises(SparkFailed) as error:
        make_class_archive.make_archive(folder)
    assert class_archive.java_options(folder) == ""
    assert error.value.log_path.exists()


def test_a_java_that_fails_has_said_why(folder: Path) -> None:
    java = Path(os.environ["JAVA_HOME"]) / "bin" / "java"
    java.write_text(java.read_text() + 'case "$1" in -Xshare:dump) echo "no space left"; exit 1;; esac\n')
    with pytest.raises(SparkFailed) as error:
        make_class_archive.make_archive(folder)
    assert "no space left" in error.value.log_path.read_text()


def test_one_maker_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would put what the other's Java has half written in place."""
    java_that_writes(monkeypatch, folder, "whole", has_ended=True)
    with only_one(folder / "lock", "class archive"), pytest.raises(JobRunning):
        make_class_archive.make_archive(folder)
    assert (folder / class_archive.NAME).read_text() == "of the release before"


def test_an_archive_that_this_user_may_not_read_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root installed with a umask of 077: ``Path.exists`` ends in an error there, and the job with it."""

    def refused(*_args: object, **_options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "access", lambda *_args: False)
    monkeypatch.setattr(Path, "stat", refused)
    assert class_archive.java_options(folder) == ""
