"""The patterned POLL is the POLL of the general encoder."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.wire import frame
from pmdaemon.wire.frame_template import encode_poll, encode_single_epoch_poll
from pmdaemon.wire.kinds import Kind

U64 = st.integers(0, (1 << 64) - 1)
PAIR = st.tuples(U64, U64).map(list)


@settings(deadline=None)
@given(U64, U64, st.lists(PAIR, max_size=3), st.one_of(PAIR, st.just([])), st.booleans())
def test_header_is_what_was_given(
    number: int, sent_ns: int, ack: list[list[int]], start: list[int], lease: bool
) -> None:
    encoded = encode_poll(number, sent_ns, ack, start, lease)
    decoded = frame.decode(encoded)
    assert decoded.kind == Kind.POLL
    assert decoded.header == {"poll": number, "sent_ns": sent_ns, "ack": ack, "from": start, "lease": lease}
    assert list(decoded.header) == ["poll", "sent_ns", "ack", "from", "lease"]
    assert not decoded.blob


def test_patterns_do_not_share_their_holes() -> None:
    assert len(encode_poll(1, 2, [[3, 4]], [5, 6], True)) > len(encode_poll(1, 2, [], [5, 6], True))
    assert encode_poll(1, 2, [], [5, 6], True) != encode_poll(1, 2, [], [5, 6], False)


@settings(deadline=None)
@given(U64, U64, U64, U64, U64, st.booleans())
def test_for_one_epoch_it_is_the_same_poll(
    number: int, sent_ns: int, epoch: int, acked: int, start: int, lease: bool
) -> None:
    ack = [[epoch, acked]] if acked else []
    sole = encode_single_epoch_poll(number, sent_ns, epoch, acked, start, lease)
    assert sole == encode_poll(number, sent_ns, ack, [epoch, start], lease)


def test_nothing_is_acknowledged_at_first() -> None:
    assert frame.decode(encode_single_epoch_poll(1, 2, 3, 0, 1, True)).header["ack"] == []
