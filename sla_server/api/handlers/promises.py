"""Handlers of the views about promises: the list, filtered, sorted and paged here, and slices by the hour.

States and figures come from the live view, which has those of every promise; SQL is asked for the names that
a filter means, and for all else of the few rows on the page.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from flask import Request, Response, g

from sla_server.agreements.compliance import (
    Terms,
    agreed_objectives,
    agreed_periods,
    period_budget,
    sums_of_rows,
)
from sla_server.agreements.document import Agreement
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.filters import PROMISE_STATES, chosen
from sla_server.api.handlers.documents import last_agreed_us, windows_of
from sla_server.api.handlers.read import (
    LiveObjectives,
    agreement_of,
    asked_objective,
    calendar_of,
    live_list,
    page_of,
    promised_of,
)
from sla_server.api.routes import MAX_US
from sla_server.rows import Row

VOLUMES_SHOWN: Final = 5
"""Volumes or patterns of an agreement that a row of a list names."""
TROUBLE: Final = ("violating", "at-risk", "no-data")
"""States that need a look, the worst first; those that burn their budget too fast come after them."""
_RANKS: Final = {state: rank for rank, state in enumerate(TROUBLE, 1)}
_ALARMED: Final = len(TROUBLE) + 1
_CALM: Final = len(TROUBLE) + 2
HOUR_US: Final = 3_600_000_000


def promises(context: AppContext, request: Request) -> Response:
    """A page of promises, one row an objective, worst first unless asked otherwise.

    ``count`` is the number of rows on all pages, ``states`` that of each state before the filter of states,
    ``budgets`` that of promises whose error budget is spent, and of others that spend it too fast.
    ``since_us``: when the violation opened, or when the state was first seen; null where that is not known.
    """
    offset, limit = page_of(request)
    part = request.args.get("match", "").lower()
    known = context.source.pages.agreement_names()
    if part:
        known = {name: priority for name, priority in known.items() if part in name.lower()}
    if g.scope is not None:  # here: neither `count` nor `next` is to tell of those of others
        known = {name: priority for name, priority in known.items() if g.scope.has_agreement(name)}
    live = {} if context.live.is_stale() else context.live.others()
    found = [row for (name, _objective), row in live.items() if name in known]
    heard = {row["name"] for row in found}
    found += [{"name": name, "objective": "", "state": ""} for name in known if name not in heard]
    states = Counter(row["state"] for row in found)
    wanted = set(chosen(request, "state", PROMISE_STATES))
    rows = [row for row in found if row["state"] in wanted] if wanted else found
    page = _first(rows, _keys(request.args.get("sort", "trouble"), rows), offset + limit)[offset:]
    full = _filled(context, page, known, live)
    following = str(offset + limit) if offset + limit < len(rows) else None
    return live_list(
        context, full, following, count=len(rows), before=offset, states=states, budgets=_budgets(found)
    )


def _budgets(rows: list[Row]) -> dict[str, int]:
    """How many have spent what their period allows, whatever they do now; and how many others soon will."""
    spent = [(left := row.get("budget_remaining")) is not None and left <= 0 for row in rows]
    alarmed = (bool(row.get("alerts")) for row in rows)
    return {
        "spent": sum(spent),
        "too_fast": sum(one and not is_spent for one, is_spent in zip(alarmed, spent, strict=True)),
    }


def _first(rows: list[Row], keys: list[tuple[Any, ...]], wanted: int) -> list[Row]:
    """The ``wanted`` rows of the smallest keys, in their order; of 64,000 rows 50 or all of them."""
    ranked = zip(keys, range(len(keys)), strict=True)
    is_few = wanted < len(rows) // 8  # a heap of many costs more than to sort all
    smallest = heapq.nsmallest(wanted, ranked) if is_few else sorted(ranked)[:wanted]
    return [rows[index] for _key, index in smallest]


def _keys(order: str, rows: list[Row]) -> list[tuple[Any, ...]]:
    """What rows are sorted by: what was asked for, then the name; what is not known comes last.

    One comprehension an order, without a call a row: there are up to 64,000 of them each time.
    """
    column = {"budget": "budget_remaining", "compliance": "compliance", "burn": "burn_1h"}.get(order)
    if column is not None:
        sign = -1 if order == "burn" else 1
        return [
            ((value := row.get(column)) is None, sign * (value or 0.0), row["name"], row["objective"])
            for row in rows
        ]
    if order == "name":
        return [(row["name"], row["objective"]) for row in rows]
    if order != "trouble":
        problem = f"{order[:40]!r} is no order"
        raise BadInput("sort", problem, "Use trouble, name, budget, compliance or burn")
    return [
        (
            _RANKS.get(row["state"]) or (_ALARMED if row.get("alerts") else _CALM),
            2.0 if (left := row.get("budget_remaining")) is None else left,
            row["name"],
            row["objective"],
        )
        for row in rows
    ]


def _filled(
    context: AppContext, page: list[Row], priorities: Mapping[str, str], others: Mapping[tuple[str, str], Row]
) -> list[Row]:
    """The rows of a page with what SQL and the snapshot know of them."""
    names = {row["name"] for row in page}
    agreements = {row["name"]: row for row in context.source.pages.agreements_named(names)}
    opened = {(row["name"], row["objective"]): row for row in context.source.pages.open_episodes(names)}
    live = LiveObjectives(context, others)
    rows = []
    for row in page:
        agreement = agreements.get(row["name"], {})
        now = live.of({"name": row["name"], **agreement})
        shown = next((one for one in now if one.get("objective") == row["objective"]), {})
        rows.append(_row(row, shown, agreement, opened.get((row["name"], row["objective"]))))
        rows[-1]["priority"] = priorities.get(row["name"], "")
    return rows


def _row(state: Row, shown: Row, agreement: Row, episode: Row | None) -> Row:
    spec = (agreement.get("spec") or {}).get("spec") or {}
    agreed = next(
        (one for one in agreed_objectives(agreement) if one.get("name") == state["objective"]), None
    )
    parties, volumes = spec.get("parties") or {}, (spec.get("scope") or {}).get("volumes") or []
    if agreement and not agreed_objectives(agreement):
        state = {**state, "state": "no-objective"}
    since_us = state.get("since_us")
    if episode is not None and state["state"] == "violating":
        since_us = episode["opened_us"]
    return {
        **state,
        **(promised_of(agreed) if agreed is not None else {}),
        **shown,
        "since_us": since_us,
        "episode_id": episode["episode_id"] if episode is not None else None,
        "version": agreement.get("version"),
        "customer": parties.get("customer"),
        "provider": parties.get("provider"),
        "volumes": volumes[:VOLUMES_SHOWN],
        "volume_count": len(volumes),
    }


def slice_hours(context: AppContext, request: Request, name: str) -> Response:
    """Judged slices of one objective by the hour, over its period: what the heat map and the budget rest on.

    ``bad_s`` and ``due_s`` are by the terms of the versions that judged; ``budget_s`` is the bad time that
    the whole period allows.
    """
    row = agreement_of(context, name)
    wanted, terms = asked_objective(context, request, row)
    if not terms:
        raise NotFound(f"agreement {name!r} has no objective", "Nothing of it is judged")
    last = terms[max(terms)]
    try:
        newest = Agreement.from_spec(row["spec"])
    except ValueError as exc:
        problem = f"agreement {name!r} was stored by another release and cannot be read"
        raise NotFound(problem, "Apply it again: sla apply -f FILE") from exc
    now_us = context.clock.unix_us()
    at_us = responses.number(request, "at_us", last_agreed_us(row, now_us), most=MAX_US)
    if at_us > now_us:
        raise BadInput("at_us", "lies ahead of now", "Give a time that has passed, or none")
    windows = windows_of(context.source.agreement_versions(name) or [row], newest)
    (bounds,) = agreed_periods(windows, at_us, 1)[:1]
    rows = context.source.pages.slice_hours(name, wanted, *bounds)
    judged_us = max((each["newest_us"] + each["length_us"] for each in rows), default=bounds[0])
    calendar = calendar_of(context, newest.spec.service_hours)
    sums = sums_of_rows(rows, terms, last)
    budget = period_budget(sums, newest.spec, last, bounds, max(judged_us, row["applied_us"]), calendar)
    return responses.as_list(
        list(_by_hour(rows, terms, last)),
        objective=wanted,
        from_us=bounds[0],
        to_us=bounds[1],
        judged_us=judged_us,
        target=last.target,
        tz=str(newest.spec.time_zone),
        compliance=sums.compliance,
        coverage=sums.coverage,
        budget_s=round(budget.total_minutes * 60, 3),
        bad_s=sums.bad_us / 1e6,
    )


def _by_hour(rows: Iterable[Row], terms: dict[int, Terms], last: Terms) -> Iterable[Row]:
    """One row an hour that has slices, oldest first."""
    hours: dict[int, list[Row]] = {}
    for row in rows:
        hours.setdefault(row["hour_us"], []).append(row)
    for hour_us, part in hours.items():
        sums = sums_of_rows(part, terms, last)
        yield {"hour_us": hour_us, **sums.counts.states(), "bad_s": sums.bad_us / 1e6,
               "due_s": (sums.good_us + sums.bad_us) / 1e6}  # fmt: skip
