"""Who used a backend while which promise on it was at risk: the graph of a volume's view.

It rests on stored decisions: each says which promise was at risk, and who used its backend how much at that
time. That they coincide is all it shows, so every line is dashed: what would have been without one of them is
what a policy's attribution says (``harms``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flask import Blueprint, Response, abort, request

from dashboard.graph import Line, draw
from sla_server.api.context import AppContext

SHARED_USE: Final = "shared_use"
KINDS: Final = ("start", "pre-position", "decrease", "unattributed", "infeasible")
"""Decisions at which a promise was at risk, with the use of its backend."""
DECISIONS_MAX: Final = 500
SPAN_MAX_US: Final = 31 * 86_400_000_000
DAY_US: Final = 86_400_000_000
MAX_US: Final = 1 << 62


def make_shared_use(context: AppContext) -> Blueprint:
    """One route, for those who see everything: neighbours are named."""
    pages = Blueprint(SHARED_USE, __name__)

    def graph(name: str) -> Response:
        to_us = request.args.get("to_us", context.clock.unix_us(), int)
        from_us = request.args.get("from_us", to_us - DAY_US, int)
        if not 0 <= from_us < to_us <= min(from_us + SPAN_MAX_US, MAX_US):
            abort(400, "from_us must lie before to_us, by 31 days at most.")
        backend = context.source.backend_of(name)
        rows = []
        if backend:
            rows = context.source.decisions(
                backend=backend, kinds=KINDS, from_us=from_us, until_us=to_us, limit=DECISIONS_MAX
            )
        title = f"Who used {backend} while which promise was at risk"
        return Response(draw(lines_of(rows), title), mimetype="image/svg+xml")

    pages.add_url_rule("/volumes/<name>/shared-use.svg", "graph", graph)
    return pages


def lines_of(decisions: Iterable[Mapping[str, Any]]) -> list[Line]:
    """From volumes to promises, as wide as the mean share of the load; clients count for their volume."""
    shares: dict[tuple[str, str], float] = {}
    counts: dict[str, int] = {}
    for row in decisions:
        figures, promise = row.get("figures") or {}, row.get("victim") or ""
        use = [each for each in figures.get("use") or [] if isinstance(each, dict)]
        if not promise or not use:
            continue
        counts[promise] = counts.get(promise, 0) + 1
        for each in use:
            key = str(each.get("volume", "")).partition("/")[0], promise
            shares[key] = shares.get(key, 0.0) + float(each.get("share_ratio") or 0.0)
    found = [(total / counts[promise], volume, promise) for (volume, promise), total in shares.items()]
    return [
        Line(
            source=volume,
            target=promise,
            weight=share,
            sure=False,
            words=f"{volume} had {share * 100:.0f} % of the load when {promise} was at risk "
            f"({counts[promise]} decision{'' if counts[promise] == 1 else 's'})",
        )
        for share, volume, promise in sorted(found, key=lambda each: (-each[0], each[1:]))
    ]
