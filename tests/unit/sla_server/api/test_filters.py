"""Filters whose values are known: a wrong one is refused by name, as an empty list reads as "nothing is"."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient

from sla_server.api.context import AppContext
from sla_server.api.filters import DECISION_KINDS, GATEWAY_STATES, JOB_KINDS, PROMISE_STATES
from sla_server.events.catalogue import ELEMENTS
from sla_server.explanation.words import SLA_STATES
from sla_server.reports.job import KIND as REPORTS
from sla_server.schedule import MODULES
from sla_server.services.control.decisions import DecisionKind
from tests.support.api import snapshot


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("promises?state=violated", "violated"),
        ("promises?state=ok,violated", "violated"),
        ("gateways?state=down", "down"),
        ("decisions?kind=cap", "cap"),
        ("jobs?state=failure", "failure"),
        ("jobs?state=fail*,x*", "x*"),
        ("policies?state=active", "active"),
        ("jobs?kind=polici", "polici"),
        ("jobs?kind=policy,x*", "x*"),
        ("inbox?severity=warning,fatal", "fatal"),
        ("inbox?element=disk", "disk"),
        ("inbox?kind=gateway-losst", "gateway-losst"),
        ("inbox?kind=gatewai-*", "gatewai-*"),
        ("inbox?kind=gateway-lost,clock-skew", "gateway-lost,clock-skew"),
    ],
)
def test_a_value_that_no_row_can_have_is_refused(
    web: FlaskClient, context: AppContext, query: str, value: str
) -> None:
    context.live.put(snapshot())
    answer = web.get(f"/api/v1/{query}")
    assert answer.status_code == 400
    name = query.partition("?")[2].partition("=")[0]
    assert answer.json["detail"].startswith(f"{name}: ")
    assert value in answer.json["detail"]


@pytest.mark.parametrize("query", ["promises?state=,", "jobs?state=,,"])
def test_commas_alone_are_no_value(web: FlaskClient, query: str) -> None:
    assert "has only commas" in web.get(f"/api/v1/{query}").json["detail"]


@pytest.mark.parametrize(
    "query",
    [
        *(f"promises?state={state}" for state in PROMISE_STATES),
        *(f"gateways?state={state}" for state in GATEWAY_STATES),
        f"decisions?kind={','.join(DECISION_KINDS)}",
        "jobs?state=fail*,done",
        "policies?state=in-force,*pinned",
        f"jobs?kind={','.join(JOB_KINDS)}",
        "jobs?kind=*-test",
        f"inbox?element={','.join(ELEMENTS)}",
        "inbox?kind=gateway-*",
        "inbox?kind=*lost",
        "inbox?kind=agent-newer",
        "inbox?kind=ag*",
        "inbox?kind=violation-opened&severity=critical,info",
    ],
)
def test_values_that_rows_may_have_are_taken(web: FlaskClient, context: AppContext, query: str) -> None:
    context.live.put(snapshot())
    assert web.get(f"/api/v1/{query}").status_code == 200


def test_the_values_are_those_that_are_written() -> None:
    assert set(DECISION_KINDS) == {kind.value for kind in DecisionKind}
    assert set(PROMISE_STATES) == SLA_STATES.keys() - {"good", "bad", "no_data", "not_applicable"}
    assert set(JOB_KINDS) == MODULES.keys() - {"report"} | {REPORTS}


def test_a_kind_of_events_that_is_none_is_refused_with_those_that_resemble_it(web: FlaskClient) -> None:
    assert "Did you mean gateway-lost" in web.get("/api/v1/inbox?kind=gateway-losst").json["fix"]


def test_digits_of_other_scripts_are_no_place_in_the_log(web: FlaskClient, bearer: dict[str, str]) -> None:
    answer = web.get("/api/v1/audit/chain?after=٣", headers=bearer)
    assert (answer.status_code, "after" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize("query", ["promises?state=ok&state=violating", "inbox?limit=1&limit=2"])
def test_a_parameter_that_is_given_twice_is_refused(web: FlaskClient, query: str) -> None:
    """The second was ignored: half of what was asked for looked like all of it."""
    answer = web.get(f"/api/v1/{query}")
    assert (answer.status_code, "is given 2 times" in answer.json["detail"]) == (400, True)
