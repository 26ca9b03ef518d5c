"""Frames: round trips, limits, and every kind of damage ends in a WireError."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.errors import FrameTooLarge, MalformedFrame, WireError
from pmdaemon.wire import frame
from pmdaemon.wire.frame import (
    MAX_FOLDED_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    FrameReader,
)

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
HEADERS = st.dictionaries(st.text(max_size=8), VALUES, max_size=5)


@given(kind=st.integers(0, 255), header=HEADERS, blob=st.binary(max_size=200), flags=st.integers(0, 255))
def test_round_trip(kind: int, header: dict[str, Any], blob: bytes, flags: int) -> None:
    encoded = frame.encode(kind, header, blob, flags)
    assert len(encoded) % 8 == 0
    decoded = frame.decode(encoded)
    assert (decoded.kind, decoded.header, decoded.flags) == (kind, header, flags)
    assert bytes(decoded.blob[: len(blob)]) == blob
    assert not any(decoded.blob[len(blob) :])
    assert bytes(decoded.raw) == encoded


@given(data=st.data(), blobs=st.lists(st.binary(max_size=300), max_size=6))
def test_reader_yields_the_same_frames_however_they_are_cut(data: st.DataObject, blobs: list[bytes]) -> None:
    stream = b"".join(frame.encode(9, {"n": index}, blob) for index, blob in enumerate(blobs))
    reader, found, rest = FrameReader(), [], stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        found += [(item.header["n"], bytes(item.blob)) for item in reader.feed(rest[:size])]
        rest = rest[size:]
    assert [index for index, _ in found] == list(range(len(blobs)))
    assert all(got[: len(sent)] == sent for (_, got), sent in zip(found, blobs, strict=True))
    assert reader.pending_bytes == 0


@given(header=HEADERS, blob=st.binary(max_size=100), at=st.integers(0), value=st.integers(0, 255))
@settings(max_examples=300)
def test_a_changed_byte_is_a_frame_or_a_wire_error(
    header: dict[str, Any], blob: bytes, at: int, value: int
) -> None:
    damaged = bytearray(frame.encode(3, header, blob))
    damaged[at % len(damaged)] = value
    for decode in (frame.decode, frame.decode_own):
        try:
            decoded = decode(bytes(damaged))
        except WireError:
            continue
        assert isinstance(decoded.header, dict)


def test_the_header_of_an_own_frame_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"recv_us": [0x0006_8080_9090_DDDD] * 40}  # numbers whose bytes look like lists
    encoded, walked = frame.encode(9, header), []
    monkeypatch.setattr(frame, "check_nesting", lambda packed, _depth: walked.append(packed))
    assert frame.decode_own(encoded).header == frame.decode(encoded).header == header
    assert len(walked) == 1  # by decode alone
    with pytest.raises(MalformedFrame):
        frame.decode_own(encoded[:-8])


@given(junk=st.binary(max_size=400))
@settings(max_examples=300)
def test_junk_is_frames_or_a_wire_error(junk: bytes) -> None:
    reader = FrameReader()
    try:
        for item in reader.feed(junk):
            assert isinstance(item.header, dict)
    except WireError:
        return
    assert reader.pending_bytes <= len(junk)


@pytest.mark.parametrize("size", range(1, 40))
def test_truncated_frame_does_not_decode(size: int) -> None:
    encoded = frame.encode(3, {"key": "value of some length"}, b"x" * 8)
    assert len(encoded) > 40
    with pytest.raises(MalformedFrame):
        frame.decode(encoded[:size])


def test_announced_size_above_the_limit_is_refused_before_the_bytes_arrive() -> None:
    with pytest.raises(FrameTooLarge) as caught:
        list(FrameReader(1024).feed(PREFIX.pack(1020 + 8, 0, 1, 0)))
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (1032, 1024)


def test_limits_of_the_encoder() -> None:
    with pytest.raises(FrameTooLarge, match="frame header"):
        frame.encode(1, {"text": "x" * (MAX_HEADER_BYTES + 1)})
    with pytest.raises(FrameTooLarge, match="frame of"):
        frame.encode(1, {}, bytes(MAX_FRAME_BYTES))
    assert len(frame.encode(1, {}, bytes(MAX_FRAME_BYTES - 16))) == MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("packed", "problem"),
    [
        (b"\x93\x01\x02\x03", "not a map"),
        (b"\x81\x01\x02", "not msgpack"),
        (b"\x81\xc4\x01k\x02", "string keys"),
        (b"\xc1", "not msgpack"),
        (b"\x82\xa1a", "not msgpack"),
        (b"\x81\xa1\xff\x01", "not msgpack"),
        (b"\xdd\x00\x00\xff\xff" * 3, "announces 65536 items in 15 bytes"),
        (b"\x91" * 3000, "nests more than 32"),
    ],
)
def test_header_that_is_no_header(packed: bytes, problem: str) -> None:
    total = PREFIX.size + len(packed) + (-len(packed) % 8)
    data = (PREFIX.pack(total - 4, len(packed), 1, 0) + packed).ljust(total, b"\0")
    with pytest.raises(MalformedFrame, match=problem):
        frame.decode(data)


@pytest.mark.parametrize("length", [0, 3, 5, 9, 11])
def test_length_word_that_cannot_be(length: int) -> None:
    with pytest.raises(MalformedFrame):
        frame.peek_size(memoryview(PREFIX.pack(length, 0, 1, 0)))


def test_split_refuses_left_over_bytes() -> None:
    one = frame.encode(1, {"a": 1})
    assert [bytes(item) for item in frame.split(one + one)] == [one, one]
    with pytest.raises(MalformedFrame, match="left over"):
        list(frame.split(one + one[:5]))


def test_reader_looks_at_a_partial_frame_only_when_it_may_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real = frame.peek_size
    monkeypatch.setattr(frame, "peek_size", lambda *args: looks.append(1) or real(*args))
    reader, encoded = FrameReader(), frame.encode(1, {"a": 1}, bytes(4000))
    found = [item for index in range(len(encoded)) for item in reader.feed(encoded[index : index + 1])]
    assert len(found) == 1
    # first byte, whole prefix, whole frame, its decoding, and the nothing that follows; not 4,000 times
    assert len(looks) <= 5


def test_limit_may_be_raised_between_frames() -> None:
    reader, large = FrameReader(64), frame.encode(2, {}, bytes(100))
    assert len(list(reader.feed(frame.encode(1, {})))) == 1
    reader.limit_bytes = 1024
    assert len(list(reader.feed(large))) == 1


def test_a_header_that_fits_is_not_folded_and_a_longer_one_is_the_blob() -> None:
    short = {"caps": [{"volume": "v"}]}
    assert frame.encode_folding(9, short) == frame.encode(9, short)
    assert frame.unfold(frame.decode(frame.encode(9, short))).header == short
    long = {"caps": [{"volume": f"v{number}" + "x" * 100} for number in range(4000)]}
    received = frame.decode(frame.encode_folding(9, long))
    assert received.header.keys() == {frame.FOLDED}
    unfolded = frame.unfold(received)
    assert (unfolded.kind, unfolded.header, len(unfolded.blob)) == (9, long, 0)


def test_a_header_that_is_too_long_to_be_folded_is_refused() -> None:
    with pytest.raises(FrameTooLarge, match="folded frame header"):
        frame.encode_folding(9, {"text": "x" * MAX_FOLDED_BYTES})


@pytest.mark.parametrize("size", [0, -1, 9, "8", None, 1 << 40])
def test_a_folded_header_that_is_none_is_refused(size: Any) -> None:
    received = frame.decode(frame.encode(9, {"folded": size}, b"12345678"))
    if size is None:
        assert frame.unfold(received) is received
        return
    with pytest.raises(MalformedFrame, match="folded header of"):
        frame.unfold(received)


def test_what_is_folded_keeps_the_limits_of_a_header() -> None:
    deep = b"\x91" * 40 + b"\xc0"
    for packed in (b"\xc0", deep, b"\x81\x01\x02"):
        with pytest.raises(MalformedFrame):
            frame.unfold(frame.decode(frame.encode(9, {"folded": len(packed)}, packed)))
