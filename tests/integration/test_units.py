"""The systemd units: what a service could do if it were taken over (review, finding 16: 8.5 to 9.2)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from sla_server.schedule import QUIET
from tests.support.paths import ROOT

UNITS = ("sla-server", "sla-relay", "sla-policy", "sla-rollup", "sla-job@", "gateway-agent")
MOST = 3.0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_takes_away_what_its_service_does_not_need(unit: str) -> None:
    path = ROOT / "deploy" / "systemd" / f"{unit}.service"
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= MOST


@pytest.mark.parametrize("unit", ["sla-policy", "sla-rollup", "sla-job@"])
def test_a_job_that_had_nothing_to_do_is_no_failed_unit(unit: str) -> None:
    """As where the server starts the jobs itself."""
    text = (ROOT / "deploy" / "systemd" / f"{unit}.service").read_text()
    assert f"SuccessExitStatus={' '.join(str(status) for status in sorted(QUIET) if status)}\n" in text
