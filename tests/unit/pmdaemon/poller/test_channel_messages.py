"""Messages between the daemon's parent and its pairs: what is sent is read again, also by another release."""

from __future__ import annotations

import json

import pytest

from pmdaemon.poller.channel_messages import (
    OPS,
    GatewayRegistered,
    Mail,
    MovedConnection,
    NewConnection,
    PairReport,
    Refused,
    RegisteredElsewhere,
    Sent,
    ShardMap,
    Unreadable,
    decode,
    encode,
    op_of,
)

MESSAGES: list[Sent] = [
    NewConnection("127.0.0.1:5000", dialled=True),
    ShardMap([0, 1, 1]),
    MovedConnection(3, "g", 1, "127.0.0.1:5000", dialled=False, opened_ns=7),
    Mail(3, "services"),
    RegisteredElsewhere("g", "127.0.0.1:5000"),
    PairReport(3, 2, 123.5, 0.25, [[7, 2]], {"inbound thread": 9}, {"polls": 5.0}),
    GatewayRegistered("g", "127.0.0.1:5000"),
    Refused("127.0.0.1:5000", "no room", is_over=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=op_of)
def test_what_is_sent_is_read_again_with_keys_of_a_later_release(message: Sent) -> None:
    text = json.loads(encode(message))
    assert text["op"] == op_of(message)
    assert decode(encode(message)) == message
    assert decode(json.dumps({**text, "later": 1}).encode()) == message


def test_each_message_has_an_op() -> None:
    assert [op_of(message) for message in MESSAGES] == list(OPS)


@pytest.mark.parametrize(
    ("text", "op", "problem"),
    [
        (b'{"op":"mail","shard":3}', "mail", "it lacks sender"),
        (b'{"op":"sing"}', "sing", "'sing' is no message of this release"),
        (b'{"op":"map","owners":[0,"1"]}', "map", "its owners is [0, '1'], expected [int]"),
        (b'{"op":"mail","shard":true,"sender":"s"}', "mail", "its shard is True, expected int"),
        (b'{"op":"report","steps":{"inbound":"x"}}', "report", "expected {str: int}"),
        (b"{}", "None", "'None' is no message of this release"),
        (b'{"op":"map","own', "", "Unterminated string"),
        (b"7", "", "not iterable"),
    ],
)
def test_what_cannot_be_read_says_why(text: bytes, op: str, problem: str) -> None:
    body = decode(text)
    assert isinstance(body, Unreadable)
    assert body.op == op == op_of(body)
    assert problem in body.problem


def test_a_report_of_an_older_release_has_the_values_of_before() -> None:
    assert decode(b'{"op":"report","connections":4}') == PairReport(connections=4)


def test_the_bytes_are_those_of_releases_before() -> None:
    """Both sides are of two releases while an upgrade restarts them."""
    assert [encode(message).decode() for message in MESSAGES] == [
        '{"op":"new","address":"127.0.0.1:5000","dialled":true}',
        '{"op":"map","owners":[0,1,1]}',
        '{"op":"moved","shard":3,"gw":"g","hops":1,"address":"127.0.0.1:5000","dialled":false,"opened_ns":7}',
        '{"op":"mail","shard":3,"sender":"services"}',
        '{"op":"elsewhere","gw":"g","address":"127.0.0.1:5000"}',
        '{"op":"report","connections":3,"gateways":2,"t_ptmax_us":123.5,"busy_ratio":0.25,"shards":[[7,2]],'
        '"steps":{"inbound thread":9},"metrics":{"polls":5.0}}',
        '{"op":"up","gw":"g","address":"127.0.0.1:5000"}',
        '{"op":"refused","address":"127.0.0.1:5000","reason":"no room","is_over":true}',
    ]
