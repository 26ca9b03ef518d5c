"""Control groups in fake trees of both versions; the real v1 is in integration."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from gateway_agent import cgroups, devices
from gateway_agent.cgroups import IoCounts, IoLimits, find_group
from gateway_agent.errors import GroupUnusable

DEVICE = "253:3"
LIMITS = IoLimits(100, 50, 4096, None)


def v2_tree(root: Path, *names: str) -> Path:
    (root / "cgroup.controllers").write_text("io memory\n")
    for name in names:
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "io.stat").write_text(
            "8:0 rbytes=1 wbytes=1 rios=1 wios=1 dbytes=0 dios=0\n"
            f"{DEVICE} rbytes=8192 wbytes=4096 rios=2 wios=1 dbytes=0 dios=0\n"
        )
        (folder / "io.max").write_text(f"{DEVICE} rbps=4096 wbps=max riops=100 wiops=50\n")
    return root


def v1_tree(root: Path, name: str) -> Path:
    folder = root / "blkio" / name
    folder.mkdir(parents=True)
    rows = (
        f"8:0 Read 9\n{DEVICE} Read {{}}\n{DEVICE} Write {{}}\n{DEVICE} Sync 3\n{DEVICE} Total 3\nTotal 12\n"
    )
    (folder / "blkio.throttle.io_serviced").write_text(rows.format(2, 1))
    (folder / "blkio.throttle.io_service_bytes").write_text(rows.format(8192, 4096))
    for kind, value in (("read_iops", "100"), ("write_iops", "50"), ("read_bps", "4096"), ("write_bps", "")):
        text = f"8:0 7\n{DEVICE} {value}\n" if value else ""
        (folder / f"blkio.throttle.{kind}_device").write_text(text)
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_group_did_and_its_limits(tmp_path: Path, version: int) -> None:
    root = v2_tree(tmp_path, "batch.slice") if version == 2 else v1_tree(tmp_path, "batch.slice")
    group = find_group("batch.slice", DEVICE, root)
    assert group.counts() == IoCounts(reads=2, writes=1, read_bytes=8192, write_bytes=4096)
    assert group.limits() == LIMITS


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_on_a_partition_is_counted_and_limited_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The kernel has no line of a partition: as such it would look like a group that does nothing."""
    disk = tmp_path / "sys/devices/dm"
    part = disk / "dm3p1"
    part.mkdir(parents=True)
    (disk / "dev").write_text(f"{DEVICE}\n")
    (part / "partition").write_text("1\n")
    numbers = tmp_path / "sys/dev/block"
    numbers.mkdir(parents=True)
    (numbers / "259:4").symlink_to(part)
    monkeypatch.setattr(devices, "SYS", tmp_path / "sys")  # a partition needs a disk
    root = v2_tree(tmp_path, "batch.slice") if version == 2 else v1_tree(tmp_path, "batch.slice")
    group = find_group("batch.slice", "259:4", root)
    assert group.device == DEVICE
    assert (group.counts().reads, group.limits()) == (2, LIMITS)


def test_v2_limits_are_written_in_one_line(tmp_path: Path) -> None:
    group = find_group("batch.slice", DEVICE, v2_tree(tmp_path, "batch.slice"))
    group.set_limits(LIMITS)
    assert (group.path / "io.max").read_text() == f"{DEVICE} riops=100 wiops=50 rbps=4096 wbps=max"
    assert group.limits() == LIMITS
    group.set_limits(IoLimits())
    assert group.limits() == IoLimits()


def test_v1_limits_are_a_file_each_and_zero_takes_one_away(tmp_path: Path) -> None:
    group = find_group("batch.slice", DEVICE, v1_tree(tmp_path, "batch.slice"))
    group.set_limits(LIMITS)
    found = {path.name: path.read_text() for path in group.path.glob("*_device")}
    assert found == {
        "blkio.throttle.read_iops_device": f"{DEVICE} 100",
        "blkio.throttle.write_iops_device": f"{DEVICE} 50",
        "blkio.throttle.read_bps_device": f"{DEVICE} 4096",
        "blkio.throttle.write_bps_device": f"{DEVICE} 0",
    }


def test_a_group_without_io_on_the_device_did_nothing(tmp_path: Path) -> None:
    group = find_group("batch.slice", "9:9", v2_tree(tmp_path, "batch.slice"))
    assert (group.counts(), group.limits()) == (IoCounts(), IoLimits())


