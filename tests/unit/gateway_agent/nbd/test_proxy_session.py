import pytest

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd import session
from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE
from gateway_agent.nbd.loop import IN
from pmdaemon.wire.cut import COL, FAILED, IO_ANY, IO_READ, OUTSTANDING, OVERDUE
from pmdaemon.wire.rates import Rates
from tests.support.nbd import ALL_FLAGS, MIB, Rig, replies
from tests.support.nbd_proxy import Pair, read, write

READ_ONLY = p.TX_HAS_FLAGS | p.TX_READ_ONLY


@pytest.fixture
def pair():
    return Pair(Rig())


def test_bytes_pass_unchanged_both_ways_and_are_counted(pair):
    said = (
        read(1) + write(2, b"w" * 4096) + p.request(p.Cmd.FLUSH, 3, 0, 0) + p.request(p.Cmd.TRIM, 4, 0, 512)
    )
    pair.say(said)
    assert bytes(pair.far.sent) == said
    pair.rig.clock.advance(0.003)
    answered = p.simple_reply(2) + p.simple_reply(1) + b"r" * 512 + p.simple_reply(4) + p.simple_reply(3)
    pair.answer(answered)
    assert bytes(pair.near.sent) == answered
    row = pair.row()
    assert (row["arrived"], row["reads"], row["writes"], row["others"]) == (2, 1, 1, 2)
    assert (row["read_bytes"], row["write_bytes"], row["errors"]) == (512, 4096, 0)
    assert (row["lat_sum_us"], row["svc_sum_us"], row["delay_sum_us"]) == (6000, 6000, 0)
    assert (row["inflight"], row["held"]) == (0, 0)


def test_a_write_in_two_receives_with_nothing_else_under_way_goes_out_whole(pair):
    said = write(1, b"x" * 70_000)
    pair.say(said[:28])
    pair.say(said[28:])
    assert bytes(pair.far.sent) == said


def test_disc_closes_both_sides_when_all_is_answered_and_not_before(pair):
    pair.say(read(1, 64), p.request(p.Cmd.DISC, 0, 0, 0))
    assert not pair.session.is_closed
    pair.answer(p.simple_reply(1), b"a" * 32)
    assert not pair.session.is_closed, "half a reply is no answer"
    pair.answer(b"b" * 32)
    assert pair.session.is_closed
    assert pair.near.is_closed
    assert bytes(pair.far.sent)[28:] == p.request(p.Cmd.DISC, 0, 0, 0)
    assert not pair.far.is_closed, "the upstream closes first"
    pair.end(pair.far)
    assert pair.far.is_closed
    assert replies(pair.near.sent, {1: 64})[0][2] == b"a" * 32 + b"b" * 32
    assert pair.stream.sessions == []


def test_an_upstream_that_dies_between_replies_gives_eio_for_all_then_the_end(pair):
    pair.rig.volume.set_caps(Rates(ops_per_s=50), pair.rig.clock.monotonic_ns())
    pair.say(*(read(n) for n in range(10)))  # a burst of two goes through, the rest is held
    inflight, held = pair.session.gauges()
    assert inflight
    assert held
    pair.end(pair.far)
    assert sorted(item[:2] for item in replies(pair.near.sent)) == [(n, p.EIO) for n in range(10)]
    assert (pair.near.is_shut, pair.far.is_closed) == (True, True)
    pair.end(pair.near)
    assert pair.session.is_closed
    row = pair.row()
    assert (row["arrived"], row["reads"], row["errors"], row["read_bytes"]) == (10, 10, 10, 0)


def test_an_upstream_that_dies_within_a_reply_ends_the_client_and_counts(pair):
    pair.say(read(1, 64), read(2))
    pair.answer(p.simple_reply(1), b"a" * 10)
    pair.end(pair.far)
    assert pair.near.is_shut
    assert len(pair.near.sent) == 26, "nothing may follow a torn reply"
    assert pair.row()["errors"] == 2


