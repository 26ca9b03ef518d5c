"""``sla events pair status`` on files; no server runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sla_server.cli.main import cli
from sla_server.events.delivery_state import FRESH_S, write_delivery_state

PAIR: dict[str, Any] = {
    "name": "site-a",
    "partner": "site-b",
    "state": "connected",
    "since_us": 1_800_000_000_000_000,
    "mirroring": True,
    "keeping": True,
    "unconfirmed": 5,
    "mirrored": 4,
    "behind": 1,
    "partner_full": False,
    "kept": 7,
    "store_fullness": 0.25,
    "replaying": False,
    "taken_over": 0,
    "certificate_until_us": 1_800_000_000_000_000,
    "last_failure": "",
}


class Shell:
    def __init__(self, folder: Path) -> None:
        self.metrics = folder / "run" / "metrics"
        self.metrics.mkdir(parents=True)
        self.config = folder / "server.toml"
        self.write('enabled = true\nname = "site-a"\npartner = "site-b"\naddress = "10.0.0.2:7413"\n')

    def write(self, table: str) -> None:
        text = f'data_dir = "{self.config.parent}/data"\nruntime_dir = "{self.config.parent}/run"\n'
        self.config.write_text(f"{text}[events.pair]\n{table}")

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, ["--config", str(self.config), "events", "pair", "status", *arguments])


@pytest.fixture
def sla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("SLA_SERVER", "SLA_CONFIG", "SLA__DATA_DIR", "SLA__RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return Shell(tmp_path)


def test_a_connected_pair_and_a_lost_one(sla: Shell) -> None:
    write_delivery_state(sla.metrics, [], [], pair=PAIR)
    done = sla()
    assert done.exit_code == 0, done.output
    assert "site-b (this is site-a)" in done.stdout
    assert "5 not confirmed by all recipients, 4 of them mirrored" in done.stdout
    assert "7 kept here, room used 25%" in done.stdout
    lost = {"state": "lost", "replaying": True, "taken_over": 3, "last_failure": "connection refused"}
    write_delivery_state(sla.metrics, [], [], pair=PAIR | lost)
    done = sla()
    assert done.exit_code == 1
    assert "LOST" in done.stdout
    assert "3 of its events since it was lost, replaying" in done.stdout
    assert "connection refused" in done.stdout
    assert json.loads(sla("-o", "json").stdout)["taken_over"] == 3


def test_without_a_partner_or_a_state_it_says_why(sla: Shell) -> None:
    done = sla()
    assert done.exit_code == 2
    assert "not known" in done.stderr
    write_delivery_state(sla.metrics, [], [], pair=PAIR)
    past = (sla.metrics / "delivery.json").stat().st_mtime - 2 * FRESH_S
    os.utime(sla.metrics / "delivery.json", (past, past))
    assert sla().exit_code == 2
    sla.write("enabled = false\n")
    done = sla()
    assert done.exit_code == 2
    assert "no partner" in done.stderr


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("enabled = true\n", "name, partner, address"),
        ('enabled = true\nname = "a"\npartner = "a"\naddress = "10.0.0.2:7413"\n', "both a"),
        ('enabled = true\nname = "a"\npartner = "b"\naddress = "10.0.0.2:0"\n', "port 0"),
        ('name = "a b"\n', "a name has"),
        ('listen = "here"\n', "address:port"),
        ("silence_s = 0.1\n", "silence_s"),
    ],
)
def test_mistakes_of_the_table_are_named(sla: Shell, table: str, named: str) -> None:
    sla.write(table)
    done = sla()
    assert done.exit_code == 78
    assert named in done.stderr
