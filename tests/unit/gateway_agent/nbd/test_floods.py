"""What one client may ask for in one turn of the loop: the others wait for no more."""

import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import exports
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.buffers import BATCH_BYTES, FINISHED_INTS
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.handshake import MOST_AT_ONCE, ServerHandshake
from gateway_agent.nbd.loop import IN
from gateway_agent.nbd.negotiation import Negotiation
from gateway_agent.nbd.proxy_session import MOST_IN_FLIGHT
from gateway_agent.nbd.session import MOST_HEADS
from pmdaemon.wire.rates import Rates
from tests.support.nbd import FakeSocket, Rig, plane_config, replies
from tests.support.nbd_proxy import Pair
from tests.unit.gateway_agent.nbd.test_file_session import Client, read

MOST_PLAIN = 512


@pytest.fixture
def recorded(monkeypatch):
    """How many requests were complete at once."""
    found, record = [], StreamAccount.record

    def counted(self, finished, now_ns):
        found.append(len(finished) // FINISHED_INTS)
        record(self, finished, now_ns)

    monkeypatch.setattr(StreamAccount, "record", counted)
    return found


def turns_of(client):
    """Turns of the loop until everything is answered."""
    turns = 0
    while client.sock.incoming or client.session.inflight or client.session.requests.queue:
        if client.sock.incoming and client.rig.loop.masks[client.sock.fileno()] & IN:
            client.rig.loop.handlers[client.sock.fileno()](IN)
        client.rig.loop.turn()
        turns += 1
        assert turns < 1000
    return turns


def test_tiny_reads_are_done_some_hundreds_at_a_time(tmp_path, recorded):
    (tmp_path / "disk.img").write_bytes(bytes(1 << 20))
    client = Client(tmp_path / "disk.img", "loop")
    count = 30_000
    client.sock.incoming.append(b"".join(read(n, n, 1) for n in range(count)))
    assert turns_of(client) >= count * 28 // BATCH_BYTES
    assert max(recorded) <= MOST_PLAIN
    assert sum(recorded) == count
    assert {
        cookie for cookie, error, _ in replies(bytes(client.sock.sent), dict.fromkeys(range(count), 1))
    } == set(range(count))
    client.session.close("test is over")
    client.storage.release()


@pytest.mark.parametrize("step", [1, 2, 20], ids=["no reads", "reads between them", "many reads"])
@pytest.mark.parametrize("caps", ["no caps", "caps"])
@pytest.mark.parametrize("kind", ["file", "upstream"])
def test_requests_that_are_refused_are_answered_some_hundreds_at_a_time(tmp_path, recorded, kind, caps, step):
    (tmp_path / "disk.img").write_bytes(bytes(1 << 20))
    client = Client(tmp_path / "disk.img", "loop")
    rig, sock, session = client.rig, client.sock, client.session
    if kind == "upstream":
        pair = Pair(Rig())
        rig, sock, session = pair.rig, pair.near, pair.session
    if caps == "caps":
        rig.volume.set_caps(Rates(ops_per_s=1e6, burst_s=0.05), rig.clock.monotonic_ns())
    count = BATCH_BYTES // 28
    said = [read(n, 0, 8) if n % step else p.request(99, n, 0, 0) for n in range(count)]
    sock.incoming.append(b"".join(said))
    rig.loop.handlers[sock.fileno()](IN)
    turns, before = 1, 0
    while session.requests.queue:
        assert 0 < len(recorded) - before <= 2 * MOST_HEADS
        assert sum(recorded[before:]) <= 2 * MOST_PLAIN
        before = len(recorded)
        assert rig.loop.turn()
        turns += 1
    assert turns >= count // step // MOST_HEADS
    found = replies(bytes(sock.sent), {n: 8 for n in range(count) if n % step})
    refused = [(n, p.EINVAL) for n in range(0, count, step)]
    assert [(cookie, error) for cookie, error, _ in found if error] == refused
    assert len(found) == (count if kind == "file" else len(refused)), "the upstream has answered none"
    session.close("test is over")
    assert (session, "heads") not in rig.loop.timers
    client.session.close("test is over")
    client.storage.release()


def test_a_client_with_very_many_requests_under_way_is_read_no_further_until_some_are_answered():
    pair = Pair(Rig())
    count = 60_000
    pair.say(*(read(n, n, 1) for n in range(count)))
    assert MOST_IN_FLIGHT <= len(pair.session.inflight) < MOST_IN_FLIGHT + BATCH_BYTES // 28 + 1
    answered = 0
    while answered < count:
        under_way = list(pair.session.inflight)
        assert 0 < len(under_way) < 2 * MOST_IN_FLIGHT
        pair.answer(*(p.simple_reply(cookie) + b"r" for cookie in under_way[:4000]))
        answered += len(under_way[:4000])
        pair.say()
    assert len(replies(bytes(pair.near.sent), dict.fromkeys(range(count), 1))) == count
    pair.session.close("test is over")


def test_a_flood_ends_with_its_connection():
    pair = Pair(Rig())
    pair.near.incoming.append(b"".join(p.request(99, n, 0, 0) for n in range(2 * MOST_HEADS)))
    pair.rig.loop.handlers[pair.near.fileno()](IN)
    assert (pair.session, "heads") in pair.rig.loop.timers
    pair.session.close("it is gone")
    assert (pair.session, "heads") not in pair.rig.loop.timers


# -- negotiation


FLAGS = p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE | p.FLAG_NO_ZEROES)
INFO = p.option(p.Opt.INFO, p.go_data("v0", ()))


