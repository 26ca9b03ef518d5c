"""Upstream mode with ``upstream_connections``: one client's requests on several connections."""

from __future__ import annotations

import random

import pytest

from gateway_agent.errors import UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import GONE, IN
from gateway_agent.nbd.upstream_handshake import Agreed
from gateway_agent.nbd.upstream_runs import _MOST_RUNS
from pmdaemon.wire.rates import Rates
from tests.support.nbd import ALL_FLAGS, MIB, assembled, chunks, replies
from tests.support.nbd_proxy import IN_CHUNKS, Pair, read, write
from tests.support.nbd_several import Several

DISC = p.request(p.Cmd.DISC, 0, 0, 0)


def parsed(raw):
    """Requests of one connection, each whole: (command, cookie, offset, length, bytes)."""
    found, at = [], 0
    while at < len(raw):
        _, _, command, cookie, offset, length = p.REQUEST.unpack_from(raw, at)
        size = p.REQUEST.size + (length if command == p.Cmd.WRITE else 0)
        found.append((command, cookie, offset, length, raw[at : at + size]))
        assert len(found[-1][4]) == size, "a request is on one connection, whole"
        at += size
    return found


def test_batches_go_to_one_connection_after_the_other_and_the_answers_come_back(openings):
    each = Several(openings)
    for cookie in (1, 2, 3, 4):
        each.say(read(cookie))
    assert each.sent() == [read(3), read(1) + read(4), read(2)]
    each.answer(1, p.simple_reply(4) + b"4" * 512)
    each.answer(0, p.simple_reply(3) + b"3" * 512)
    each.answer(2, p.simple_reply(2) + b"2" * 512)
    each.answer(1, p.simple_reply(1) + b"1" * 512)
    lengths = dict.fromkeys((1, 2, 3, 4), 512)
    assert replies(each.near.sent, lengths) == [(n, 0, str(n).encode() * 512) for n in (4, 3, 2, 1)]
    row = each.pair.row()
    assert (row["arrived"], row["reads"], row["errors"], row["inflight"]) == (4, 4, 0, 0)


def test_a_large_batch_is_divided_at_whole_requests(openings):
    each = Several(openings, size_bytes=64 * MIB)
    said = [write(n, bytes([n]) * 100_000) for n in range(9)]
    each.say(*said)
    cookies = [[found[1] for found in parsed(raw)] for raw in each.sent()]
    assert sorted(cookie for some in cookies for cookie in some) == list(range(9))
    assert all(len(some) >= 2 and some == sorted(some) for some in cookies)
    assert sorted(found[4] for raw in each.sent() for found in parsed(raw)) == sorted(said)


def test_a_payload_that_arrives_in_pieces_stays_on_its_connection(openings):
    each = Several(openings)
    said = write(1, b"w" * 5000)
    for at in range(0, len(said), 700):
        each.say(said[at : at + 700])
    each.say(read(2))
    assert each.sent() == [b"", said, read(2)]


def test_a_connection_that_takes_nothing_leaves_its_run_to_the_next(openings):
    each = Several(openings)
    each.fars[1].window = 0
    each.say(read(1))
    each.say(read(2))
    assert each.sent() == [read(2), b"", read(1)]
    each.fars[2].window = each.fars[0].window = 0
    each.say(read(3))
    assert each.sent() == [read(2), b"", read(1)]
    each.rig.open_window(each.fars[0])
    for far in each.fars:
        each.rig.open_window(far)
    assert sorted(found[1] for raw in each.sent() for found in parsed(raw)) == [1, 2, 3]


