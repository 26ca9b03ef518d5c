"""A bit flipped at every byte, a cut at every length: others survive, damage is named, nothing invented."""

from __future__ import annotations

from functools import cache

import pytest

from pmdaemon.diskqueue.errors import DiskQueueError, QueueUnreadable, RecordDamaged
from pmdaemon.diskqueue.format import DATA_START, HEADER_BYTES
from tests.support.diskqueue import RING_BYTES, contents, open_queue
from tests.support.faulty_disk import FaultDisk

PAYLOADS = [b"a" * 40, b"b" * 300, b"c" * 200, b"d" * 100]
PLACES = {1: (0, 96), 2: (256, 356), 3: (768, 256), 4: (1024, 156)}  # seq -> (offset, bytes without padding)


@cache
def files(indexed: bool) -> dict[str, bytes]:
    disk = FaultDisk()
    queue = open_queue(disk)
    for number, data in enumerate(PAYLOADS):
        queue.put(data)
        if indexed and number == 2:
            queue.sync_index()
    if indexed:
        queue.close()
    return {name: bytes(file.cached) for name, file in disk.files.items()}


EXPECTED = dict(enumerate(PAYLOADS, 1))


def hit(position: int) -> int | None:
    """Whose header, destination or data that byte of the data file is."""
    for seq, (offset, size) in PLACES.items():
        if offset <= position - DATA_START < offset + size:
            return seq
    return None


@pytest.mark.parametrize("indexed", [True, False])
def test_every_bit_flip_of_the_data_file(indexed: bool) -> None:
    whole = files(indexed)
    for position in [*range(0, 80), *range(4096, 4176), *range(DATA_START, DATA_START + 5 * 256 + 512)]:
        data = bytearray(whole["data"])
        data[position] ^= 1 << (position % 8)
        queue = open_queue(FaultDisk({**whole, "data": bytes(data)}))
        victim = hit(position)
        assert contents(queue) == {seq: body for seq, body in EXPECTED.items() if seq != victim}, position
        covered = [
            extent
            for extent in queue.report.extents
            if extent.offset <= position < extent.offset + extent.size_bytes
        ]
        # The newest record's signature, if no index knows the record, is a tail like any torn one.
        hidden = not indexed and victim == 4 and position - DATA_START < 1024 + 4
        assert bool(covered) == (victim is not None and not hidden), position
        assert queue.put(b"new") > 4


def test_every_bit_flip_of_the_index() -> None:
    whole = files(True)
    for position in [*range(0, 512), *range(4096, 4608), *range(8192, 8192 + 6 * 128)]:
        index = bytearray(whole["index"])
        index[position] ^= 1 << (position % 8)
        queue = open_queue(FaultDisk({**whole, "index": bytes(index)}))
        assert contents(queue) == EXPECTED, position
        assert not queue.report.extents


@pytest.mark.parametrize("indexed", [True, False])
def test_every_truncation_of_the_data_file(indexed: bool) -> None:
    whole = files(indexed)
    for length in [*range(DATA_START, DATA_START + 1300), 9999, DATA_START + RING_BYTES - 1]:
        disk = FaultDisk({**whole, "data": whole["data"][:length]})
        queue = open_queue(disk)
        kept = {s: d for s, d in EXPECTED.items() if sum(PLACES[s]) <= length - DATA_START}
        assert contents(queue) == kept, length
        assert queue.report.extents[-1].offset == length
        assert queue.report.extents[-1].size_bytes == DATA_START + RING_BYTES - length
        assert len(disk.open("data").cached) == DATA_START + RING_BYTES


def test_truncation_of_the_index_loses_nothing() -> None:
    whole = files(True)
    for length in [0, 1, 100, 511, 4096, 4200, 8191, *range(8192, 8192 + 700, 9)]:
        queue = open_queue(FaultDisk({**whole, "index": whole["index"][:length]}))
        assert contents(queue) == EXPECTED, length


def test_header_gone_in_both_copies_comes_from_the_index() -> None:
    whole = files(True)
    queue = open_queue(FaultDisk({**whole, "data": bytes(DATA_START) + whole["data"][DATA_START:]}))
    assert contents(queue) == EXPECTED


@pytest.mark.parametrize("front", [bytes(DATA_START), b"\x7fELF".ljust(DATA_START, b"\1")])
def test_without_any_header_records_are_not_overwritten(front: bytes) -> None:
    whole = files(True)
    data = front + whole["data"][DATA_START:]
    disk = FaultDisk({"data": data})
    with pytest.raises(QueueUnreadable, match="backup"):
        open_queue(disk)
    assert bytes(disk.open("data").cached) == data


def test_index_of_another_queue_is_not_believed() -> None:
    queue = open_queue(FaultDisk({"data": files(True)["data"], "index": _other_index()}))
    assert contents(queue) == EXPECTED
    assert "another" in queue.report.index_problem


def _other_index() -> bytes:
    disk = FaultDisk()
    open_queue(disk).close()
    return bytes(disk.open("index").cached)


def test_a_queued_copy_of_the_file_is_not_taken_for_records() -> None:
    """The search steps through a damaged record, which holds intact records of this very file."""
    disk = FaultDisk()
    queue = open_queue(disk)
    queue.put(b"inner" * 20)
    image = bytes(disk.open("data").cached[DATA_START : DATA_START + 256])
    queue.put(bytes(256 - HEADER_BYTES) + image * 2)
    data = bytearray(disk.open("data").cached)
    data[DATA_START + 256 + 30] ^= 1
    again = open_queue(FaultDisk({"data": bytes(data)}))
    assert contents(again) == {1: b"inner" * 20}
    assert again.report.extents


def test_damage_while_running_is_named() -> None:
    disk = FaultDisk()
    queue = open_queue(disk)
    seq = queue.put(b"rots")
    disk.open("data").cached[DATA_START + 58] ^= 1
    with pytest.raises(RecordDamaged, match=f"byte {DATA_START}") as caught:
        queue.read(seq)
    assert isinstance(caught.value, DiskQueueError)
    assert caught.value.size_bytes == 256
