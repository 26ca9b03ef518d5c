"""Large requests in file mode: whole or not at all, a piece a turn, in bounded memory, no deadlock."""

import os

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.buffers import CAPACITY_BYTES, LIMIT_BYTES
from gateway_agent.nbd.file_session import SMALL_LIMIT_BYTES
from gateway_agent.nbd.storage_jobs import PIECE_BYTES
from tests.support.nbd import MIB, FakeSocket, replies
from tests.unit.gateway_agent.nbd.test_file_session import Client, read, write

SIZE = 64 * MIB
OLD = b"o"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "disk.img"
    with open(path, "wb") as file:
        file.write(OLD * 2 * MIB)
        file.truncate(SIZE)
    return path


@pytest.fixture(params=["loop", "workers"])
def client(request, path):
    client = Client(path, request.param)
    yield client
    client.session.close("test is over")
    client.say()
    client.storage.release()


def content(path, length, offset=0):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


@pytest.mark.parametrize(
    ("length", "sent"), [(4096, 1000), (MIB, 700_001), (MIB, MIB - 1), (MIB + 1, MIB), (2 * MIB, 1_500_000)]
)
def test_a_client_that_goes_away_within_a_write_leaves_nothing_of_it(client, path, length, sent):
    client.say(write(1, 0, b"N" * length)[: 28 + sent])
    client.session.close("the client is gone")
    client.say()
    assert content(path, 2 * MIB) == OLD * 2 * MIB
    assert client.rig.context.payload_memory.used_bytes == 0


def test_a_write_that_has_begun_is_finished_whatever_becomes_of_its_client(path):
    client = Client(path, "loop")
    client.rig.deliver(client.sock, write(1, 0, b"N" * 3 * MIB))
    assert client.rig.loop.turn()
    assert content(path, MIB + 1) == b"N" * MIB + OLD
    client.session.close("the client is gone")
    client.say()
    assert content(path, 3 * MIB + 1) == b"N" * 3 * MIB + b"\0"
    assert client.rig.context.payload_memory.used_bytes == 0


def test_a_stop_finishes_the_writes_that_have_begun_and_begins_no_other(path):
    client = Client(path, "loop")
    sock = FakeSocket()
    client.rig.deliver(client.sock, write(1, 0, b"N" * 3 * MIB))
    assert client.rig.loop.turn()
    other = client.another(sock)
    client.rig.deliver(sock, write(1, 8 * MIB, b"M" * 3 * MIB))
    client.session.close("the plane stops")
    other.close("the plane stops")
    client.turns.stop()
    assert content(path, 3 * MIB) == b"N" * 3 * MIB
    assert content(path, 3 * MIB, 8 * MIB) == bytes(3 * MIB)


@pytest.mark.parametrize("mib", [1, 2, 4, 16, 32])
def test_a_large_write_behind_a_read_that_nobody_takes_is_done(client, path, mib):
    """The client reads only when all of its write is sent."""
    client.sock.window = 100
    payload = os.urandom(mib * MIB)
    client.say(read(1, 0, mib * MIB), write(2, 32 * MIB, payload))
    assert not client.sock.incoming, "the write is not taken while the read's reply is not"
    assert content(path, mib * MIB, 32 * MIB) == payload
    while len(client.sock.sent) < 32 + mib * MIB:
        before = len(client.sock.sent)
        client.rig.open_window(client.sock, 700_000)
        client.say()
        assert len(client.sock.sent) > before
    found = {item[0]: item for item in replies(client.sock.sent, {1: mib * MIB})}
    assert found == {1: (1, 0, (OLD * 2 * MIB + bytes(30 * MIB))[: mib * MIB]), 2: (2, 0, b"")}
    assert client.rig.context.reply_memory.used_bytes == 0
    assert client.row()["inflight"] == 0


def test_many_requests_of_each_kind_before_the_first_reply_is_taken(client, path):
    client.sock.window = 0
    lengths = {}
    for number in range(40):
        length = (number % 5 + 1) * 500_000
        lengths[2 * number] = length
        client.say(read(2 * number, 0, length), write(2 * number + 1, 32 * MIB, b"w" * length))
        assert not client.sock.incoming
    client.say(p.request(p.Cmd.FLUSH, 1000, 0, 0), p.request(p.Cmd.WRITE_ZEROES, 1001, 40 * MIB, 4 * MIB))
    total = sum(lengths.values()) + 82 * 16
    while len(client.sock.sent) < total:
        before = len(client.sock.sent)
        client.rig.open_window(client.sock, 300_000)
        client.say()
        assert len(client.sock.sent) > before
    found = replies(client.sock.sent, lengths)
    assert sorted(item[:2] for item in found) == sorted((n, 0) for n in (*range(80), 1000, 1001))


