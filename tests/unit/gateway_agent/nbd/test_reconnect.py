"""Upstream mode with ``reconnect_s``: an upstream that goes away and comes back."""

from dataclasses import replace

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.errors import UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd import upstream_return
from gateway_agent.nbd.upstream_handshake import Agreed
from gateway_agent.nbd.volume import Volume
from pmdaemon.wire.rates import Rates, RateSet
from tests.support.nbd import ALL_FLAGS, HOLD_NS, FakeSocket, Rig, chunks, replies
from tests.support.nbd_proxy import IN_CHUNKS, Pair, read, upstream_of, write

FLUSH = p.request(p.Cmd.FLUSH, 77, 0, 0)
READ_ONLY = p.TX_HAS_FLAGS | p.TX_READ_ONLY
WITHIN_S = 5.0


class Openings:
    """Attempts to connect; each is answered by the test."""

    def __init__(self):
        self.tries = []

    def __call__(self, loop, uri, on_ready, on_failed, **how):
        self.on_ready, self.on_failed, self.how = on_ready, on_failed, how
        self.tries.append((uri, how))
        return self

    def cancel(self):
        self.on_ready = self.on_failed = None


@pytest.fixture
def openings(monkeypatch):
    made = Openings()
    monkeypatch.setattr(upstream_return, "UpstreamOpening", made)
    return made


def rig_of(flags=ALL_FLAGS, reconnect_s=WITHIN_S, **more):
    rig = Rig(flags=flags, **more)
    settings = {"volume": "vol-1", "backend": "disk", "upstream": rig.export.upstream}
    rig.volume.export = ExportConfig.model_validate(settings | {"reconnect_s": reconnect_s})
    return rig


def pair_of(rig=None, agreed=None, mode=p.SIMPLE_REPLIES, is_flushed=True):
    pair = Pair(rig or rig_of(), mode=mode, agreed=agreed)
    if is_flushed:
        flush(pair)
    return pair


def flush(pair):
    """What was acknowledged is stable."""
    if not pair.rig.facts.flags & p.TX_READ_ONLY:
        pair.say(FLUSH)
        pair.answer(p.simple_reply(77))
        pair.near.sent.clear()
        pair.far.sent.clear()


def lose(pair, seconds=0.0):
    pair.far.is_ended = True
    pair.rig.loop.handlers[pair.far.fileno()](1)
    pair.rig.loop.fire(seconds)


def come_back(pair, openings, agreed=None, facts=None):
    """On another connection."""
    pair.far = FakeSocket()
    upstream = upstream_of(pair.rig, pair.far, agreed)
    upstream = replace(upstream, facts=facts or pair.rig.facts)
    openings.on_ready(upstream, upstream.facts)


def is_kept(pair):
    return not (pair.near.is_shut or pair.session.is_closed)


def test_what_was_not_answered_is_asked_again_in_its_order_and_then_the_rest(openings):
    pair = pair_of()
    pair.say(read(1), read(2, 64, 4096), p.request(p.Cmd.FLUSH, 3, 0, 0))
    pair.answer(p.simple_reply(1) + b"r" * 512)
    lose(pair, 0.1)
    said = read(4) + write(5, b"w" * 100)
    pair.say(said)
    assert pair.far.is_closed
    come_back(pair, openings)
    assert bytes(pair.far.sent) == read(2, 64, 4096) + p.request(p.Cmd.FLUSH, 3, 0, 0) + said
    pair.rig.clock.advance(1)
    pair.answer(*(p.simple_reply(n) + b"r" * size for n, size in ((3, 0), (4, 512), (2, 64), (5, 0))))
    found = replies(pair.near.sent, {1: 512, 2: 64, 4: 512})
    assert [item[:2] for item in found] == [(1, 0), (3, 0), (4, 0), (2, 0), (5, 0)]
    row = pair.row()
    assert (row["arrived"], row["reads"], row["writes"], row["errors"]) == (4, 3, 1, 0)
    assert (row["inflight"], row["held"]) == (0, 0)
    assert is_kept(pair)
    assert pair.rig.loop.timers == {}