def test_a_connection_that_says_nothing_gets_no_more_while_others_answer(openings):
    each = Several(openings)
    for cookie in (1, 2, 3):
        each.say(read(cookie))
    each.answer(1, p.simple_reply(1) + b"r" * 512)
    each.answer(0, p.simple_reply(3) + b"r" * 512)
    hanging = bytes(each.fars[2].sent)
    for cookie in range(4, 20):
        each.rig.loop.fire(1)
        each.say(read(cookie))
        (asked,) = [far for far, raw in enumerate(each.sent()) if raw.endswith(read(cookie))]
        each.answer(asked, p.simple_reply(cookie) + b"r" * 512)
    assert bytes(each.fars[2].sent) == hanging
    assert all(raw.count(read(1)[:4]) > 5 for raw in each.sent()[:2]), "the others have their turns"
    each.answer(2, p.simple_reply(2) + b"r" * 512)
    for cookie in (20, 21, 22):
        each.say(read(cookie))
    assert len(each.fars[2].sent) > len(hanging), "it has answered"


def test_where_all_are_slow_each_has_its_turn(openings):
    each = Several(openings)
    for cookie in range(1, 10):
        each.say(read(cookie))
        each.rig.loop.fire(2)
    assert [len(raw) for raw in each.sent()] == [3 * p.REQUEST.size] * 3


def test_while_a_reply_has_come_in_part_those_of_the_others_wait(openings):
    each = Several(openings)
    each.say(read(1, 2000))
    each.say(read(2, 2000))
    each.answer(1, p.simple_reply(1) + b"a" * 700)
    other = p.simple_reply(2) + b"b" * 2000
    each.fars[2].incoming.append(other)
    each.rig.loop.handlers[each.fars[2].fileno()](IN)
    assert bytes(each.near.sent) == p.simple_reply(1) + b"a" * 700
    assert not each.rig.loop.masks.get(each.fars[2].fileno(), 0) & IN, "it is not asked about it again"
    each.answer(1, b"a" * 1300)
    each.answer(2)
    assert bytes(each.near.sent) == p.simple_reply(1) + b"a" * 2000 + other


def test_an_answer_of_the_gateway_waits_for_the_end_of_a_reply(openings):
    each = Several(openings)
    each.say(read(1, 2000))
    each.answer(1, p.simple_reply(1) + b"a" * 700)
    each.say(p.request(p.Cmd.READ, 2, 2 * MIB, 512))  # beyond the end
    assert len(each.near.sent) == 716
    each.answer(1, b"a" * 1300)
    assert replies(each.near.sent, {1: 2000}) == [(1, 0, b"a" * 2000), (2, p.EINVAL, b"")]


