"""Block devices as people name them, found in /dev and /sys.

    sda, nvme0n1, dm-3          the kernel's own names           8:0             its number
    /dev/mapper/vg0-data        device-mapper, also vg0-data     vg0/data        LVM, also /dev/vg0/data
    /dev/disk/by-id/..., by-uuid, by-path, by-label, by-partuuid: links that udev makes

    sda1, /dev/disk/by-uuid/... of a file system, as a rule: partitions; ``whole_disk`` says what they are on

Kernel names of ``dm`` and ``md`` devices, and of disks in general, may be others after the next boot; what is
to be promised of a device should have one of the other names. In containers and on hosts without udev the
links are missing; names of device-mapper are found in /sys there.

Nothing here has state. Thread: any; each call looks at some small files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway_agent.errors import DeviceNotFound

DEV: Final = Path("/dev")
SYS: Final = Path("/sys")
SECTOR_BYTES: Final = 512  # the unit of the kernel's sizes, whatever the device's own sector size
_NUMBER: Final = re.compile(r"\d+:\d+")
_FOLDERS: Final = ("disk", "mapper", "block", "char", "loop")
"""Folders of /dev that are no volume group."""


def device_number(device: str) -> str:
    """MAJOR:MINOR of a block device.

    Raises:
        DeviceNotFound: no block device has this name now.
    """
    if _NUMBER.fullmatch(device):
        return device
    for place in _places(device):
        try:
            found = place.stat()
        except (OSError, ValueError):
            continue
        if stat.S_ISBLK(found.st_mode):
            return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    name = name_of(device)
    for folder in (SYS / "class/block" / name, *(SYS / "class/block").glob("dm-*")):
        if folder.name == name or _text(folder / "dm/name") == name:
            number = _text(folder / "dev")
            if number:
                return number
    raise DeviceNotFound(device)


def whole_disk(number: str) -> str:
    """MAJOR:MINOR of the disk that a partition is on; that of any other device is its own."""
    folder = SYS / "dev/block" / number
    if not (folder / "partition").exists():
        return number
    return _text(folder.resolve().parent / "dev") or number


def kernel_name(device: str) -> str:
    """What the kernel calls a device in /proc/diskstats; "" while there is no such device."""
    try:
        return (SYS / "dev/block" / device_number(device)).resolve(strict=True).name
    except (DeviceNotFound, OSError):
        return ""


def size_bytes(device: str) -> int:
    """Size of a block device as the kernel knows it, 0 when it does not say."""
    try:
        sectors = _text(SYS / "dev/block" / device_number(device) / "size")
    except DeviceNotFound:
        return 0
    return int(sectors) * SECTOR_BYTES if sectors.isdigit() else 0


def name_of(device: str) -> str:
    """The short name of a device, which is part of its volume's: ``vg0-data`` of /dev/mapper/vg0-data.

    Both names of a logical volume have the same: ``vg0/data`` is vg0-data. Of a link below /dev/disk it is
    the last part.
    """
    group, name = _logical_volume(device)
    return mapper_name(group, name) if group else device.rpartition("/")[2]


def mapper_name(group: str, name: str) -> str:
    """Name that LVM gives a logical volume in device-mapper: hyphens of its parts are doubled."""
    return "-".join(part.replace("-", "--") for part in (group, name))


def _logical_volume(device: str) -> tuple[str, str]:
    """Volume group and name of ``vg/lv`` and ``/dev/vg/lv``; empty for others."""
    parts = device.removeprefix("/dev/").split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in _FOLDERS:
        return "", ""
    return parts[0], parts[1]


def _places(device: str) -> Iterator[Path]:
    if device.startswith("/dev/"):
        yield DEV / device.removeprefix("/dev/")
    elif device.startswith("/"):
        yield Path(device)
    else:
        yield DEV / device
    yield DEV / "mapper" / name_of(device)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
