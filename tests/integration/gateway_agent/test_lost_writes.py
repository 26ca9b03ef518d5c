"""File mode on a disk that could not write what it had taken, and could later: as a full thin volume."""

import os

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.storage import VolumeStorage
from tests.support.nbd import MIB
from tests.support.thin_disk import ThinDisk

SIZE_BYTES = 8 * MIB


@pytest.fixture(params=[False, True], ids=["ext4", "overlayfs"])
def disk(request):
    with ThinDisk(is_overlaid=request.param) as made:
        yield made


@pytest.mark.parametrize("fua", [False, True], ids=["flush", "FUA"])
def test_what_is_written_again_after_it_failed_is_there_after_a_power_cut(disk, fua):
    path = disk.path / "volume.img"
    path.write_bytes(b"")
    os.truncate(path, SIZE_BYTES)
    former = VolumeStorage("vol-1", str(path), read_only=False)
    assert former.write(b"1" * 4096, 0, fua=False) == former.flush() == 0
    disk.fill()
    if fua:
        assert former.write(b"2" * MIB, MIB, fua=True) in (p.ENOSPC, p.EIO)
        again = former
        again.hold()
    else:
        assert former.write(b"2" * MIB, MIB, fua=False) == 0, "the kernel has taken it"
        assert former.flush() in (p.ENOSPC, p.EIO)
        again = VolumeStorage("vol-1", str(path), read_only=False)
    disk.free()
    seen = bytearray(MIB)
    assert again.read(memoryview(seen), MIB) == 0
    assert not any(seen), "what is on the disk, and not what was to be there"
    assert again.write(b"2" * MIB, MIB, fua=fua) == 0
    assert fua or again.flush() == 0
    found = (disk.after_power_cut() / "volume.img").read_bytes()
    assert found[:4096] == b"1" * 4096
    assert found[MIB : 2 * MIB] == b"2" * MIB
    former.release()
    again.release()


def test_fua_takes_no_error_from_a_flush(disk):
    """The kernel says it once: to the change with FUA, which is not what was lost."""
    path = disk.path / "volume.img"
    path.write_bytes(b"")
    os.truncate(path, SIZE_BYTES)
    volume = VolumeStorage("vol-1", str(path), read_only=False)
    assert volume.flush() == 0
    disk.fill()
    assert volume.write(b"1" * MIB, 0, fua=False) == 0, "the kernel has taken it"
    assert volume.write(b"2" * MIB, 2 * MIB, fua=True) in (p.ENOSPC, p.EIO)
    assert volume.flush() in (p.ENOSPC, p.EIO)
    volume.release()
