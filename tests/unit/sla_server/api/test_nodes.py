"""``/nodes``: who acts, for how many gateways, and who is away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock, boot_ns
from sla_server.api.context import AppContext
from sla_server.lease_file import LeaseState
from sla_server.nodes_file import RunningNode, write_nodes


def _nodes(context: AppContext) -> list[dict[str, Any]]:
    web = dashboard.create_app(context).test_client()
    found: list[dict[str, Any]] = web.get("/api/v1/nodes", base_url="http://127.0.0.1:8411").json["items"]
    return found


def test_a_server_without_a_cluster_has_none(web: FlaskClient) -> None:
    assert web.get("/api/v1/nodes").json["items"] == []


def test_nodes_say_who_acts_and_who_is_away(context: AppContext, clock: FakeClock, tmp_path: Path) -> None:
    context.metrics.folder = tmp_path / "metrics"
    context = replace(context, nodes=("n1", "n2", "n3"))
    assert [row["state"] for row in _nodes(context)] == ["unknown"] * 3
    former = [RunningNode(name, "s", "2.15.1") for name in ("n1", "n2")]
    write_nodes(tmp_path, former, clock.unix_us())
    assert [row["state"] for row in _nodes(context)] == ["runs", "runs", "away"]
    own = RunningNode("n1", "s", "2.15.1", "0.2.0", takes_over=True, page="https://sla-1")
    write_nodes(tmp_path, [own, former[1]], clock.unix_us())
    LeaseState("n1", "n2", 7, 0, 6.0, boot_ns() - 2 * 10**9).write(tmp_path)
    first, second, third = _nodes(context)
    assert (first["state"], first["gateways"], first["is_this"], first["fence"]) == (
        "stands-by",
        0,
        True,
        None,
    )
    assert (first["release"], first["page"], first["lease_s"]) == ("0.2.0", "https://sla-1", None)
    assert (second["release"], second["page"], second["lease_s"]) == (None, None, 6.0)
    assert 2 <= second["heard_s"] < 10
    up = sum(row["state"] == "up" for row in context.source.gateways())
    assert (second["state"], second["gateways"], second["fence"], second["site"]) == ("acts", up, 7, "s")
    assert (third["state"], third["version"]) == ("away", None)
    assert [row["why"] for row in (first, second, third)] == [None, None, None]
    LeaseState("n1", "n2", 7, 0, 6.0, boot_ns(), gave_up="n1", why="has not reached the database").write(
        tmp_path
    )
    assert [row["why"] for row in _nodes(context)] == ["has not reached the database", None, None]
    LeaseState("n1", "n2", 7, 0, 6.0, boot_ns() - 60 * 10**9).write(tmp_path)  # nothing new was heard since
    assert [row["state"] for row in _nodes(context)] == ["stands-by", "runs", "away"]
