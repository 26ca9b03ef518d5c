"""A file system of ext4 whose disk promises more room than it has, as thin volumes do, and has it later.

A loop device over a sparse file in a tmpfs, all in a mount namespace of its own (see ``small_disk``). When
the tmpfs is full the device reports errors for blocks that were never written, and the file system for what
it had taken: at the next sync.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

ROOM: Final = "64m"
SAYS: Final = "200M"
MAKE: Final = (
    f'set -e; mount -t tmpfs -o size={ROOM} thin "$0"; cd "$0"; mkdir disk later; truncate -s {SAYS} image; '
    "mkfs.ext4 -q -b 4096 -J size=4 -E lazy_itable_init=0,nodiscard image; "
)
BARE: Final = "mount -o loop image disk; "
OVERLAID: Final = (
    "mkdir low below; mount -o loop image below; mkdir below/upper below/work; "
    "mount -t overlay -o lowerdir=low,upperdir=below/upper,workdir=below/work over disk; "
)
WAIT: Final = "echo ready; cd /; exec cat"
CHANGES: Final = 800  # of the directory, each synced: all of the journal has its blocks behind them
WHAT_TO_DO: Final = "run as root with CAP_SYS_ADMIN, loop devices and e2fsprogs: {reason}"


class ThinDisk:
    """See the module. Skips the test where it may not be made.

    Attributes:
        path: of the file system's root.

    Args:
        is_overlaid: it is the upper layer of an overlayfs, as in a container.
    """

    def __init__(self, *, is_overlaid: bool = False) -> None:
        self._upper = "upper" if is_overlaid else "."
        make = f"{MAKE}{OVERLAID if is_overlaid else BARE}{WAIT}"
        self._mount_point = Path(tempfile.mkdtemp(prefix="sla-thin-"))
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", make, str(self._mount_point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._root = Path(f"/proc/{self._holder.pid}/root{self._mount_point}")
        self.path = self._root / "disk"
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, problem = self._holder.communicate()
            self._mount_point.rmdir()
            pytest.skip(WHAT_TO_DO.format(reason=problem.strip() or "no reason given"))

        for number in range(CHANGES):
            with (self.path / f"change-{number}").open("wb") as file:
                os.fsync(file.fileno())
            (self.path / f"change-{number}").unlink()

    def __enter__(self) -> ThinDisk:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._holder.communicate()  # closes its standard input: it ends, and all mounts with it
        self._mount_point.rmdir()

    @property
    def inside(self) -> tuple[list[str], Path]:
        """What runs a command where the file system is mounted, and where: SQLite needs it so."""
        return ["nsenter", "-t", str(self._holder.pid), "-m"], self._mount_point

    def fill(self) -> None:
        """From now on the disk has no block more than it has used."""
        use_up(self._root)

    def free(self) -> None:
        """It has room again."""
        free(self._root)

    def after_power_cut(self) -> Path:
        """The root of the file system as it would be found if the power failed at the first call."""
        inside, _ = self.inside
        if any((self._root / "later").iterdir()):
            return self._root / "later" / self._upper
        image, copy, later = (str(self._mount_point / name) for name in ("image", "copy", "later"))
        subprocess.run([*inside, "cp", "--sparse=always", image, copy], check=True)
        subprocess.run([*inside, "mount", "-o", "loop", copy, later], check=True)
        return self._root / "later" / self._upper


def use_up(root: Path) -> None:
    """See ``ThinDisk.fill``; any process that sees its root."""
    with (root / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def free(root: Path) -> None:
    """See ``ThinDisk.free``."""
    (root / "ballast").unlink()
