"""Handlers about reports: of any period as it is known now, and those that were issued."""

from __future__ import annotations

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.reports.compute import compute_report, plain
from sla_server.reports.document import ReportContent
from sla_server.reports.errors import NoSuchPeriod, NothingToReport
from sla_server.reports.inputs import LAST, read_inputs


def sla_report(context: AppContext, request: Request, name: str) -> Response:
    """What a report of a period says now."""
    return responses.as_json(plain(computed(context, name, request.args.get("period", LAST))))


def computed(context: AppContext, name: str, period: str) -> ReportContent:
    """The report of a period, from what is stored now.

    Raises:
        BadInput: the text names no period.
        NotFound: the agreement was never applied, or not in force in it.
    """
    try:
        return compute_report(read_inputs(context.source, name, period, context.clock.unix_us()))
    except NoSuchPeriod as exc:
        raise BadInput("period", str(exc)) from exc
    except NothingToReport as exc:
        raise NotFound(str(exc), "") from exc
