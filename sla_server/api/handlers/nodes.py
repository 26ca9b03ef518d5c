"""The handler about the nodes of the cluster: whose server acts since when, and whose stand by."""

from __future__ import annotations

from typing import Any

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.lease_file import LeaseFile, LeaseState
from sla_server.nodes_file import RunningNode, read_nodes
from sla_server.rows import Row


def nodes(context: AppContext, _request: Request) -> Response:
    """All nodes of ``[cluster]``, this server's first; none without it.

    ``state`` is ``acts``, ``stands-by`` (its server takes over when the acting one does not go on), ``runs``
    (there is no server around it, or one that takes over from none, or of a former release), ``away``, or
    ``unknown`` while this server's own node does not answer. ``lease_s`` and ``heard_s`` are of the acting
    server: how long its lease holds without a renewal, and how long ago this server heard of it. ``why``: why
    a server that stands by gave the lease up by itself, to the one that acts; null of all others.
    """
    if not context.nodes or context.metrics.folder is None:
        return responses.as_list([])
    runtime_dir = context.metrics.folder.parent
    running, lease = read_nodes(runtime_dir, context.clock.unix_us()), LeaseFile(runtime_dir).read()
    stored = {str(row["server"]): row for row in context.source.fences()}
    gateways = sum(row["state"] == "up" for row in context.source.gateways())
    rows: list[Row] = []
    for name in context.nodes:
        node, term = running.get(name), stored.get(name)
        acts = name == lease.acting and term is not None and node is not None
        row: dict[str, Any] = {
            "name": name,
            "state": _state(node, is_known=bool(running), acts=acts),
            "site": node.site if node else None,
            "version": node.version if node else None,
            "release": (node.release or None) if node else None,
            "page": (node.page or None) if node else None,
            "is_this": name == context.nodes[0],
            "gateways": gateways if acts else 0,
            "fence": int(term["fence"]) if acts and term else None,
            "since_us": int(term["since_us"]) if acts and term else None,
            "lease_s": lease.lease_s if acts else None,
            "heard_s": _heard_s(lease) if acts else None,
            "why": (lease.why or None) if name == lease.gave_up and not acts else None,
        }
        rows.append(row)
    return responses.as_list(rows)


def _heard_s(lease: LeaseState) -> float | None:
    return None if lease.heard_s is None else round(lease.heard_s, 1)


def _state(node: RunningNode | None, *, is_known: bool, acts: bool) -> str:
    if not is_known:
        return "unknown"
    if node is None:
        return "away"
    if acts:
        return "acts"
    return "stands-by" if node.takes_over else "runs"