class Talk:
    """A client in negotiation with a plane of many exports."""

    def __init__(self, folder, exports):
        (folder / "disk.img").write_bytes(bytes(4096))
        entries = [
            {"volume": f"v{n}", "backend": "b", "file": str(folder / "disk.img")} for n in range(exports)
        ]
        self.rig, self.sock = Rig(), FakeSocket()
        self.exports = ExportTable(plane_config(*entries), self.rig.context, lambda: None)
        self.negotiation = Negotiation(self.rig.loop, self.sock, self.exports, lambda _each: None)
        self.negotiation.start()

    def say(self, data):
        self.sock.sent.clear()
        self.rig.deliver(self.sock, data)


@pytest.fixture
def talk(tmp_path):
    made = []

    def make(exports=1):
        made.append(Talk(tmp_path, exports))
        return made[-1]

    yield make
    for each in made:
        each.exports.close()


def test_many_questions_at_once_are_answered_one_behind_the_other(talk):
    each, count = talk(), MOST_AT_ONCE - 6
    each.say(FLAGS + INFO * count + p.option(p.Opt.GO, p.go_data("v0", ())) + p.request(p.Cmd.READ, 7, 0, 8))
    raw = bytes(each.sock.sent)
    assert raw.count(p.OPTION_REPLY_MAGIC.to_bytes(8, "big")) == 2 * (count + 1)
    assert replies(raw[-24:], {7: 8}) == [(7, 0, bytes(8))]
    (session,) = each.rig.cuts.table.streams[0].sessions
    session.close("test is over")


def test_more_questions_at_once_than_any_client_has_end_the_connection(talk):
    with pytest.raises(NbdProtocolError, match="257 options at once"):
        talk().say(FLAGS + INFO * 2000)
    with pytest.raises(NbdProtocolError, match="options at once"):
        talk().say(FLAGS + p.option(p.Opt.LIST) * 2000)


def test_long_lists_are_asked_for_once(talk):
    machine = ServerHandshake([f"volume-with-a-long-name-{n}" * 4 for n in range(500)], "client")
    machine.feed(FLAGS + p.option(p.Opt.LIST))
    with pytest.raises(NbdProtocolError, match="options at once"):
        machine.feed(p.option(p.Opt.LIST) * 200)


def test_what_a_client_may_see_is_looked_for_once_until_the_exports_are_others(talk, monkeypatch):
    each, looks = talk(20), []
    monkeypatch.setattr(exports, "why_refused", lambda export, _client: looks.append(export.volume) or "")
    each.say(FLAGS + INFO * 200 + p.option(p.Opt.LIST))
    assert len(looks) == 20
    entry = {"volume": "v7", "backend": "b", "file": each.exports.volumes["v7"].export.file}
    each.exports.apply(plane_config(entry))
    each.say(p.option(p.Opt.LIST) + INFO)
    assert b"v7" in each.sock.sent
    assert b"v3" not in each.sock.sent
    assert len(looks) == 21


def test_bytes_that_complete_no_question_cost_no_look_at_the_exports(talk, monkeypatch):
    each, looks = talk(20), []
    visible = each.exports.visible
    monkeypatch.setattr(each.exports, "visible", lambda client: looks.append(client) or visible(client))
    for byte in FLAGS + p.option(p.Opt.STRUCTURED_REPLY) + p.option(p.Opt.LIST):
        each.say(bytes([byte]))
    assert len(looks) == 1
