"""A file as a volume: its holes, what it can do quickly, and what it says of itself."""

import ctypes
import errno
import os
import random
import threading

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd import storage as storage_module
from gateway_agent.nbd.storage import HOLE_BYTES, VolumeStorage
from pmdaemon.runtime import writeback
from tests.support.nbd import MIB

HOLE = p.STATE_HOLE | p.STATE_ZERO
UNIT = HOLE_BYTES  # a multiple of what any file system keeps apart


@pytest.fixture
def path(tmp_path):
    return tmp_path / "disk.img"


@pytest.fixture
def opened(path):
    made = []

    def open_it(read_only=False):
        made.append(VolumeStorage("vol-1", str(path), read_only=read_only))
        return made[-1]

    yield open_it
    for each in made:
        each.release()


def make(path, size_bytes, *data):
    """A sparse file with data in these (begin, end)."""
    with open(path, "wb") as file:
        file.truncate(size_bytes)
        for begin, end in data:
            file.seek(begin)
            file.write(b"d" * (end - begin))


class Seeks:
    """Counts os.lseek; may fail as a file system does that knows nothing of holes."""

    def __init__(self, monkeypatch, error=0):
        self.asked, self._lseek, self._error = [], os.lseek, error
        monkeypatch.setattr(os, "lseek", self)

    def __call__(self, fd, at, whence):
        if whence == os.SEEK_END:
            return self._lseek(fd, at, whence)
        self.asked.append(whence)
        if self._error:
            raise OSError(self._error, "no")
        return self._lseek(fd, at, whence)


def test_holes_of_a_read_are_found_and_small_ones_are_read(path, opened):
    make(path, 4 * MIB, (MIB, MIB + 4096), (2 * MIB + 4096, 3 * MIB))
    storage = opened()
    assert storage.holes(0, 4 * MIB) == [(0, MIB), (MIB + UNIT, 2 * MIB + 4096), (3 * MIB, 4 * MIB)]
    assert storage.holes(2 * MIB - 512 - UNIT, UNIT) == [(2 * MIB - 512 - UNIT, 2 * MIB - 512)]
    assert storage.holes(2 * MIB, UNIT) == [], "only the first 4 KiB of it are a hole"
    assert storage.holes(3 * MIB, UNIT - 1) == [], "too small to look for one"


def test_no_read_looks_more_often_than_once_a_step(path, opened, monkeypatch):
    make(path, 32 * MIB, *((at, at + 4096) for at in range(0, 32 * MIB, 2 * UNIT)))
    storage, seeks = opened(), Seeks(monkeypatch)
    assert len(storage.holes(0, 32 * MIB)) == 32 * MIB // (2 * UNIT)
    assert len(seeks.asked) <= 32 * MIB // UNIT
    assert os.SEEK_HOLE not in seeks.asked, "that could be a search to the end of the file"


def test_a_file_with_all_of_its_blocks_is_not_searched_until_it_is_punched(path, opened, monkeypatch):
    make(path, 4 * MIB, (0, 4 * MIB))
    storage, seeks = opened(), Seeks(monkeypatch)
    assert storage.holes(0, 4 * MIB) == []
    assert not seeks.asked
    assert storage.trim(MIB, MIB) == (0, MIB)
    assert storage.holes(0, 4 * MIB) == [(MIB, 2 * MIB)]


def test_what_is_written_into_a_hole_is_no_hole(path, opened):
    make(path, 4 * MIB)
    storage = opened()
    assert storage.holes(0, 4 * MIB) == [(0, 4 * MIB)]
    assert storage.write(b"x" * 512, 2 * MIB, fua=False) == 0
    (before, after) = storage.holes(0, 4 * MIB)
    assert before == (0, 2 * MIB)
    assert after[0] > 2 * MIB
    assert storage.block_status(2 * MIB, 512, 9) == [(512, 0)]