def test_answers_at_an_upstreams_death_are_not_overtaken_by_a_reset(pair):
    pair.near.window = 0
    pair.say(read(1), write(2, b"w" * 100)[:50])
    pair.end(pair.far)
    pair.say(b"w" * 78)  # the client is in the middle of sending: it must be able to end that, to read
    assert not pair.near.incoming
    assert not pair.session.is_closed
    pair.rig.open_window(pair.near)
    assert sorted(item[:2] for item in replies(pair.near.sent)) == [(1, p.EIO), (2, p.EIO)]
    assert pair.near.is_shut
    assert not pair.near.is_closed
    pair.say(read(3))
    pair.end(pair.near)
    assert pair.session.is_closed
    assert pair.rig.loop.timers == {}


def test_a_client_that_does_not_leave_after_an_upstreams_death_is_closed_in_time(pair):
    pair.end(pair.far)
    pair.rig.loop.fire(session.LINGER_NS / 1e9)
    assert pair.session.is_closed
    assert pair.near.is_closed


def test_a_refusal_that_waits_behind_a_torn_reply_is_counted(pair):
    pair.say(read(1, 64))
    pair.answer(p.simple_reply(1), b"a" * 10)
    pair.say(read(2, 512, MIB))
    pair.end(pair.far)
    row = pair.row()
    assert (row["arrived"], row["reads"], row["errors"]) == (2, 2, 2)


@pytest.mark.parametrize(
    "said",
    [
        p.simple_reply(99),
        p.SIMPLE_REPLY.pack(0x668E33EF, 0, 1),
        p.simple_reply(1) + b"a" * 512 + p.simple_reply(99),
    ],
    ids=["unknown", "of another kind", "behind a good one"],
)
def test_a_reply_that_nobody_asked_for_ends_the_client_and_all_its_requests_have_failed(pair, said):
    pair.say(read(1), read(2))
    pair.far.incoming.append(said)
    with pytest.raises(Exception, match="unknown cookie") as caught:
        pair.rig.loop.handlers[pair.far.fileno()](IN)
    pair.rig.loop.failures[pair.far.fileno()](caught.value)
    assert pair.session.is_closed
    row = pair.row()
    assert (row["arrived"], row["reads"], row["errors"]) == (2, 2, 2)


def test_a_client_that_leaves_in_the_middle_of_a_write_sends_no_disc_into_its_payload(pair):
    pair.say(write(1, b"x" * 100)[:110])
    pair.end(pair.near)
    assert pair.session.is_closed
    assert len(pair.far.sent) == 110


def test_a_client_that_does_not_read_stops_the_upstream_and_nothing_is_lost(pair):
    pair.near.window = 20
    pair.say(read(1, 64), read(2, 64))
    pair.rig.clock.advance(0.5)
    pair.answer(p.simple_reply(1), b"a" * 64)
    assert pair.far.fileno() not in pair.rig.loop.masks, "replies are to wait in the upstream's socket"
    assert pair.session.gauges() == (0, 0), "one is answered, the other one waits for its client"
    for _ in range(3):
        pair.rig.clock.advance(60)
        now_ns = pair.rig.clock.monotonic_ns()
        assert pair.session.outstanding(now_ns)[0][:2] == (now_ns - 500_000_000, KIND_READ)
        assert [entry[2:] for entry in pair.taken().missed] == [(500, 500)] * 2, "it grows no older"
    pair.rig.open_window(pair.near)
    pair.rig.clock.advance(0.25)
    pair.answer(p.simple_reply(2), b"b" * 64)
    assert [item[0] for item in replies(pair.near.sent, {1: 64, 2: 64})] == [1, 2]
    row = pair.row()
    assert (row["reads"], row["lat_sum_us"], row["svc_sum_us"]) == (1, 750_000, 750_000)


