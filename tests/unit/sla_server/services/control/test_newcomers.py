"""When the clients of a volume that no agreement names are taken together, and for how long."""

from __future__ import annotations

from sla_server.services.control.newcomers import KEPT_S, WITHIN_S, Newcomers, together_text

S = 1_000_000_000
WITHIN, KEPT = round(WITHIN_S), round(KEPT_S)


def test_the_second_new_client_within_a_minute_is_one_too_many() -> None:
    found = Newcomers()
    assert found.joined(["v", "w"], 0) == []
    assert found.joined(["v"], (WITHIN + 1) * S) == [], "the first one was too long ago"
    assert list(found.together) == []
    assert found.joined(["v"], (WITHIN + 2) * S) == ["v"]
    assert list(found.together) == ["v"]


def test_it_is_kept_while_a_cap_is_in_force_and_for_a_while_after_it() -> None:
    found = Newcomers()
    assert [found.joined(["v"], at * S) for at in (0, 5)] == [[], ["v"]]
    assert found.keep({"v"}, 3 * KEPT * S) == []
    assert found.keep((), (4 * KEPT - 1) * S) == []
    assert found.keep((), 4 * KEPT * S) == ["v"]
    assert found.joined(["v"], 4 * KEPT * S) == [], "counted from the beginning"


def test_after_a_restart_what_is_in_force_is_kept() -> None:
    found = Newcomers()
    found.restored("v")
    assert list(found.together) == ["v"]
    assert found.keep((), 5 * S) == []
    assert found.keep((), (5 + KEPT) * S) == ["v"]


def test_why_is_said_of_each() -> None:
    every, jobs = together_text(["v/*", "w/job-*"]).split("; ")
    why = "clients came under new names 2 times within 60 s. All that"
    assert every.startswith(f"v: {why} no agreement names share one rate")
    assert jobs.startswith(f"w: {why} match job-* share one rate")
