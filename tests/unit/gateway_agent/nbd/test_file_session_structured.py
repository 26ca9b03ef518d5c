"""File mode before a client with structured replies: chunks, holes, block status, errors with a text."""

import os
import random
import struct

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.storage import HOLE_BYTES
from gateway_agent.nbd.storage_jobs import MAX_JOBS
from tests.support.nbd import MIB, assembled, chunks
from tests.unit.gateway_agent.nbd.test_file_session import Client, read, write

SIZE = 16 * MIB
HOLE = p.STATE_HOLE | p.STATE_ZERO
BOTH = p.ReplyMode(structured=True, allocation=True)
DATA = p.Chunk.OFFSET_DATA


@pytest.fixture
def path(tmp_path):
    """Data in [1, 3) MiB and in the last 4 KiB."""
    path = tmp_path / "disk.img"
    with open(path, "wb") as file:
        file.truncate(SIZE)
        for start, data in ((MIB, random.Random(1).randbytes(2 * MIB)), (SIZE - 4096, b"e" * 4096)):
            file.seek(start)
            file.write(data)
    return path


@pytest.fixture(params=["loop", "workers"])
def client(request, path):
    client = Client(path, request.param, mode=BOTH)
    yield client
    client.session.close("test is over")
    client.say()
    client.storage.release()


def answers(client):
    """Chunks since the last call, by cookie."""
    found: dict[int, list] = {}
    for chunk in chunks(client.sock.sent):
        found.setdefault(chunk[0], []).append(chunk)
    client.sock.sent.clear()
    return found


def error_of(found):
    """(error, text, offset or None) of a reply that is one error chunk."""
    ((_, kind, is_last, payload),) = found
    assert is_last
    size = int.from_bytes(payload[4:6], "big")
    place = int.from_bytes(payload[6 + size :], "big") if kind == p.Chunk.ERROR_OFFSET else None
    assert kind in (p.Chunk.ERROR, p.Chunk.ERROR_OFFSET)
    return int.from_bytes(payload[:4], "big"), payload[6 : 6 + size].decode(), place


def status(cookie, offset, length, flags=0):
    return p.request(p.Cmd.BLOCK_STATUS, cookie, offset, length, flags)


def test_a_read_of_data_is_one_chunk_and_a_change_has_a_simple_reply(client, path):
    client.say(read(1, MIB + 5, 4096), write(2, 5, b"new"), p.request(p.Cmd.FLUSH, 3, 0, 0))
    expected = path.read_bytes()[MIB + 5 :][:4096]
    assert bytes(client.sock.sent).count(p.data_chunk_head(1, MIB + 5, 4096, True) + expected) == 1
    found = answers(client)
    assert [found[2], found[3]] == [[(n, None, True, bytes(4))] for n in (2, 3)]
    assert path.read_bytes()[5:8] == b"new"
    row = client.row()
    assert (row["reads"], row["writes"], row["others"], row["read_bytes"]) == (1, 1, 1, 4096)


def test_random_reads_are_what_the_file_has(client, path):
    rng, content, asked = random.Random(2), path.read_bytes(), {}
    for cookie in range(60):
        length = rng.choice((0, 1, 4096, HOLE_BYTES - 1, HOLE_BYTES, 300_000, MIB, MIB + 1, 5 * MIB))
        offset = rng.choice((rng.randrange(SIZE - length + 1), 0, SIZE - length, MIB))
        asked[cookie] = offset, length, rng.choice((0, p.CMD_FLAG_DF, p.CMD_FLAG_FUA))
    client.say(*(p.request(p.Cmd.READ, cookie, *what) for cookie, what in asked.items()))
    found = answers(client)
    assert sorted(found) == sorted(asked)
    for cookie, (offset, length, flags) in asked.items():
        if not length:
            assert found[cookie] == [(cookie, p.Chunk.NONE, True, b"")]
            continue
        assert assembled(found[cookie], offset, length) == content[offset : offset + length]
        assert len(found[cookie]) == 1 or flags != p.CMD_FLAG_DF
    holes = [chunk for each in found.values() for chunk in each if chunk[1] == p.Chunk.OFFSET_HOLE]
    assert holes
    row = client.row()
    assert (row["reads"], row["read_bytes"]) == (60, sum(length for _, length, _ in asked.values()))
    assert client.rig.context.reply_memory.used_bytes == 0


