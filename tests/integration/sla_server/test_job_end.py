"""A job's process ends with the job's status, whatever libraries would do at the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sla_server.schedule import MODULES

ABORTS = "import atexit, os\natexit.register(os.abort)\n"
"""As Arrow's threads do now and then."""


def run(*command: str, python_path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path} if python_path else None
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("return", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(81)", 81, ""),
        ("raise click.UsageError('not so')", 2, "not so"),
        ("raise SystemExit('not so')", 1, "not so"),
    ],
)
def test_the_status_is_the_command_s(ends: str, status: int, said: str) -> None:
    script = (
        f"{ABORTS}import click, sys\nfrom sla_server.jobs import as_process\n"
        f"def job():\n    sys.stdout.write('an answer')\n    {ends}\n"
        "as_process(click.Command('job', callback=job))\n"
    )
    done = run("-c", script)
    assert (done.returncode, done.stdout) == (status, "an answer"), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("module", sorted(set(MODULES.values())))
def test_each_job_ends_so(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    done = run("-m", module, "--help", python_path=str(tmp_path))
    assert (done.returncode, done.stdout[:6]) == (0, "Usage:"), done.stderr
