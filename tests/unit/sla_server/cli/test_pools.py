"""``sla get pools`` and ``sla describe pool`` against the real API in process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sla_server.cli.tables import bar_of, pool_level
from tests.support import api
from tests.support.cli import Terminal


def test_the_list_has_level_bar_figures_and_the_day(sla: Terminal) -> None:
    said = sla("get", "pools", "--tz", "UTC").output.splitlines()
    assert said[0].split() == ["POOL", "LEVEL", "FULL", "SIZE", "FULL", "ON", "READ"]
    assert "gateway-a/data" in said[-2]
    for part in ("81.0%", "filling up", "100.0 GiB", "\u2588" * 6 + "\u2591" * 2):
        assert part in said[-2]


def test_a_pool_is_found_by_its_name_or_the_nearest_is_named(sla: Terminal) -> None:
    assert "gateway-a/data" in sla("get", "pool", "gateway-a/data").output
    done = sla("get", "pool", "gateway-a/dat")
    assert done.exit_code != 0
    assert "Near it: gateway-a/data" in done.output


def test_everything_about_a_pool(sla: Terminal) -> None:
    said = " ".join(sla("describe", "pool", "gateway-a/data").output.split())
    for part in (
        "gateway-a/data (lvm, backend disk-0)",
        "81.0%, 81.0 GiB of 100.0 GiB",
        "promised to 2 volumes: 65.0 GiB, 0.65 times the pool",
        "grows by 1.0 GiB a day; full on",
        "lv-erp: 60.0 GiB, 41.0 GiB used, served as erp-db",
        "lv-old: 5.0 GiB, neither served nor open for",
        "archive, dry-run: archive --old: would be run",
    ):
        assert part in said
    assert sla.source.asked[-3][0:2] == ("pool_volumes", "g-1")


def test_no_line_is_wider_than_the_terminal(sla: Terminal) -> None:
    assert max(map(len, sla("describe", "pool", "gateway-a/data").output.splitlines())) <= 80


def test_why_no_day_is_named(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = {"full_us": None, "reason": "3 days are known, 7 are needed", "slope_bytes_per_day": None}
    monkeypatch.setattr(sla.source, "pools", lambda: [api.pool(forecast=forecast)])
    assert "forecast: none, 3 days are known" in sla("describe", "pool", "gateway-a/data").output
    monkeypatch.setattr(sla.source, "pools", lambda: [api.pool(forecast=None)])
    assert "forecast: none yet, no day" in sla("describe", "pool", "gateway-a/data").output, "the first day"


def test_json_is_what_the_api_says(sla: Terminal) -> None:
    row: dict[str, Any] = json.loads(sla("describe", "pool", "g-1/data", "-o", "json").output)
    assert (row["name"], row["full_ratio"], len(row["days"])) == ("gateway-a/data", 0.81, 10)


@pytest.mark.parametrize(
    ("name", "said"),
    [("data", "is not GATEWAY/POOL; sla get pools lists them"), ("gateway-a/x", "no pool 'gateway-a/x'")],
)
def test_a_wrong_name_says_what_to_do(sla: Terminal, name: str, said: str) -> None:
    done = sla("describe", "pool", name)
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())


def test_levels_in_words() -> None:
    levels = [pool_level({"level": level}).plain for level in ("ok", "warn", "critical", "")]
    assert levels == ["ok", "filling up", "nearly full", "-"]
    assert pool_level({"level": "ok", "is_stale": True}).plain == "not read"
    assert [bar_of(ratio) for ratio in (None, 0.5, 2.0)] == [
        "-",
        "\u2588" * 4 + "\u2591" * 4,
        "\u2588" * 8,
    ]
