"""A gateway with its session as plain values, and back: what moves from one pair process to another.

Both sides' monotonic clocks are the machine's, so times stay valid. ``awaiting_since_ns`` stays behind: a
poll that was accounted for may not have left, and waiting for its answer would call the gateway stalled;
the new pair polls at the next phase, and answers to older polls are recognised by the record.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from pmdaemon.poller.clock_offset import OffsetEstimator, OffsetSample
from pmdaemon.poller.gateway import Gateway, GatewayState
from pmdaemon.poller.peer import AgentPeer
from pmdaemon.poller.positions import CutPositions
from pmdaemon.wire.messages.agent import Hello, StreamEntry


def pack_gateway(gateway: Gateway) -> dict[str, Any]:
    """Everything of a gateway that has a session. Takes its lock, and takes its session away."""
    with gateway.lock:
        conn, gateway.conn = gateway.conn, None
        record = gateway.record.pack()
    assert conn is not None  # the caller looked; only the inbound thread ends sessions
    hello, conn.gateway = conn.hello, None
    assert hello is not None  # a session that has registered said HELLO
    return {
        "id": gateway.gateway_id,
        "hello": list(astuple(hello)),
        "schema_seen": conn.schema_seen,
        "exports": gateway.exports,
        "streams": [list(stream) for stream in gateway.streams.values()],
        "offset": gateway.offset.best,
        "condition": gateway.condition.value,
        "dropped": gateway.dropped,
        "announced_dropped": list(gateway.announced_dropped),
        "record": record,
    }


def unpack_gateway(packed: dict[str, Any], conn: AgentPeer) -> Gateway:
    """The gateway, with its session on ``conn``. Not yet known to anybody."""
    gateway = Gateway(packed["id"])
    hello = Hello(*packed["hello"])
    conn.hello, conn.schema_seen, conn.gateway = hello, packed["schema_seen"], gateway
    gateway.name, gateway.software, gateway.address = hello.name, hello.software, conn.address
    gateway.epoch = hello.epoch
    gateway.exports = packed["exports"]
    gateway.streams = {item[0]: StreamEntry(*item) for item in packed["streams"]}
    if packed["offset"] is not None:
        gateway.offset = OffsetEstimator(OffsetSample(*packed["offset"]))
    gateway.condition = GatewayState(packed["condition"])
    gateway.dropped = packed["dropped"]
    gateway.announced_dropped = (packed["announced_dropped"][0], packed["announced_dropped"][1])
    gateway.record = CutPositions.unpack(packed["record"])
    gateway.conn = conn
    return gateway