@pytest.mark.parametrize(
    ("limited", "written"), [("", "9:9 0"), ("9:9 50\n", "9:9 50\n")], ids=["new device", "limited"]
)
def test_v1_is_made_to_count_a_device_that_it_does_not_know(
    tmp_path: Path, limited: str, written: str
) -> None:
    group = find_group("batch.slice", "9:9", v1_tree(tmp_path, "batch.slice"))
    file = group.path / "blkio.throttle.read_iops_device"
    file.write_text(limited)
    assert group.counts() == IoCounts()
    assert file.read_text() == written
    file.write_text("")
    assert group.counts() == IoCounts()
    assert file.read_text() == ""  # once is enough


CONTAINER = "4f1d2c3b5a69" + "0" * 52


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("mysql.service", "system.slice/mysql.service"),
        (f"container:{CONTAINER[:12]}", f"system.slice/docker-{CONTAINER}.scope"),
        (f"container:{CONTAINER}", f"machine.slice/libpod-{CONTAINER}.scope"),
        (f"container:{CONTAINER[:20]}", f"kubepods.slice/pod-1/cri-containerd-{CONTAINER}.scope"),
        (f"container:{CONTAINER[:12]}", f"docker/{CONTAINER}"),
        ("system.slice/mysql.service", "system.slice/mysql.service"),
        ("mysql*.service", "system.slice/mysql-5.7.service"),
        ("user.slice/*/app-*.scope", "user.slice/user-7.slice/app-backup.scope"),
    ],
)
def test_groups_are_found_as_people_name_them(tmp_path: Path, asked: str, name: str) -> None:
    root = v2_tree(tmp_path, name, "system.slice/other.service")
    assert find_group(asked, DEVICE, root).path == root / name
    assert find_group(str(root / name), DEVICE, root).path == root / name


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("none.service", "none.service: no group of this name below"),
        ("twice.service", "2 groups have this name"),
        ("container:4f1d", "needs 12 digits at least"),
        ("t*.service", "2 groups have this name"),
        ("a.slice/none.service", "no group of this name below"),
        ("mysql", "expected a path, a systemd unit"),
        ("/sys/fs/cgroup/none", "there is no such directory now"),
    ],
)
def test_a_group_that_is_not_found_says_what_to_do(tmp_path: Path, asked: str, problem: str) -> None:
    root = v2_tree(tmp_path, "a.slice/twice.service", "b.slice/twice.service")
    with pytest.raises(GroupUnusable, match=problem):
        find_group(asked, DEVICE, root)


def test_a_host_without_the_controller(tmp_path: Path) -> None:
    with pytest.raises(GroupUnusable, match="neither cgroup v2 nor the blkio controller"):
        find_group("a.slice", DEVICE, tmp_path)


def test_a_group_that_ended_and_one_without_the_controller(tmp_path: Path) -> None:
    group = find_group("a.slice", DEVICE, v2_tree(tmp_path, "a.slice"))
    (group.path / "io.stat").unlink()
    with pytest.raises(
        GroupUnusable, match=r"enable the controller with \+io in .* of a systemd unit with IOAccounting=yes"
    ):
        group.counts()
    (group.path / "io.max").unlink()
    group.path.rmdir()
    with pytest.raises(GroupUnusable, match="its unit or container has ended"):
        group.set_limits(LIMITS)


def test_a_container_is_found_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "docker/containers" / CONTAINER
    folder.mkdir(parents=True)
    (folder / "config.v2.json").write_text(json.dumps({"ID": CONTAINER, "Name": "/web"}))
    tree = tmp_path / "cgroup"
    tree.mkdir()
    root = v2_tree(tree, f"system.slice/docker-{CONTAINER}.scope")
    found = find_group("container:web", DEVICE, root, containers=tmp_path)
    assert found.path.name == f"docker-{CONTAINER}.scope"


def test_what_looks_after_a_container_of_podman_is_not_the_container(tmp_path: Path) -> None:
    names = [f"machine.slice/libpod-{kind}{CONTAINER}.scope" for kind in ("conmon-", "")]
    found = find_group(f"container:{CONTAINER}", DEVICE, v2_tree(tmp_path, *names))
    assert found.path.name == f"libpod-{CONTAINER}.scope"


def test_limits_under_a_name_that_several_groups_have_by_now_are_no_silent_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = v2_tree(tmp_path, "a/app-1.scope", "b/app-2.scope")
    monkeypatch.setattr(cgroups, "find_group", partial(find_group, root=root))  # not in the kernel's tree
    (problem,) = cgroups.release([("app-*.scope", DEVICE)])
    assert "2 groups have this name" in problem
    assert cgroups.release([("gone.scope", DEVICE)]) == []