def test_a_hole_is_said_and_not_sent(client):
    client.say(read(1, 4 * MIB, 8 * MIB), read(2, 4 * MIB, MIB), read(3, 4 * MIB, 4096))
    found = answers(client)
    assert bytes(found[1][0][3]) == p.hole_chunk(1, 4 * MIB, 8 * MIB, True)[20:]
    assert found[2][0][1] == p.Chunk.OFFSET_HOLE
    assert found[3][0][1] == DATA, "a small read is not worth the look"


def test_block_status_goes_on_where_it_ended(client):
    at, found = 0, []
    while at < SIZE:
        client.say(status(1, at, SIZE - at))
        ((_, kind, is_last, payload),) = answers(client)[1]
        assert (kind, is_last) == (p.Chunk.BLOCK_STATUS, True)
        assert int.from_bytes(payload[:4], "big") == p.ALLOCATION_ID
        extents = list(p.EXTENT.iter_unpack(payload[4:]))
        found += extents
        at += sum(length for length, _ in extents)
    last = 13 * MIB - 4096
    assert found == [(MIB, HOLE), (2 * MIB, 0), (last, HOLE), (4096, 0)]
    client.say(*(status(n, MIB + 512, size, p.CMD_FLAG_REQ_ONE) for n, size in ((2, 4 * MIB), (3, 512))))
    found = {cookie: payload[4:] for cookie, ((_, _, _, payload),) in answers(client).items()}
    assert found == {2: p.EXTENT.pack(2 * MIB - 512, 0), 3: p.EXTENT.pack(512, 0)}
    assert client.row()["others"] == 3


def test_trim_and_zeroes_make_holes_that_are_seen(client):
    client.say(p.request(p.Cmd.TRIM, 1, MIB, MIB))
    client.say(status(2, 0, 4 * MIB))
    assert answers(client)[2][0][3][4:] == b"".join(
        p.EXTENT.pack(*each) for each in ((2 * MIB, HOLE), (MIB, 0), (MIB, HOLE))
    )
    client.say(p.request(p.Cmd.WRITE_ZEROES, 3, 2 * MIB, MIB))
    client.say(status(4, 0, 4 * MIB), read(5, 0, 4 * MIB))
    found = answers(client)
    assert found[4][0][3][4:] == p.EXTENT.pack(4 * MIB, HOLE)
    assert found[5][0][1] == p.Chunk.OFFSET_HOLE


def test_zeroes_that_would_be_slow_are_refused_in_words(client, path):
    client.storage._impossible.update((3, 17))  # as on a file system without both
    client.say(p.request(p.Cmd.WRITE_ZEROES, 1, MIB, 4096, p.CMD_FLAG_FAST_ZERO))
    client.say(p.request(p.Cmd.WRITE_ZEROES, 2, MIB, MIB, p.CMD_FLAG_FAST_ZERO | p.CMD_FLAG_NO_HOLE))
    before, found = path.read_bytes(), answers(client)
    for cookie in (1, 2):
        error, text, place = error_of(found[cookie])
        assert (error, place) == (p.ENOTSUP, MIB)
        assert "without FAST_ZERO" in text
    assert before[MIB : MIB + 4096] != bytes(4096)
    assert client.row()["errors"] == 2


def test_cache_is_done_and_is_an_operation_of_no_kind(client):
    client.say(p.request(p.Cmd.CACHE, 1, 0, SIZE), p.request(p.Cmd.CACHE, 2, 5, 0))
    assert answers(client) == {n: [(n, None, True, bytes(4))] for n in (1, 2)}
    row = client.row()
    assert (row["reads"], row["writes"], row["others"], row["errors"]) == (0, 0, 2, 0)


