"""What a header may nest and announce, before it is decoded."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.errors import MalformedFrame
from pmdaemon.wire import frame
from pmdaemon.wire.frame import MAX_DEPTH, PREFIX
from tests.unit.pmdaemon.wire.test_frame import VALUES

PLENTY = 1 << 20


def raw(header: bytes, kind: int = 1) -> bytes:
    """A frame with this header, whatever it is."""
    total = PREFIX.size + len(header) + -len(header) % 8
    return PREFIX.pack(total - 4, len(header), kind, 0) + header.ljust(total - PREFIX.size, b"\0")


def nest(depth: int) -> Any:
    """So many lists and maps in one another."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@given(value=VALUES)
def test_what_msgpack_writes_passes(value: Any) -> None:
    frame.check_nesting(msgpack.packb(value, use_bin_type=True), 10)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 255, 256, 65_535, 65_536])
def test_every_form_of_length(size: int) -> None:
    for value in (b"x" * size, "x" * size, [1] * size, msgpack.ExtType(5, b"x" * size)):
        frame.check_nesting(msgpack.packb(value, use_bin_type=True), 1)
    frame.check_nesting(msgpack.packb({str(number): -1.5 for number in range(min(size, 70_000))}), 1)


@given(packed=st.binary(max_size=300))
def test_any_bytes_are_refused_or_pass(packed: bytes) -> None:
    try:
        frame.check_nesting(packed, MAX_DEPTH)
    except MalformedFrame:
        return
    assert len(packed) > 0


def test_depth_is_limited_whatever_the_size() -> None:
    assert frame.decode(raw(msgpack.packb({"k": nest(MAX_DEPTH - 1)}))).header
    for depth in (MAX_DEPTH, 1000):
        with pytest.raises(MalformedFrame, match=f"nests more than {MAX_DEPTH}"):
            frame.decode(raw(msgpack.packb({"k": nest(depth)})))


@pytest.mark.parametrize(
    "opening", [b"\xdc\x20\x00", b"\xdd\0\0\x20\0", b"\xde\x20\0\xa1k", b"\x91\xdc\x0f\xff"]
)
def test_a_small_frame_allocates_little(opening: bytes) -> None:
    """1,000 lists of 8,192 announced items in 3 KB took 64 MB."""
    hostile = raw(b"\x81\xa1k" + opening * 1000)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            frame.decode(hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(hostile) + 16_384


@pytest.mark.parametrize("lists", [1, 2, 3, 30])
def test_the_largest_header_allocates_in_proportion(lists: int) -> None:
    hostile = raw((b"\x81\xa1k" + b"\xdc\x1f\xff" * lists).ljust(60_000, b"\x01"))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            frame.decode(hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PLENTY


def test_keys_are_text() -> None:
    with pytest.raises(MalformedFrame, match="not msgpack"):
        frame.decode(raw(msgpack.packb({"k": {1: 2}})))
    with pytest.raises(MalformedFrame, match="string keys"):
        frame.decode(raw(msgpack.packb({b"k": 2})))
