"""What commands say while the services part is silent: what is stored, and that the rest is not known."""

from __future__ import annotations

import json

import pytest

from tests.support.api import slice_sum
from tests.support.cli import Terminal


@pytest.mark.parametrize(
    "words", [["get", "slas"], ["get", "volumes"], ["get", "gateways"], ["describe", "sla", "erp-gold"]]
)
def test_old_live_values_are_not_shown_as_current(sla: Terminal, words: list[str]) -> None:
    sla.clock.advance(12)
    done = sla(*words)
    assert done.exit_code == 75
    assert "No live data for 12s: the services part is silent (sla-server status)." in done.stderr
    assert "erp-gold" in done.stdout or "erp-db" in done.stdout or "gateway-a" in done.stdout
    assert "kept  " not in done.stdout
    assert "9.20ms" not in done.stdout
    assert max(map(len, [*done.stderr.splitlines(), *done.stdout.splitlines()[:3]])) <= 80
    shown = sla(*words, "-o", "json")
    assert shown.exit_code == 75
    assert json.loads(shown.stdout)


def test_one_picture_of_old_values_is_not_printed(sla: Terminal) -> None:
    sla.clock.advance(12)
    done = sla("top", "--once")
    assert (done.exit_code, done.stdout) == (75, "")
    assert "No live data for 12s: the services part is silent" in done.stderr


def test_counts_are_shown_all_the_same(sla: Terminal) -> None:
    sla.clock.advance(12)
    row = next(line for line in sla("get", "volumes").stdout.splitlines() if line.startswith("erp-db"))
    assert row.split() == ["erp-db", "disk-0", "-", "-", "-", "-", "60,215"]


def test_what_needs_no_live_view_ends_well(sla: Terminal) -> None:
    sla.clock.advance(12)
    for words in (["get", "slas", "-o", "yaml"], ["get", "events"], ["get", "slices", "erp-gold"]):
        assert sla(*words).exit_code == 0
    assert sla("describe", "sla", "erp-gold", "--version", "1").exit_code == 0


def test_periods_and_credits_say_that_they_are_by_time(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sla.source.agreement_versions("erp-gold")
    rows[0]["spec"]["spec"]["objectives"][0]["budgeting"]["slice"] = "5m"
    monkeypatch.setattr(sla.source, "agreement_versions", lambda _name: rows)
    sums = [slice_sum("bad", 7, minutes=5, version=1), slice_sum("good", 685, version=2)]
    monkeypatch.setattr(sla.source, "slice_sums", lambda *_: sums)
    words = "bad 35m of 12h due, by time, in slices of 1m and 5m"
    periods = sla("get", "periods", "erp-gold").stdout.splitlines()
    assert f"2027-01-01: {words}." in periods
    described = sla("describe", "sla", "erp-gold").stdout.replace("\n#    ", "")
    assert f"promised, {words}" in described
    assert max(map(len, periods)) <= 80


@pytest.mark.parametrize("kind", ["slices", "periods", "episodes"])
def test_an_objective_that_does_not_exist_is_named_with_those_that_do(sla: Terminal, kind: str) -> None:
    done = sla("get", kind, "erp-gold/nope")
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "sla: agreement 'erp-gold' has no objective 'nope'",
        "  It has latency",
    ]
