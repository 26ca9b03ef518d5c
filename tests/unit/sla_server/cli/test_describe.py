"""``sla describe`` of every kind: all that is known, in the units that the keys name."""

from __future__ import annotations

import json

import pytest

from sla_server.agreements.load import load_documents
from sla_server.cli.describe import describe, row_lines, title_of, value_text
from sla_server.cli.get import DOCUMENTS
from sla_server.cli.kinds import singular_of
from sla_server.cli.tables import KINDS
from tests.support import api
from tests.support.api import NOW_US
from tests.support.cli import Terminal

NAMES = {
    "gateways": "gateway-a", "volumes": "erp-db", "pools": "gateway-a/data", "slas": "erp-gold",
    "maintenance": "disks", "calendars": "bank", "recipients": "mail", "routes": "all", "silences": "now",
    "volumelabels": "vol-17",
    "backends": "disk-0", "processes": "services", "episodes": str(api.EPISODE["episode_id"])[:8],
    "throttles": "batch", "events": "e0001", "policies": "3", "jobs": "policy", "nodes": "n1",
}  # fmt: skip


def test_every_kind_of_which_there_are_some_is_described() -> None:
    of_others = {kind for kind, listed in KINDS.items() if listed.of} | {"trend", "decisions", "promises"}
    assert set(describe.commands) == {singular_of(kind) for kind in set(KINDS) - of_others}
    assert set(NAMES) == set(KINDS) - of_others


@pytest.mark.parametrize("kind", list(NAMES))
def test_it_fits_eighty_columns(sla: Terminal, kind: str) -> None:
    done = sla("describe", singular_of(kind), NAMES[kind])
    assert done.exit_code in (0, 75), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 2
    own = [line for line in lines if kind not in DOCUMENTS or line.startswith("#")]
    assert max(map(len, own)) <= 80
    assert json.loads(sla("describe", f"{singular_of(kind)}/{NAMES[kind]}", "-o", "json").stdout)


def test_a_volume_with_its_clients_and_its_events(sla: Terminal) -> None:
    lines = [" ".join(line.split()) for line in sla("describe", "volume", "batch").output.splitlines()]
    assert "size: 64.0 MiB" in lines
    assert "p95: 131ms" in lines
    assert lines.count("volume: batch") == 1, "what is known of it is not said twice"
    assert lines[lines.index("clients:") + 1].startswith("127.0.0.1: 48,211 reads")
    assert lines[lines.index("newest events:") - 1] == "Why it is as it is: sla why batch"


@pytest.mark.parametrize("kind", ["calendars", "routes", "recipients", "maintenance", "silences"])
def test_a_document_can_be_applied_again(sla: Terminal, kind: str) -> None:
    (loaded,) = load_documents(sla("describe", singular_of(kind), NAMES[kind]).output, 60)
    assert loaded.document.name == NAMES[kind]


def test_a_size_that_is_not_known_is_not_nothing(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = sla.source.volumes()
    monkeypatch.setattr(sla.source, "volumes", lambda *_: [{**row, "size_bytes": 0} for row in volumes])
    said = sla("describe", "volume", "batch").output
    assert "size:               not known: its gateway has not read it from the storage" in said


def test_a_name_that_is_not_there(sla: Terminal) -> None:
    done = sla("describe", "backend", "disk-O")
    assert (done.exit_code, "Near it: disk-0" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("p95_us", 9_200, "9.20ms"),
        ("size_bytes", 1 << 26, "64.0 MiB"),
        ("bytes_per_s", 5e6, "5000000"),
        ("cap_bytes_per_s", 5e6, "5.0MB/s"),
        ("io_waited_ratio", 0.137, "13.70%"),
        ("read_only", False, "no"),
        ("iops", 80.4, "80.4"),
        ("reads", 48_211, "48,211"),
        ("state", "up", "up"),
    ],
)
def test_values_have_the_unit_of_their_key(key: str, value: object, text: str) -> None:
    assert value_text(key, value).replace(",", "") == text.replace(",", "")
    assert not title_of(key).endswith("_us")


def test_times_are_not_durations() -> None:
    assert ":" in value_text("applied_us", NOW_US)
    rows = [{"a": 1, "b": {"c": [2, 3]}}, {"a": None}]
    lines = [" ".join(line.split()) for line in row_lines({"x": rows})]
    assert lines == ["x:", "- a: 1", "b:", "c: 2, 3"]


def test_numbers_that_name_something_can_be_copied() -> None:
    assert value_text("pid", 8835) == "8835"
    assert value_text("gen", 1_796_071_019_466_067) == "1796071019466067"
    assert value_text("reads", 8835) == "8,835"