def test_a_file_that_became_shorter_has_no_hole_behind_its_end(path, opened):
    make(path, 4 * MIB)
    storage = opened()
    os.truncate(path, MIB + 512)
    assert storage.holes(0, 4 * MIB) == [(0, MIB + 512)]
    assert storage.block_status(0, 4 * MIB, 9) == [(MIB + 512, HOLE), (3 * MIB - 512, 0)]
    assert storage.read(memoryview(bytearray(512)), 2 * MIB) == p.EIO


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_that_does_not_know_its_holes_is_all_data(path, opened, monkeypatch, error):
    make(path, 4 * MIB)
    storage = opened()
    Seeks(monkeypatch, error)
    assert storage.holes(0, 4 * MIB) == []
    assert storage.block_status(MIB, 2 * MIB, 9) == [(2 * MIB, 0)]


def test_block_status_is_what_the_file_has(path, opened):
    rng = random.Random(5)
    units = [rng.random() < 0.4 for _ in range(64)]
    make(path, 64 * UNIT, *((n * UNIT, (n + 1) * UNIT) for n, has_data in enumerate(units) if has_data))
    storage = opened()
    for _ in range(200):
        begin, end = sorted(rng.sample(range(0, 64 * UNIT + 1, 512), 2))
        most = rng.choice((1, 3, 100))
        at = begin
        extents = storage.block_status(begin, end - begin, most)
        assert 1 <= len(extents) <= most
        for length, state in extents:
            assert length > 0
            expected = {HOLE if not units[n] else 0 for n in range(at // UNIT, (at + length - 1) // UNIT + 1)}
            assert expected == {state}
            at += length
        assert at == end or (at < end and len(extents) == most)


def test_a_large_stretch_of_data_is_searched_to_its_end_once(path, opened, monkeypatch):
    make(path, 64 * UNIT, (0, 63 * UNIT))
    storage, seeks = opened(), Seeks(monkeypatch)
    for n in range(63):
        assert storage.block_status(n * UNIT, UNIT, 9) == [(UNIT, 0)]
    assert seeks.asked == [os.SEEK_DATA, os.SEEK_HOLE]
    assert storage.block_status(63 * UNIT, UNIT, 9) == [(UNIT, HOLE)]
    assert storage.write_zeroes(UNIT, UNIT, may_punch=True, fast=False) == (0, UNIT)
    assert storage.block_status(0, 3 * UNIT, 9) == [(UNIT, 0), (UNIT, HOLE), (UNIT, 0)]


def test_an_extent_has_a_length_whatever_another_does_to_the_file(path, opened, monkeypatch):
    make(path, MIB, (0, MIB))
    storage = opened()
    monkeypatch.setattr(os, "lseek", lambda _fd, at, _whence: at)  # data here, and at once a hole here
    assert storage.block_status(0, 2048, 99) == [(512, 0)] * 4


@pytest.mark.parametrize("hole", [False, True])
def test_zeroes_are_fast_or_refused_and_then_nothing_is_changed(path, opened, monkeypatch, hole):
    make(path, MIB, (0, MIB))
    storage, can = opened(), []
    monkeypatch.setattr(storage_module, "_fallocate", lambda *what: can.append(what) or 95)
    assert storage.write_zeroes(0, MIB, may_punch=hole, fast=True)[0] == p.ENOTSUP
    assert path.read_bytes() == b"d" * MIB
    assert storage.write_zeroes(0, MIB, may_punch=hole, fast=False) == (0, MIB)
    assert path.read_bytes() == bytes(MIB)
    assert len(can) == 1, "what the file cannot do is asked once"


def test_a_range_that_cannot_be_punched_says_nothing_of_the_next(path, opened, monkeypatch):
    make(path, MIB, (0, MIB))
    storage, errors = opened(), [errno.EINVAL, 0]
    monkeypatch.setattr(storage_module, "_fallocate", lambda *_what: errors.pop(0))
    assert storage.trim(1, 100) == (0, 100)
    assert storage.trim(0, 4096) == (0, 4096)
    assert not errors


def test_a_device_is_fast_only_where_it_is_known_to_be(path, opened, monkeypatch):
    make(path, MIB, (0, MIB))
    storage = opened()
    storage._is_device = True  # a real one needs root; its other operations are the same calls
    monkeypatch.setattr(storage_module, "_fallocate", lambda *_what: 0)
    assert storage.write_zeroes(0, MIB, may_punch=True, fast=True) == (0, MIB)
    for offset, length, may_punch in ((0, MIB, False), (1, 512, True), (0, 513, True)):
        assert storage.write_zeroes(offset, length, may_punch=may_punch, fast=True) == (p.ENOTSUP, 0)
    assert not storage.may_have_holes


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (errno.EDQUOT, p.ENOSPC),
        (errno.EFBIG, p.ENOSPC),
        (errno.ENOSPC, p.ENOSPC),
        (errno.EPERM, p.EPERM),
        (errno.EROFS, p.EPERM),
        (errno.ENXIO, p.EIO),
    ],
)
def test_errors_travel_as_the_protocol_says(path, opened, monkeypatch, raised, told):
    def fail(*_args):
        raise OSError(raised, "no")

    make(path, MIB, (0, MIB))
    storage = opened()
    for name in ("pwritev", "posix_fadvise"):
        monkeypatch.setattr(os, name, fail)
    assert storage.write(b"x", 0, fua=False) == told
    assert storage.cache(0, 4096) == (told, 4096)