@pytest.mark.parametrize(("command", "charged"), [(p.Cmd.CACHE, SIZE), (p.Cmd.BLOCK_STATUS, 0)])
def test_what_reads_ahead_is_charged_as_a_read_and_what_looks_one_operation(path, command, charged):
    client = Client(path, "loop", mode=BOTH)
    client.rig.deliver(client.sock, p.request(command, 1, 0, SIZE))
    client.session.requests.queue.append((0, 2, command, SIZE, 0, 0, 0))
    assert client.session.head_charge() == (charged, client.rig.export.cost_write + charged / 65_536)
    client.session.requests.queue.clear()
    client.say()
    assert client.row()["cost_milli"] == 1000 + charged * 1000 // 65_536


def test_what_fails_says_why_and_where(client, path):
    os.truncate(path, 2 * MIB)
    client.say(read(1, MIB, 2 * MIB), read(2, 5 * MIB, 512), read(3, MIB, 4096))
    found = answers(client)
    error, text, place = error_of(found[1])
    assert (error, text) == (p.EIO, "read: Input/output error")
    assert MIB <= place <= 2 * MIB
    assert error_of(found[2]) == (p.EIO, "read: Input/output error", 5 * MIB)
    assert found[3][0][1] == DATA
    assert client.row()["errors"] == 2
    assert client.rig.context.reply_memory.used_bytes == 0


def test_what_is_refused_says_why_and_has_no_place(client):
    client.say(read(1, SIZE, 512), p.request(9, 2, 0, 0), status(3, 0, 0), write(4, SIZE, b"alien"))
    client.say(p.request(p.Cmd.READ, 5, 0, 33 * MIB, p.CMD_FLAG_DF), read(6, 0, 512))
    found = answers(client)
    assert found.pop(6)[0][1] == DATA
    refused = {cookie: error_of(each) for cookie, each in found.items()}
    assert {cookie: error for cookie, (error, _, _) in refused.items()} == {
        1: p.EINVAL, 2: p.EINVAL, 3: p.EINVAL, 4: p.ENOSPC, 5: p.EOVERFLOW,
    }  # fmt: skip
    assert all(text and place is None for _, text, place in refused.values())


def test_a_client_without_the_context_is_refused_its_status(path):
    client = Client(path, "loop", mode=p.ReplyMode(structured=True))
    client.say(status(1, 0, 512), read(2, 0, 512))
    found = answers(client)
    assert error_of(found[1])[0] == p.EINVAL
    assert found[2][0][1] == DATA


def test_a_client_that_takes_nothing_costs_bounded_memory(client):
    client.sock.window = 0
    for start in range(0, 2000, 100):
        client.say(*(status(n, 0, SIZE) for n in range(start, start + 100)))
    assert len(client.session._replies) <= MAX_JOBS + 1
    client.say(write(9999, 0, b"goes on"))
    assert 9999 not in client.session.inflight, "what is behind them goes on"
    while len(client.session.inflight) or client.session._replies:
        client.rig.open_window(client.sock, 50_000)
        client.say()
    client.rig.open_window(client.sock)
    assert sorted(answers(client)) == [*range(2000), 9999]


def test_large_reads_that_are_not_taken_are_whole_when_they_are(client, path):
    client.sock.window = 100
    client.say(read(1, 0, 8 * MIB), write(2, SIZE - 512, b"w" * 512), read(3, MIB, 2 * MIB))
    expected = path.read_bytes()
    while set(answered := {chunk[0] for chunk in whole(client)}) != {1, 2, 3}:
        before = len(client.sock.sent)
        client.rig.open_window(client.sock, 300_000)
        client.say()
        assert len(client.sock.sent) > before, answered
    found = answers(client)
    assert assembled(found[1], 0, 8 * MIB) == expected[: 8 * MIB]
    assert assembled(found[3], MIB, 2 * MIB) == expected[MIB : 3 * MIB]
    assert client.rig.context.reply_memory.used_bytes == 0


def whole(client):
    """Chunks that have arrived, if what was sent ends with a whole one."""
    try:
        return chunks(client.sock.sent)
    except (AssertionError, struct.error):
        return []
