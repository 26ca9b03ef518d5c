"""The batch that is posted: as it lies while all its cuts go the same way, else one message a recipient."""

from __future__ import annotations

from itertools import product

import pytest

from pmdaemon.poller.cut_batch import CutsBuilder, CutsMessage, NewestCuts
from pmdaemon.wire import frame
from tests.support.gateways import GATEWAY, make_cut

OTHER = "00000000-0000-4000-8000-0000000000ff"


def placed(batch: CutsBuilder, seq: int, live: bool, gateway_id: str = GATEWAY) -> bytes:
    """A cut read into the batch's room and added there."""
    raw = make_cut(gateway_id, seq=seq, flags=frame.FLAG_LIVE if live else 0)
    batch.room[: len(raw)] = raw
    assert batch.add_placed(len(raw), gateway_id, 7, seq, seq, 0, live, 0)
    return raw


def seqs(message: CutsMessage) -> list[int]:
    return [frame.decode(raw).header["seq"] for raw in frame.split(frame.decode(message.message).blob)]


@pytest.mark.parametrize("live", [False, True])
def test_cuts_that_go_the_same_way_are_posted_as_they_lie(live: bool) -> None:
    batch = CutsBuilder(0)
    raws = [placed(batch, 1, live)]
    raws.append(make_cut(seq=2, flags=frame.FLAG_LIVE if live else 0))
    assert batch.add(raws[1], GATEWAY, 7, 2, 2, 0, live, 0, keep=not live)
    (message,) = batch.take()
    assert (message.keep, message.judge) == (not live, True)
    assert isinstance(message.message, memoryview), "nothing is joined"
    decoded = frame.decode(message.message)
    assert [bytes(raw) for raw in frame.split(decoded.blob)] == raws
    assert decoded.header["live"] == [live, live]


WAYS = ((True, True), (True, False), (False, True))  # (keep, judge)


@pytest.mark.parametrize(("first", "second"), list(product(WAYS, WAYS)))
@pytest.mark.parametrize("is_placed", [False, True])
def test_each_recipient_gets_its_own_whatever_follows_what(
    first: tuple[bool, bool], second: tuple[bool, bool], is_placed: bool
) -> None:
    batch = CutsBuilder(0)
    for seq, (keep, judge) in ((1, first), (2, second)):
        if is_placed and seq == 2 and judge:
            placed(batch, seq, live=not keep)
        else:
            assert batch.add(make_cut(seq=seq), GATEWAY, 7, seq, seq, 0, False, 0, keep, judge)
    found: dict[str, list[int]] = {"keep": [], "judge": []}
    for message in batch.take():
        found["keep"] += seqs(message) if message.keep else []
        found["judge"] += seqs(message) if message.judge else []
    assert found == {
        "keep": [seq for seq, way in ((1, first), (2, second)) if way[0]],
        "judge": [seq for seq, way in ((1, first), (2, second)) if way[1]],
    }


def test_what_waits_is_the_last_of_each_gateway_in_the_order_they_began_to_wait() -> None:
    newest = NewestCuts(0)
    for dropped, seqs_of in ((1, ((GATEWAY, 1), (OTHER, 5), (GATEWAY, 2))), (2, ((OTHER, 6), (GATEWAY, 3)))):
        batch = CutsBuilder(0)
        for gateway_id, seq in seqs_of:
            placed(batch, seq, live=True, gateway_id=gateway_id)
        (message,) = batch.take()
        assert newest.keep(message) == dropped
    names, waiting = newest.first()
    assert list(names) == [GATEWAY, OTHER]
    decoded = frame.decode(waiting)
    assert [frame.decode(raw).header["seq"] for raw in frame.split(decoded.blob)] == [3, 6]
    assert decoded.header["recv_us"] == [3, 6]
    newest.posted(names)
    assert len(newest) == 0