def test_what_is_offered(path, opened):
    make(path, MIB)
    both = p.TX_HAS_FLAGS | p.TX_SEND_FLUSH | p.TX_SEND_FUA | p.TX_CAN_MULTI_CONN
    both |= p.TX_SEND_DF | p.TX_SEND_CACHE
    changes = p.TX_SEND_TRIM | p.TX_SEND_WRITE_ZEROES | p.TX_SEND_FAST_ZERO
    assert opened().facts == p.ExportFacts(MIB, both | changes)
    assert opened(read_only=True).facts == p.ExportFacts(MIB, both | p.TX_READ_ONLY)
    assert not opened().facts.for_client(p.SIMPLE_REPLIES).flags & p.TX_SEND_DF
    assert opened().facts.for_client(p.ReplyMode(structured=True)).flags & p.TX_SEND_DF


def test_the_largest_files_are_volumes(path, opened, monkeypatch):
    with open(path, "wb") as file:
        for size_bytes in (16 << 40, (16 << 40) - 4096, 8 << 40, 1 << 40):
            try:
                file.truncate(size_bytes)
                break
            except OSError:
                continue
        else:
            pytest.skip("this file system has no files of 1 TiB")
    storage = opened()
    assert storage.facts.size_bytes == size_bytes
    assert storage.write(b"end", size_bytes - 3, fua=False) == 0
    found = bytearray(512)
    assert storage.read(memoryview(found), size_bytes - 512) == 0
    assert found[-3:] == b"end"
    seeks = Seeks(monkeypatch)
    last = size_bytes - (1 << 32) + 512
    assert [state for _, state in storage.block_status(last, (1 << 32) - 512, 9)] == [HOLE, 0]
    assert storage.block_status(0, (1 << 32) - 512, 9) == [((1 << 32) - 512, HOLE)]
    assert len(seeks.asked) <= 4
    assert storage.trim(0, (1 << 32) - 512)[0] == 0


class FailingDisk:
    """As the kernel is: a sync that could not write something fails once, the next one succeeds."""

    def __init__(self, monkeypatch, error=errno.EIO):
        self.fds, self._errors = [], [error] if error else []
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd):
        self.fds.append(fd)
        self.entered.set()
        self.may_go.wait(60)
        if self._errors:
            raise OSError(self._errors.pop(), "what was written is lost")


@pytest.mark.parametrize(("raised", "told"), [(errno.EIO, p.EIO), (errno.EDQUOT, p.ENOSPC)])
def test_after_a_flush_that_failed_none_succeeds_until_the_file_is_opened_again(
    path, opened, monkeypatch, raised, told
):
    make(path, MIB)
    storage, disk = opened(), FailingDisk(monkeypatch, raised)
    assert storage.is_current()
    assert [storage.flush() for _ in range(3)] == [told] * 3, "of which client the lost data are nobody knows"
    assert len(disk.fds) == 2, "and once before the pages are dropped"
    assert not storage.is_current()
    again = opened()
    assert again.flush() == 0
    assert again.is_current()


