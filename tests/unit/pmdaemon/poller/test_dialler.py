"""Listed gateways: which they are, and when each is dialled."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.poller.config import PmFile
from pmdaemon.poller.dialler import (
    DialledFile,
    Dialler,
    GatewayList,
    Target,
)
from pmdaemon.runtime.clock import FakeClock


def test_a_long_list_is_not_dialled_in_one_instant() -> None:
    clock = FakeClock()
    dialler = Dialler(lambda _sock, _address: None, clock, random.Random(1))
    dialler.replace([Target(f"gw-{number}", f"127.0.0.1:{number}") for number in range(1, 1001)])
    due = [entry.due_ns - clock.monotonic_ns() for entry in dialler._entries.values()]
    assert sum(item < 1e8 for item in due) < 150
    assert max(due) <= 1e9
    dialler.close()


def config(tmp_path: Path, *, tls: bool = False, **table: Any) -> PmFile:
    return PmFile.model_validate(
        {"runtime_dir": tmp_path, "pmdaemon": {"tls": {"enabled": tls}, **table}},
    )


def store(tmp_path: Path, value: Any, stamp: int) -> None:
    path = tmp_path / "gateways.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    os.utime(path, ns=(stamp, stamp))


def test_both_lists_and_only_when_changed(tmp_path: Path) -> None:
    listed = GatewayList(config(tmp_path, gateway=[{"name": "own", "address": "127.0.0.1:1"}]))
    own = Target("own", "127.0.0.1:1", "configuration")
    assert listed.changed() == [own]
    assert listed.changed() is None
    store(tmp_path, [{"name": "a", "address": "127.0.0.1:1"}, {"name": "b", "address": "127.0.0.1:2"}], 10**9)
    assert listed.changed() == [own, Target("b", "127.0.0.1:2")]
    assert listed.changed() is None
    (tmp_path / "gateways.json").unlink()
    assert listed.changed() == [own]


@pytest.mark.parametrize(
    "value",
    [
        "junk",
        "[" * 50_000,
        "{}",
        "[1]",
        [{"name": "x"}],
        [{"name": "x", "address": "host:1"}],
        [{"name": "x\x1b[2J", "address": "127.0.0.1:1"}],
        [{"name": "x", "address": "127.0.0.1:0"}],
        [{"name": "x", "address": "10.0.0.1:7412"}],
    ],
)
def test_what_cannot_be_dialled_is_left_out(tmp_path: Path, value: Any) -> None:
    store(tmp_path, value, 10**9)
    assert GatewayList(config(tmp_path)).changed() == []


def test_what_is_left_out_is_told_with_its_reason_until_it_is_mended(tmp_path: Path) -> None:
    listed = GatewayList(config(tmp_path))
    store(tmp_path, [{"name": "x", "address": "10.0.0.1:7412"}, {"name": "y", "address": "host:1"}], 10**9)
    listed.changed()
    assert [(row["name"], row["state"]) for row in listed.not_dialled] == [
        ("x", "not-dialled"),
        ("y", "not-dialled"),
    ]
    assert "TLS is off" in listed.not_dialled[0]["reason"]
    assert "not an IP address" in listed.not_dialled[1]["reason"]
    store(tmp_path, [{"name": "x", "address": "127.0.0.1:7412"}], 2 * 10**9)
    assert listed.changed() == [Target("x", "127.0.0.1:7412")]
    assert listed.not_dialled == []


def test_how_it_goes_is_written_when_it_changes_and_touched_when_not(tmp_path: Path) -> None:
    told = DialledFile(tmp_path / "dialled.json")
    rows = [{"name": "x", "address": "127.0.0.1:1", "state": "waiting", "reason": "Connection refused"}]
    told.write(rows)
    path = tmp_path / "dialled.json"
    assert json.loads(path.read_text()) == rows
    first = path.stat().st_ino
    os.utime(path, ns=(0, 0))
    told.write(rows)
    assert path.stat().st_ino == first, "not written again"
    assert path.stat().st_mtime_ns > 0, "but fresh"
    told.write([])
    assert json.loads(path.read_text()) == []
    path.unlink()
    told.write([])
    assert json.loads(path.read_text()) == []


def test_other_machines_with_tls_only(tmp_path: Path) -> None:
    store(tmp_path, [{"name": "x", "address": "10.0.0.1:7412"}], 10**9)
    assert GatewayList(config(tmp_path, tls=True)).changed() == [Target("x", "10.0.0.1:7412")]
    with pytest.raises(ValueError, match="another machine's"):
        config(tmp_path, gateway=[{"name": "own", "address": "10.0.0.2:1"}])
    assert config(tmp_path, tls=True, gateway=[{"name": "own", "address": "10.0.0.2:1"}])