def test_what_a_client_does_not_take_is_bounded(client):
    client.sock.window = 0
    client.say(*(read(n, 0, 1 + (n % 32 + 1) * MIB) for n in range(200)))
    session = client.session
    held = client.rig.context.reply_memory.used_bytes
    assert held <= 40 * MIB if client.pool is None else held <= LIMIT_BYTES
    assert session._out.unsent_bytes <= PIECE_BYTES + 200 * 16
    assert sum(len(data) for data, _ in session._replies) <= held + SMALL_LIMIT_BYTES + 200 * 16


def test_clients_of_a_plane_share_one_bound_and_all_are_served(path):
    client = Client(path, "workers")
    memory, limit = client.rig.context.reply_memory, 8 * MIB
    memory.__init__(client.rig.loop, limit)
    pairs = [(client.sock, client.session)]
    for _ in range(9):
        sock = FakeSocket()
        pairs.append((sock, client.another(sock)))
    for sock, session in pairs:
        sock.window = 0
        client.rig.deliver(sock, b"".join(read(n, 0, 3 * MIB) for n in range(4)))
        client.rig.deliver(sock, write(9, 0, b"w" * 2 * MIB))
        client.say()
        assert not sock.incoming, "a payload waits for nobody's replies"
        assert 9 not in session.inflight
    assert 0 < memory.used_bytes <= limit
    for sock, _ in pairs * 4:
        client.rig.open_window(sock)
        client.say()
        assert memory.used_bytes <= limit
    assert {len(sock.sent) for sock, _ in pairs} == {4 * (3 * MIB + 16) + 16}
    assert memory.used_bytes == 0


def test_one_large_request_is_done_in_pieces_and_others_are_served_between(path):
    client, sock = Client(path, "loop"), FakeSocket()
    client.another(sock)
    client.rig.deliver(client.sock, p.request(p.Cmd.WRITE_ZEROES, 1, 0, SIZE, p.CMD_FLAG_NO_HOLE))
    client.storage._impossible.add(17)  # as on tmpfs, which cannot make a range zero
    turns = 0
    while not client.sock.sent:
        client.rig.deliver(sock, read(turns, SIZE - 4096, 4096))
        assert len(sock.sent) == (turns + 1) * 4112, "another client waits for a whole large request"
        assert client.rig.loop.turn()
        turns += 1
    assert turns >= SIZE // PIECE_BYTES
    assert content(path, SIZE) == bytes(SIZE)


def test_a_crowd_of_small_requests_ends_a_turn_too(path):
    client, sock = Client(path, "loop"), FakeSocket()
    client.another(sock)
    client.rig.deliver(client.sock, b"".join(p.request(p.Cmd.FLUSH, n, 0, 0) for n in range(1000)))
    assert len(client.sock.sent) < 1000 * 16
    client.rig.deliver(sock, read(1, 0, 4096))
    assert len(sock.sent) == 4112
    client.say()
    assert len(client.sock.sent) == 1000 * 16


def test_disc_behind_large_requests_waits_for_their_replies(client):
    client.sock.window = 1000
    client.say(read(1, 0, 5 * MIB), p.request(p.Cmd.DISC, 0, 0, 0))
    assert not client.session.is_closed
    while not client.session.is_closed:
        client.rig.open_window(client.sock, MIB)
        client.say()
    assert len(client.sock.sent) == 5 * MIB + 16


def test_a_large_read_that_fails_is_an_error_and_not_a_torn_reply(client, path):
    os.truncate(path, 3 * MIB)
    client.say(read(1, 0, 4 * MIB), read(2, 0, 3 * MIB))
    found = sorted(item[:2] for item in replies(client.sock.sent, {2: 3 * MIB}))
    assert found == [(1, p.EIO), (2, 0)]
    assert client.rig.context.reply_memory.used_bytes == 0


def test_fua_of_a_large_trim_is_kept_at_its_end(client, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    client.say(p.request(p.Cmd.TRIM, 1, 0, SIZE, p.CMD_FLAG_FUA), p.request(p.Cmd.TRIM, 2, 0, SIZE))
    assert len(flushed) == 1
    assert sorted(item[:2] for item in replies(client.sock.sent)) == [(1, 0), (2, 0)]


def test_a_small_write_always_fits_behind_what_is_gone(path):
    client = Client(path, "loop")
    data = write(1, 5, b"a" * 10) + write(2, 0, b"N" * CAPACITY_BYTES)
    for start in range(0, len(data), 99_991):
        client.say(data[start : start + 99_991])
    assert content(path, CAPACITY_BYTES) == b"N" * CAPACITY_BYTES