def test_a_flush_that_waits_while_another_fails_fails(path, opened, monkeypatch):
    make(path, MIB)
    storage, disk, found = opened(), FailingDisk(monkeypatch), []
    disk.may_go.clear()
    clients = [threading.Thread(target=lambda: found.append(storage.flush())) for _ in range(3)]
    clients[0].start()
    assert disk.entered.wait(60)
    for client in clients[1:]:
        client.start()
    disk.may_go.set()
    for client in clients:
        client.join(60)
    assert (found, len(disk.fds)) == ([p.EIO] * 3, 2)


def test_a_flush_is_not_answered_by_one_that_began_before_it(path, opened, monkeypatch):
    make(path, MIB)
    storage, disk, found = opened(), FailingDisk(monkeypatch, 0), []
    disk.may_go.clear()
    clients = [threading.Thread(target=lambda: found.append(storage.flush())) for _ in range(2)]
    clients[0].start()
    assert disk.entered.wait(60)
    clients[1].start()
    disk.may_go.set()
    for client in clients:
        client.join(60)
    assert (found, len(disk.fds)) == ([0, 0], 2)


def test_a_flush_is_one_of_the_descriptor_that_writes(path, opened, monkeypatch):
    """File systems of FUSE may know what came by it, and what became of that, and of no other's."""
    make(path, MIB)
    written, plain = [], os.pwritev

    def pwritev(fd, *how):
        written.append(fd)
        return plain(fd, *how)

    monkeypatch.setattr(os, "pwritev", pwritev)
    storage, disk = opened(), FailingDisk(monkeypatch, 0)
    assert storage.write(b"d" * 512, 0, fua=False) == 0
    assert storage.flush() == 0
    assert written == disk.fds


EXT4, OVERLAYFS = 0xEF53, 0x794C7630


class AskedKernel:
    """Says by a descriptor what it has not said by that one yet, as sync_file_range(2) does."""

    def __init__(self, monkeypatch, *errors, file_system=EXT4):
        self.fds, self._errors = [], list(errors)
        monkeypatch.setattr(writeback._libc, "sync_file_range", self)  # no file fails on demand
        monkeypatch.setattr(writeback, "_file_system", lambda _fd: file_system)  # tests may be in a container

    def __call__(self, fd, *_range):
        self.fds.append(fd)
        error = self._errors.pop(0) if self._errors else 0
        ctypes.set_errno(error)
        return -1 if error else 0


def test_fua_takes_no_error_from_a_flush(path, opened, monkeypatch):
    """The kernel keeps for each descriptor what it has said: one by which nothing is done is asked, too."""
    make(path, MIB)
    storage, disk = opened(), FailingDisk(monkeypatch, 0)
    kernel = AskedKernel(monkeypatch, errno.EIO)
    assert storage.write(b"d" * 512, 0, fua=True) == 0
    assert [storage.flush() for _ in range(2)] == [p.EIO] * 2
    (synced, _), (asked,) = disk.fds, kernel.fds
    assert asked != synced
    assert os.fstat(asked).st_ino == os.fstat(synced).st_ino
    assert not storage.is_current()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_the_kernel_is_not_to_be_asked_so_both_are_synced(path, opened, monkeypatch, error):
    make(path, MIB)
    storage, disk = opened(), FailingDisk(monkeypatch, 0)
    kernel = AskedKernel(monkeypatch, error)
    assert storage.flush() == 0
    assert disk.fds[1:] == kernel.fds


def test_of_a_file_system_above_another_both_are_synced(path, opened, monkeypatch):
    """There sync_file_range knows nothing of what the one below could not write."""
    make(path, MIB)
    storage, disk = opened(), FailingDisk(monkeypatch, 0)
    kernel = AskedKernel(monkeypatch, file_system=OVERLAYFS)
    assert storage.flush() == 0
    assert (len(set(disk.fds)), kernel.fds) == (2, [])