def test_an_upstream_that_does_not_take_more_is_waited_for(pair):
    pair.far.window = 40
    said = write(1, b"x" * 100) + read(2)
    pair.say(said)
    assert len(pair.far.sent) == 40
    pair.rig.open_window(pair.far)
    assert bytes(pair.far.sent) == said


def test_an_upstream_that_hangs_up_while_its_replies_are_not_wanted_does_not_spin(pair):
    pair.near.window = 0
    pair.say(read(1, 4))
    pair.answer(p.simple_reply(1), b"abcd")
    pair.far.is_ended = True
    assert pair.far.fileno() not in pair.rig.loop.masks
    pair.rig.open_window(pair.near)
    pair.end(pair.far)
    assert bytes(pair.near.sent) == p.simple_reply(1) + b"abcd"
    assert pair.near.is_shut


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (read(5, 512, MIB - 511), p.EINVAL),
        (read(5, (32 << 20) + 1), p.EINVAL),
        (p.request(p.Cmd.WRITE, 5, MIB - 1, 2) + b"xx", p.ENOSPC),
        (p.request(p.Cmd.WRITE_ZEROES, 5, MIB, 1), p.ENOSPC),
        (p.request(p.Cmd.BLOCK_STATUS, 5, 0, 512), p.EINVAL),
        (p.request(p.Cmd.READ, 5, 0, 512, 1 << 2), p.EINVAL),
    ],
)
def test_impossible_requests_are_answered_here_and_their_neighbours_are_served(pair, request_bytes, error):
    pair.say(read(1), request_bytes, read(2))
    assert bytes(pair.far.sent) == read(1) + read(2)
    assert replies(pair.near.sent) == [(5, error, b"")]


FUA, NO_HOLE, DF, FAST_ZERO = p.CMD_FLAG_FUA, p.CMD_FLAG_NO_HOLE, 1 << 2, p.CMD_FLAG_FAST_ZERO


@pytest.mark.parametrize(
    ("offered", "command", "flags", "is_passed_on"),
    [
        (p.TX_HAS_FLAGS, p.Cmd.READ, 0, True),
        (p.TX_HAS_FLAGS, p.Cmd.READ, FUA, False),
        (p.TX_HAS_FLAGS, p.Cmd.WRITE, FUA, False),
        (p.TX_HAS_FLAGS, p.Cmd.FLUSH, 0, False),
        (p.TX_HAS_FLAGS, p.Cmd.TRIM, 0, False),
        (p.TX_HAS_FLAGS, p.Cmd.WRITE_ZEROES, 0, False),
        (ALL_FLAGS, p.Cmd.READ, FUA, True),
        (ALL_FLAGS, p.Cmd.WRITE, FUA, True),
        (ALL_FLAGS, p.Cmd.FLUSH, FUA, True),
        (ALL_FLAGS, p.Cmd.TRIM, FUA, True),
        (ALL_FLAGS, p.Cmd.WRITE_ZEROES, FUA | NO_HOLE, True),
        (ALL_FLAGS, p.Cmd.WRITE_ZEROES, FAST_ZERO, False),
        (ALL_FLAGS | p.TX_SEND_FAST_ZERO, p.Cmd.WRITE_ZEROES, FAST_ZERO | NO_HOLE, True),
        (ALL_FLAGS | p.TX_SEND_FAST_ZERO, p.Cmd.TRIM, FAST_ZERO, False),
        (ALL_FLAGS, p.Cmd.READ, NO_HOLE, False),
        (ALL_FLAGS, p.Cmd.WRITE, NO_HOLE, False),
        (ALL_FLAGS, p.Cmd.TRIM, NO_HOLE, False),
        (ALL_FLAGS, p.Cmd.READ, DF, False),
        (ALL_FLAGS, p.Cmd.CACHE, 0, False),
        (ALL_FLAGS, p.Cmd.WRITE, 1 << 15, False),
    ],
)
def test_what_was_not_offered_is_refused_and_never_passed_on(offered, command, flags, is_passed_on):
    pair = Pair(Rig(flags=offered))
    length = 0 if command == p.Cmd.FLUSH else 512
    said = p.request(command, 1, 0, length, flags) + (bytes(512) if command == p.Cmd.WRITE else b"")
    pair.say(said, read(2))
    assert bytes(pair.far.sent) == (said if is_passed_on else b"") + read(2)
    assert replies(pair.near.sent) == ([] if is_passed_on else [(1, p.EINVAL, b"")])


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (read(1, 4096, 4096), 0),
        (read(1, 65536), 0),
        (read(1, 65536 + 4096), p.EINVAL),
        (read(1, 512), p.EINVAL),
        (read(1, 4096, 512), p.EINVAL),
        (write(1, bytes(65536 + 4096)), p.EINVAL),
        (write(1, b"z"), p.EINVAL),
        (p.request(p.Cmd.TRIM, 1, 0, 512 << 10), 0),  # without data a request may be larger than the maximum
        (p.request(p.Cmd.TRIM, 1, 0, 512), p.EINVAL),
        (p.request(p.Cmd.FLUSH, 1, 0, 0), 0),
        (p.request(p.Cmd.FLUSH, 1, 4096, 4096), p.EINVAL),
    ],
)
@pytest.mark.parametrize("caps", [Rates(), Rates(ops_per_s=1)])
def test_the_block_sizes_of_the_upstream_are_kept(request_bytes, error, caps):
    pair = Pair(Rig(blocks=p.BlockSizes(4096, 4096, 65536), caps=caps))
    pair.say(request_bytes)
    assert bytes(pair.far.sent) == (b"" if error else request_bytes)
    assert replies(pair.near.sent) == ([(1, error, b"")] if error else [])


