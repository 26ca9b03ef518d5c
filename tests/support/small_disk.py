"""A disk of a few MB that really fills: a tmpfs in a mount namespace of its own.

``unshare`` starts a process that mounts it and then waits; all others reach it through that process's
``/proc/PID/root``. So nothing is mounted where others see it, and nothing is left over: the disk goes with
the process, which ends with the test's (its standard input closes). Root needs CAP_SYS_ADMIN (root of a
machine has it, of a container mostly not), anybody else a kernel that gives user namespaces to unprivileged
users (Debian's does).
"""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.postgres import account

MOUNT = 'mount -t tmpfs -o "size=$1,mode=0700" small "$0"'
WAIT = "echo ready; exec cat"
WHAT_TO_DO = (
    "not on a really full disk, which this kernel does not let the test mount ({reason}); the same promise "
    "is held by [as_told-tables] and [as_told-wal]. To have this one, too, run as root with CAP_SYS_ADMIN "
    "(docker run --cap-add SYS_ADMIN --security-opt apparmor=unconfined), or allow user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
)


class SmallDisk:
    """An empty file system of ``size_bytes``, for PostgreSQL's account. Skips the test where it may not.

    Attributes:
        path: of its root, for every process of this machine and account.
    """

    def __init__(self, size_bytes: int) -> None:
        self._mount_point = Path(tempfile.mkdtemp(prefix="sla-disk-"))
        self._holder = subprocess.Popen(
            [*_in_namespace(), str(self._mount_point), str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.path = Path(f"/proc/{self._holder.pid}/root{self._mount_point}")
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, problem = self._holder.communicate()
            self._mount_point.rmdir()
            pytest.skip(WHAT_TO_DO.format(reason=problem.strip() or "no reason given"))

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._holder.communicate()  # closes its standard input: it ends, and the disk with it
        self._mount_point.rmdir()

    def folder(self, name: str) -> Path:
        """A new directory of that account on it."""
        made = self.path / name
        made.mkdir(mode=0o700)
        if owner := account():
            os.chown(made, owner["user"], owner["group"])
        return made

    def fill(self) -> None:
        """Use up the last byte."""
        with (self.path / "ballast").open("wb", buffering=0) as file:
            for chunk in (bytes(1 << 20), bytes(4096), b"\0"):
                try:
                    while True:
                        file.write(chunk)
                except OSError as exc:
                    assert exc.errno == errno.ENOSPC  # noqa: PT017 - any other is a failure of the test

    def free(self) -> None:
        """Give back what ``fill`` took."""
        (self.path / "ballast").unlink()


def _in_namespace() -> list[str]:
    """unshare, sh and what sh does; mount point and size follow."""
    owner = account()
    if not owner:
        return ["unshare", "-U", "-c", "-m", "--keep-caps", "sh", "-c", f"{MOUNT} && {{ {WAIT}; }}"]
    drop = f"setpriv --reuid {owner['user']} --regid {owner['group']} --clear-groups"
    mine = f'chown {owner["user"]}:{owner["group"]} "$0"'
    return ["unshare", "-m", "sh", "-c", f"{MOUNT} && {mine} && exec {drop} sh -c '{WAIT}'"]
