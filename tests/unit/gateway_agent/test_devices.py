"""Names of block devices; nodes of /dev cannot be made here, so devices are found in a fake /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_agent import devices
from gateway_agent.devices import device_number, kernel_name, name_of, size_bytes, whole_disk
from gateway_agent.errors import DeviceNotFound, GroupUnusable


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sda with partition sda2, and dm-3, which is the logical volume my-data of group vg0; no /dev."""
    for name, number, mapper in (("sda", "8:0", ""), ("dm-3", "253:3", "vg0-my--data")):
        folder = tmp_path / "class/block" / name
        folder.mkdir(parents=True)
        (folder / "dev").write_text(number + "\n")
        (folder / "size").write_text("2048\n")
        if mapper:
            (folder / "dm").mkdir()
            (folder / "dm/name").write_text(mapper + "\n")
        (tmp_path / "dev/block").mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev/block" / number).symlink_to(folder)
    part = tmp_path / "class/block/sda/sda2"
    part.mkdir()
    (part / "dev").write_text("8:2\n")
    (part / "size").write_text("1024\n")
    (part / "partition").write_text("2\n")
    (tmp_path / "class/block/sda2").symlink_to(part)
    (tmp_path / "dev/block/8:2").symlink_to(part)
    monkeypatch.setattr(devices, "SYS", tmp_path)  # a device node needs root and a device
    monkeypatch.setattr(devices, "DEV", tmp_path / "none")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["dm-3", "vg0-my--data", "/dev/mapper/vg0-my--data", "vg0/my-data", "/dev/vg0/my-data", "253:3"]
)
@pytest.mark.usefixtures("system")
def test_a_device_is_found_by_all_of_its_names(name: str) -> None:
    assert device_number(name) == "253:3"
    assert kernel_name(name) == "dm-3"
    assert size_bytes(name) == 2048 * 512


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("sda", "sda"),
        ("/dev/sda", "sda"),
        ("/dev/mapper/vg0-data", "vg0-data"),
        ("vg0/data", "vg0-data"),
        ("/dev/vg0/data", "vg0-data"),
        ("my-vg/lv", "my--vg-lv"),
        ("/dev/disk/by-id/wwn-0x5000", "wwn-0x5000"),
    ],
)
def test_the_short_name_is_part_of_the_volume(device: str, name: str) -> None:
    assert name_of(device) == name


@pytest.mark.parametrize("name", ["no-such-device", "/dev/null", "/no/such/path", "vg0/none", "a\0b"])
@pytest.mark.usefixtures("system")
def test_a_device_that_is_none(name: str) -> None:
    with pytest.raises(DeviceNotFound, match="no block device of this name; lsblk lists them") as raised:
        device_number(name)
    assert isinstance(raised.value, GroupUnusable)
    assert (kernel_name(name), size_bytes(name)) == ("", 0)


@pytest.mark.parametrize(
    ("number", "disk"), [("8:2", "8:0"), ("8:0", "8:0"), ("253:3", "253:3"), ("9:9", "9:9")]
)
@pytest.mark.usefixtures("system")
def test_the_disk_of_a_partition(number: str, disk: str) -> None:
    assert whole_disk(number) == disk


@pytest.mark.usefixtures("system")
def test_a_partition_is_a_device_of_its_own_elsewhere() -> None:
    assert (device_number("sda2"), kernel_name("sda2"), size_bytes("sda2")) == ("8:2", "sda2", 1024 * 512)
