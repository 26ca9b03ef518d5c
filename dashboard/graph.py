"""Who slowed whom down on a backend, as a picture: volumes on the left, promises at risk on the right.

It rests on stored decisions: each says which promise was at risk, and who used its backend how much at that
time. That they coincide is all it shows; what would have been without one of them was not tried. The server
draws it (``templates/graph.svg``); its colours are those of the page, into which it is put.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flask import Blueprint, Response, abort, render_template, request

from sla_server.api.context import AppContext

GRAPH: Final = "graph"
KINDS: Final = ("start", "pre-position", "decrease", "unattributed", "infeasible")
"""Decisions at which a promise was at risk, with the use of its backend."""
MOST: Final = 8
"""Volumes and promises drawn, those with the most first."""
DECISIONS_MAX: Final = 500
SPAN_MAX_US: Final = 31 * 86_400_000_000
ROW_PX: Final = 34
TOP_PX: Final = 40
LEFT_X, RIGHT_X, WIDE_PX = 170, 270, 440
LINE_PX: Final = 9.0
"""How wide the line of all of a backend's load is."""
NAME_CHARS: Final = 22


@dataclass(frozen=True, slots=True)
class Link:
    """A volume used the backend while a promise on it was at risk."""

    volume: str
    promise: str
    share: float
    """Of the backend's load, on average over the decisions."""
    decisions: int


def links_of(decisions: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Links of some decisions of one backend, the largest share first; a client counts for its volume."""
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
    found = [
        Link(volume, promise, share / counts[promise], counts[promise])
        for (volume, promise), share in shares.items()
    ]
    return sorted(found, key=lambda link: (-link.share, link.volume, link.promise))


def picture_of(links: list[Link], own: str) -> dict[str, Any]:
    """Where everything is drawn; ``own`` is the volume whose view it is."""
    volumes = list(dict.fromkeys(link.volume for link in links))[:MOST]
    if own in (link.volume for link in links) and own not in volumes:
        volumes[-1] = own
    promises = list(dict.fromkeys(link.promise for link in links if link.volume in volumes))[:MOST]

    def place(names: list[str]) -> dict[str, int]:
        return {name: TOP_PX + ROW_PX * number for number, name in enumerate(names)}

    left, right = place(volumes), place(promises)
    shown = [link for link in links if link.volume in left and link.promise in right]
    return {
        "wide": WIDE_PX,
        "high": TOP_PX + ROW_PX * max(len(left), len(right), 1),
        "left_x": LEFT_X,
        "right_x": RIGHT_X,
        "left": left,
        "right": right,
        "own": own,
        "lines": [
            {"link": link, "y0": left[link.volume], "y1": right[link.promise],
             "px": round(max(1.0, LINE_PX * min(link.share, 1.0)), 1)}
            for link in shown
        ],
    }  # fmt: skip


def make_graph(context: AppContext) -> Blueprint:
    """The one route; ``guard_page`` lets in who may see all volumes."""
    graph = Blueprint(GRAPH, __name__, template_folder="templates")

    @graph.get("/volumes/<path:name>/graph.svg")
    def drawn(name: str) -> Response:
        """Of the volume's backend over a range of time."""
        now_us = context.clock.unix_us()
        from_us, to_us = (request.args.get(key, default, int) for key, default in
                          (("from_us", now_us - 86_400_000_000), ("to_us", now_us)))  # fmt: skip
        if not 0 < to_us - from_us <= SPAN_MAX_US or not 0 <= from_us < 1 << 62:
            abort(400, "from_us must lie before to_us, by 31 days at most.")
        backend = context.source.backend_of(name)
        asked = {"backend": backend, "kinds": KINDS, "from_us": from_us, "until_us": to_us}
        rows = context.source.decisions(**asked, limit=DECISIONS_MAX) if backend else []
        text = render_template(
            "graph.svg", backend=backend or "", short=_short, **picture_of(links_of(rows), name)
        )
        return Response(text, mimetype="image/svg+xml")

    return graph


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"