@pytest.mark.parametrize("window", [0, 10, 28, 40, 10_000])
def test_requests_that_went_in_part_or_not_at_all_are_sent_once(openings, window):
    pair = pair_of()
    pair.far.window = window
    pair.say(read(1), read(2), read(3))
    lose(pair)
    come_back(pair, openings)
    assert bytes(pair.far.sent) == read(1) + read(2) + read(3)


def test_an_upstream_that_takes_little_gets_all_that_is_asked_again(openings):
    pair = pair_of()
    pair.say(read(1), read(2))
    lose(pair)
    pair.say(read(3))
    pair.far = FakeSocket(window=30)
    upstream = upstream_of(pair.rig, pair.far)
    openings.on_ready(upstream, upstream.facts)
    assert len(pair.far.sent) == 30
    pair.rig.open_window(pair.far)
    pair.rig.open_window(pair.far)
    assert bytes(pair.far.sent) == read(1) + read(2) + read(3)


def test_without_the_setting_a_loss_is_the_end_as_ever(openings):
    pair = pair_of(rig_of(reconnect_s=0))
    pair.say(read(1))
    lose(pair)
    assert replies(pair.near.sent) == [(1, p.EIO, b"")]
    assert not is_kept(pair)
    assert openings.tries == []


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (write(1, b"w" * 100), b""),
        (write(1, b"w" * 100)[:50], b""),
        (p.request(p.Cmd.TRIM, 1, 0, 512), b""),
        (p.request(p.Cmd.WRITE_ZEROES, 1, 0, 512), b""),
        (write(1, b"w", p.CMD_FLAG_FUA), b""),
        (write(1, b"w"), p.simple_reply(1)),
        (p.request(p.Cmd.TRIM, 1, 0, 512), p.simple_reply(1)),
    ],
    ids=["sent", "sent in part", "trim", "zeroes", "with FUA", "acknowledged", "trim acknowledged"],
)
def test_a_change_that_may_be_lost_or_done_late_makes_it_the_end(openings, change, answer):
    pair = pair_of()
    pair.say(change)
    pair.answer(answer)
    lose(pair)
    assert not is_kept(pair)
    assert openings.tries == []


def test_behind_an_upgrade_a_loss_is_the_end_for_the_other_process_may_have_changed_the_volume(openings):
    pair = pair_of()
    pair.rig.context.other.is_former = True
    lose(pair)
    assert not is_kept(pair)
    assert openings.tries == []


def test_an_upgrade_while_the_upstream_is_away_is_the_end_when_it_returns(openings):
    pair = pair_of()
    lose(pair)
    pair.rig.context.other.is_former = True
    come_back(pair, openings)
    assert not is_kept(pair)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (write(1, b"w", p.CMD_FLAG_FUA), p.simple_reply(1)),
        (write(1, b"w"), p.simple_reply(1, p.EIO)),
        (read(1), p.simple_reply(1) + bytes(512)),
    ],
)
def test_what_cannot_be_lost_keeps_the_client(openings, said, answer):
    pair = pair_of()
    pair.say(said)
    pair.answer(answer)
    lose(pair)
    come_back(pair, openings)
    assert is_kept(pair)


def test_a_write_and_then_a_flush_keep_the_client_and_a_flush_that_was_sent_before_does_not(openings):
    pair = pair_of()
    pair.say(write(1, b"w"), p.request(p.Cmd.FLUSH, 2, 0, 0))
    pair.answer(p.simple_reply(1), p.simple_reply(2))
    lose(pair)
    assert not is_kept(pair)
    pair = pair_of()
    pair.say(write(1, b"w"))
    pair.answer(p.simple_reply(1))
    flush(pair)
    lose(pair)
    come_back(pair, openings)
    assert is_kept(pair)


def test_before_the_first_flush_nothing_is_known_of_a_former_life_of_the_plane(openings):
    pair = pair_of(is_flushed=False)
    lose(pair)
    assert not is_kept(pair)