def test_writes_to_a_read_only_export_are_refused_with_their_payload_dropped():
    pair = Pair(Rig(flags=READ_ONLY))
    pair.say(*(write(n, b"x" * 5000) for n in range(3000)), read(9999))
    assert bytes(pair.far.sent) == read(9999)
    found = replies(pair.near.sent)
    assert [item[:2] for item in found] == [(n, p.EPERM) for n in range(3000)]
    row = pair.row()
    assert (row["writes"], row["errors"], row["write_bytes"], row["inflight"]) == (3000, 3000, 0, 1)


def test_a_refusal_waits_for_the_boundary_between_replies():
    pair = Pair(Rig(flags=READ_ONLY))
    pair.say(read(1, 64))
    pair.answer(p.simple_reply(1), b"a" * 30)
    pair.say(write(2, b"zz"))
    pair.answer(b"a" * 34, p.simple_reply(3)[:0])
    assert [item[:2] for item in replies(pair.near.sent, {1: 64})] == [(1, 0), (2, p.EPERM)]


@pytest.mark.parametrize("piece", [1, 16, 17, 1000, MIB])
@pytest.mark.parametrize(
    "refused",
    [
        read(2, 512, 64 * MIB),  # beyond the end
        p.request(p.Cmd.CACHE, 2, 0, 512),  # not offered
        p.request(99, 2, 0, 0),  # unknown
        write(2, b"z" * 5000),  # read-only
    ],
    ids=["beyond the end", "not offered", "unknown", "read-only"],
)
def test_a_refusal_never_lands_within_a_payload_that_fills_many_receives(refused, piece):
    pair = Pair(Rig(16 * MIB, flags=READ_ONLY))
    payload = bytes(range(251)) * 200
    pair.say(read(1, len(payload)), read(3, len(payload)))
    pair.near.window = 20  # the client does not read
    whole = b"".join(p.simple_reply(cookie) + payload for cookie in (1, 3))
    pair.answer(whole[:1000])
    pair.say(refused)
    for start in range(1000, len(whole), piece * 37):
        pair.rig.open_window(pair.near)
        pair.answer(whole[start : start + piece * 37])
    found = replies(pair.near.sent, {1: len(payload), 3: len(payload)})
    assert sorted(item[0] for item in found) == [1, 2, 3]
    assert all(payload == item[2] for item in found if item[0] != 2)
    assert [bool(item[1]) for item in sorted(found)] == [False, True, False]
    assert (pair.session.gauges(), kinds_outstanding(pair)) == ((0, 0), [])


