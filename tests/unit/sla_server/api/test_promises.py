"""The views of the page, and the answers that only they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from dashboard.views import VIEWS
from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from tests.support import api
from tests.support.api import NOW_US, snapshot

HOUR_US = 3_600_000_000


def test_every_view_has_a_shell_a_script_and_a_place_in_the_navigation(web: FlaskClient) -> None:
    scripts = Path(dashboard.__file__).parent / "static" / "views"
    own = [view for view in VIEWS if not view.elsewhere]
    assert {path.stem for path in scripts.iterdir()} == {view.key for view in own}
    for view in own:
        answer = web.get(view.path.replace("<name>", "a<b"))
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert f'data-view="{view.key}"' in answer.text
        assert "a<b" not in answer.text, "a name is text, never markup"
        for each in VIEWS:
            assert (f'href="{each.path}"' in answer.text) or each.above
        current = f'href="{view.path}" aria-current="page"' if not view.above else 'aria-current="true"'
        assert current in answer.text
    assert {view.above for view in VIEWS} <= {"", *(view.key for view in VIEWS)}


def rows_of(web: FlaskClient, query: str = "") -> list[dict[str, Any]]:
    answer = web.get(f"/api/v1/promises{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json["items"]
    return found


@pytest.fixture
def many(web: FlaskClient, context: AppContext, source: api.FakeSource) -> FlaskClient:
    """Five agreements: violated, at risk, kept with an alert, kept, and one of which nothing is heard."""
    states = {"d-bad": "violating", "c-risk": "at-risk", "b-burning": "ok", "a-kept": "ok"}
    row = snapshot()["slas"][0]
    slas = [
        {**row, "name": name, "state": state, "alerts": ["fast"] if "burning" in name else [],
         "budget_remaining": 0.9 - 0.1 * number, "burn_1h": float(number)}
        for number, (name, state) in enumerate(states.items())
    ]  # fmt: skip
    context.live.put(snapshot(slas=slas))
    agreed = source._agreement("erp-gold")
    source.__dict__["agreements"] = lambda *_: [{**agreed, "name": name} for name in (*states, "e-silent")]
    return web


def test_promises_come_worst_first_or_as_asked(many: FlaskClient) -> None:
    assert [row["name"] for row in rows_of(many)] == ["d-bad", "c-risk", "b-burning", "a-kept", "e-silent"]
    by = {
        "name": ["a-kept", "b-burning", "c-risk", "d-bad", "e-silent"],
        "budget": ["a-kept", "b-burning", "c-risk", "d-bad", "e-silent"],
        "burn": ["a-kept", "b-burning", "c-risk", "d-bad", "e-silent"],
    }
    for order, names in by.items():
        assert [row["name"] for row in rows_of(many, f"?sort={order}")] == names
    refused = many.get("/api/v1/promises?sort=colour")
    assert (refused.status_code, "Use trouble, name" in refused.json["fix"]) == (400, True)


def test_promises_are_filtered_and_paged(many: FlaskClient, source: api.FakeSource) -> None:
    answer = many.get("/api/v1/promises?state=violating,at-risk&limit=1").json
    assert ([row["name"] for row in answer["items"]], answer["next"], answer["count"]) == (["d-bad"], "1", 2)
    assert answer["states"] == {"violating": 1, "at-risk": 1, "ok": 2, "": 1}, "before the filter of states"
    rest = many.get("/api/v1/promises?state=violating,at-risk&limit=1&offset=1").json
    assert ([row["name"] for row in rest["items"]], rest["next"], rest["before"]) == (["c-risk"], None, 1)
    assert [row["name"] for row in rows_of(many, "?match=B-B")] == ["b-burning"], "whatever the case"
    assert ("agreements_named", ["b-burning"]) in source.asked, "SQL is asked about the page only"


def test_what_is_kept_now_may_have_spent_its_budget(many: FlaskClient, context: AppContext) -> None:
    assert many.get("/api/v1/promises?state=violating").json["budgets"] == {"spent": 0, "too_fast": 1}
    row = snapshot()["slas"][0]
    shown = [
        {**row, "name": name, "budget_remaining": left, "alerts": alerts}
        for name, left, alerts in (
            ("d-bad", 0.0, []),
            ("b-burning", -0.4, ["fast"]),
            ("a-kept", 0.5, ["slow"]),
        )
    ]
    context.live.put(snapshot(slas=shown))
    assert many.get("/api/v1/promises").json["budgets"] == {"spent": 2, "too_fast": 1}


def test_a_promise_says_for_whom_and_since_when(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    assert rows_of(web)[0]["since_us"] is None, "kept; since when is not known"
    context.live.put(snapshot(slas=[{**snapshot()["slas"][0], "state": "violating"}]))
    (row,) = rows_of(web)
    assert (row["customer"], row["volumes"], row["volume_count"]) == ("acme", ["vol-17"], 1)
    assert row["since_us"] == api.EPISODE["opened_us"], "the violation goes on"
    assert (row["latency_us"], row["threshold_us"], row["priority"]) == (9_200, 12_000, "gold")


def test_old_live_values_are_not_shown_as_new(
    web: FlaskClient, context: AppContext, clock: FakeClock
) -> None:
    context.live.put(snapshot())
    clock.advance(60)
    (row,) = rows_of(web)
    assert (row["name"], row["state"]) == ("erp-gold", "")


def test_hours_add_up_to_the_budget(web: FlaskClient, source: api.FakeSource) -> None:
    answer = web.get("/api/v1/slas/erp-gold/hours").json
    rows = answer["items"]
    assert len(rows) == 48
    assert sum(row["bad_s"] for row in rows) == answer["bad_s"] == 15 * 60
    assert [row["no_data"] for row in rows if row["no_data"]] == [60]
    assert answer["from_us"] <= rows[0]["hour_us"] < NOW_US <= answer["to_us"]
    assert answer["budget_s"] > answer["bad_s"]
    before = web.get(f"/api/v1/slas/erp-gold/hours?at_us={answer['from_us'] - 1}").json
    assert before["to_us"] == answer["from_us"], "the period before"
    assert web.get(f"/api/v1/slas/erp-gold/hours?at_us={NOW_US + 1}").status_code == 400
    assert web.get("/api/v1/slas/erp-gold/hours?objective=none").status_code == 404


def test_volumes_are_sorted_by_what_they_do(
    web: FlaskClient, context: AppContext, source: api.FakeSource
) -> None:
    context.live.put(snapshot())
    names = lambda query: [row["volume"] for row in web.get(f"/api/v1/volumes{query}").json["items"]]  # noqa: E731
    assert names("?sort=busiest&limit=2") == ["batch", "erp-db"]
    assert names("?limit=1&offset=1") == ["erp-db"]
    assert ("volumes_named", ["erp-db"]) in source.asked, "sums of the page only"
    assert names("?match=ERP") == ["erp-db"]
    assert names("?backend=none") == []
    page = web.get("/api/v1/volumes?limit=1").json
    assert (page["count"], page["before"], page["next"]) == (2, 0, "1")
    assert web.get("/api/v1/volumes?sort=colour").status_code == 400


def test_a_volume_that_a_person_throttled_says_so(web: FlaskClient, context: AppContext) -> None:
    by_hand = {**snapshot()["throttles"][0], "source": "manual"}
    context.live.put(snapshot(throttles=[by_hand]))
    rows = web.get("/api/v1/volumes").json["items"]
    assert {row["volume"]: row["throttled_by_hand"] for row in rows} == {"batch": True, "erp-db": False}


def test_gateways_and_backends_by_name(web: FlaskClient) -> None:
    assert [row["name"] for row in web.get("/api/v1/gateways?match=WAY-A&state=up").json["items"]] == [
        "gateway-a"
    ]
    assert web.get("/api/v1/gateways?state=lost").json["items"] == []
    assert web.get("/api/v1/backends?match=none").json["items"] == []


def test_gateways_are_sorted_by_what_is_so_now(web: FlaskClient, context: AppContext) -> None:
    """What SQL says of a gateway is older than the live view, which the list shows."""
    stored = [
        {"gateway_id": f"g-{n}", "name": f"gw-{n}", "state": "up", "last_cut_us": 90 - n, "dropped_cuts": 0}
        for n in range(5)
    ]
    stored[4] |= {"state": "stopped", "last_cut_us": None, "dropped_cuts": 7}
    live = [
        {"gateway_id": "g-1", "state": "lost", "last_cut_us": 5, "io_waited_ratio": 0.1},
        {"gateway_id": "g-2", "state": "stalled", "last_cut_us": 50, "io_waited_ratio": 0.4},
    ]
    context.source.__dict__["gateways"] = lambda: stored
    context.live.put(snapshot(gateways=live))

    def names(query: str) -> list[str]:
        return [row["name"] for row in web.get(f"/api/v1/gateways{query}").json["items"]]

    assert names("") == names("?sort=name") == [f"gw-{n}" for n in range(5)]
    assert names("?sort=trouble") == ["gw-1", "gw-2", "gw-0", "gw-3", "gw-4"]
    assert names("?sort=oldest") == ["gw-1", "gw-2", "gw-3", "gw-0", "gw-4"]
    assert names("?sort=waited&limit=2") == ["gw-2", "gw-1"], "before it is cut"
    assert names("?sort=lost&limit=1") == ["gw-4"]
    assert names("?state=lost") == ["gw-1"]
    assert names("?state=up") == ["gw-0", "gw-3"]
    refused = web.get("/api/v1/gateways?sort=colour")
    assert (refused.status_code, "Use name, trouble" in refused.text) == (400, True)


def test_backends_are_sorted_by_what_is_so_now(web: FlaskClient, context: AppContext) -> None:
    context.source.__dict__["backends"] = lambda: [
        {"backend": f"disk-{n}", "first_seen_us": api.NOW_US} for n in range(4)
    ]
    busy = {"phase": "idle", "cost_per_s": 100.0}
    live = [
        {"backend": "disk-0", **busy},
        {"backend": "disk-1", **busy, "cost_per_s": 900.0, "phase": "hold", "cap_cost_per_s": 300.0},
        {"backend": "disk-2", **busy, "phase": "decrease", "cap_cost_per_s": 400.0},
        {"backend": "disk-3", **busy, "fault": "hangs"},
    ]
    context.live.put(snapshot(backends=live))

    def names(query: str) -> list[str]:
        return [row["backend"][-1] for row in web.get(f"/api/v1/backends{query}").json["items"]]

    assert names("") == ["0", "1", "2", "3"]
    assert names("?sort=trouble") == ["3", "2", "1", "0"]
    assert names("?sort=busiest&limit=2") == ["1", "0"], "before it is cut"
    assert names("?sort=fullest") == ["0", "1", "2", "3"], "what the others can take is not known"
    assert names("?sort=held") == ["1", "2", "0", "3"]
    assert web.get("/api/v1/backends?sort=colour").status_code == 400


def test_one_backend_has_its_load_and_what_it_can_take(web: FlaskClient, context: AppContext) -> None:
    context.live.put(snapshot())
    row = web.get("/api/v1/backends/disk-0").json
    assert (row["live"]["cost_per_s"], row["volume_count"], row["policy_version"]) == (371.0, 2, 3)
    kept = [load for load, usual, _most in row["curves"][0]["points"] if usual <= 1]
    assert row["capacity"][0]["cost_per_s"] == max(kept) == 700.0, "what screenshots show agrees with itself"
    assert web.get("/api/v1/backends/none").status_code == 404


def test_decisions_of_a_volume(web: FlaskClient, source: api.FakeSource) -> None:
    rows = web.get("/api/v1/decisions?volume=batch&kind=cap-set,cap-released").json["items"]
    assert [row["decision_id"] for row in rows] == ["d-2"]
    (asked,) = [asked[1] for asked in source.asked if asked[0] == "decisions"]
    assert (asked["kinds"], asked["until_us"] - asked["from_us"]) == (
        ["cap-set", "cap-released"],
        24 * HOUR_US,
    )
    assert web.get("/api/v1/decisions?from_us=5&to_us=1").status_code == 400


def test_volumes_of_a_policy_go_on_where_the_page_before_ended(web: FlaskClient) -> None:
    page = web.get("/api/v1/policies/3/volumes?limit=1").json
    assert (page["items"][0]["hours"], page["next"]) == (40, "batch")
    assert web.get("/api/v1/policies/3/volumes?limit=1&after=batch").json == {"items": [], "next": None}
    assert web.get("/api/v1/policies/7/volumes").status_code == 404


def test_maintenance_of_one_agreement(web: FlaskClient) -> None:
    assert [row["name"] for row in web.get("/api/v1/maintenance").json["items"]] == ["disks"]
    assert web.get("/api/v1/maintenance?agreement=erp-gold").json["items"] == [], "its scope is another one"
    assert web.get("/api/v1/maintenance?agreement=none").status_code == 404