@pytest.mark.parametrize("flags", [READ_ONLY, ALL_FLAGS & ~p.TX_CAN_MULTI_CONN])
def test_a_client_that_changes_nothing_needs_no_flush_and_no_multi_conn(openings, flags):
    pair = pair_of(rig_of(flags))
    pair.say(read(1))
    lose(pair)
    assert is_kept(pair) == bool(flags & p.TX_READ_ONLY)


def test_what_another_connection_wrote_counts_too(openings):
    rig = rig_of()
    pair, other = pair_of(rig), pair_of(rig)
    other.say(write(1, b"w"))
    other.answer(p.simple_reply(1))
    lose(pair)
    assert not is_kept(pair)
    flush(other)
    third = pair_of(rig)
    lose(third)
    other.say(write(2, b"w"))
    come_back(third, openings)
    assert not is_kept(third), "a change of another connection is under way: it may be acknowledged, and lost"
    third.end(third.far)
    assert third.far.is_closed


@pytest.mark.parametrize(
    "failing", [FLUSH, write(77, b"w", p.CMD_FLAG_FUA)], ids=["flush", "change with FUA"]
)
def test_behind_a_flush_that_failed_a_loss_is_the_end_for_who_was_there(openings, failing):
    rig = rig_of()
    pair, other = pair_of(rig), pair_of(rig)
    pair.say(write(1, b"w"))
    pair.answer(p.simple_reply(1))
    other.say(failing)
    other.answer(p.simple_reply(77, p.EIO))  # what pair wrote is lost, and its connection would say so
    flush(other)
    later = pair_of(rig)
    for each in (pair, later):
        lose(each)
    assert not is_kept(pair), "on a connection made now its flush would succeed"
    assert is_kept(later)
    other.say(failing)
    other.answer(p.simple_reply(77, p.EIO))
    flush(other)
    come_back(later, openings)
    assert not is_kept(later), "nor is it, when that happens while the upstream is away"


def test_a_flush_on_a_connection_made_later_is_no_proof_of_what_was_written_before(openings):
    """Its host may have gone down and come back, which the earlier connection does not know yet."""
    rig = rig_of()
    pair = pair_of(rig)
    pair.say(write(1, b"w"))
    pair.answer(p.simple_reply(1))
    later = pair_of(rig)
    lose(pair)
    assert not is_kept(pair), "its flush would succeed, too, and what it wrote is gone"
    lose(later)
    assert is_kept(later)


def test_a_flush_that_was_lost_with_its_answer_is_made_good_by_none_of_a_later_connection(openings):
    """It may have failed, and its storage have said so on that one only."""
    rig = rig_of()
    pair, other = pair_of(rig), pair_of(rig)
    pair.say(write(1, b"w"))
    pair.answer(p.simple_reply(1))
    other.say(FLUSH)
    lose(other)
    assert not is_kept(other)
    later = pair_of(rig)
    lose(pair)
    assert not is_kept(pair)
    assert is_kept(later)


def test_a_connection_that_was_made_again_speaks_for_what_came_since(openings):
    rig = rig_of()
    pair, other = pair_of(rig), pair_of(rig)
    lose(pair)
    come_back(pair, openings)
    other.say(write(1, b"w"))
    other.answer(p.simple_reply(1))
    flush(pair)
    lose(other)
    assert is_kept(other), "all was stable when it was made again"


def test_a_flush_that_has_no_answer_is_none_that_failed(openings):
    rig = rig_of()
    pair, other = pair_of(rig), pair_of(rig)
    other.say(FLUSH)
    other.end(other.near)
    lose(other)
    lose(pair)
    assert is_kept(pair)


def test_the_rest_of_a_write_that_has_its_answer_is_no_request_to_another_connection(openings):
    pair = pair_of()
    whole = write(1, b"w" * 1000)
    pair.say(whole[:500])
    pair.answer(p.simple_reply(1, p.EIO))
    lose(pair)
    assert not is_kept(pair)
    assert openings.tries == []
    pair = pair_of()
    pair.say(whole[:500])
    pair.answer(p.simple_reply(1, p.EIO))
    pair.say(whole[500:])
    lose(pair)
    come_back(pair, openings)
    pair.say(read(2))
    assert bytes(pair.far.sent) == read(2)