@pytest.mark.parametrize("mode", [p.SIMPLE_REPLIES, IN_CHUNKS], ids=["simple", "in chunks"])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_is_whole_on_every_connection_and_counted_once(openings, mode, seed):
    rng = random.Random(seed)
    caps = rng.choice((None, Rates(ops_per_s=2000), Rates(bytes_per_s=4e6, cost_per_s=500)))
    each = Several(openings, most=4, opened=1, mode=mode, size_bytes=64 * MIB, caps=caps)
    said = bytearray()
    lengths, kinds = {}, {}
    for cookie in range(1, 200):
        length = rng.choice((512, 4096, 4096, 70_000))
        kinds[cookie] = command = rng.choice((p.Cmd.READ, p.Cmd.READ, p.Cmd.WRITE, p.Cmd.FLUSH))
        if command == p.Cmd.READ:
            lengths[cookie] = length
            said += read(cookie, length, offset=cookie * 512)
        elif command == p.Cmd.WRITE:
            said += write(cookie, rng.randbytes(length))
        else:
            said += p.request(p.Cmd.FLUSH, cookie, 0, 0)
    taken = [0] * 4  # of each connection's requests, answered
    waiting = [bytearray() for _ in range(4)]
    whole = bytes(said)

    def answer_of(found):
        command, cookie, offset, length, _ = found
        if command != p.Cmd.READ:
            return p.simple_reply(cookie)
        payload = cookie.to_bytes(2, "big") * (length // 2)
        if mode.structured:
            half = length // 2
            head = p.data_chunk_head(cookie, offset, half, False) + payload[:half]
            return head + p.data_chunk_head(cookie, offset + half, length - half, True) + payload[half:]
        return p.simple_reply(cookie) + payload

    def step():
        far = rng.randrange(len(each.fars))
        sock = each.fars[far]
        found = []
        at = 0
        raw = bytes(sock.sent)
        while at + p.REQUEST.size <= len(raw):
            _, _, command, cookie, offset, length = p.REQUEST.unpack_from(raw, at)
            at += p.REQUEST.size + (length if command == p.Cmd.WRITE else 0)
            if at <= len(raw):
                found.append((command, cookie, offset, length, b""))
        fresh = found[taken[far] :]
        taken[far] = len(found)
        rng.shuffle(fresh)
        for request in fresh:
            waiting[far] += answer_of(request)
        if waiting[far] and not sock.incoming:
            size = rng.randrange(1, 200_000)
            sock.incoming.append(bytes(waiting[far][:size]))
            del waiting[far][:size]
        if sock.incoming and each.rig.loop.masks.get(sock.fileno(), 0) & IN:
            each.rig.loop.handlers[sock.fileno()](IN)

    steps = 0
    while said or any(each.session.gauges()):
        steps += 1
        if said:
            size = rng.choice((28, 500, 20_000))
            each.say(bytes(said[:size]))
            del said[:size]
        if openings and not steps % 10:
            each.open_next()
        if rng.random() < 0.1:
            rng.choice(each.fars).window = rng.choice((0, 10, 1000))
        for sock in rng.sample(each.fars, len(each.fars)):
            if sock.window < 1000 and rng.random() < 0.7:
                each.rig.open_window(sock)
        for _ in range(3):
            step()
        each.rig.loop.fire(rng.choice((0.0, 0.001, 0.02)))
        each.rig.assert_all_counted()
    assert len(each.fars) == 4
    asked = [found for raw in each.sent() for found in parsed(raw)]
    assert sorted(found[4] for found in asked) == sorted(found[4] for found in parsed(whole))
    found = replied(each.near.sent, lengths, mode)
    assert sorted(item[0] for item in found) == sorted(kinds)
    for cookie, error, payload in found:
        assert not error
        assert payload == cookie.to_bytes(2, "big") * (lengths.get(cookie, 0) // 2)
    row = each.pair.row()
    transfers = sum(command != p.Cmd.FLUSH for command in kinds.values())
    assert (row["arrived"], row["reads"] + row["writes"]) == (transfers, transfers)
    assert (row["others"], row["errors"]) == (len(kinds) - transfers, 0)
    assert all(len(parsed(raw)) > 10 for raw in each.sent()), "all of them are used"


def replied(raw, lengths, mode):
    """(cookie, error, payload) of each answer that is here whole."""
    raw = bytes(raw)
    if not mode.structured:
        found, at = [], 0
        while at + 16 <= len(raw):
            _, error, cookie = p.SIMPLE_REPLY.unpack_from(raw, at)
            size = lengths.get(cookie, 0)
            if at + 16 + size > len(raw):
                break
            found.append((cookie, error, raw[at + 16 : at + 16 + size]))
            at += 16 + size
        return found
    end = at = 0
    while at + 16 <= len(raw):
        if raw[at : at + 4] == p.SIMPLE_REPLY_MAGIC.to_bytes(4, "big"):
            at += 16
        else:
            if at + 20 > len(raw):
                break
            at += 20 + int.from_bytes(raw[at + 16 : at + 20], "big")
        if at <= len(raw):
            end = at
    by_cookie = {}
    for chunk in chunks(raw[:end]):
        by_cookie.setdefault(chunk[0], []).append(chunk)
    found = []
    for cookie, pieces in by_cookie.items():
        if pieces[-1][2]:
            data = assembled(pieces, cookie * 512, lengths[cookie]) if cookie in lengths else b""
            found.append((cookie, 0, data))
    return found


def test_without_the_flag_there_is_one(openings):
    each = Several(openings, opened=1, flags=ALL_FLAGS & ~p.TX_CAN_MULTI_CONN)
    assert openings == []
    each.say(read(1))
    assert each.sent() == [read(1)]


def test_one_that_cannot_be_made_is_tried_again_and_nothing_waits_for_it(openings):
    each = Several(openings, opened=1)
    openings.pop().on_failed(UpstreamError("nbd://x", "no more clients"))
    each.say(read(1))
    assert each.sent() == [read(1)]
    each.rig.loop.fire(5)
    each.open_next()
    assert openings == [], "one after the other"
    each.answer(0, p.simple_reply(1) + b"r" * 512)
    assert openings == [], "that was asked before it was made"
    each.say(read(2))
    each.answer(0, p.simple_reply(2) + b"r" * 512)
    each.open_next()
    each.say(read(3))
    each.answer(1, p.simple_reply(3) + b"r" * 512)
    for cookie in (4, 5, 6):
        each.say(read(cookie))
    assert openings == []
    assert all(each.sent()), "three are there"


def test_an_upstream_that_takes_no_more_is_asked_less_and_less_often(openings):
    each = Several(openings, opened=1)
    for wait_s in (5, 10, 20, 40, 80, 80):
        openings.pop().on_failed(UpstreamError("nbd://x", "no more clients"))
        each.rig.loop.fire(wait_s - 1)
        assert openings == []
        each.rig.loop.fire(1)
        assert len(openings) == 1
    each.open_next()
    each.say(read(1))
    each.answer(0, p.simple_reply(1) + b"r" * 512)
    openings.pop().on_failed(UpstreamError("nbd://x", "no more clients"))
    each.rig.loop.fire(5)
    assert len(openings) == 1, "from the beginning again"


def test_one_of_another_size_is_not_used_nor_asked_for_again(openings):
    each = Several(openings, opened=1)
    other = each.open_next(facts=p.ExportFacts(4096, ALL_FLAGS))
    each.say(read(1), read(2))
    assert bytes(each.fars[0].sent) == read(1) + read(2)
    assert bytes(other.sent) == DISC
    each.rig.loop.fire(9)
    assert openings == []


@pytest.mark.parametrize("far", [0, 1, 2])
def test_one_that_ends_with_nothing_to_answer_is_opened_again_and_the_others_go_on(openings, far):
    each = Several(openings)
    for cookie in (1, 2, 3):
        each.say(read(cookie))
    for number, cookie in ((1, 1), (2, 2), (0, 3)):
        if number == far:
            each.answer(number, p.simple_reply(cookie) + b"r" * 512)
    each.end(far)
    assert each.is_kept
    assert each.fars[far].is_closed
    for number, cookie in ((1, 1), (2, 2), (0, 3)):
        if number != far:
            each.answer(number, p.simple_reply(cookie) + b"r" * 512)
    each.rig.loop.fire(5)
    fourth = each.open_next()
    each.say(read(4))
    (asked,) = [number for number, raw in enumerate(each.sent()) if raw.endswith(read(4))]
    each.answer(asked, p.simple_reply(4) + b"r" * 512)
    for cookie in (5, 6, 7):
        each.say(read(cookie))
    assert fourth.sent
    assert sum(len(raw) for raw in each.sent()) == 7 * p.REQUEST.size
    row = each.pair.row()
    assert (row["reads"], row["errors"], row["inflight"]) == (4, 0, 3)


def test_what_an_ended_connection_did_not_take_goes_to_another(openings):
    each = Several(openings, opened=2)
    for far in each.fars:
        far.window = 0
    each.say(read(1), read(2))
    stuck = each.session._sending.upstream.sock  # which of the two is not to be seen from outside
    each.end(each.fars.index(stuck))
    (other,) = [far for far in each.fars if far is not stuck]
    each.rig.open_window(other)
    assert bytes(other.sent) == read(1) + read(2)
    each.answer(each.fars.index(other), *(p.simple_reply(n) + b"r" * 512 for n in (1, 2)))
    assert each.pair.row()["reads"] == 2


@pytest.mark.parametrize("ended", [0, 1])
def test_the_rest_of_a_write_that_has_its_answer_goes_to_no_other_connection(openings, ended):
    """It would be requests there, whatever a guest has put into it."""
    each = Several(openings, most=2, opened=2)
    whole = write(1, b"w" * 1000)
    each.say(whole[:500])
    each.answer(1, p.simple_reply(1, p.EIO))
    each.end(ended)
    each.say(whole[500:], read(2))
    assert not each.fars[0].sent
    assert each.is_kept == (ended == 0)
    assert bytes(each.fars[1].sent) == (whole[:500] if ended else whole + read(2))


def test_behind_a_flush_that_failed_no_connection_is_made_in_the_place_of_one(openings):
    """A storage may say on those only that were there that something is lost: nbdkit does."""
    each = Several(openings, opened=1)
    other = Pair(each.rig, "host-b", IN_CHUNKS, Agreed(structured=True))
    each.open_next()
    other.say(p.request(p.Cmd.FLUSH, 7, 0, 0))
    other.answer(p.simple_reply(7, p.EIO))
    late = each.open_next()
    assert bytes(late.sent) == DISC
    each.end(1)
    each.rig.loop.fire(100)
    assert openings == []
    each.say(read(1))
    each.answer(0, p.simple_reply(1) + b"r" * 512)
    assert each.is_kept
    later = Several(openings, opened=2)
    later.end(1)
    later.rig.loop.fire(5)
    assert openings


@pytest.mark.parametrize("failing", [p.request(p.Cmd.FLUSH, 7, 0, 0), write(7, b"w" * 512, p.CMD_FLAG_FUA)])
def test_a_flush_that_failed_counts_also_on_a_connection_of_which_nothing_is_remembered(openings, failing):
    """Without structured replies: by another export of the same storage, or from before a reload."""
    each = Several(openings, opened=1)
    several = each.rig.volume.export
    each.rig.volume.export = several.model_copy(update={"upstream_connections": 1})
    other = Pair(each.rig, "host-b")
    each.rig.volume.export = several
    other.say(failing)
    other.answer(p.simple_reply(7, p.EIO))
    assert bytes(each.open_next().sent) == DISC
    assert replies(other.near.sent) == [(7, p.EIO, b"")]


def test_a_read_that_failed_is_no_flush(openings):
    each = Several(openings, opened=1)
    several = each.rig.volume.export
    each.rig.volume.export = several.model_copy(update={"upstream_connections": 1})
    other = Pair(each.rig, "host-b")
    each.rig.volume.export = several
    other.say(read(7))
    other.answer(p.simple_reply(7, p.EIO))
    assert not each.open_next().sent


def test_one_that_ends_with_an_answer_owed_is_the_end_as_ever(openings):
    each = Several(openings)
    each.say(read(1))
    each.say(read(2))
    each.end(1)
    assert sorted(item[:2] for item in replies(each.near.sent)) == [(1, p.EIO), (2, p.EIO)]
    assert not each.is_kept
    assert all(far.is_closed for far in each.fars)
    row = each.pair.row()
    assert (row["reads"], row["errors"]) == (2, 2)
    each.rig.loop.fire(60)
    assert openings == []


def test_one_that_ends_within_a_reply_is_the_end_at_once(openings):
    each = Several(openings)
    each.say(read(1))
    each.say(read(2))
    each.answer(1, p.simple_reply(1) + b"a" * 10)
    each.end(1)
    assert len(each.near.sent) == 26, "nothing may follow a torn reply"
    assert each.pair.row()["errors"] == 2


def flushed(each):
    each.say(p.request(p.Cmd.FLUSH, 77, 0, 0))
    (far,) = [number for number, raw in enumerate(each.sent()) if raw]
    each.answer(far, p.simple_reply(77))
    for sock in (each.near, *each.fars):
        sock.sent.clear()


def test_a_flush_on_one_connection_covers_the_changes_of_the_others(openings):
    each = Several(openings, reconnect_s=5)
    each.say(write(1, b"w" * 512))
    each.answer(1, p.simple_reply(1))
    each.say(p.request(p.Cmd.FLUSH, 2, 0, 0))
    assert each.fars[2].sent
    each.answer(2, p.simple_reply(2))
    each.say(read(3))
    each.end(0)
    assert each.is_kept, "all that was acknowledged is stable"


@pytest.mark.parametrize("change", [True, False])
def test_a_loss_with_several_asks_again_what_no_connection_has_answered(openings, change):
    each = Several(openings, reconnect_s=5)
    flushed(each)
    for cookie in (1, 2, 3, 4):
        each.say(read(cookie))
    if change:
        each.say(write(5, b"w" * 512))
    assert len([raw for raw in each.sent() if raw]) == 3
    lost = each.fars
    each.end(next(number for number, raw in enumerate(each.sent()) if raw and read(3) in raw))
    assert all(far.is_closed for far in lost)
    if change:
        assert not each.is_kept, "a change under way may be done late"
        return
    each.say(read(6))
    each.rig.loop.fire(0.1)
    back = each.open_next()
    assert bytes(back.sent) == b"".join(map(read, (1, 2, 3, 4, 6)))
    second = each.open_next()
    each.say(read(7))
    each.say(read(8))
    assert sorted((bytes(back.sent)[5 * 28 :], bytes(second.sent))) == sorted((read(8), read(7)))
    for number, sock in enumerate(each.fars):
        if sock in (back, second):
            each.answer(number, *(p.simple_reply(f[1]) + b"r" * 512 for f in parsed(bytes(sock.sent))))
    answered = {item[0] for item in replies(each.near.sent, dict.fromkeys(range(9), 512))}
    assert answered == {1, 2, 3, 4, 6, 7, 8}
    row = each.pair.row()
    assert (row["errors"], row["inflight"]) == (0, 0)


@pytest.mark.parametrize("how", ["disc", "gone"])
def test_at_its_end_every_connection_is_let_go_in_order(openings, how):
    each = Several(openings)
    for cookie in (1, 2):
        each.say(read(cookie))
    owing = [1, 2]
    if how == "disc":
        each.say(DISC)
        for far, cookie in ((1, 1), (2, 2)):
            each.answer(far, p.simple_reply(cookie) + b"r" * 512)
        owing = []
    else:
        each.near.is_ended = True
        each.rig.loop.handlers[each.near.fileno()](IN | GONE)
    assert each.session.is_closed
    for number, far in enumerate(each.fars):
        assert bytes(far.sent).endswith(DISC) == (number not in owing), "first all answers"
    for number in owing:
        each.answer(number, p.simple_reply(number) + b"r" * 512)
    for number, far in enumerate(each.fars):
        assert bytes(far.sent).endswith(DISC)
        each.end(number)
        assert far.is_closed
    assert each.rig.context.farewells == set()
    assert openings == []
    assert each.rig.loop.timers == {}


def test_an_opening_under_way_ends_with_its_session(openings):
    each = Several(openings, opened=1)
    assert len(openings) == 1
    each.session.close("test")
    assert openings == []


def test_runs_are_forgotten_when_their_requests_are_answered(openings):
    each = Several(openings)
    for cookie in range(3 * _MOST_RUNS):
        each.say(read(cookie))
        far = next(n for n, sock in enumerate(each.fars) if bytes(sock.sent).endswith(read(cookie)))
        each.answer(far, p.simple_reply(cookie) + b"r" * 512)
    assert len(each.session._runs._starts) <= _MOST_RUNS + 2  # nothing outside shows what is remembered


def test_a_request_that_waits_for_ever_keeps_no_runs_of_the_others(openings):
    each = Several(openings)
    stuck = [1, 2, 3]
    for cookie in range(1, 4 * _MOST_RUNS):
        each.say(read(cookie))
        far = next(n for n, sock in enumerate(each.fars) if bytes(sock.sent).endswith(read(cookie)))
        if cookie in stuck:
            continue
        each.answer(far, p.simple_reply(cookie) + b"r" * 512)
    assert len(each.session._runs._starts) <= _MOST_RUNS + 2  # nothing outside shows what is remembered
    owed = [set(each.session._owed_by(used)) for used in each.session._used]
    sent = [{cookie for cookie in stuck if read(cookie) in bytes(sock.sent)} for sock in each.fars]
    assert owed == sent, "and each is known to be on the connection on which it was sent"
