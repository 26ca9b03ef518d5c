import mmap
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from pmdaemon.mailbox.ring import PayloadRing


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


@given(position=st.integers(0, 1 << 62), payload=st.binary(min_size=1, max_size=128))
def test_what_is_written_at_a_position_is_read_there(position: int, payload: bytes) -> None:
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"\xee" * 4096
    ring = PayloadRing(memory, memoryview(memory), 256, 128)
    ring.write(position, payload, len(payload))
    assert ring.read(position, len(payload)) == payload
    view = ring.view(position, len(payload))
    assert view == payload
    assert view.readonly
    assert memory[:256] == b"\xee" * 256
    assert memory[384:] == b"\xee" * (4096 - 384)
    assert memory[256:384].count(b"\xee") >= 128 - len(payload)


def test_a_payload_goes_on_at_the_beginning(memory: mmap.mmap) -> None:
    ring = PayloadRing(memory, memoryview(memory), 64, 64)
    ring.write(56, b"abcdefghijkl", 12)
    assert memory[120:128] == b"abcdefgh"
    assert memory[64:68] == b"ijkl"


def test_views_are_accepted(memory: mmap.mmap) -> None:
    ring = PayloadRing(memory, memoryview(memory), 64, 64)
    ring.write(60, memoryview(b"abcdefgh"), 8)
    assert ring.read(60, 8) == b"abcdefgh"


def test_a_view_is_the_ring_itself_unless_the_payload_meets_its_end(memory: mmap.mmap) -> None:
    ring = PayloadRing(memory, memoryview(memory), 64, 64)
    ring.write(0, b"abcd", 4)
    view = ring.view(0, 4)
    memory[64:68] = b"ABCD"
    assert view == b"ABCD"
    ring.write(60, b"abcdefgh", 8)
    copied = ring.view(60, 8)
    memory[64:68] = b"EFGH"
    assert copied == b"abcdefgh"


@given(data=st.binary(max_size=5000), start=st.integers(0, (1 << 32) - 1))
def test_the_checksum_is_crc32_whatever_the_kind_of_buffer(data: bytes, start: int) -> None:
    assert crc32(data, start) == zlib.crc32(data, start)
    assert crc32(memoryview(b"x" + data)[1:]) == crc32(bytearray(data)) == zlib.crc32(data)
