"""The wheel, installed apart from the checkout: it holds all that the server needs, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from tests.support.paths import ROOT
from tests.support.ports import free_port

LIMIT_S = 300


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [str(ROOT / "deploy" / "wheel.sh"), str(folder)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def files_of(folder: str, *patterns: str) -> set[str]:
    """Files of the checkout."""
    found = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_product_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("pmdaemon", "sla_server", "gateway_agent", "dashboard", "sql")
    wanted = set().union(*(files_of(package, "*.py") for package in packages))
    wanted |= files_of("dashboard/static", "*") | files_of("dashboard/templates", "*.html")
    wanted |= files_of("sla_server/reports/templates", "*") | files_of("sql", "*.sql", "*.mako")
    assert wanted - names == set()
    others = {name for name in names if name.split("/")[0] not in packages}
    assert {re.sub(r"^[^/]*\.(dist-info|data)/.*", r"\1", name) for name in others} == {"dist-info", "data"}
    manuals = {name.rpartition("/")[2] for name in others if "/man1/" in name}
    assert manuals == {path.name for path in (ROOT / "docs" / "man").glob("*.1")}


class Installed:
    """An environment with the wheel; what it depends on comes from the one that runs the tests."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self._programs = folder / "venv" / "bin"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        shared = [path for path in sys.path if path.endswith("site-packages")]
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
        where = ["--disable-pip-version-check", "--no-compile", "--prefix", str(folder / "venv"), str(wheel)]
        subprocess.run([*command, "--ignore-installed", *where], check=True, timeout=LIMIT_S)
        (packages / "shared.pth").write_text("\n".join(shared))
        for program in self._programs.iterdir():
            if not program.is_symlink() and program.read_bytes().startswith(b"#!"):
                text = program.read_text().replace(sys.executable, str(self._programs / "python"), 1)
                program.write_text(text)
        self.folder = folder
        self.port = free_port()
        (folder / "server.toml").write_text(
            f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
            f'[api]\nlisten = "127.0.0.1:{self.port}"\n[database]\nqueue_bytes = 16777216\n'
        )

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLA", "PYTHON"))}
        return subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.folder,
            env={**kept, "SLA_CONFIG": str(self.folder / "server.toml")},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * LIMIT_S,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    made = Installed(tmp_path_factory.mktemp("installed"), wheel)
    yield made
    made.run("sla-server", "stop")


def test_the_installed_server_starts_shows_its_page_and_stops(installed: Installed) -> None:
    where = installed.run("python", "-c", "import sla_server; print(sla_server.__file__)").stdout
    assert where.startswith(str(installed.folder)), "the checkout is not what runs"
    assert installed.run("sla-server", "--version").stdout.startswith("sla-server, version ")
    for program in ("sla", "gateway-agent", "pmdaemon"):
        assert installed.run(program, "--help").returncode == 0
    started = installed.run("sla-server", "start", "--background", "--limit", str(LIMIT_S))
    assert started.returncode == 0, started.stderr
    deadline = Deadline(LIMIT_S)  # a part that was late to report for a moment is a problem for that moment
    while not json.loads((status := installed.run("sla-server", "status", "-o", "json")).stdout)["is_well"]:
        assert not deadline.passed, status.stdout
    with urllib.request.urlopen(f"http://127.0.0.1:{installed.port}/static/app.js", timeout=120) as answer:
        assert answer.status == 200
    stopped = installed.run("sla-server", "stop", "--limit", str(LIMIT_S))
    assert stopped.stdout == "server stopped\n", stopped.stderr
