"""A real control group with a real block device: a loop device, and a process in the group that reads it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway_agent.cgroups import ROOT

SIZE_BYTES = 16 << 20
READER = """
import mmap, os, random, sys
group, device, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
open(group + "/cgroup.procs", "w").write(str(os.getpid()))
disk, page = os.open(device, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
done = 0
while done < times or not times:
    os.preadv(disk, [page], 4096 * random.randrange(4096))
    done += 1
"""


@dataclass
class ControlGroup:
    """A group and a loop device."""

    path: Path
    device: str

    def read(self, times: int = 0) -> subprocess.Popen[bytes]:
        """A process of the group that reads 4 KiB so often, past the page cache; 0: until it is killed."""
        return subprocess.Popen([sys.executable, "-c", READER, str(self.path), self.device, str(times)])


def why_not() -> str:
    """Why this host has no control group to try; empty if it has."""
    if os.geteuid():
        return "control groups and loop devices are root's"
    if not (ROOT / "blkio" / "cgroup.procs").exists() and not (ROOT / "cgroup.subtree_control").exists():
        return "no cgroup tree is mounted"
    trial = (ROOT / "blkio" if (ROOT / "blkio").is_dir() else ROOT) / f"sla-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as exc:
        return f"no group can be made here: {exc.strerror}"
    probe = subprocess.run(["losetup", "-f"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else f"no loop device: {probe.stderr.decode().strip()}"


@contextlib.contextmanager
def control_group(folder: Path) -> Iterator[ControlGroup]:
    """Made here and taken away again."""
    image = folder / "disk.img"
    image.write_bytes(bytes(SIZE_BYTES))
    losetup = ["losetup", "-f", "--show", str(image)]
    device = subprocess.run(losetup, capture_output=True, text=True, check=True).stdout.strip()
    tree = ROOT / "blkio" if (ROOT / "blkio").is_dir() else ROOT
    group = tree / f"sla-test-{os.getpid()}.slice"
    try:
        group.mkdir()
        if tree == ROOT:
            with contextlib.suppress(OSError):
                (ROOT / "cgroup.subtree_control").write_text("+io")
        yield ControlGroup(group, device)
    finally:
        for pid in (group / "cgroup.procs").read_text().split() if group.exists() else ():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)
        for _ in range(100):
            try:
                group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:  # a process of it is still ending
                subprocess.run(["sleep", "0.1"], check=True)
        subprocess.run(["losetup", "-d", device], check=True)
