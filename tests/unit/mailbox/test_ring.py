import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.mailbox.ring import Ring


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


@given(position=st.integers(0, 1 << 62), payload=st.binary(min_size=1, max_size=128))
def test_what_is_written_at_a_position_is_read_there(position: int, payload: bytes) -> None:
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"\xee" * 4096
    ring = Ring(memory, 256, 128)
    ring.write(position, payload, len(payload))
    assert ring.read(position, len(payload)) == payload
    assert memory[:256] == b"\xee" * 256
    assert memory[384:] == b"\xee" * (4096 - 384)
    assert memory[256:384].count(b"\xee") >= 128 - len(payload)


def test_a_payload_goes_on_at_the_beginning(memory: mmap.mmap) -> None:
    ring = Ring(memory, 64, 64)
    ring.write(56, b"abcdefghijkl", 12)
    assert memory[120:128] == b"abcdefgh"
    assert memory[64:68] == b"ijkl"


def test_views_are_accepted(memory: mmap.mmap) -> None:
    ring = Ring(memory, 64, 64)
    ring.write(60, memoryview(b"abcdefgh"), 8)
    assert ring.read(60, 8) == b"abcdefgh"
