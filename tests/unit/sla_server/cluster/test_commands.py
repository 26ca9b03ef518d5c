"""Commands: carried out by name, answered with the node and how many answers to expect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from sla_server.cluster.commands import Answers, CommandTable, NodeAnswer, is_asked, subject_of
from sla_server.cluster.errors import ClusterRefused


async def _double(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if arguments["number"] < 0:
        raise ClusterRefused("it is below 0")
    return {"number": 2 * arguments["number"]}


def _answer(command: str, **arguments: Any) -> NodeAnswer:
    table = CommandTable("n1")
    table.register("double", _double)
    message = json.dumps({"command": command, "arguments": arguments}).encode()
    return asyncio.run(table.carry_out(message, 3))


def test_a_command_is_carried_out_and_its_answer_says_how_many_to_expect() -> None:
    answer = _answer("double", number=4)
    assert answer == NodeAnswer("n1", 3, {"number": 8})
    assert NodeAnswer.parse(answer.encode()) == answer


def test_what_cannot_be_done_is_answered_with_the_reason() -> None:
    assert _answer("double", number=-1).problem == "double: it is below 0"
    assert _answer("double").problem == "double: 'number'"
    assert _answer("halve").problem == "there is no command 'halve'; there are double"
    table = CommandTable("n1")
    assert "no command" in asyncio.run(table.carry_out(b"{}", 1)).problem


def test_a_command_has_one_owner() -> None:
    table = CommandTable("n1")
    table.register("double", _double)
    with pytest.raises(ValueError, match="registered twice"):
        table.register("double", _double)


def test_all_is_done_when_every_node_has_answered_without_a_problem() -> None:
    one, two = NodeAnswer("n1", 2), NodeAnswer("n2", 2)
    assert Answers((one, two), 2).is_done
    assert Answers((one,), 2).missing == 1
    assert not Answers((one,), 2).is_done
    assert not Answers((one, NodeAnswer("n2", 2, {}, "no")), 2).is_done


def test_commands_are_published_below_the_reserved_destination() -> None:
    assert subject_of("n1") == "sla.d.__ADMIN._ADMIN.node.n1"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"node": "n1"}'])
def test_an_answer_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        NodeAnswer.parse(data)


def test_what_a_consumer_had_delivered_to_the_subject_of_commands_is_none() -> None:
    assert is_asked("_INBOX.abc.n1")
    assert is_asked("_INBOX_boss.abc.n1")
    assert not is_asked("$JS.ACK.SLA_orders.x.1.1.1.1.0")
    assert not is_asked("")
