"""``sla simulate`` on a small agreement; its tests share the loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sla_server.cli.main import cli

AGREEMENT = """\
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: gold}
spec:
  scope: {volumes: [gold]}
  priority: gold
  guarantee: {floor_iops: 60}
  objectives:
  - name: latency
    indicator: {metric: latency, percentile: 95}
    demand_curve: [{value_ms: 12}]
    applicability: {min_ios_per_slice: 10}
    budgeting: {method: timeslices, slice: 30s, target: 0.99}
"""
QUICK = ("--duration", "12s", "--load", "volume=gold,iops=60,gateway=A")
GREEDY = ("--load", "volume=big,depth=16,from_s=2,gateway=B")


@pytest.fixture
def slas(tmp_path: Path) -> Path:
    """A directory with the agreement, in slices of 5 s."""
    folder = tmp_path / "slas"
    folder.mkdir()
    (folder / "gold.yaml").write_text(AGREEMENT.replace("30s", "5s"))
    return folder


def run(*arguments: object) -> Result:
    """The command with these words."""
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])
