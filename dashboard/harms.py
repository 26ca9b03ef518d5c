"""The graph of who hurt whom by one policy's attribution; the table beside it has the API's same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from flask import Blueprint, Response, abort

from dashboard.graph import Line, draw
from sla_server.api.context import AppContext
from sla_server.api.errors import ApiError
from sla_server.api.handlers.policies import harms_of

HARMS: Final = "harms"


def make_harms(context: AppContext) -> Blueprint:
    """One route, for those who see everything: neighbours are named."""
    pages = Blueprint(HARMS, __name__)

    def graph(version: str) -> Response:
        try:
            rows = harms_of(context, version)
        except ApiError as exc:
            abort(exc.status, exc.detail)
        return Response(draw(lines_of(rows), "Who hurt whom"), mimetype="image/svg+xml")

    pages.add_url_rule("/policies/<version>/harms.svg", "graph", graph)
    return pages


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """From volumes to the promises that they hurt, as wide as their share of the harm."""
    return [
        Line(
            source=row["volume"],
            target=f"{row['sla']}/{row['objective']} on {row['backend']}",
            weight=row["share"],
            sure=row["likely_cause"],
            words=f"{row['volume']}: {row['share'] * 100:.0f} % of the harm; without it "
            f"{row['avoided_bad']} of {row['bad']} bad intervals would be good "
            f"({'likely cause' if row['likely_cause'] else 'correlation: ' + row['reason']})",
        )
        for row in rows
    ]
