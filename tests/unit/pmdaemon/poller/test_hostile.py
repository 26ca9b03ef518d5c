"""Whatever a peer sends, in whatever state: the worst it brings about is the end of its own connection.

Property tests over the whole receiving side of a pair (``PairRig``): a step that raises is a
dead pair. The other gateway is polled and its cut is kept in every example.
"""

from __future__ import annotations

from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import GATEWAY, hello, make_cut, register, schema, streams
from tests.support.pair import OTHER, PairRig

HANDSHAKE = (hello(), schema(), register(), streams())
POLLED = len(HANDSHAKE) + 1
# Frames that would be right at their time; the tests put wrong values in.
RIGHT: tuple[tuple[int, dict[str, Any], bytes], ...] = (
    *((item.kind, item.header, bytes(item.blob)) for item in map(frame.decode, HANDSHAKE)),
    *((item.kind, item.header, bytes(item.blob)) for item in (frame.decode(make_cut(rows=2)),)),
    (Kind.REPLY, {"poll": 1, "sent_ns": 1, "wall_us": 1, "cuts": 0, "dropped": 0}, b""),
    (Kind.CAPS_ACK, {"gen": 1, "ok": True, "reason": ""}, b""),
    (Kind.THRESHOLDS_ACK, {"version": 1}, b""),
    (
        Kind.SPACE,
        {
            "pool": "p",
            "kind": "path",
            "backend": "",
            "size_bytes": 2,
            "used_bytes": 1,
            "other_ratio": None,
            "provisioned_bytes": 0,
            "volume_count": 0,
            "volumes": [],
            "at_us": 1,
        },
        b"",
    ),
    (Kind.ALERT, {"kind": "x", "severity": "info", "text": "y", "at_us": 1, "details": {}}, b""),
    (Kind.ENROL, {"token": "t", "gw": GATEWAY, "csr": b"x"}, b""),
    (Kind.RENEW, {"csr": b"x"}, b""),
    *((kind, {}, b"") for kind in (Kind.CA_QUERY, Kind.UNSUPPORTED, Kind.ERROR, Kind.BYE, Kind.POLL)),
)
KEYS = st.sampled_from(sorted({key for _, header, _ in RIGHT for key in header} | {"gap", "code", "id"}))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from([GATEWAY, OTHER, "nbd", "info", 0, 1])
)
DEEP = st.integers(1, 1000).map(lambda depth: reduce(lambda inner, _: [inner], range(depth), 1))
VALUES = (
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=8,
    )
    | DEEP
    | st.integers(100, 9000).map(lambda size: "\x1b]0;" + "x" * size)
    | st.integers(100, 9000).map(lambda size: [None] * size)
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A right frame with up to three values replaced or left out, and perhaps another blob."""
    kind, right, blob = draw(st.sampled_from(RIGHT))
    header = dict(right)
    for key in draw(st.lists(st.sampled_from(sorted(right)) | KEYS if right else KEYS, max_size=3)):
        if draw(st.booleans()):
            header[key] = draw(VALUES)
        else:
            header.pop(key, None)
    return frame.encode(kind, header, draw(st.just(blob) | st.binary(max_size=64)))


def cuts_of(rig: PairRig, gateway_id: str) -> list[tuple[int, int]]:
    """(seq, epoch) of the cuts of one gateway that were given to dbmanager."""
    headers = [
        frame.decode(raw).header
        for batch in rig.mailbox.to("dbmanager", Kind.CUTS)
        for raw in frame.split(batch.blob)
    ]
    wanted = gateway_id.replace("-", "")
    return [(header["seq"], header["ep"]) for header in headers if header["gw"].hex() == wanted]


def told_of_the_other(said: bytes, after: int) -> tuple[list[int], tuple[str, str], set[str]]:
    """A peer gets through ``after`` steps, the last its first poll, and says this.

    Returns:
        Of another gateway: the seqs of its cuts; the first news of all, which is of it; all its states.
    """
    rig = PairRig()
    try:
        rig.watermarks()
        good, bad = rig.up(OTHER), rig.dial()
        bad.send(*HANDSHAKE[:after], *(() if after == POLLED else (said,)))
        rig.step()
        rig.pass_time(1.1)
        if after == POLLED:
            bad.send(said)
            rig.step()
        for poll in rig.polls(good):
            good.answer(poll)
        rig.pass_time(0.2)
        states = rig.mailbox.states()
        seqs = [seq for seq, _ in cuts_of(rig, OTHER)]
        assert not rig.counters["connection_faults"], "a defect of ours ended a connection"
        return seqs, states[0], {state for gateway_id, state in states if gateway_id == OTHER}
    finally:
        rig.close()


UNHARMED = ([1], (OTHER, "up"), {"up"})


@settings(max_examples=150)
@given(said=frames(), after=st.integers(0, POLLED))
def test_any_frame_in_any_state(said: bytes, after: int) -> None:
    assert told_of_the_other(said, after) == UNHARMED


def nest(depth: int) -> Any:
    """So many lists in one another: repr of 1,000 is a RecursionError."""
    return reduce(lambda inner, _: [inner], range(depth), 1)


@pytest.mark.parametrize("depth", [20, 1000])
@pytest.mark.parametrize("after", range(POLLED + 1))
def test_every_key_of_every_frame_may_be_a_deep_nest(depth: int, after: int) -> None:
    """A frame of 1,040 bytes ended the process, and with it all its gateways."""
    for kind, right, blob in RIGHT:
        for key in {*right, "reason", "text"}:
            said = frame.encode(kind, {**right, key: nest(depth)}, blob)
            assert told_of_the_other(said, after) == UNHARMED, (kind, key)


@pytest.mark.parametrize("where", ["_handle", "_receive", "_serve"])
def test_a_defect_of_ours_ends_the_connection_that_met_it(where: str) -> None:
    rig = PairRig()
    try:
        rig.watermarks()
        good, bad = rig.up(OTHER), rig.up()
        original = getattr(rig.inbound, where)

        def defect(conn: Any, *rest: Any) -> Any:
            if conn.gateway is not None and conn.gateway.gateway_id == GATEWAY:
                raise RecursionError("a defect")
            return original(conn, *rest)

        with patch.object(rig.inbound, where, defect):
            rig.pass_time(1.1)
            if where == "_serve":  # is asked when the socket can be written to, too
                (conn,) = (c for c in rig.connections if c.gateway and c.gateway.gateway_id == GATEWAY)
                rig.inbound._readiness.modify(conn, 3)  # as a send that blocked has it done
            bad.send(frame.encode(Kind.THRESHOLDS_ACK, {"version": 1}))
            for poll in rig.polls(good):
                good.answer(poll)
            rig.pass_time(0.2)
        assert rig.counters["connection_faults"] == 1
        assert rig.mailbox.states()[-1] == (GATEWAY, "lost")
        assert [seq for seq, _ in cuts_of(rig, OTHER)] == [1]
        again = rig.up()  # and it may come again
        again.send(frame.encode(Kind.THRESHOLDS_ACK, {"version": 1}))
        rig.step()
        assert rig.counters["connection_faults"] == 1
    finally:
        rig.close()


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_session(data: Any) -> None:
    whole = bytearray(b"".join((*HANDSHAKE, make_cut(rows=2), make_cut(seq=2))))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    assert told_of_the_other(bytes(whole), 0) == UNHARMED


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_answer_after_good_ones(data: Any) -> None:
    rig = PairRig()
    try:
        rig.watermarks()
        good, bad = rig.up(OTHER), rig.up()
        for _ in range(3):
            rig.pass_time(1)
            for agent in (good, bad):
                for poll in rig.polls(agent):
                    agent.answer(poll)
        rig.pass_time(1)
        (poll,) = rig.polls(bad)
        said: list[bytes] = []
        with patch.object(bad, "send", lambda *frames: said.extend(frames)):
            bad.answer(poll)
        whole = bytearray(b"".join(said))
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        bad.send(bytes(whole[: data.draw(st.integers(1, len(whole)))]))
        for poll in rig.polls(good):
            good.answer(poll)
        rig.step()
        rig.pass_time(0.2)
        gateway = rig.registry.get(OTHER)
        assert gateway is not None
        assert (gateway.conn is not None, good.next_seq) == (True, 5)
        assert [seq for seq, _ in cuts_of(rig, OTHER)] == [1, 2, 3, 4]
        assert len(cuts_of(rig, GATEWAY)) in (3, 4)
    finally:
        rig.close()
