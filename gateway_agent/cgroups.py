"""Block I/O of control groups: counted and limited by the kernel, device by device, in cgroup v1 and v2.

A *group* is a directory of the kernel's tree: of a systemd unit, a slice, a container, or one made by hand.
Of each device the kernel counts the I/Os and bytes that the group's processes did, and holds them back beyond
four limits: reads a second, writes a second, bytes read a second, bytes written a second.

    v2   io.stat (rios, wios, rbytes, wbytes), io.max: one line a device
    v1   blkio.throttle.io_serviced and .io_service_bytes, and a file for each limit: "MAJOR:MINOR VALUE"

What the kernel does not do: it knows no latency of a group. In v1 writes of the page cache count for the
root, not for the group that made them, and a limit does not hold for the groups within the group. From Linux
6.10 on, v1 counts a device from the moment the first limit on it is written; so one is taken away there that
is not there, before anything is counted. ``dm`` and ``md`` devices are limited at their own level; a limit on
the device below them would hold back all its users. Of partitions the kernel keeps nothing by group: v2 has
no counts of one, which looks like no I/O, and a limit on one is refused. So the whole disk of a partition is
meant, with all that the group does on it.

Nothing here has state but the paths. Thread: any; each call reads or writes some small files.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/blkio-controller.rst.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from gateway_agent.containers import CONTAINERS, container_id
from gateway_agent.devices import device_number, whole_disk
from gateway_agent.errors import GroupUnusable

ROOT: Final = Path("/sys/fs/cgroup")
MOST_DIRECTORIES: Final = 20_000  # looked at for a unit or a container
UNIT_SUFFIXES: Final = (".service", ".slice", ".scope")
CONTAINER: Final = "container:"
MIN_ID_CHARACTERS: Final = 12
_ID: Final = re.compile("[0-9a-f]+")
_V1_COUNTS: Final = ("blkio.throttle.io_serviced", "blkio.throttle.io_service_bytes")
_RECURSIVE: Final = "_recursive"  # with the groups within
_V1_LIMITS: Final = (
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_iops_device",
    "blkio.throttle.read_bps_device",
    "blkio.throttle.write_bps_device",
)
_V2_LIMITS: Final = ("riops", "wiops", "rbps", "wbps")


class IoCounts(NamedTuple):
    """What a group did on a device since the group was made."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


class IoLimits(NamedTuple):
    """A second, None without a limit."""

    read_iops: int | None = None
    write_iops: int | None = None
    read_bps: int | None = None
    write_bps: int | None = None


