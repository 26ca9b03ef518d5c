"""What answers of the engine mean; the answers are as 2.15.1 and 2.9.10 give them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from nats.js import JetStreamManager
from nats.js.api import StreamInfo

from sla_server.cli.cluster import troubles
from sla_server.cli.cluster_mirror import mirror_json
from sla_server.cluster.admin import (
    ClusterState,
    NodeRow,
    StreamRow,
    all_consumers,
    node_row,
    stream_row,
)
from sla_server.cluster.messages.mirrors import MirrorRow


def _answer(name: str, meta: dict[str, Any] | None) -> dict[str, Any]:
    streams: dict[str, Any] = {"stats": {"storage": 1234}}
    if meta is not None:
        streams["meta"] = meta
    return {
        "server": {
            "name": name,
            "ver": "2.15.1",
            "tags": ["site.berlin", "essential.replicas:3", "essential.name:sla"],
        },
        "statsz": {
            "connections": 4,
            "mem": 99,
            "active_servers": 4,  # n3 was killed and started a minute ago
            "jetstream": streams,
            "routes": [{"rid": 9 + number, "name": f"n{2 + number % 2}"} for number in range(8)],
        },
    }


def _row(name: str = "n1", leader: str = "n1", **changes: Any) -> NodeRow:
    return replace(node_row(_answer(name, {"leader": leader})), **changes)


def _stream(**changes: Any) -> StreamRow:
    row = StreamRow("orders", ("orders.>",), 3, "n1", ("n2", "n3"), (), 5, 500)
    return replace(row, **changes)


def test_the_leader_says_who_the_members_are() -> None:
    replicas = [{"name": "n2", "current": True}, {"name": "n3", "offline": True}]
    row = node_row(_answer("n1", {"leader": "n1", "replicas": replicas, "cluster_size": 3}))
    assert (row.name, row.site, row.version, row.leader) == ("n1", "berlin", "2.15.1", "n1")
    assert row.members == (("n2", True), ("n3", False))
    assert row.parameters == {"replicas": "3", "name": "sla"}
    assert (row.connections, row.expected, row.stored_bytes, row.memory_bytes) == (4, 3, 1234, 99)


def test_a_node_that_was_killed_and_started_again_is_expected_to_answer_once() -> None:
    answer = _answer("n1", None)
    assert node_row(answer).expected == 3
    del answer["statsz"]["routes"]
    assert node_row(answer).expected == 1


def test_a_node_without_peers_leads_itself_and_one_that_has_lost_its_leader_says_so() -> None:
    assert node_row(_answer("n1", None)).leader == "n1"
    assert node_row(_answer("n1", {"cluster_size": 3})).leader == ""


def test_copies_that_are_behind_or_away_are_told_apart_from_complete_ones() -> None:
    info = StreamInfo.from_response(
        {
            "config": {"name": "orders", "subjects": ["orders.>"], "num_replicas": 3},
            "state": {"messages": 5, "bytes": 500, "first_seq": 1, "last_seq": 5, "consumer_count": 0},
            "cluster": {
                "leader": "n1",
                "replicas": [
                    {"name": "n3", "current": False},
                    {"name": "n2", "current": True},
                    {"name": "n4", "current": True, "offline": True},
                ],
            },
        }
    )
    row = stream_row(info)
    assert (row.leader, row.current, row.behind) == ("n1", ("n2",), ("n3", "n4"))
    assert (row.replicas, row.messages, row.stored_bytes) == (3, 5, 500)


def test_the_streams_of_a_node_without_others_are_led_by_it() -> None:
    info = StreamInfo.from_response(
        {
            "config": {"name": "orders", "subjects": ["orders.>"], "num_replicas": 1},
            "state": {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0, "consumer_count": 0},
        }
    )
    row = stream_row(info, "n1")
    assert (row.leader, row.current, row.behind) == ("n1", (), ())
    assert ClusterState((_row("n1"),), (row,)).is_well


def test_a_cluster_is_well_when_all_members_answer_and_all_copies_are_complete() -> None:
    members = (("n1", True), ("n2", True))
    whole = ClusterState((_row("n1", members=members), _row("n2")), (_stream(),))
    assert whole.is_well
    assert troubles(whole) == []
    assert (whole.leader, whole.missing, whole.mixed) == ("n1", (), False)


def test_each_trouble_is_said() -> None:
    members = (("n2", False), ("n3", False))
    state = ClusterState(
        (_row("n1", members=members), _row("n2", parameters={"replicas": "5"})),
        (_stream(behind=("n3",)), _stream(name="bills", leader="")),
    )
    assert not state.is_well
    assert state.missing == ("n3",)
    assert troubles(state) == [
        "n3 does not run",
        "essential parameters differ between nodes: 'sla cluster config' names them",
        "copies of stream orders are behind on n3",
        "stream bills has no leader and takes no messages",
    ]
    lost = ClusterState((_row("n1", leader=""),), (), "listing the streams: no node leads")
    assert not lost.is_well
    assert troubles(lost)[0] == "no node leads the cluster: a majority of its nodes is missing"


def test_a_node_that_has_turned_its_storage_off_is_in_trouble_and_leads_nothing() -> None:
    answer = _answer("n1", {"leader": "n1"})
    del answer["statsz"]["jetstream"]
    answer["server"]["jetstream"] = True  # so 2.15.1
    row = node_row(answer)
    assert (row.is_storing, row.leader) == (False, "")
    state = ClusterState((row, _row("n2", "n2")), ())
    assert not state.is_well
    assert state.leader == "n2"
    [text] = troubles(state)
    assert text.startswith("n1 stores nothing: its engine has turned storage off")


def test_a_mirror_that_is_behind_is_no_copy_that_is_behind() -> None:
    row = MirrorRow(
        "SLA_a_mn3", "SLA_a", "n3", is_running=True, hears_primary=True, behind_messages=9, behind_s=4.0
    )
    state = ClusterState((_row("n1"),), (_stream(behind=()),), mirrors=(row,))
    assert state.is_well
    assert troubles(state) == []
    assert mirror_json(row)["text"] == "asynchronous copy, 9 messages / 4 s behind"
    assert mirror_json(row)["kind"] == "asynchronous copy"


def test_a_drain_looks_at_all_consumers_of_a_stream() -> None:
    class Manager:
        async def consumers_info(self, _stream: str, offset: int) -> list[int]:
            return list(range(600))[offset : offset + 256]  # as many as the engine says at once

    found = asyncio.run(all_consumers(cast(JetStreamManager, Manager()), "S"))
    assert found == list(range(600))
