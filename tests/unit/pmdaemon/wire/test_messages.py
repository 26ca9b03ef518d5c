"""The message classes: their page is up to date, every kind has one, and what is written can be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from docs import messages as page
from pmdaemon.errors import MalformedFrame, WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages import (
    agent,
    alerts,
    api,
    ends,
    mirror,
    orders,
    plane_report,
    planes,
    server,
    thresholds,
)
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.client_caps import caps_client
from tests.support.paths import FIXTURES

GOLDEN = FIXTURES / "golden" / "v1"
GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
EXPORT = {"volume": "v", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}
ALERT = alerts.Alert("plane-died", "warning", "it died", 7, {"plane": "nbd-0"})
REPORT = server.GatewayReport(GATEWAY, "g", "lost", "gone", "a:1", "s", 7, 5, -3, 2)
CLIENT_CAP = {"volume": "w", "client": "c", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 5.0}
WHOLE_CLIENT = {"client": "c", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 5.0, "burst_s": 2.0}


def test_the_page_is_what_make_docs_writes() -> None:
    assert page.TARGET.read_text() == page.render(), "run: make docs"


def test_every_kind_has_one_class() -> None:
    kinds = [
        message.KIND
        for module in (*page.OF_AGENT, server, orders, api, planes, plane_report, mirror)
        for message in page.messages_of(module)
    ]
    assert sorted(kinds) == sorted(set(Kind) - {Kind.CUT})


@pytest.mark.parametrize(
    "message",
    [
        agent.Hello,
        agent.Welcome,
        agent.Registration,
        agent.Registered,
        agent.Poll,
        agent.Reply,
        agent.CapSet,
        agent.CapsAck,
        thresholds.Thresholds,
        thresholds.ThresholdsAck,
        ends.Unsupported,
        ends.Error,
        ends.Bye,
    ],
)
def test_golden_frames_survive_parse_and_encode(message: Any) -> None:
    """By meaning: POLL has its own encoder, and a reader leaves out what it has no use for."""
    raw = (GOLDEN / f"{message.KIND.name.lower()}.bin").read_bytes()
    header = frame.decode(raw).header
    parsed = message.parse(header)
    if message is agent.Welcome:
        parsed = replace(parsed, server_us=header["server_us"])
    assert frame.decode(parsed.encode()).header == header
    if message is not agent.Poll:
        assert parsed.encode() == raw


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (REPORT, server.GatewayReport.parse),
        (replace(REPORT, state="up", exports=[EXPORT], spool=[[7, 1, 2]]), server.GatewayReport.parse),
        (replace(REPORT, state="up", features=("client-caps",)), server.GatewayReport.parse),
        (server.StreamsSeen(GATEWAY, []), server.StreamsSeen.parse),
        (server.CapsState(GATEWAY, 3, "sent", "", 5), lambda header: server.CapsState.parse(header, 9)),
        (server.GatewayAlert(ALERT, GATEWAY), lambda header: server.GatewayAlert.parse(header, 9)),
        (orders.CapsOrder.of(GATEWAY, agent.CapSet(1, 2, ())), orders.CapsOrder.parse),
        (agent.CapSet(1, 2, (), (CLIENT_CAP,)), agent.CapSet.parse),
        (planes.DpCaps(1, 2, (), (CLIENT_CAP,)), planes.DpCaps.parse),
        (agent.CapSet(1, 2, (), whole_clients=(WHOLE_CLIENT,)), agent.CapSet.parse),
        (
            orders.CapsOrder.of(GATEWAY, agent.CapSet(1, 2, (), whole_clients=(WHOLE_CLIENT,))),
            orders.CapsOrder.parse,
        ),
        (agent.Hello.of(GATEWAY, "g", 7, "s"), agent.Hello.parse),
        (orders.ThresholdsOrder.of(GATEWAY, thresholds.Thresholds(1, ())), orders.ThresholdsOrder.parse),
        (orders.Lease(5), orders.Lease.parse),
        (server.WatermarksNotice(5, [["a", 1, 2]]), server.WatermarksNotice.parse),
        (server.DurableNotice(5, []), server.DurableNotice.parse),
        (server.Recorded("r", ok=False, error="no"), server.Recorded.parse),
        (server.CutsHeader(0, 1, [1], [0], [False]), server.CutsHeader.parse),
        (api.ServiceRequest("r", "mode", "ann", {"mode": "observe"}), api.ServiceRequest.parse),
        (api.ServiceResponse.of("r", 404, {"a": 1}), api.ServiceResponse.parse),
        (planes.DpCollect(5), planes.DpCollect.parse),
        (planes.DpHandOver(["unix:x"], {"gen": 1}, 7, None, 1, 2), planes.DpHandOver.parse),
    ],
)
def test_what_is_encoded_can_be_parsed(message: WireMessage, read: Any) -> None:
    received = frame.decode(message.encode())
    assert received.kind == message.KIND
    assert read(received.header).encode() == message.encode()


def test_a_request_that_has_an_id_is_read_and_one_without_is_not() -> None:
    read = api.ServiceRequest.parse({"req": "r", "op": [5], "who": "a" * 999, "body": "text"})
    assert read == api.ServiceRequest("r", "[5]", "a" * api.MAX_WHO, None)
    assert api.ServiceRequest.parse({"req": "r", "op": "mode", "body": {}}).who == "unknown"
    for request in (None, "", 5):
        with pytest.raises(MalformedFrame, match=r"key 'req' is .*, expected an id"):
            api.ServiceRequest.parse({"req": request, "op": "mode", "who": "ann", "body": {}})


def test_keys_are_left_out_only_where_they_are_optional() -> None:
    assert "exports" not in REPORT.header()
    assert "together" not in server.RecordRows([], None, "services").header()
    assert server.RecordRows([], None, "services").header() == {"rows": [], "req": None, "from": "services"}


def test_a_set_without_caps_of_clients_is_what_it_always_was() -> None:
    assert agent.CapSet(1, 2, ()).header() == {"gen": 1, "lease_us": 2, "caps": ()}
    assert agent.CapSet.parse({"gen": 1, "lease_us": 2, "caps": [], "clients": []}).clients is None
    assert agent.CapSet(1, 2, ({"volume": "v"},), (CLIENT_CAP,)).volumes == {"v", "w"}


def test_a_cap_of_a_whole_client_names_no_volume_and_passes_the_pair_as_it_came() -> None:
    made = agent.CapSet(1, 2, (), whole_clients=(WHOLE_CLIENT,))
    assert (made.volumes, made.is_shared) == (frozenset(), True)
    order = orders.CapsOrder.parse(frame.decode(orders.CapsOrder.of(GATEWAY, made).encode()).header)
    assert agent.CapSet.parse(frame.decode(order.caps_frame()).header) == made
    for wrong, problem in (
        ({"cost_per_s": 1}, "names no client"),
        ({"client": "c", "ops_per_s": 0}, "ops_per_s"),
    ):
        with pytest.raises(MalformedFrame, match=problem):
            agent.CapSet.parse({"gen": 1, "lease_us": 2, "caps": [], "whole_clients": [wrong]})


@pytest.mark.parametrize(
    ("clients", "problem"),
    [
        (7, "is no list of maps"),
        ([7], "is no list of maps"),
        ([{"volume": "v", "cost_per_s": 1}], "names no client"),
        ([{"client": "c", "cost_per_s": 1}], "names no volume"),
        ([{"volume": "v", "client": "c", "cost_per_s": 0}], "'cost_per_s'"),
        ([{"volume": "v", "client": "*", "except": "db"}], "'except' is no list of globs"),
        ([{"volume": "v", "client": "*", "except": [7]}], "'except' is no list of globs"),
        ([{"volume": "v", "client": "*", "except": ["db"] * 65}], "has 65 globs, expected at most 64"),
        ([{"volume": "v", "client": "c", "except": ["db"]}], "and a client that is a glob"),
    ],
)
def test_a_malformed_cap_of_a_client_is_named(clients: Any, problem: str) -> None:
    with pytest.raises(MalformedFrame, match=problem):
        agent.CapSet.parse({"gen": 1, "lease_us": 2, "caps": [], "clients": clients})


def test_a_cap_of_all_clients_that_are_not_named() -> None:
    entry = {"volume": "v", "client": "*", "except": ["db-*"], "cost_per_s": 5.0}
    (found,) = agent.CapSet.parse({"gen": 1, "lease_us": 2, "caps": [], "clients": [entry]}).clients or ()
    assert found["except"] == ["db-*"]
    assert [caps_client(found, name) for name in ("db-1", "job")] == [False, True]
    assert [caps_client({"client": "c"}, name) for name in ("c", "d")] == [True, False]


@pytest.mark.parametrize("features", [None, "client-caps", [7], ["a b"], ["a"] * 33])
def test_features_are_short_names(features: Any) -> None:
    header = agent.Hello.of(GATEWAY, "g", 7, "s").header()
    with pytest.raises(WireError, match="features"):
        agent.Hello.parse({**header, "features": features})


def test_an_agent_of_before_says_no_features() -> None:
    header = agent.Hello.of(GATEWAY, "g", 7, "s").header()
    del header["features"]
    assert agent.Hello.parse(header).features == ()


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"n": 1, "recv_us": [1], "offset_us": [1]},
        {"n": 2, "recv_us": [1], "offset_us": [1], "live": [True]},
        {"n": "1", "recv_us": [1], "offset_us": [1], "live": [True]},
    ],
)
def test_cuts_need_one_value_for_each(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame, match="CUTS"):
        server.CutsHeader.parse(header)
