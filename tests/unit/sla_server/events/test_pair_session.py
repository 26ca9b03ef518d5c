"""The ends of a mirror connection: what may be said when, what is refused, and what is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pmdaemon.errors import FrameTooLarge, MalformedFrame, PeerRefused, ProtocolViolation, WireError
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.ends import Bye, Error
from pmdaemon.wire.messages.mirror import (
    MIRROR_PROTO,
    MirrorBeat,
    MirrorConfirmed,
    MirrorDelivered,
    MirroredQueue,
    MirrorEvents,
    MirrorHello,
    MirrorKept,
    MirrorWelcome,
)
from sla_server.events.pair_session import (
    MOST_UNKEPT_BYTES,
    PIECE_BYTES,
    RECEIVE,
    STRANGER_BYTES,
    KeeperSession,
    MirrorEnded,
    MirrorSession,
    MirrorState,
    OriginSession,
)
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Held
from tests.support.deliveries import event
from tests.support.partners import Partners, PartnerServer

QUEUE = "0123456789abcdef"
RECORD = QueuedEvent(event(1)).encode()
SAMPLES: dict[Kind, WireMessage] = {
    Kind.MIRROR_HELLO: MirrorHello(MIRROR_PROTO, "b", "a", (MirroredQueue("main", QUEUE),)),
    Kind.MIRROR_WELCOME: MirrorWelcome(MIRROR_PROTO, "b", {QUEUE: 1}, 100),
    Kind.MIRROR_EVENTS: MirrorEvents.of(QUEUE, [(1, RECORD)]),
    Kind.MIRROR_KEPT: MirrorKept(QUEUE, 1),
    Kind.MIRROR_CONFIRMED: MirrorConfirmed((QUEUE,), {"r": (1,)}, {QUEUE: 1}, (3, 1 << 40), 1 << 41),
    Kind.MIRROR_DELIVERED: MirrorDelivered("r", ("e1",)),
    Kind.MIRROR_BEAT: MirrorBeat(),
    Kind.ERROR: Error("name", "text"),
    Kind.BYE: Bye("reason"),
}


@pytest.fixture
def server(tmp_path: Path) -> PartnerServer:
    return Partners(tmp_path).a


def session(server: PartnerServer, role: str, state: MirrorState) -> MirrorSession:
    made: OriginSession | KeeperSession = (
        server.core.dialled() if role == "origin" else server.core.accepted()
    )
    if state is MirrorState.MIRRORING:
        first = Kind.MIRROR_WELCOME if role == "origin" else Kind.MIRROR_HELLO
        made.received(SAMPLES[first].encode())
    assert made.state is state
    return made


def frames(data: bytes | bytearray) -> list[frame.Frame]:
    return [frame.decode(raw) for raw in frame.split(bytes(data))]


@pytest.mark.parametrize("role", ["origin", "keeper"])
@pytest.mark.parametrize("state", list(MirrorState))
def test_each_role_takes_in_each_state_what_the_table_says_and_nothing_else(
    server: PartnerServer, role: str, state: MirrorState
) -> None:
    for kind, message in SAMPLES.items():
        made = session(server, role, state)
        if kind not in RECEIVE[role, state]:
            with pytest.raises(ProtocolViolation, match=kind.name):
                made.received(message.encode())
        elif kind in (Kind.ERROR, Kind.BYE):
            with pytest.raises(MirrorEnded):
                made.received(message.encode())
        elif kind is Kind.MIRROR_KEPT:  # a queue of this test is none of the server's
            with pytest.raises(PeerRefused):
                made.received(message.encode())
        else:
            made.received(message.encode())


def test_a_message_that_is_sent_is_read_as_it_was(server: PartnerServer) -> None:
    parsers = {
        Kind.MIRROR_HELLO: MirrorHello.parse,
        Kind.MIRROR_WELCOME: MirrorWelcome.parse,
        Kind.MIRROR_KEPT: MirrorKept.parse,
        Kind.MIRROR_CONFIRMED: MirrorConfirmed.parse,
        Kind.MIRROR_DELIVERED: MirrorDelivered.parse,
    }
    for kind, parse in parsers.items():
        assert parse(frame.decode(SAMPLES[kind].encode()).header) == SAMPLES[kind]
    found = MirrorEvents.parse(frame.decode(SAMPLES[Kind.MIRROR_EVENTS].encode()))
    assert list(found.each()) == [(1, RECORD)]


@pytest.mark.parametrize(
    "message",
    [
        MirrorHello(MIRROR_PROTO + 1, "b", "a", ()),
        MirrorHello(MIRROR_PROTO, "c", "a", ()),
        MirrorHello(MIRROR_PROTO, "b", "c", ()),
    ],
)
def test_a_partner_of_another_name_or_protocol_is_refused(
    server: PartnerServer, message: MirrorHello
) -> None:
    made = session(server, "keeper", MirrorState.GREETING)
    with pytest.raises(PeerRefused):
        made.received(message.encode())
    assert not server.ledger.queues


@pytest.mark.parametrize(
    "header",
    [
        {"queue": "x", "seqs": [1], "sizes": [len(RECORD)]},
        {"queue": QUEUE, "seqs": [2, 1], "sizes": [1, 1]},
        {"queue": QUEUE, "seqs": [0], "sizes": [len(RECORD)]},
        {"queue": QUEUE, "seqs": [1], "sizes": [0]},
        {"queue": QUEUE, "seqs": [1], "sizes": [1 << 30]},
        {"queue": QUEUE, "seqs": [1, 2], "sizes": [len(RECORD)]},
        {"queue": QUEUE, "seqs": list(range(1, 2000)), "sizes": [1] * 1999},
        {"queue": QUEUE, "seqs": "1", "sizes": [1]},
    ],
)
def test_events_of_a_false_form_are_refused(server: PartnerServer, header: dict[str, object]) -> None:
    made = session(server, "keeper", MirrorState.MIRRORING)
    with pytest.raises((MalformedFrame, FrameTooLarge)):
        made.received(frame.encode(Kind.MIRROR_EVENTS, header, RECORD))
    assert len(server.store) == 0


@pytest.mark.parametrize("record", [b"{", b'"text"', b'{"event":{}}', b"\xff" * 50, b"[" * 5000])
def test_what_is_no_event_is_refused_before_it_is_stored(server: PartnerServer, record: bytes) -> None:
    made = session(server, "keeper", MirrorState.MIRRORING)
    with pytest.raises(PeerRefused, match="no event"):
        made.received(MirrorEvents.of(QUEUE, [(1, RECORD), (2, record)]).encode())
    assert len(server.store) == 0


@pytest.mark.parametrize(
    "header",
    [
        {"queues": [QUEUE], "cursors": {"r": [1, 2]}, "done": {}},
        {"queues": [QUEUE], "cursors": {"r": [-1]}, "done": {}},
        {"queues": [QUEUE], "cursors": [], "done": {}},
        {"queues": [QUEUE], "cursors": {"r" * 300: [1]}, "done": {}},
        {"queues": [QUEUE], "cursors": {}, "done": {QUEUE: True}},
        {"queues": [QUEUE] * 5, "cursors": {}, "done": {}},
        {"queues": [QUEUE], "cursors": {}, "done": {}, "open": b"123", "open_through": 1},
        {"queues": [QUEUE], "cursors": {}, "done": {}, "open": [1], "open_through": 1},
        {"queues": [], "cursors": {}, "done": {}, "open": b"", "open_through": 1},
    ],
)
def test_confirmations_of_a_false_form_are_refused(server: PartnerServer, header: dict[str, object]) -> None:
    made = session(server, "keeper", MirrorState.MIRRORING)
    with pytest.raises(WireError):
        made.received(frame.encode(Kind.MIRROR_CONFIRMED, header))


def test_before_its_hello_a_partner_cannot_make_us_buffer(server: PartnerServer) -> None:
    made = session(server, "keeper", MirrorState.GREETING)
    with pytest.raises(FrameTooLarge):
        made.received(frame.encode(Kind.MIRROR_HELLO, {"x": "y" * STRANGER_BYTES})[:8])


def test_confirmations_of_thousands_of_recipients_are_folded_and_read(server: PartnerServer) -> None:
    cursors: dict[str, tuple[int, ...]] = {f"recipient-number-{number}": (number,) for number in range(4000)}
    made = session(server, "keeper", MirrorState.MIRRORING)
    made.received(MirrorConfirmed((QUEUE,), cursors, {QUEUE: 0}).encode())
    assert server.ledger.is_done("recipient-number-7", (QUEUE, 7))
    assert not server.ledger.is_done("recipient-number-7", (QUEUE, 8))


def test_what_a_slow_keeper_has_not_confirmed_is_bounded(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    many = [event(number, event_id=f"a{number}", text="x" * 1900) for number in range(1, 401)]
    for start in range(0, 400, 100):
        pair.a.add(*many[start : start + 100])
    origin = pair.a.core.dialled()
    queue_id = pair.a.rig.main.queue_id
    origin.received(MirrorWelcome(MIRROR_PROTO, "b", {}, 100).encode())
    for _ in range(10):
        origin.step(None)
    sent = [each for each in frames(origin.outgoing) if each.kind == Kind.MIRROR_EVENTS]
    assert sum(len(each.blob) for each in sent) < MOST_UNKEPT_BYTES + (256 << 10)
    assert 100 < sum(len(each.header["seqs"]) for each in sent) < 400
    last = sent[-1].header["seqs"][-1]
    origin.outgoing.clear()
    origin.received(MirrorKept(queue_id, last).encode())
    origin.step(None)
    rest = [each for each in frames(origin.outgoing) if each.kind == Kind.MIRROR_EVENTS]
    assert not rest or rest[0].header["seqs"][0] == last + 1


def test_a_keeper_without_room_is_tried_again_a_second_later(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(event(1), event(2))
    origin = pair.a.core.dialled()
    origin.received(MirrorWelcome(MIRROR_PROTO, "b", {}, 100).encode())
    origin.step(None)
    origin.outgoing.clear()
    origin.received(MirrorKept(pair.a.rig.main.queue_id, 1, is_full=True).encode())
    origin.step(None)
    assert Kind.MIRROR_EVENTS not in {each.kind for each in frames(origin.outgoing)}
    pair.clock.advance(1.1)
    origin.step(None)
    again = [each for each in frames(origin.outgoing) if each.kind == Kind.MIRROR_EVENTS]
    assert [list(each.header["seqs"]) for each in again] == [[2]]


def test_what_was_delivered_goes_out_in_pieces_before_the_welcome(tmp_path: Path) -> None:
    server = Partners(tmp_path).a
    server.ledger.greeted([MirroredQueue("main", QUEUE)])
    identities = [f"{number:036}" for number in range(20_000)]
    beginning = event(1)
    server.ledger.take(
        QueuedEvent(replace(beginning, event_id=each), origin=QUEUE, origin_seq=seq)
        for seq, each in enumerate(identities, 1)
    )
    server.ledger.report(
        {"event_id": each, "recipient": recipient, "delivery_id": each, "state": "confirmed"}
        for recipient in ("r", "s", "t")
        for each in identities
    )
    keeper = server.core.accepted()
    keeper.received(SAMPLES[Kind.MIRROR_HELLO].encode())
    found = list[frame.Frame]()
    while keeper.outgoing or keeper.refill():
        keeper.step()  # the loop's turns add nothing while the socket is full
        assert len(keeper.outgoing) < 2 * PIECE_BYTES
        found += frames(keeper.outgoing)
        keeper.outgoing.clear()
    assert [each.kind for each in found] == [Kind.MIRROR_DELIVERED] * 120 + [Kind.MIRROR_WELCOME]


def positions(data: bytes) -> list[tuple[MirrorConfirmed, dict[str, int]]]:
    """Confirmations of an origin, each with the newest number of each queue that was sent before it."""
    found, sent = list[tuple[MirrorConfirmed, dict[str, int]]](), dict[str, int]()
    for each in frames(data):
        if each.kind == Kind.MIRROR_EVENTS:
            sent[each.header["queue"]] = each.header["seqs"][-1]
        elif each.kind == Kind.MIRROR_CONFIRMED:
            found.append((MirrorConfirmed.parse(each.header), dict(sent)))
    return found


def test_a_confirmation_does_not_pass_what_is_held_back_before_that_is_mirrored(
    server: PartnerServer,
) -> None:
    until_us = server.clock.unix_us() + 5_000_000
    server.rig.router.holds = lambda found, _recipient, now_us: (
        Held("quiet hours", until_us) if found.event_id == "e2" and now_us < until_us else None
    )
    server.answers("r", None)
    server.add(event(1))
    origin = server.core.dialled()
    origin.received(MirrorWelcome(MIRROR_PROTO, "b", {}, 1000).encode())
    server.core.heard()
    server.run()
    many = [event(number, text="x" * 1900) for number in range(2, 320)]  # more than may be under way
    for start in range(0, len(many), 100):
        server.add(*many[start : start + 100])
    server.run()
    server.clock.advance(1.0)
    server.rig.senders["r"].back.append(server.rig.senders["r"].reply(CONFIRMED))
    server.run()  # e2 is held back, and the cursor passes it; nothing is kept yet
    assert len(server.rig.later) == 1
    data = b""
    for _ in range(20):
        said = bytes(origin.outgoing)
        origin.outgoing.clear()
        for each in frames(said):
            if each.kind == Kind.MIRROR_EVENTS:
                origin.received(MirrorKept(each.header["queue"], each.header["seqs"][-1]).encode())
        data += said
        server.clock.advance(0.1)
        server.run()
    later_id, main_id = server.rig.later.queue.queue_id, server.rig.main.queue_id
    found = positions(data)
    assert all(sent.get(later_id, 0) >= confirmed.open_through for confirmed, sent in found)
    assert found[-1][0].open_seqs == (1,)
    assert found[-1][0].done[main_id] >= 2