def test_a_refusal_waits_for_what_the_upstream_has_not_taken():
    pair = Pair(Rig(flags=READ_ONLY))
    pair.far.window = 10
    pair.say(read(1), write(2, b"zz"), read(3))
    assert replies(pair.near.sent) == []
    pair.rig.open_window(pair.far)
    assert replies(pair.near.sent) == [(2, p.EPERM, b"")]
    assert bytes(pair.far.sent) == read(1) + read(3)


def test_a_cookie_used_twice_at_the_same_time_is_answered_twice_one_after_the_other(pair):
    pair.say(read(1, 4), read(1, 8), read(2, 2), p.request(p.Cmd.CACHE, 2, 0, 0))
    assert bytes(pair.far.sent) == read(1, 4)
    pair.answer(p.simple_reply(1) + b"aaaa")
    assert bytes(pair.far.sent) == read(1, 4) + read(1, 8) + read(2, 2)
    pair.answer(p.simple_reply(2) + b"cc", p.simple_reply(1) + b"bbbbbbbb")
    whole = p.simple_reply(1) + b"aaaa" + p.simple_reply(2) + b"cc" + p.simple_reply(1) + b"bbbbbbbb"
    assert bytes(pair.near.sent) == whole + p.simple_reply(2, p.EINVAL)
    assert not pair.session.is_closed


def test_a_cookie_used_twice_under_a_cap_is_charged_once():
    pair = Pair(Rig(caps=Rates(ops_per_s=100)))
    pair.say(read(1, 4), read(1, 4))
    ready_ns = pair.rig.rates.ready_ns()
    pair.answer(p.simple_reply(1) + b"aaaa")
    assert bytes(pair.far.sent) == read(1, 4) * 2
    assert pair.rig.rates.ready_ns() - ready_ns == 10**7


def test_capped_requests_are_held_and_their_delay_is_measured():
    pair = Pair(Rig(caps=Rates(ops_per_s=100)))
    pair.say(*(read(n) for n in range(13)))
    inflight, held = pair.session.gauges()
    assert inflight + held == 13
    assert inflight == 3  # depth of 20 ms and the one at its edge
    pair.rig.loop.fire(1.0)
    assert bytes(pair.far.sent) == b"".join(read(n) for n in range(13))
    pair.answer(*(p.simple_reply(n) + bytes(512) for n in range(13)))
    row = pair.row()
    assert row["arrived"] == row["reads"] == 13
    assert row["delay_sum_us"] == pytest.approx(sum(10_000 * n for n in range(1, 11)), abs=20)
    assert row["lat_sum_us"] == 13 * 1_000_000


def test_caps_taken_away_release_what_is_held():
    pair = Pair(Rig(caps=Rates(cost_per_s=1)))
    pair.say(*(read(n) for n in range(5)))
    pair.rig.volume.set_caps(Rates(), pair.rig.clock.monotonic_ns())
    assert pair.session.gauges() == (5, 0)
    assert pair.rig.loop.timers == {}


def test_a_refusal_is_free_but_does_not_overtake_its_own_connection():
    pair, other = Pair(rig := Rig(caps=Rates(ops_per_s=1))), Pair(rig, "host-b")
    unknown = p.request(p.Cmd.BLOCK_STATUS, 77, 0, 512)
    pair.say(read(1), read(2), unknown)
    other.say(unknown)
    assert replies(pair.near.sent) == []
    assert replies(other.near.sent) == [(77, p.EINVAL, b"")]


