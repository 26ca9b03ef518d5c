"""Filters with a closed set of values: one that no row can have is refused, for an empty list says "none"."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final

from flask import Request

from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.messages.alerts import ALERT_PREFIX
from sla_server.agreements.selectors import nearest
from sla_server.api.errors import BadInput
from sla_server.events import catalogue

PROMISE_STATES: Final = (
    "violating", "at-risk", "no-data", "ok", "idle", "out-of-curve", "not-applicable", "excluded",
)  # fmt: skip
GATEWAY_STATES: Final = ("up", "stalled", "detached", "lost", "stopped", "refused")
JOB_KINDS: Final = (
    "rollup", "cost-model", "capacity", "demand", "attribution", "space", "report-inputs", "policy",
    "back-test", "reports",
)  # fmt: skip
JOB_STATES: Final = ("running", "done", "not-published", "failed", "killed")
POLICY_STATES: Final = (
    "published", "in-force", "pinned", "superseded", "rolled-back", "rejected", "rejected-pinned",
)  # fmt: skip
DECISION_KINDS: Final = (
    "start", "decrease", "increase", "release", "pre-position", "unattributed", "infeasible",
    "control-oscillation", "ahead-off", "cap-set", "cap-changed", "cap-released", "observed", "not-effective",
)  # fmt: skip


def chosen(request: Request, name: str, known: Collection[str], *, patterns: bool = False) -> list[str]:
    """Values of a filter, several with commas between; none without it.

    Args:
        request: has the filter in its query.
        name: of the filter.
        known: values that rows may have.
        patterns: whether * matches anything.

    Raises:
        BadInput: a value that is none of them, or only commas.
    """
    text = request.args.get(name, "")
    values = [part for part in text.split(",") if part]
    for value in values:
        is_pattern = patterns and "*" in value
        if value not in known and not is_pattern:
            raise BadInput(name, f"{excerpt(value)} is none of its values", f"Use {', '.join(known)}")
        if is_pattern and not any(fnmatchcase(each, value.replace("[", "[[]")) for each in known):
            raise BadInput(name, f"{excerpt(value)} matches none of its values: {', '.join(known)}")
    if text and not values:
        raise BadInput(name, "has only commas", f"Use {', '.join(known)}")
    return values


def known_kind(kind: str) -> str:
    """A kind of events, if it can occur.

    Raises:
        BadInput: it cannot; names those that resemble it.
    """
    if not catalogue.is_known(kind):
        near = nearest(kind, catalogue.KINDS)
        fix = f"{f'Did you mean {near}? ' if near else ''}docs/formats/events.md lists all kinds"
        raise BadInput("kind", f"no event is of kind {excerpt(kind)}", fix)
    return kind


def kind_or_pattern(request: Request) -> str:
    """The kind of events that is asked for, or a pattern with *; "" for all.

    Raises:
        BadInput: as ``known_kind``; a pattern may also mean kinds of agents that are newer than the server.
    """
    wanted = request.args.get("kind", "")
    begin, star, _rest = wanted.partition("*")
    if not star:
        return known_kind(wanted) if wanted else ""
    is_agents = ALERT_PREFIX.startswith(begin) or begin.startswith(ALERT_PREFIX)
    if not is_agents and not any(fnmatchcase(kind, wanted.replace("[", "[[]")) for kind in catalogue.KINDS):
        fix = "docs/formats/events.md lists all kinds"
        raise BadInput("kind", f"no event is of a kind that fits {excerpt(wanted)}", fix)
    return wanted