class Group:
    """One group on one device.

    Args:
        path: the group's directory.
        device: MAJOR:MINOR.
        is_v2: whether the tree is of cgroup v2.
    """

    def __init__(self, path: Path, device: str, *, is_v2: bool) -> None:
        self.path = path
        self.device = device
        self.is_v2 = is_v2
        self._is_counted = is_v2

    def counts(self) -> IoCounts:
        """What it did so far; nothing yet is all zeros.

        Raises:
            GroupUnusable: the group is gone, or without the io controller, or this process may not start
                the counting.
        """
        if self.is_v2:
            fields = dict(self._fields("io.stat").get(self.device, ()))
            found = [fields.get(key, "0") for key in ("rios", "wios", "rbytes", "wbytes")]
            return IoCounts(*(int(value) for value in found))
        within = _RECURSIVE if (self.path / f"{_V1_COUNTS[0]}{_RECURSIVE}").exists() else ""
        ios, size = (self._v1_counts(f"{name}{within}") for name in _V1_COUNTS)
        if not (ios or self._is_counted):
            self._start_counting()
        return IoCounts(ios.get("Read", 0), ios.get("Write", 0), size.get("Read", 0), size.get("Write", 0))

    def limits(self) -> IoLimits:
        """Those in force, as the kernel reads them back.

        Raises:
            GroupUnusable: as ``counts``.
        """
        if self.is_v2:
            fields = dict(self._fields("io.max").get(self.device, ()))
            values = [fields.get(key, "max") for key in _V2_LIMITS]
            return IoLimits(*(None if value == "max" else int(value) for value in values))
        found = []
        for name in _V1_LIMITS:
            lines = (line.split() for line in self._read(name).splitlines())
            found.append(next((int(line[1]) for line in lines if line and line[0] == self.device), None))
        return IoLimits(*found)

    def set_limits(self, limits: IoLimits) -> None:
        """Put limits in force, all four; read them back with ``limits``.

        Raises:
            GroupUnusable: the group is gone, or this process may not; or it is of v1 and has groups within,
                for which a limit would not hold.
        """
        if self.is_v2:
            pairs = zip(_V2_LIMITS, limits, strict=True)
            text = " ".join(f"{key}={'max' if value is None else value}" for key, value in pairs)
            self._write("io.max", f"{self.device} {text}")
            return
        if limits != IoLimits() and (inner := self._within()):
            raise GroupUnusable(
                str(self.path),
                f"cgroup v1 limits no group together with those within it, as {inner}; name these instead",
            )
        for name, value in zip(_V1_LIMITS, limits, strict=True):
            self._write(name, f"{self.device} {0 if value is None else value}")  # 0 takes a limit away

    def _start_counting(self) -> None:
        """Have v1 count the device; a limit that is in force says that it does."""
        if self.limits().read_iops is None:
            self._write(_V1_LIMITS[0], f"{self.device} 0")
        self._is_counted = True

    def _within(self) -> str:
        """Name of a group within this one, if there is any."""
        try:
            return min((each.name for each in os.scandir(self.path) if each.is_dir()), default="")
        except OSError as exc:
            raise self._unusable("groups within", exc) from exc

    def _fields(self, name: str) -> dict[str, list[tuple[str, str]]]:
        """Lines of ``MAJOR:MINOR key=value ...`` by device."""
        found = {}
        for line in self._read(name).splitlines():
            device, *pairs = line.split()
            found[device] = [(key, value) for key, _, value in (pair.partition("=") for pair in pairs)]
        return found

    def _v1_counts(self, name: str) -> dict[str, int]:
        """Lines of ``MAJOR:MINOR Read 12``; the last one is a sum over all devices."""
        rows = (line.split() for line in self._read(name).splitlines())
        return {row[1]: int(row[2]) for row in rows if len(row) == 3 and row[0] == self.device}

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError as exc:
            raise self._unusable(name, exc) from exc

    def _write(self, name: str, text: str) -> None:
        try:
            (self.path / name).write_text(text)
        except OSError as exc:
            raise self._unusable(f"{name} ({text!r})", exc) from exc

    def _unusable(self, what: str, exc: OSError) -> GroupUnusable:
        if not self.path.exists():
            return GroupUnusable(
                str(self.path), "it is gone; its unit or container has ended", is_absent=True
            )
        if isinstance(exc, FileNotFoundError):
            return GroupUnusable(
                str(self.path),
                f"it has no {what}: enable the controller with +io in cgroup.subtree_control; of a systemd "
                "unit with IOAccounting=yes",
            )
        return GroupUnusable(str(self.path), f"{what}: {exc.strerror}")


