"""The kernel's own control groups: a loop device, read past the page cache."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_agent.cgroups import ROOT, IoLimits, find_group
from gateway_agent.errors import GroupUnusable
from tests.support.control_group import SIZE_BYTES, ControlGroup, control_group, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[ControlGroup]:
    with control_group(tmp_path) as made:
        yield made


def test_the_kernel_counts_and_holds_a_group(real: ControlGroup) -> None:
    group = find_group(real.path.name, real.device)
    assert group.path == real.path
    assert group.limits() == IoLimits()
    limits = IoLimits(100, 50, 1 << 30, None)
    group.set_limits(limits)
    assert group.limits() == limits
    before, began_s = group.counts(), time.monotonic()
    assert real.read(times=200).wait(120) == 0
    took_s, after = time.monotonic() - began_s, group.counts()
    assert (after.reads - before.reads, after.read_bytes - before.read_bytes) == (200, 200 * 4096)
    assert took_s > 1.0  # 2 s less what the kernel lets through at first; a busy host only takes longer
    group.set_limits(IoLimits())
    assert group.limits() == IoLimits()


def test_names_of_the_device(real: ControlGroup) -> None:
    numbers = {find_group(str(real.path), name).device for name in (real.device, Path(real.device).name)}
    assert len(numbers) == 1
    found = subprocess.run(
        ["lsblk", "-no", "MAJ:MIN", real.device], capture_output=True, text=True, check=True
    )
    assert numbers == {found.stdout.strip()}


def test_what_a_group_does_on_a_partition_is_counted_and_held(real: ControlGroup, tmp_path: Path) -> None:
    name = Path(real.device).name
    subprocess.run(["addpart", real.device, "1", "0", str(SIZE_BYTES // 512)], check=True)
    try:
        number = Path(f"/sys/class/block/{name}p1/dev").read_text().strip()
        major, minor = map(int, number.split(":"))
        node = tmp_path / "part"
        os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(major, minor))
        try:
            node.open("rb").close()
        except OSError as exc:
            pytest.skip(f"no device node can be used in {tmp_path}: {exc.strerror}")
        for device in (number, str(node)):
            group = find_group(str(real.path), device)
            before = group.counts()
            assert ControlGroup(real.path, str(node)).read(times=50).wait(120) == 0
            assert group.counts().reads - before.reads == 50
            group.set_limits(IoLimits(read_iops=100))
            assert group.limits() == IoLimits(read_iops=100)
            group.set_limits(IoLimits())
    finally:
        subprocess.run(["delpart", real.device, "1"], check=True)


@pytest.mark.skipif(not (ROOT / "blkio").is_dir(), reason="in v2 limits hold for the groups within")
def test_v1_counts_the_groups_within_and_refuses_to_limit_them(real: ControlGroup) -> None:
    inner = ControlGroup(real.path / "within.service", real.device)
    inner.path.mkdir()
    try:
        group = find_group(str(real.path), real.device)
        before = group.counts()
        assert inner.read(times=50).wait(120) == 0
        assert group.counts().reads - before.reads == 50
        with pytest.raises(GroupUnusable, match=r"no group together with .*, as within\.service"):
            group.set_limits(IoLimits(read_iops=10))
        group.set_limits(IoLimits())
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                inner.path.rmdir()
                break
            time.sleep(0.1)
