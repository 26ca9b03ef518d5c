from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sla_server.cli import policy
from tests.support.cli import Terminal


class Job:
    """Stands in for the Spark job: what was started, and how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
        self.commands: list[list[str]] = []
        self.status = status
        monkeypatch.setattr(policy.subprocess, "run", self.run)

    def run(self, command: list[str], check: bool, **_how: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self.status)


def test_run_starts_the_job_and_announces_its_result(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 0)
    sla.mailbox.answer = lambda _header: (True, 200, {"version": 4})
    done = sla("policy", "run", "--config", "sla.toml")
    assert done.exit_code == 0
    assert job.commands == [[sys.executable, "-m", "sla_server.policy_jobs.job", "--config", "sla.toml"]]
    assert "policy version 4" in done.stdout
    assert sla.asked == [("policies_changed", {})]


def test_the_configuration_of_the_environment(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 0)
    monkeypatch.setenv("SLA_CONFIG", "from-environment.toml")
    sla("policy", "run")
    assert job.commands[0][-1] == "from-environment.toml"
    assert policy.command_of("policy", None)[-1] == "sla_server.policy_jobs.job"
    assert policy.command_of("policy", Path("x"))[-2:] == ["--config", "x"]


def test_a_failed_job_announces_nothing(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(monkeypatch, 3)
    done = sla("policy", "run")
    assert done.exit_code == 3
    assert "stays as it was" in done.stderr
    assert sla.asked == []


def test_a_server_that_does_not_hear_of_it_is_no_failure(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(monkeypatch, 0)
    sla.mailbox.full = True
    done = sla("policy", "run")
    assert done.exit_code == 0
    assert "will look for it" in done.stderr


def test_list(sla: Terminal) -> None:
    done = sla("policy", "list")
    assert done.exit_code == 0, done.output
    assert "in-force" in done.output


def test_a_policy_that_does_not_help_is_no_failure_of_the_job_and_has_its_own_status(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(monkeypatch, 81)
    done = sla("policy", "run")
    assert done.exit_code == 81
    assert "sla policy pin VERSION" in done.stderr
    assert sla.asked == []
