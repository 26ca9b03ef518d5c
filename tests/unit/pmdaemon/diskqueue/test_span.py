"""A queue over several files: records across the borders, parts that are missing, exchanged or half made.

Some tests read private state: how far a round is, and how much memory is held, is no part of the interface.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueueBusy, QueueFull, QueueNoSpace, QueuePoisoned, QueueUnreadable
from pmdaemon.diskqueue.format import DATA_START
from pmdaemon.diskqueue.storage import PART_START, FileStorage, SpannedStorage
from tests.support.diskqueue import contents, drain

PART_BYTES = 16 << 10  # of 48 KiB in all, header included


def paths(folder: Path, count: int = 3) -> list[Path]:
    return [folder / f"part-{number}" for number in range(count)]


def opened(files: list[Path], **changes: Any) -> DiskQueue:
    values: dict[str, Any] = {
        "data_path": files[0], "more_paths": tuple(files[1:]), "data_bytes": 3 * PART_BYTES - DATA_START,
        "entries": 300, "reserve_bytes": 0, "reserve_entries": 0,
    }  # fmt: skip
    return DiskQueue(QueueSettings(**{**values, **changes}), helper=False)


def killed(queue: DiskQueue) -> None:
    queue._close_files()


def test_files_share_the_ring_evenly(tmp_path: Path) -> None:
    files = paths(tmp_path)
    opened(files).close()
    assert [path.stat().st_size for path in files] == [PART_START + PART_BYTES] * 3
    assert (tmp_path / "part-0.index").exists()


@pytest.mark.parametrize("ending", [DiskQueue.close, killed])
def test_records_across_borders_and_round_the_ring_come_back(tmp_path: Path, ending: Any) -> None:
    files, rng, model = paths(tmp_path), random.Random(5), {}
    queue = opened(files)
    for number in range(200):
        data = bytes([number]) * rng.randrange(2000, 9000)
        while True:
            try:
                model[queue.put(data)] = data
                break
            except QueueFull:
                oldest = min(model)
                queue.delete_through(oldest)
                del model[oldest]
        if number % 40 == 39:
            ending(queue)
            queue = opened(files)
            assert {seq: data for seq, data in contents(queue).items() if seq in model} == model
    assert queue._state.ring.lap > 5
    queue.close()


def test_a_batch_larger_than_a_part_is_one_write_over_three_files(tmp_path: Path) -> None:
    queue = opened(paths(tmp_path))
    batch = [bytes([n]) * 900 for n in range(36)]
    queue.put_many(batch)
    killed(queue)
    again = opened(paths(tmp_path))
    assert drain(again) == batch
    again.close()


def test_every_file_written_to_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, synced = SpannedStorage(paths(tmp_path)), []
    storage.allocate(3 * PART_BYTES)
    real = os.fdatasync

    def note(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", note)
    storage.write(PART_BYTES - 4, [b"12345678"])
    storage.sync()
    assert synced == ["part-0", "part-1"]
    storage.write(2 * PART_BYTES, [b"x"])
    storage.sync()
    assert synced == ["part-0", "part-1", "part-2"]
    assert bytes(storage.view()[PART_BYTES - 4 : PART_BYTES + 4]) == b"12345678"
    storage.close()


def test_a_failed_sync_of_one_file_poisons_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = opened(paths(tmp_path))
    queue.put(b"kept")
    real = FileStorage.sync

    def fail(self: FileStorage) -> None:
        if self._path.name == "part-1":
            raise OSError(errno.EIO, "Input/output error")
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(FileStorage, "sync", fail)
        with pytest.raises(QueuePoisoned, match="Input/output"):
            queue.put(bytes(PART_BYTES))
    queue.close()
    again = opened(paths(tmp_path))
    assert next(iter(contents(again).values())) == b"kept"
    again.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: files[1].unlink(),
        lambda files: files[1].rename(files[1].with_name("x")) and files[2].rename(files[1]),
        lambda files: shutil.copy(files[0], files[2]),
        lambda files: files[2].write_bytes(b""),
    ],
    ids=["missing", "moved up", "copied", "emptied"],
)
def test_a_part_that_is_not_there_is_refused_and_nothing_is_changed(tmp_path: Path, spoil: Any) -> None:
    files = paths(tmp_path)
    queue = opened(files)
    queue.put(b"precious")
    queue.close()
    safe = files[0].read_bytes()
    spoil(files)
    with pytest.raises(QueueUnreadable, match="same order"):
        opened(files)
    assert files[0].read_bytes() == safe


def test_another_order_or_number_of_files_is_refused(tmp_path: Path) -> None:
    files = paths(tmp_path)
    opened(files).close()
    for wrong in ([files[0], files[2], files[1]], files[:2]):
        with pytest.raises(QueueUnreadable):
            opened(wrong)
    with pytest.raises(QueueUnreadable):
        DiskQueue(QueueSettings(data_path=files[0]), helper=False)
    opened(files).close()


def test_each_file_is_owned(tmp_path: Path) -> None:
    queue = opened(paths(tmp_path))
    with pytest.raises(QueueBusy):
        opened([tmp_path / "other", tmp_path / "part-1"])
    queue.close()


@pytest.mark.parametrize("at", range(1, 10))
def test_dying_while_it_is_made_leaves_nothing_that_hinders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At each write and allocation of the parts; the second try finds what the first left."""
    calls = [0]

    def dies(name: str) -> Any:
        real = getattr(FileStorage, name)

        def call(self: FileStorage, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return real(self, *arguments)

        return call

    with monkeypatch.context() as patched:
        for name in ("allocate", "write"):
            patched.setattr(FileStorage, name, dies(name))
        with contextlib.suppress(KeyboardInterrupt):
            killed(opened(paths(tmp_path)))
    queue = opened(paths(tmp_path))
    queue.put(b"works")
    queue.close()
    again = opened(paths(tmp_path))
    assert drain(again) == [b"works"]
    again.close()


def test_headers_of_two_tries_are_made_again(tmp_path: Path) -> None:
    files = paths(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for tried in (files, paths(other)):
        storage = SpannedStorage(tried)
        storage.allocate(3 * PART_BYTES)
        storage.close()
    shutil.copy(paths(other)[0], files[0])
    queue = opened(files)
    queue.put(b"works")
    assert drain(queue) == [b"works"]
    queue.close()


def test_no_room_for_a_part_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("part-2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(QueueNoSpace, match="part-2"):
            opened(paths(tmp_path))
    opened(paths(tmp_path)).close()


def test_a_part_cut_off_is_filled_up_and_its_records_are_reported(tmp_path: Path) -> None:
    files = paths(tmp_path)
    queue = opened(files)
    first = queue.put(bytes(7000))
    queue.put(b"x" * 9000)  # reaches into part 1
    queue.close()
    os.truncate(files[1], PART_START + 100)
    again = opened(files)
    assert list(contents(again)) == [first]
    assert again.report.extents
    again.close()