@pytest.mark.parametrize(
    ("request_bytes", "charged_bytes"),
    [
        (read(1, 65_536), 65_536),
        (write(1, b"x" * 65_536), 65_536),
        (p.request(p.Cmd.WRITE_ZEROES, 1, 0, MIB), MIB),
        (p.request(p.Cmd.WRITE_ZEROES, 1, 0, MIB, p.CMD_FLAG_NO_HOLE), MIB),
        (p.request(p.Cmd.TRIM, 1, 0, MIB), MIB // 16),
        (p.request(p.Cmd.FLUSH, 1, 0, 0), 0),
        (p.request(p.Cmd.CACHE, 1, 0, MIB), MIB),
    ],
)
def test_what_each_command_is_charged_under_each_rate_and_counted_as(request_bytes, charged_bytes):
    for caps, seconds in (
        (Rates(ops_per_s=0.1), 10),
        (Rates(bytes_per_s=MIB / 16), charged_bytes / MIB * 16),
        (Rates(cost_per_s=1), 1 + charged_bytes / 65_536),
    ):
        pair = Pair(Rig(flags=ALL_FLAGS | p.TX_SEND_CACHE, caps=caps))
        pair.say(request_bytes)
        pair.rig.loop.fire(seconds - 0.02)
        owed_ns = pair.rig.rates.ready_ns() + 20_000_000 - pair.rig.clock.monotonic_ns()
        assert owed_ns == pytest.approx(20e6 if seconds else 0, abs=1000), "the rest of it"
        pair.answer(p.simple_reply(1), bytes(65_536) if request_bytes == read(1, 65_536) else b"")
        assert pair.row()["cost_milli"] == 1000 + charged_bytes * 1000 // 65_536


def test_of_requests_that_came_with_what_is_none_no_column_has_more_than_another():
    pair = Pair(Rig())
    with pytest.raises(NbdProtocolError) as raised:
        pair.say(read(1) + write(2, b"x") + bytes(p.REQUEST.size))
    pair.session.failed(raised.value)
    assert pair.taken() is None, "they were not counted as arrived, so they have not failed"


def test_a_hint_of_the_whole_volume_is_charged_as_the_largest_read():
    pair = Pair(Rig(size_bytes=1 << 44, flags=ALL_FLAGS | p.TX_SEND_CACHE))
    pair.say(p.request(p.Cmd.CACHE, 1, 0, 0xFFFF_FFFF))
    pair.answer(p.simple_reply(1))
    assert pair.row()["cost_milli"] == 1000 + (32 * MIB) * 1000 // 65_536


def test_an_export_says_what_trims_and_zeroes_cost_its_storage():
    pair = Pair(Rig())
    pair.rig.volume.export = pair.rig.export.model_copy(update={"cost_trim": 0.0, "cost_zeroes": 0.25})
    pair.say(p.request(p.Cmd.TRIM, 1, 0, MIB), p.request(p.Cmd.WRITE_ZEROES, 2, 0, MIB))
    pair.answer(p.simple_reply(1), p.simple_reply(2))
    assert pair.row()["cost_milli"] == 2000 + MIB * 1000 // 65_536 // 4


def test_an_io_is_held_as_long_as_the_rate_asks():
    pair = Pair(Rig(caps=Rates(ops_per_s=0.05)))
    pair.say(*(read(n) for n in range(3)))
    pair.rig.loop.fire(19.97)
    assert pair.session.gauges() == (1, 2)
    pair.rig.loop.fire(0.02)
    assert pair.session.gauges() == (2, 1)
    pair.rig.loop.fire(20)
    assert pair.session.gauges() == (3, 0)


def test_connections_of_a_volume_take_turns_whatever_their_depth():
    rig = Rig(caps=Rates(ops_per_s=100))
    deep, shallow = Pair(rig, "deep"), Pair(rig, "shallow")
    deep.say(*(read(n) for n in range(400)))
    shallow.say(*(read(n) for n in range(400)))
    rig.loop.fire(1.0)
    assert abs(len(deep.far.sent) - len(shallow.far.sent)) <= 4 * 28
    assert (len(deep.far.sent) + len(shallow.far.sent)) / 28 == pytest.approx(102, abs=2)


def test_a_session_that_closes_leaves_no_timer_and_no_turn():
    pair = Pair(Rig(caps=Rates(ops_per_s=1)))
    pair.say(read(1), read(2))
    pair.end(pair.near)
    pair.rig.loop.fire(10)
    assert pair.rig.loop.timers == {}
    assert pair.stream.sessions == []


def test_a_client_that_never_reads_refusals_is_read_no_further():
    pair = Pair(Rig(flags=READ_ONLY))
    pair.near.window = 0
    bad = p.request(p.Cmd.TRIM, 0, 0, 1)
    for _ in range(20):
        pair.rig.deliver(pair.near, bad * 20_000)
    assert pair.near.incoming, "it must stop reading"
    assert pair.session._out.unsent_bytes < 5 << 20


def kinds_outstanding(pair):
    now_ns = pair.rig.clock.monotonic_ns()
    return sorted(kind for _, kind, _ in pair.session.outstanding(now_ns))


def test_a_request_is_outstanding_until_its_answer_is_here_whole(pair):
    pair.say(read(1, 64), write(2, b"w" * 16), p.request(p.Cmd.FLUSH, 3, 0, 0))
    assert kinds_outstanding(pair) == [KIND_READ, KIND_WRITE, KIND_FLUSH]
    pair.answer(p.simple_reply(2), p.simple_reply(1), b"a" * 10)
    assert kinds_outstanding(pair) == [KIND_READ, KIND_FLUSH], "a part of its reply is on its way"
    pair.say(read(4, 512, MIB))
    assert kinds_outstanding(pair) == [KIND_READ, KIND_FLUSH], "refused; its answer waits behind that reply"
    pair.near.window = 0
    pair.answer(b"a" * 54)
    assert kinds_outstanding(pair) == [KIND_FLUSH], "answered; when its client takes it is its own affair"
    pair.rig.open_window(pair.near)
    assert kinds_outstanding(pair) == [KIND_FLUSH]
    assert [item[0] for item in replies(pair.near.sent, {1: 64})] == [2, 1, 4]


def test_a_reply_in_parts_ages_no_more_while_the_client_takes_none_of_it(pair):
    pair.say(read(1, 4000))
    pair.rig.clock.advance(1)
    pair.near.window = 100
    pair.answer(p.simple_reply(1), b"a" * 1000)
    for _ in range(2):
        pair.rig.clock.advance(60)
        assert (OUTSTANDING + IO_READ, 0, 1000, 1000) in pair.taken().missed
    pair.rig.open_window(pair.near)
    pair.rig.clock.advance(1)
    pair.answer(b"a" * 3000)
    row = pair.row()
    assert (row["reads"], row["lat_sum_us"], row["svc_sum_us"]) == (1, 2_000_000, 2_000_000)


@pytest.mark.parametrize("caps", [Rates(), Rates(ops_per_s=0.1)])
def test_a_write_arrives_with_its_payload_however_slow_its_sender_is(caps):
    pair = Pair(Rig(caps=caps))
    pair.stream.set_limits([(IO_ANY, 5000)], 0)
    pair.say(write(1, b"a" * 10))
    pair.answer(p.simple_reply(1))
    said = write(2, b"x" * 70_000)
    pair.say(said[:10_000])
    for _ in range(2):
        pair.rig.clock.advance(60)
        taken = pair.taken()
        more = [entry for entry in taken.missed if entry[0] > IO_ANY]
        assert more == [(OUTSTANDING + IO_READ, 0, 0, 0)], "its sender takes its time"
        assert (taken.row[COL["inflight"]], taken.row[COL["held"]]) == (0, 0)
    pair.say(said[10_000:])
    pair.rig.clock.advance(2)
    assert (OUTSTANDING, 0, 2000, 2000) in pair.taken().missed
    pair.rig.loop.fire(10)
    pair.answer(p.simple_reply(2))
    assert pair.row()["lat_sum_us"] == 12_000_000


def test_a_write_that_fills_the_buffer_waits_for_its_upstream_and_ages():
    pair = Pair(Rig(16 * MIB))
    pair.far.window = 0
    said = write(1, b"x" * 3 * MIB)
    for start in range(0, len(said), 300_000):
        pair.say(said[start : start + 300_000])
    assert pair.near.incoming, "the buffer is full"
    pair.rig.clock.advance(8)
    assert (OUTSTANDING, 0, 8000, 8000) in pair.taken().missed
    assert pair.session.gauges() == (1, 0)


def test_a_client_that_leaves_within_a_write_abandons_no_io(pair):
    pair.say(write(1, b"x" * 100)[:110])
    pair.rig.clock.advance(8)
    pair.end(pair.near)
    assert pair.taken().missed == []


def test_what_caps_hold_ages_though_the_client_takes_no_answers():
    pair = Pair(Rig(caps=Rates(ops_per_s=0.1)))
    pair.say(read(1, 64), read(2, 64))
    pair.near.window = 0
    pair.answer(p.simple_reply(1), b"a" * 64)
    pair.rig.clock.advance(4)
    assert (OUTSTANDING, 0, 4000, 4000) in pair.taken().missed
    assert pair.session.gauges() == (0, 1)


def test_held_requests_are_outstanding_since_they_came():
    pair = Pair(Rig(caps=Rates(ops_per_s=1.0)))
    arrived_ns = pair.rig.clock.monotonic_ns()
    pair.say(*(read(cookie) for cookie in range(4)))
    pair.rig.clock.advance(0.5)
    now_ns = pair.rig.clock.monotonic_ns()
    assert pair.session.outstanding(now_ns) == [(arrived_ns, KIND_READ, 0)] * 4


@pytest.mark.parametrize("who", ["client", "upstream", "plane"])
def test_what_is_under_way_when_a_session_ends_is_counted_once(pair, who):
    pair.stream.set_limits([(IO_ANY, 5000)], 0)
    pair.say(read(1, 64), read(2))
    pair.answer(p.simple_reply(1), b"a" * 10)
    pair.rig.clock.advance(1)
    if who == "plane":
        pair.session.close("the plane stops")
    else:
        pair.end(pair.near if who == "client" else pair.far)
    pair.rig.clock.advance(1)
    pair.rig.loop.fire(session.LINGER_NS / 1e9)
    found = {(io, limit): figures for io, limit, *figures in pair.taken().missed}
    assert pair.session.is_closed
    stalled = {(OUTSTANDING, 0): [0, 1000], (OUTSTANDING + IO_READ, 0): [0, 1000]}
    if who == "upstream":
        assert found == {
            (IO_ANY, 5000): [2, 2],
            (FAILED, 5000): [2, 2],
            (FAILED, 0): [2, 0],
            (FAILED + IO_READ, 0): [2, 0],
            **stalled,
        }
    else:
        abandoned = {(OVERDUE, 0): [2, 2000], (OVERDUE + IO_READ, 0): [2, 2000]}
        assert found == {(OVERDUE, 5000): [2, 0], **abandoned, **stalled}
    assert pair.taken() is None


def test_a_client_whose_socket_breaks_under_its_replies_had_been_answered(pair):
    pair.stream.set_limits([(IO_ANY, 5000)], 0)
    pair.say(read(1, 64), read(2, 64))
    pair.rig.clock.advance(1)
    pair.near.is_closed = True
    pair.far.incoming.append(p.simple_reply(1) + b"a" * 64)
    pair.rig.loop.handlers[pair.far.fileno()](IN)
    assert pair.session.is_closed
    found = pair.taken().missed
    assert found[:2] == [(IO_ANY, 5000, 1, 1), (OVERDUE, 5000, 1, 0)], "one complete, one abandoned"
