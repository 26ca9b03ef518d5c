"""Shapes: what one recognises is what decoding would have said, and nothing else."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.errors import WireError
from pmdaemon.wire import cut, frame, frame_template
from pmdaemon.wire.frame_template import SHAPES_A_SIZE, SIZES, FrameTemplates, Match
from pmdaemon.wire.kinds import Kind

GATEWAY = bytes(range(16))
CUT: dict[str, Any] = {
    "gw": GATEWAY,
    "ep": 0xFEDCBA9876543210,
    "seq": 300,
    "t": 1_800_000_000_123_456,
    "d": 1_000_321,
    "tg": -1,
    "ts": 3,
    "gap": 0,
    "n": 1,
    "h": 2,
    "m": 0,
    "sch": 1,
}
REPLY: dict[str, Any] = {
    "poll": 70_000,
    "sent_ns": 1 << 40,
    "wall_us": 1_800_000_000_000_000,
    "cuts": 1,
    "first": [7, 300],
    "last": [7, 300],
    "dropped": 0,
}
VALUES = ("gw", "ep", "seq", "n", "h", "m", "poll", "wall_us", "dropped")
WIDE = st.integers(0, (1 << 63) - 1)
COUNTS = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32])


def answer(cut_header: dict[str, Any], reply: dict[str, Any], blob_bytes: int = 160) -> memoryview:
    parts = (frame.encode(Kind.CUT, cut_header, bytes(blob_bytes)), frame.encode(Kind.REPLY, reply))
    return memoryview(b"".join(parts))


def said(data: memoryview) -> tuple[Any, ...]:
    """The values as decoding gives them."""
    first, second = (frame.decode(raw) for raw in frame.split(data))
    both = first.header | second.header
    return tuple(both[key] for key in VALUES)


def match(shapes: FrameTemplates, data: memoryview) -> Match | None:
    """As an answer that lies at the beginning of a longer buffer."""
    return shapes.match(memoryview(bytes(data) + b"\xa5" * 100), len(data))


def learned(*answers: memoryview) -> FrameTemplates:
    shapes = FrameTemplates()
    for item in answers:
        assert shapes.learn(item)
    return shapes


def test_nothing_is_known_at_first() -> None:
    assert match(FrameTemplates(), answer(CUT, REPLY)) is None
    assert match(FrameTemplates(), memoryview(b"")) is None


@settings(deadline=None)
@given(st.integers(0, (1 << 64) - 1), COUNTS, COUNTS, WIDE, COUNTS, st.integers(0, 40))
def test_a_match_says_what_decoding_says(ep: int, seq: int, h: int, t: int, poll: int, blocks: int) -> None:
    shapes = learned(answer(CUT, REPLY))
    data = answer(CUT | {"ep": ep, "seq": seq, "h": h, "t": t}, REPLY | {"poll": poll}, 8 * blocks)
    found = match(shapes, data)
    if found is None:  # a number of another width: then it can be learned as well
        assert shapes.learn(data)
        found = match(shapes, data)
    assert found is not None
    cut_bytes, blob_bytes, values = found
    assert values == said(data)
    assert (cut_bytes, blob_bytes) == (len(next(frame.split(data))), 8 * blocks)


def test_usual_changes_need_no_lesson() -> None:
    shapes = learned(answer(CUT, REPLY))
    later = answer(CUT | {"seq": 301, "t": 1_800_000_001_123_456, "h": 100}, REPLY | {"poll": 70_001})
    assert match(shapes, later) is not None


def test_a_damaged_answer_is_no_match_or_says_what_decoding_says() -> None:
    """Every bit of both heads turned: a match must be an answer that the long way takes for the same."""
    good = answer(CUT, REPLY)
    shapes = learned(good)
    usual = match(shapes, good)
    assert usual is not None
    cut_bytes, blob_bytes, _ = usual
    heads = [*range(cut_bytes - blob_bytes), *range(cut_bytes, len(good))]
    matches = 0
    for at in heads:
        for bit in range(8):
            damaged = bytearray(good)
            damaged[at] ^= 1 << bit
            view = memoryview(damaged)
            if (found := match(shapes, view)) is not None:
                matches += 1
                assert found[2] == said(view)
    assert 0 < matches < len(heads) * 8


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_keys_of_an_agent_with_planes_are_no_hindrance(rows: int) -> None:
    """Marks of planes, pressure of its host, and what is sequential: nearly all of its cuts have them."""
    more = {"dp": {"nbd-0": 1_800_000_000_000_001, "nbd-1": 1_800_000_000_000_002}, "psi": 70_000}
    one, other = (CUT | more | {"sq": bytes([fill]) * 4 * rows} for fill in (0, 255))
    shapes = learned(answer(one, REPLY))
    later = other | {"seq": 301, "psi": 71_000, "dp": {"nbd-0": 1 << 60, "nbd-1": 1 << 61}}
    data = answer(later, REPLY)
    found = match(shapes, data)
    assert found is not None
    assert found[2] == said(data)
    assert match(shapes, answer(one | {"sq": bytes(4 * rows + 4)}, REPLY)) is None
    assert match(shapes, answer(one | {"dp": {"nbd-0": 1 << 60, "nbd-2": 1 << 61}}, REPLY)) is None


@pytest.mark.parametrize("wall_us", [1 << 63, (1 << 64) - 1])
def test_what_the_long_way_refuses_is_no_match(wall_us: int) -> None:
    shapes = learned(answer(CUT, REPLY))
    assert match(shapes, answer(CUT, REPLY | {"wall_us": wall_us})) is None
    assert match(shapes, answer(CUT | {"t": wall_us}, REPLY)) is None
    broken = frame.decode(frame.encode(Kind.CUT, CUT | {"t": wall_us}, bytes(160)))
    with pytest.raises(WireError):
        cut.check(broken)


@pytest.mark.parametrize("size", [0, 7, 15, 16, 100])
def test_a_part_or_more_than_an_answer_is_no_match(size: int) -> None:
    data = answer(CUT, REPLY)
    shapes = learned(data)
    assert match(shapes, data[:size]) is None
    assert match(shapes, data[: len(data) - 8]) is None
    assert match(shapes, memoryview(bytes(data) + bytes(8))) is None


@pytest.mark.parametrize(
    ("cut_header", "reply"),
    [
        (dict(reversed(CUT.items())), REPLY),  # another order of what is asked for
        (CUT | {"note": "text"}, REPLY),
        (CUT | {"gw": b"short"}, REPLY),
        (CUT | {str(number): number for number in range(9)}, REPLY),  # 16 keys and more have another form
        ({key: value for key, value in CUT.items() if key != "seq"}, REPLY),
        (CUT, REPLY | {"dropped": None}),
        (CUT, {key: value for key, value in REPLY.items() if key != "poll"}),
    ],
)
def test_what_cannot_be_learned(cut_header: dict[str, Any], reply: dict[str, Any]) -> None:
    data = answer(cut_header, reply)
    shapes = FrameTemplates()
    assert not shapes.learn(data)
    assert match(shapes, data) is None


def test_a_key_twice_cannot_be_learned() -> None:
    data = bytearray(answer(CUT | {"zeq": 300}, REPLY))
    at = data.index(b"\xa3zeq")
    data[at : at + 4] = b"\xa3seq"
    assert not FrameTemplates().learn(memoryview(data))


def test_only_a_plain_cut_and_its_reply_are_learned() -> None:
    a_cut, a_reply = frame.encode(Kind.CUT, CUT, bytes(160)), frame.encode(Kind.REPLY, REPLY)
    flagged = frame.encode(Kind.CUT, CUT, bytes(160), flags=2)
    for frames in ((a_cut,), (a_reply, a_cut), (a_cut, a_cut), (flagged, a_reply), (a_cut, a_cut, a_reply)):
        assert not FrameTemplates().learn(memoryview(b"".join(frames)))


def test_a_live_cut_has_a_shape_of_its_own() -> None:
    plain, live = (
        memoryview(frame.encode(Kind.CUT, CUT, bytes(160), flags) + frame.encode(Kind.REPLY, REPLY))
        for flags in (0, frame.FLAG_LIVE)
    )
    for known, other in ((plain, live), (live, plain)):
        shapes = learned(known)
        assert match(shapes, known) is not None
        assert match(shapes, other) is None
        assert shapes.learn(other)
        assert match(shapes, known) == match(shapes, other) is not None


@pytest.mark.parametrize("part", [slice(0, -8), slice(8, None), slice(0, 4), slice(100, 200)])
def test_what_is_not_whole_frames_is_not_learned(part: slice) -> None:
    assert not FrameTemplates().learn(answer(CUT, REPLY)[part])


def test_of_equal_size_the_newest_few_are_kept() -> None:
    names = [f"k{number}" for number in range(SHAPES_A_SIZE + 1)]
    answers = [answer(CUT | {name: 1}, REPLY) for name in names]
    shapes = learned(*answers)
    assert [match(shapes, item) is not None for item in answers] == [False, *[True] * SHAPES_A_SIZE]


def test_two_shapes_of_equal_size_in_turn() -> None:
    """The padding hides how long the head is: size alone does not tell which shape it is."""
    long, short = answer(CUT | {"seq": 70_000}, REPLY), answer(CUT | {"seq": 300}, REPLY)
    assert len(long) == len(short)
    shapes = learned(long, short)
    for data in (long, short, long, short):
        found = match(shapes, data)
        assert found is not None
        assert found[2] == said(data)


def test_answers_of_ever_new_sizes_are_recognised_and_memory_is_bounded() -> None:
    shapes = learned(answer(CUT, REPLY))
    for blocks in range(SIZES + 2):
        assert match(shapes, answer(CUT, REPLY, 8 * blocks)) is not None
    assert match(shapes, answer(CUT, REPLY, 0)) is not None
    assert len(shapes._by_bytes) <= SIZES  # memory, which shows nowhere else


def with_streams(rows: int) -> memoryview:
    return answer(CUT | {"n": rows, "sq": bytes(4 * rows)}, REPLY)


def test_the_header_of_a_cut_of_very_many_streams_is_not_learned() -> None:
    """A gateway whose rows change from cut to cut would fill the memory with shapes of 16 KB."""
    shapes = FrameTemplates()
    tracemalloc.start()
    for rows in range(1300, 4000, 10):
        assert not shapes.learn(with_streams(rows))
    assert tracemalloc.get_traced_memory()[0] < 1 << 20
    tracemalloc.stop()
    assert match(learned(with_streams(1000)), with_streams(1000)) is not None


def test_shapes_beyond_what_they_may_take_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_template, "MOST_BYTES", 64 << 10)
    shapes = FrameTemplates()
    for rows in range(1, 1000, 10):
        assert shapes.learn(with_streams(rows))
        assert match(shapes, with_streams(rows)) is not None
    known = [rows for rows in range(1, 1000, 10) if match(shapes, with_streams(rows)) is not None]
    assert known[-1] == 991
    assert 2 <= len(known) <= 10
