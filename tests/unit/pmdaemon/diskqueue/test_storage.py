"""The real file: zero-filled, locked by its owner, mapped for readers; and FaultStorage's faults."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueueBusy, QueueNoSpace, QueueUnreadable
from pmdaemon.diskqueue.storage import CHECK_BYTES, IOV_MAX, FileStorage, SpannedStorage
from tests.support.faulty_disk import Crashed, FaultDisk


def test_allocated_file_is_whole_and_private(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "f")
    storage.allocate(3 << 20)
    status = os.stat(tmp_path / "f")
    assert status.st_size == 3 << 20
    assert status.st_blocks * 512 >= 3 << 20
    assert status.st_mode & 0o777 == 0o600
    assert not any(bytes(storage.view()))
    storage.close()


def test_growing_keeps_what_was_there(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "f")
    storage.allocate(4096)
    storage.write(100, [b"kept"])
    storage.allocate(8192)
    assert bytes(storage.view()[100:104]) == b"kept"
    assert len(storage.view()) == 8192
    storage.close()


def test_writes_of_any_number_of_buffers_are_seen_at_once(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "f")
    storage.allocate(4 << 20)
    few, many = [b"ab", b"", b"c"], [bytes([n % 251]) * 300 for n in range(IOV_MAX * 2 + 7)]
    storage.write(0, few)
    storage.write(4096, many)
    storage.sync()
    whole = b"".join(many)
    assert bytes(storage.view()[:3]) == b"abc"
    assert bytes(storage.view()[4096 : 4096 + len(whole)]) == whole
    storage.close()


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real = FileStorage(tmp_path / "f"), os.pwrite
    storage.allocate(4096)
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, b"".join(parts)[:3], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:2], at))
    storage.write(10, [b"abcdef", b"ghi"])
    assert bytes(storage.view()[10:19]) == b"abcdefghi"
    storage.close()


def test_one_owner_and_readers_beside_it(tmp_path: Path) -> None:
    settings = QueueSettings(data_path=tmp_path / "q", data_bytes=1 << 16, entries=64)
    queue = DiskQueue(settings, helper=False)
    with pytest.raises(QueueBusy, match="Stop that process"):
        DiskQueue(settings, helper=False)
    reader = FileStorage(tmp_path / "q", read_only=True)
    queue.put(b"seen by the reader")
    assert b"seen by the reader" in bytes(reader.view())
    with pytest.raises(OSError):
        reader.write(0, [b"x"])
    reader.close()
    queue.close()
    again = DiskQueue(settings, helper=False)
    assert again.report.clean
    assert [message.data for message in again.lock(1)] == [b"seen by the reader"]
    again.close()


def test_what_cannot_be_opened_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(QueueUnreadable, match="Check the path"):
        FileStorage(tmp_path / "missing", read_only=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(QueueUnreadable):
        FileStorage(tmp_path / "link")
    with pytest.raises(QueueUnreadable):
        FileStorage(tmp_path / "no" / "directory")


def test_no_room_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    storage = FileStorage(tmp_path / "f")
    with pytest.raises(QueueNoSpace, match="Free space"):
        storage.allocate(1 << 20)
    assert os.stat(tmp_path / "f").st_size == 0
    storage.close()


def test_queues_on_several_paths_and_an_index_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    queues = [
        DiskQueue(
            QueueSettings(
                data_path=tmp_path / name, index_path=tmp_path / "fast" / name, data_bytes=1 << 16, entries=64
            ),
            helper=False,
        )
        for name in ("a", "b")
    ]
    for queue in queues:
        queue.put(queue.name.encode())
        queue.close()
    assert sorted(path.name for path in (tmp_path / "fast").iterdir()) == ["a", "b"]
    assert not (tmp_path / "a.index").exists()


def test_reserves_larger_than_the_queue_are_refused() -> None:
    with pytest.raises(ValidationError, match="reserve_entries"):
        QueueSettings(data_path=Path("q"), entries=16, reserve_entries=16)
    with pytest.raises(ValidationError, match="reserve_bytes"):
        QueueSettings(data_path=Path("q"), data_bytes=4096, reserve_bytes=4096)


def test_fault_storage_forgets_tears_and_fails() -> None:
    disk = FaultDisk(crash_at=6)
    file = disk.open("f")
    file.allocate(4096)
    file.write(0, [b"s" * 512])
    file.sync()
    file.write(512, [b"u" * 2048])
    found = {bytes(file.found_later(random.Random(seed))) for seed in range(20)}
    assert len(found) > 5
    assert all(image.startswith(b"s" * 512) for image in found)
    disk.fail_next(errno.EIO)
    with pytest.raises(OSError):
        file.sync()
    assert not any(bytes(file.durable[512:])), "what a failed sync drops stays lost"
    with pytest.raises(Crashed):
        file.sync()


def test_fault_storage_fills_up() -> None:
    with pytest.raises(QueueNoSpace):
        DiskQueue(
            QueueSettings(data_path=Path("q"), data_bytes=1 << 20),
            data=FaultDisk(limit_bytes=1 << 16).open("d"),
            index=FaultDisk().open("i"),
            helper=False,
        )


@pytest.mark.parametrize("count", [1, 2])
def test_a_mapping_that_outlives_its_owner_does_not_hold_the_lock(tmp_path: Path, count: int) -> None:
    """As that of a killed process does while somebody reads its /proc/PID/smaps."""
    paths = [tmp_path / name for name in ("a", "b")[:count]]
    opened = lambda: SpannedStorage(paths) if count > 1 else FileStorage(paths[0])  # noqa: E731
    owner = opened()
    owner.allocate(8192)
    held = owner.view()[:1]
    with pytest.raises(QueueBusy):
        opened()
    owner.close()
    assert bytes(held) == b"\0", "the mapping is there"
    opened().close()


def test_a_file_that_cannot_be_mapped_is_let_go_of_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FileStorage(tmp_path / "q")
    first.allocate(4096)
    first.close()

    def no_memory(*_args: object, **_how: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_memory)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            FileStorage(tmp_path / "q")
    again = FileStorage(tmp_path / "q")
    assert len(again.view()) == 4096
    again.close()


def test_what_the_disk_cannot_read_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the end of a file that was cut the kernel answers as where a disk cannot read: with SIGBUS."""
    path = tmp_path / "q"
    path.write_bytes(bytes(1 << 16))
    real = mmap.mmap

    def cut(fd: int, size_bytes: int, *, access: int) -> mmap.mmap:
        made = real(fd, size_bytes, access=access)
        os.truncate(path, 1 << 12)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", cut)
        with pytest.raises(QueueUnreadable, match="the disk cannot read a part of it") as caught:
            FileStorage(path)
    assert str(path) in str(caught.value)
    FileStorage(path).close()  # its lock was let go of


def peak_bytes() -> int:
    """Of what this process has had in memory, pages of files included."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def test_what_is_read_to_check_it_is_let_go_of_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with path.open("wb") as file:
        file.truncate(16 * CHECK_BYTES)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak_bytes()
    FileStorage(path).close()
    assert peak_bytes() - before < 4 * CHECK_BYTES
