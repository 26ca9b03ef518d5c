import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.mailbox.ring import CRC_BYTES, PayloadRing, checksum


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


@given(
    length=st.one_of(st.integers(1, 64), st.integers(CRC_BYTES - 9, CRC_BYTES + 40)),
    at=st.integers(0, 1 << 20),
    bit=st.integers(0, 7),
)
def test_the_checksum_notices_any_changed_bit_and_does_not_depend_on_the_kind_of_buffer(
    length: int, at: int, bit: int
) -> None:
    data = bytearray(bytes(range(251)) * 20)[:length]
    before = checksum(bytes(data))
    assert before == checksum(memoryview(data)) == checksum(memoryview(b"x" + data)[1:])
    assert 0 <= before < 1 << 32
    data[at % length] ^= 1 << bit
    assert checksum(bytes(data)) != before
