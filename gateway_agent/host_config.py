"""What the agent's file says of I/O that passes no data plane: devices, control groups, QEMU processes.

Parts of ``config.AgentConfig``; it checks what they have to do with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import AfterValidator, Field, field_validator, model_validator

from gateway_agent.devices import name_of
from pmdaemon.runtime.config import StrictModel
from pmdaemon.wire.labels import why_no_labels
from pmdaemon.wire.names import NAME_RULE, checked_name, is_name
from pmdaemon.wire.rates import LEAST_RATE, MOST_RATE, Rates

UNIX_PATH_BYTES: Final = 107  # sun_path of Linux, less its final NUL


Name = Annotated[str, AfterValidator(checked_name)]
"""A name of a volume or backend."""


def _checked_labels(value: dict[str, str]) -> dict[str, str]:
    if problem := why_no_labels(value):
        raise ValueError(problem)
    return value


Labels = Annotated[dict[str, str], AfterValidator(_checked_labels), Field(default_factory=dict)]
"""Labels of a volume."""
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE, allow_inf_nan=False)]


class StaticCap(StrictModel):
    """Caps of one volume that always hold, with or without a server; null is no cap."""

    ops_per_s: Rate | None = None
    bytes_per_s: Rate | None = None
    cost_per_s: Rate | None = None

    @property
    def rates(self) -> Rates:
        """As enforcers take them."""
        return Rates(self.ops_per_s, self.bytes_per_s, self.cost_per_s)


class HostConfig(StrictModel):
    """Statistics of the host's own block devices, beside the I/O path."""

    enabled: bool = False
    """Whether /proc/diskstats is read."""
    devices: tuple[str, ...] = (
        "sd?",
        "sd[a-z][a-z]",
        "vd?",
        "xvd?",
        "nvme*n?",
        "nvme*n??",
        "mmcblk?",
        "dm-*",
        "md*",
    )
    """Patterns of kernel device names; the default takes whole devices, not their partitions. Also names with
    a slash: ``/dev/mapper/NAME``, ``vg/lv``, ``/dev/disk/by-id/...``, which stay the same over a boot."""
    backends: dict[str, str] = Field(default_factory=dict)
    """Backend of a device; a device that is not named is a backend of its own, NAME:DEVICE."""

    @field_validator("devices")
    @classmethod
    def _are_usable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for device in value:
            if "/" in device and not is_name(name_of(device)):
                raise ValueError(
                    f"device {device!r} would be called {name_of(device)!r}, which {NAME_RULE}; "
                    "write another of its names (ls -l /dev/mapper /dev/disk/*)"
                )
        return value

    @field_validator("backends")
    @classmethod
    def _are_names(cls, value: dict[str, str]) -> dict[str, str]:
        for device, backend in value.items():
            if not is_name(backend):
                raise ValueError(f"backend {backend!r} of {device} must be letters, digits and . _ : @ -")
        return value


class CgroupEntry(StrictModel):
    """``[[cgroup]]``: processes of this host that use a block device, counted and slowed by the kernel."""

    name: Name
    """Its volume is ``cgroup:GATEWAY:NAME``."""
    group: str
    """Path below ``/sys/fs/cgroup``, systemd unit (``mysql.service``), ``container:ID``, ``container:NAME``
    or a pattern that one group alone has (``docker-4f1d*.scope``)."""
    device: str
    """Block device: ``sda``, ``/dev/mapper/vg-lv``, ``vg/lv``, ``/dev/disk/by-id/...``, a device-mapper name,
    or ``MAJOR:MINOR``. Of a partition its whole disk counts, as in the kernel."""
    backend: Name
    """What this device shares with others: judging and throttling go by it."""
    labels: Labels
    """By which agreements choose it: ``{tier = "gold"}``."""
    cap: StaticCap | None = None
    """Static limits, in force while the agent runs: ``{ops_per_s, bytes_per_s, cost_per_s}``."""

    def volume(self, gateway: str) -> str:
        """Its name at the server."""
        return f"cgroup:{gateway}:{self.name}"


class QemuVolume(StrictModel):
    """``[[qemu.volume]]``: a drive or a throttle group of a QEMU process."""

    name: Name
    """Its volume is ``qemu:GATEWAY:NAME``, or ``throttle-group:GATEWAY:NAME`` for a group without drive."""
    backend: Name
    """What it shares with others: judging and throttling go by it."""
    drive: str = ""
    """Drive of a VM, by id of ``-drive`` or ``-device``, or node name: it is counted, and limited unless
    ``group`` is."""
    group: str = ""
    """Throttle group, by id or path in the object model: it is limited; QEMU counts nothing of it."""
    labels: Labels
    """By which agreements choose it: ``{tier = "gold"}``."""
    cap: StaticCap | None = None
    """Static limits, in force while the agent runs: ``{ops_per_s, bytes_per_s, cost_per_s}``."""

    @model_validator(mode="after")
    def _is_something(self) -> QemuVolume:
        if not self.drive and not self.group:
            raise ValueError(
                f"volume {self.name}: set drive (of a VM), group (a throttle group), or both: the drive is "
                "counted then, and the group limited"
            )
        return self

    def volume(self, gateway: str) -> str:
        """Its name at the server: the prefix says what can be measured of it."""
        return f"{'qemu' if self.drive else 'throttle-group'}:{gateway}:{self.name}"

    @property
    def place(self) -> tuple[str, str]:
        """Where its limits are: kind and name."""
        return ("group", self.group) if self.group else ("drive", self.drive)


class QemuEntry(StrictModel):
    """``[[qemu]]``: a QEMU process, counted and slowed through its monitor (QMP)."""

    name: Name
    """What people call it: the VM, or the storage daemon."""
    socket: str
    """Path of a QMP socket that no other program uses: it serves one at a time."""
    volume: Annotated[list[QemuVolume], Field(min_length=1)]
    """Its drives and throttle groups."""

    @field_validator("socket")
    @classmethod
    def _is_path(cls, value: str) -> str:
        if not value.startswith("/") or len(value.encode()) > UNIX_PATH_BYTES or "\0" in value:
            raise ValueError(f"must be a path from / on, of {UNIX_PATH_BYTES} bytes at most")
        return value

    def places(self) -> Iterator[tuple[str, str, str]]:
        """Where limits are: socket, kind and name, as ``qmp.release`` takes them."""
        for each in self.volume:
            yield (self.socket, *each.place)


def check_qemu(entries: list[QemuEntry], gateway: str) -> None:
    """See that no two tables mean the same.

    Raises:
        ValueError: names both.
    """
    names, sockets, volumes = set[str](), dict[str, str](), set[str]()
    for entry in entries:
        if entry.name in names:
            raise ValueError(f"two [[qemu]] tables have the name {entry.name}")
        names.add(entry.name)
        other = sockets.setdefault(entry.socket, entry.name)
        if other != entry.name:
            raise ValueError(f"[[qemu]] {entry.name}: socket {entry.socket} is that of {other} already")
        places = [each.place for each in entry.volume]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice is not None:
            raise ValueError(
                f"[[qemu]] {entry.name}: {' '.join(twice)} limits two volumes; one would take the limits of "
                "the other away"
            )
        for each in entry.volume:
            volume = each.volume(gateway)
            if volume in volumes:
                raise ValueError(f"two volumes of [[qemu]] have the name {each.name}")
            if not is_name(volume):
                raise ValueError(
                    f"[[qemu]] {entry.name}: its volume {volume} has {len(volume)} characters, 128 at most"
                )
            volumes.add(volume)