def find_group(name: str, device: str, root: Path = ROOT, containers: Path = CONTAINERS) -> Group:
    """The group of a path, a systemd unit or a container, on a device.

    Args:
        name: ``/sys/fs/cgroup/...``, ``mysql.service``, ``system.slice/mysql.service``, ``batch.slice``,
            ``container:ID`` (12 digits of the ID at least: as docker, podman and Kubernetes put it into the
            name of the group), ``container:NAME``, or a pattern that one group alone has.
        device: as ``devices.device_number`` takes it; of a partition its whole disk is meant.
        root: where the kernel's tree is mounted.
        containers: as ``containers.container_id`` takes it.

    Raises:
        GroupUnusable: there is none, or several.
    """
    number = whole_disk(device_number(device))
    tree, is_v2 = _tree(root)
    if name.startswith("/"):
        path = Path(name)
        if not path.is_dir():
            problem = "there is no such directory now; its unit or container does not run"
            raise GroupUnusable(name, problem, is_absent=True)
        return Group(path, number, is_v2=is_v2)
    found = list(_named(name, tree, containers))
    if not found:
        problem = f"no group of this name below {tree}; its unit or container does not run"
        raise GroupUnusable(name, problem, is_absent=True)
    if len(found) > 1:
        paths = ", ".join(str(path) for path in found[:3])
        raise GroupUnusable(name, f"{len(found)} groups have this name: {paths}; write the path of one")
    return Group(found[0], number, is_v2=is_v2)


def _check_name(name: str) -> None:
    """See that a name has a form that ``find_group`` knows.

    Raises:
        GroupUnusable: says which there are.
    """
    if name.startswith(CONTAINER):
        is_known = len(name) > len(CONTAINER)
    else:
        is_known = "/" in name or name.endswith(UNIT_SUFFIXES) or _is_pattern(name)
    if not is_known:
        raise GroupUnusable(
            name,
            "expected a path, a systemd unit (NAME.service, .slice, .scope), container:ID, container:NAME or "
            "a pattern (docker-4f1d*.scope)",
        )


def _named(name: str, tree: Path, containers: Path) -> Iterator[Path]:
    _check_name(name)
    if name.startswith(CONTAINER):
        wanted = name.removeprefix(CONTAINER)
        is_id = len(wanted) >= MIN_ID_CHARACTERS and _ID.fullmatch(wanted)
        identity = wanted if is_id else container_id(wanted, containers)
        yield from (path for path in _directories(tree) if _is_container(path.name, identity))
    elif _is_pattern(name):
        for path in _directories(tree):
            if fnmatchcase(str(path.relative_to(tree)) if "/" in name else path.name, name):
                yield path
    elif "/" in name:
        if (tree / name).is_dir():
            yield tree / name
    else:
        yield from (path for path in _directories(tree) if path.name == name)


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def release(groups: Iterable[tuple[str, str]]) -> list[str]:
    """Take all limits away from (group, device), as ``find_group`` takes them; returns what could not be.

    A group that is not there has none, and is no problem.
    """
    problems = []
    for name, device in groups:
        try:
            group = find_group(name, device)
            group.set_limits(IoLimits())
        except GroupUnusable as exc:
            if not exc.is_absent:
                problems.append(str(exc))
    return problems


def _tree(root: Path) -> tuple[Path, bool]:
    """Where block I/O is controlled, and whether that is v2. A hybrid host has v1 beside an empty v2."""
    if (root / "blkio").is_dir():
        return root / "blkio", False
    if (root / "cgroup.controllers").exists():
        return root, True
    raise GroupUnusable(str(root), "neither cgroup v2 nor the blkio controller of v1 is mounted here")


def _directories(tree: Path) -> Iterator[Path]:
    looked = 0
    for folder, names, _ in os.walk(tree):
        names.sort()
        for name in names:
            looked += 1
            if looked > MOST_DIRECTORIES:
                raise GroupUnusable(
                    str(tree), f"more than {MOST_DIRECTORIES:,} groups; write the path of one"
                )
            yield Path(folder, name)


def _is_container(name: str, wanted: str) -> bool:
    """``docker-ID.scope``, ``cri-containerd-ID.scope``, ``libpod-ID.scope`` or the ID alone.

    Not ``libpod-conmon-ID.scope``: that is the process that looks after the container, and does its log.
    """
    kind, _, identity = name.removesuffix(".scope").rpartition("-")
    return identity.startswith(wanted) and not kind.endswith("conmon")
