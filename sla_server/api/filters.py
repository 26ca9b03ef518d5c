"""Filters with a closed set of values: one that no row can have is refused, for an empty list says "none"."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final

from flask import Request

from pmdaemon.runtime.excerpt import excerpt
from sla_server.api.errors import BadInput

PROMISE_STATES: Final = (
    "violating", "at-risk", "no-data", "ok", "idle", "out-of-curve", "not-applicable", "excluded",
)  # fmt: skip
GATEWAY_STATES: Final = ("up", "stalled", "detached", "lost", "stopped", "refused")
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