def test_a_client_that_is_gone_when_its_begun_reads_fail_waits_for_no_upstream(openings):
    pair = pair_of(rig_of(), Agreed(True, 5), IN_CHUNKS)
    pair.say(read(1, 8192), read(2, 8192))
    pair.answer(*(p.data_chunk_head(each, 0, 512, False) + bytes(512) for each in (1, 2)))
    pair.near.is_shut = True
    lose(pair, 0.1)
    assert pair.session.is_closed
    assert openings.tries == []
    assert pair.rig.loop.timers == {}


def test_a_connection_from_before_the_setting_makes_it_uncertain(openings):
    rig = rig_of(reconnect_s=0)
    before = pair_of(rig)
    rig.volume.export = rig.volume.export.model_copy(update={"reconnect_s": WITHIN_S})
    pair = pair_of(rig)
    lose(pair)
    assert not is_kept(pair)
    before.end(before.near)
    pair = pair_of(rig)
    lose(pair)
    assert is_kept(pair)


def test_it_is_tried_again_until_the_time_has_passed_and_then_all_are_answered_with_errors(openings):
    pair = pair_of()
    pair.say(read(1))
    lose(pair)
    pair.rig.loop.fire(0.01)
    while is_kept(pair):
        assert len(openings.tries) < 100
        if openings.on_failed is not None:
            failed, openings.on_failed = openings.on_failed, None
            failed(UpstreamError("x", "not there"))
        pair.rig.loop.fire(0.1)
    assert 10 < len(openings.tries) < 30
    assert replies(pair.near.sent) == [(1, p.EIO, b"")]
    row = pair.row()
    assert (row["reads"], row["errors"]) == (1, 1)
    assert row["lat_sum_us"] == pytest.approx(WITHIN_S * 1e6, rel=0.03), "the outage is in the latency"


@pytest.mark.parametrize(
    "change",
    [{"size_bytes": 4096}, {"flags": ALL_FLAGS & ~p.TX_SEND_TRIM}, {"blocks": p.BlockSizes(512)}],
)
def test_an_upstream_that_is_another_one_is_not_used(openings, change):
    pair = pair_of()
    pair.say(read(1))
    lose(pair, 0.1)
    come_back(pair, openings, facts=replace(pair.rig.facts, **change))
    assert bytes(pair.far.sent) == p.request(p.Cmd.DISC, 0, 0, 0)
    pair.end(pair.far)
    assert pair.far.is_closed
    assert replies(pair.near.sent) == [(1, p.EIO, b"")]


def test_a_loss_within_a_reply_is_the_end(openings):
    pair = pair_of()
    pair.say(read(1))
    pair.answer(p.simple_reply(1) + b"r" * 100)
    lose(pair)
    assert not is_kept(pair)


def test_half_a_header_is_dropped(openings):
    pair = pair_of()
    pair.say(read(1))
    pair.answer(p.simple_reply(1)[:9])
    lose(pair)
    come_back(pair, openings)
    pair.answer(p.simple_reply(1) + b"r" * 512)
    assert replies(pair.near.sent, {1: 512}) == [(1, 0, b"r" * 512)]


def test_of_a_reply_in_chunks_that_has_begun_the_rest_is_an_error_and_the_others_are_asked_again(openings):
    agreed = Agreed(True, 5)
    pair = pair_of(rig_of(), agreed, IN_CHUNKS)
    pair.say(read(1, 8192), read(2, 512))
    begun = p.data_chunk_head(1, 0, 4096, False) + bytes(4096)
    pair.answer(begun)
    lose(pair, 0.1)
    assert chunks(pair.near.sent)[1][:3] == (1, p.Chunk.ERROR, 1)
    come_back(pair, openings, Agreed(True, 6))
    assert bytes(pair.far.sent) == read(2, 512)
    pair.answer(p.hole_chunk(2, 0, 512, True))
    assert chunks(pair.near.sent)[2][:2] == (2, p.Chunk.OFFSET_HOLE)
    pair.say(p.request(p.Cmd.BLOCK_STATUS, 3, 0, 512))
    pair.answer(p.status_chunk(3, 6, [(512, 0)], True))
    assert chunks(pair.near.sent)[3][3][:4] == p.ALLOCATION_ID.to_bytes(4, "big")
    assert is_kept(pair)


