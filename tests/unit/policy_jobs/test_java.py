"""Finding Java: the order, the refusals, the script that stands in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from sla_server.policy_jobs import java
from sla_server.policy_jobs.errors import NoJava


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


def test_the_operators_java_home_comes_first(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21.0.1", "java.base jdk.incubator.vector")
    path = fake_java(tmp_path / "other", "17.0.1", "java.base jdk.incubator.vector") / "bin"
    assert java.java_home(tmp_path, {"JAVA_HOME": str(home), "PATH": f"{path}:/bin"}) == home


def test_java_on_path_is_next(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.1", "java.base jdk.incubator.vector")
    found = java.java_home(tmp_path, {"PATH": f"{home}/bin:/bin"})
    assert found == home


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
        java.java_home(tmp_path, {"JAVA_HOME": str(home), "PATH": "/nonexistent"})
    assert "Install the 'policy' extra" in str(caught.value)


def test_the_stand_in_drops_only_the_one_option(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    program = real / "bin" / "java"
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "[$a]"; done\n')
    program.chmod(0o700)
    home = java.write_shim(real, tmp_path)
    done = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=other"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == ["[-Xmx1g]", "[a b]", "[--add-modules=other]"]


def test_without_any_java_the_wheel_stands_in(tmp_path: Path) -> None:
    home = java.java_home(tmp_path, {"PATH": "/nonexistent"})
    assert home.is_relative_to(tmp_path)
    done = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert (java.major_version(done.stderr) or 0) >= java.OLDEST
