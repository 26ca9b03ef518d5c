"""What a server that stands by answers: it changes nothing, and says which server acts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock, boot_ns
from sla_server.api.acting import ActingServer
from sla_server.api.context import AppContext
from sla_server.api.errors import StandsBy
from sla_server.api.operations import Operations
from sla_server.lease_file import LeaseState
from sla_server.nodes_file import RunningNode, write_nodes
from tests.support import api
from tests.support.agreements import FULL

LONG_NS = 3_600 * 10**9
N2_ACTS = "the server of node n2 acts, this one (node n1) stands by"
HEADERS = {"Authorization": f"Bearer {api.TOKEN}"}


PAGE = "https://sla-2.example.org:8411"


def _n2_acts(folder: Path) -> None:
    LeaseState("n1", "n2", 7, 0, 6.0, boot_ns() - 10**9, PAGE).write(folder)


@pytest.fixture
def standing_by(
    context: AppContext, mailbox: api.AnsweringMailbox, clock: FakeClock, tmp_path: Path
) -> FlaskClient:
    """Of a server whose lease file is in ``tmp_path``: the server of n2 acts."""
    _n2_acts(tmp_path)
    acting = ActingServer(tmp_path, clock)
    operations = Operations(
        lambda message: mailbox.post("services", message), FakeClock(), wait_s=0.01, check=acting.check
    )
    return dashboard.create_app(replace(context, acting=acting, operations=operations)).test_client()


def test_a_change_is_refused_where_the_server_stands_by_and_does_not_wait_for_its_turn(
    standing_by: FlaskClient, mailbox: api.AnsweringMailbox, tmp_path: Path
) -> None:
    throttle = {"volume": "erp-db", "iops": 100, "reason": "backup"}
    for method, path, how in (
        ("POST", "/api/v1/slas", {"data": FULL}),
        ("POST", "/api/v1/throttles", {"json": throttle}),
        ("PUT", "/api/v1/mode", {"json": {"mode": "observe"}}),
    ):
        answer = standing_by.open(
            path, method=method, headers=HEADERS, base_url="http://127.0.0.1:8411", **how
        )
        assert (answer.status_code, answer.json["type"]) == (503, "urn:storage-sla:problem:stands-by"), path
        assert answer.json["detail"] == N2_ACTS
        assert f"Make the change at the server of n2, {PAGE}" in answer.json["fix"]
    assert mailbox.posted == []
    LeaseState("n1", "n1", 8, boot_ns() + LONG_NS).write(tmp_path)  # now it acts
    standing_by.put(
        "/api/v1/mode", headers=HEADERS, base_url="http://127.0.0.1:8411", json={"mode": "observe"}
    )
    assert [header["op"] for header in mailbox.posted] == ["mode"]


def test_health_and_the_live_view_say_which_server_acts(
    standing_by: FlaskClient, clock: FakeClock, tmp_path: Path
) -> None:
    others = [RunningNode("n1", "s", "2", page="http://here"), RunningNode("n2", "s", "2", page=PAGE)]
    write_nodes(tmp_path, [*others, RunningNode("n3", "s", "2")], clock.unix_us())
    health = standing_by.get("/api/v1/health", base_url="http://127.0.0.1:8411")
    assert health.status_code == 503
    assert (health.json["services"], health.json["acting"], health.json["stands_by"]) == (
        N2_ACTS,
        "n2",
        N2_ACTS,
    )
    assert N2_ACTS in [row["reason"] for row in health.json["problems"]]
    ready = standing_by.get("/api/v1/ready", base_url="http://127.0.0.1:8411")
    assert (ready.status_code, ready.json["waits_for"][0]["reason"]) == (503, N2_ACTS)
    server = standing_by.get("/api/v1/live", base_url="http://127.0.0.1:8411").json["server"]
    assert (server["acting"], server["stands_by"]) == ("n2", N2_ACTS)
    assert (server["acting_page"], server["pages"]) == (PAGE, {"n2": PAGE})
    for gave_up, more in (("n1", ": it gave the lease up, as it cannot act"), ("n3", "")):
        LeaseState("n1", "n2", 7, 0, 6.0, boot_ns(), gave_up=gave_up, why="cannot act").write(tmp_path)
        server = standing_by.get("/api/v1/live", base_url="http://127.0.0.1:8411").json["server"]
        assert server["stands_by"] == N2_ACTS + more
    LeaseState("n1", "n1", 8, boot_ns() + LONG_NS).write(tmp_path)
    server = standing_by.get("/api/v1/live", base_url="http://127.0.0.1:8411").json["server"]
    assert (server["acting"], server["stands_by"]) == ("n1", "")


@pytest.mark.parametrize(
    ("holder", "who"), [("n2", "the server of node n2"), ("n1", "this server"), ("", "none")]
)
def test_a_server_that_has_lost_the_cluster_says_neither_that_another_one_acts_nor_that_none_does(
    standing_by: FlaskClient, tmp_path: Path, holder: str, who: str
) -> None:
    until_ns = boot_ns() - 34 * 10**9 if holder == "n1" else 0
    LeaseState("n1", holder, 7, until_ns, 6.0, boot_ns() - 40 * 10**9, PAGE).write(tmp_path)
    health = standing_by.get("/api/v1/health", base_url="http://127.0.0.1:8411").json
    assert (health["acting"], health["acting_page"]) == (None, None)
    assert health["stands_by"] == (
        f"which server acts is not known here: node n1 has had no answer of the cluster for 40 s; {who} "
        "acted then"
    )


def test_why_names_the_server_that_acts(standing_by: FlaskClient, web: FlaskClient) -> None:
    asked = {"path": "/api/v1/why/erp-db", "query_string": {"kind": "volume"}}
    sections = standing_by.get(**asked, base_url="http://127.0.0.1:8411").json["sections"]
    found = {section["title"]: section["lines"] for section in sections}
    assert found["Server"] == ["The server of node n2 acts: it polls, judges and controls."]
    assert found["Stored"][0].startswith("The server of node n2 acts, this one (node n1) stands by: what is")
    alone = web.get(**asked).json["sections"]
    assert "Server" not in {section["title"] for section in alone}


def test_a_lease_of_its_own_that_has_lapsed_is_nobodys(tmp_path: Path) -> None:
    acting = ActingServer(tmp_path)
    for state in (None, LeaseState("n1", "n1", 7, boot_ns() - 1), LeaseState("n1", "", 0, 0)):
        if state is not None:
            state.write(tmp_path)
        with pytest.raises(StandsBy, match="no server acts just now") as caught:
            acting.check()
        assert "Try again" in caught.value.fix
        nobody = {"acting": None, "acting_page": None, "stands_by": caught.value.detail, "pages": {}}
        assert acting.described() == nobody
    ActingServer().check()
    assert ActingServer().described() is None