def test_what_goes_wrong_as_the_upstream_returns_ends_the_client_which_would_wait_for_ever(openings):
    pair = pair_of()
    pair.say(read(1))
    lose(pair, 0.1)
    openings.how["on_failure"](OSError(12, "Cannot allocate memory"))
    assert pair.session.is_closed
    assert pair.near.is_closed
    assert pair.rig.loop.timers == {}


def test_an_upstream_that_lost_its_chunks_is_not_used(openings):
    pair = pair_of(rig_of(), Agreed(True, 5), IN_CHUNKS)
    lose(pair, 0.1)
    come_back(pair, openings, Agreed())
    assert not is_kept(pair)


def test_held_requests_stay_held_and_refused_ones_wait_for_their_place(openings):
    pair = pair_of(rig_of(caps=Rates(ops_per_s=10)))
    pair.rig.loop.fire(10)
    pair.say(read(1), read(2), read(3), read(4, 512, 1 << 40))
    lose(pair)
    inflight, held = pair.session.gauges()
    pair.rig.loop.fire(0.05)
    assert pair.session.gauges() == (inflight, held)
    pair.rig.loop.fire(1)
    assert replies(pair.near.sent) == [], "nothing overtakes what could not go"
    come_back(pair, openings)
    assert bytes(pair.far.sent) == read(1) + read(2) + read(3)
    assert replies(pair.near.sent) == [(4, p.EINVAL, b"")]


@pytest.mark.parametrize("who", ["client", "plane", "drain"])
def test_an_end_while_it_is_away_leaves_nothing_behind(openings, who):
    pair = pair_of()
    pair.say(read(1))
    lose(pair, 0.1)
    if who == "client":
        pair.end(pair.near)
    elif who == "plane":
        pair.session.close("the plane stops")
    else:
        pair.session.drain()
        come_back(pair, openings)
        pair.end(pair.far)
        assert pair.far.is_closed
        pair.end(pair.near)
    assert pair.session.is_closed
    assert openings.on_ready is None or who == "drain"
    assert pair.rig.loop.timers == {}


def test_a_client_that_says_disc_while_it_is_away_is_answered_first(openings):
    pair = pair_of()
    pair.say(read(1), p.request(p.Cmd.DISC, 0, 0, 0))
    lose(pair, 0.1)
    assert not pair.session.is_closed
    come_back(pair, openings)
    pair.answer(p.simple_reply(1) + b"r" * 512)
    assert pair.session.is_closed
    assert bytes(pair.far.sent) == read(1) + p.request(p.Cmd.DISC, 0, 0, 0)


def test_it_may_go_and_come_back_again(openings):
    pair = pair_of()
    pair.say(read(1))
    for _ in range(3):
        lose(pair, 0.1)
        come_back(pair, openings)
        assert bytes(pair.far.sent) == read(1)
    assert len(openings.tries) == 3
    assert openings.tries[0][1]["will_transmit"]


@pytest.mark.parametrize("is_stable", [False, True])
def test_what_another_export_of_the_same_upstream_wrote_counts_too(openings, is_stable):
    rig = rig_of()
    pair = pair_of(rig)
    export = rig.volume.export.model_copy(update={"volume": "vol-2"})
    rig.volume = Volume(export, RateSet(20_000_000), rig.context, HOLD_NS)
    other = Pair(rig, "host-b")
    other.say(write(1, b"w" * 512))
    other.answer(p.simple_reply(1))
    if is_stable:
        flush(other)
    pair.say(read(1))
    lose(pair)
    assert is_kept(pair) == is_stable
