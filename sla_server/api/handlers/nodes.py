"""The handler about the nodes of the cluster: whose server acts, and for how many gateways."""

from __future__ import annotations

from typing import Any

from flask import Request, Response

from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.lease_file import LeaseFile
from sla_server.nodes_file import read_nodes
from sla_server.rows import Row


def nodes(context: AppContext, _request: Request) -> Response:
    """All nodes of ``[cluster]``, this server's first; none without it.

    ``state`` is ``acts``, ``runs`` (its server, if it has one and takes over, stands by), ``away``, or
    ``unknown`` while this server's own node does not answer.
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
        acts = name == lease.holder and term is not None and node is not None
        row: dict[str, Any] = {
            "name": name,
            "state": _state(is_known=bool(running), runs=node is not None, acts=acts),
            "site": node.site if node else None,
            "version": node.version if node else None,
            "is_this": name == context.nodes[0],
            "gateways": gateways if acts else 0,
            "fence": int(term["fence"]) if acts and term else None,
            "since_us": int(term["since_us"]) if acts and term else None,
        }
        rows.append(row)
    return responses.as_list(rows)


def _state(*, is_known: bool, runs: bool, acts: bool) -> str:
    if not is_known:
        return "unknown"
    if not runs:
        return "away"
    return "acts" if acts else "runs"
