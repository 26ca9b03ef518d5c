"""One reading of a pool of storage: which commands are run, and what their output means.

All go through programs of the system (``stat``, ``lvs``, ``dmsetup``, ``zfs``, ``snmpbulkwalk``): a file
system that hangs then holds a child that can be given up, not a thread of ours. Output is asked for in bytes
and without headings.

``read`` gets a function that runs a command; nothing else here does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pmdaemon.errors import SlaError, WireError
from pmdaemon.runtime.commands import CommandFailed
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.space.config import SpaceSource
from pmdaemon.wire.messages.space import MAX_SPACE_VOLUMES, VOLUME_NAME_CHARACTERS, Space

SECTOR_BYTES: Final = 512
MOST_PROVISIONED_BYTES: Final = (1 << 63) - 1  # sparse files of a few users add up to more than is counted
_NOT_UNDERSTOOD: Final = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, RecursionError
)  # fmt: skip
"""What reading the output of a program may end in, whatever it wrote."""
Run = Callable[[Sequence[str]], str]
"""Runs a command, returns its standard output; raises ``CommandFailed``."""


class SpaceUnreadable(SlaError):
    """A source of space could not be read this time; ``problem`` says why."""

    retryable = True

    def __init__(self, source: str, problem: str) -> None:
        self.source = source
        self.problem = problem
        super().__init__(f"the space of {source} cannot be read: {problem}")


class FoundVolume(NamedTuple):
    """A volume in a pool; ``paths``: under which names an export may serve it."""

    name: str
    size_bytes: int
    used_bytes: int | None
    in_use: bool | None
    paths: tuple[str, ...] = ()


class FoundPool(NamedTuple):
    """What one reading found."""

    size_bytes: int
    used_bytes: int
    other_ratio: float | None = None
    volumes: Sequence[FoundVolume] = ()


def read(source: SpaceSource, run: Run, exported: Mapping[str, str], now_us: int) -> Space:
    """Read one source.

    Args:
        source: which.
        run: runs its commands.
        exported: path of a file or device to the volume that an export of this host serves from it.
        now_us: the wall clock.

    Raises:
        SpaceUnreadable: a command failed, or its output is not what was expected.
    """
    try:
        found = _READERS[source.kind](source, run)
    except CommandFailed as exc:
        raise SpaceUnreadable(source.name, str(exc)) from exc
    except _NOT_UNDERSTOOD as exc:
        problem = f"what its commands wrote is not understood: {type(exc).__name__}: {excerpt(str(exc))}"
        raise SpaceUnreadable(source.name, problem) from exc
    served = {**exported, **source.serves}
    reading = reading_of(source.name, source.kind, source.backend, found, served, now_us)
    try:
        return Space.parse({**reading.header(), "volumes": list(reading.volumes)}, now_us)
    except WireError as exc:  # the server would end the session of one who sends it
        raise SpaceUnreadable(source.name, f"its figures cannot be true: {exc}") from exc


def reading_of(
    name: str, kind: str, backend: str, found: FoundPool, served: Mapping[str, str], now_us: int
) -> Space:
    """The message about one pool; ``served``: name or path of a volume in it to the volume that is served."""
    volumes = sorted(found.volumes, key=lambda each: (-each.size_bytes, each.name))
    return Space(
        pool=name,
        kind=kind,
        backend=backend,
        size_bytes=found.size_bytes,
        used_bytes=min(found.used_bytes, found.size_bytes),
        other_ratio=found.other_ratio,
        provisioned_bytes=min(sum(each.size_bytes for each in volumes), MOST_PROVISIONED_BYTES),
        volume_count=len(volumes),
        volumes=tuple(_as_header(each, served) for each in volumes[:MAX_SPACE_VOLUMES]),
        at_us=now_us,
    )


def _as_header(volume: FoundVolume, served: Mapping[str, str]) -> dict[str, Any]:
    shown = "".join(letter if letter.isprintable() else "?" for letter in volume.name)
    return {
        "name": shown[:VOLUME_NAME_CHARACTERS],
        "size_bytes": volume.size_bytes,
        "used_bytes": volume.used_bytes,
        "volume": next((served[path] for path in (volume.name, *volume.paths) if path in served), ""),
        "in_use": volume.in_use,
    }


# -- file systems


def _path(source: SpaceSource, run: Run) -> FoundPool:
    """As ``df`` counts: of what users can have, not of what is reserved for root."""
    said = run(["stat", "-f", "-c", "%S %b %f %a %c %d", "--", source.path]).split()
    block, total, free, available, files, free_files = map(int, said)
    used = total - free
    other = (files - free_files) / files if files > 0 else None
    return FoundPool((used + available) * block, used * block, other)


def _loop(source: SpaceSource, run: Run) -> FoundPool:
    pool = _path(source, run)
    listing = run(["find", source.path, "-maxdepth", "1", "-type", "f", "-printf", r"%s %b %f\0"])
    attached = _attached(run)
    volumes = []
    for line in filter(None, listing.split("\0")):
        size, blocks, name = line.split(" ", 2)
        path = f"{source.path.rstrip('/')}/{name}"
        in_use = None if attached is None else path in attached
        volumes.append(FoundVolume(name, int(size), int(blocks) * SECTOR_BYTES, in_use, (path,)))
    return pool._replace(volumes=volumes)


def _attached(run: Run) -> set[str] | None:
    """Files behind loop devices; None where that cannot be asked."""
    try:
        said = run(["losetup", "--list", "--json", "--output", "BACK-FILE"])
    except CommandFailed:
        return None
    devices = json.loads(said)["loopdevices"] if said.strip() else []
    return {str(each["back-file"]) for each in devices}


# -- LVM

_LVM: Final = ("--reportformat", "json", "--units", "b", "--nosuffix", "--readonly")


def _lvm(source: SpaceSource, run: Run) -> FoundPool:
    columns = "lv_name,lv_size,data_percent,metadata_percent,pool_lv,lv_attr,lv_device_open"
    rows = _report(run(["lvs", *_LVM, "-o", columns, source.group]), "lv")
    if source.device:
        pool = next((row for row in rows if row["lv_name"] == source.device), None)
        if pool is None:
            raise SpaceUnreadable(source.name, f"volume group {source.group} has no pool {source.device}")
        size = int(pool["lv_size"])
        metadata = float(pool["metadata_percent"]) / 100 if pool.get("metadata_percent") else None
        volumes = [row for row in rows if row["pool_lv"] == source.device]
        used = round(size * float(pool["data_percent"] or 0) / 100)
        return FoundPool(size, used, metadata, [_lv(source.group, row) for row in volumes])
    (group,) = _report(run(["vgs", *_LVM, "-o", "vg_size,vg_free", source.group]), "vg")
    size = int(group["vg_size"])
    whole = [row for row in rows if not row["pool_lv"]]
    return FoundPool(size, size - int(group["vg_free"]), None, [_lv(source.group, row) for row in whole])


def _report(text: str, key: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(text)["report"][0][key]
    return rows


def _lv(group: str, row: Mapping[str, str]) -> FoundVolume:
    name, size = row["lv_name"], int(row["lv_size"])
    is_pool = row["lv_attr"][:1] in "tT" and not row["pool_lv"]  # holds others, which are in use or not
    used = round(size * float(row["data_percent"]) / 100) if row["data_percent"] else size
    mapped = f"{group.replace('-', '--')}-{name.replace('-', '--')}"
    in_use = True if is_pool else row["lv_device_open"] == "open"
    return FoundVolume(
        name, size, used, in_use, (f"/dev/{group}/{name}", f"/dev/mapper/{mapped}", f"{group}/{name}")
    )


# -- device mapper


def _thin(source: SpaceSource, run: Run) -> FoundPool:
    """A thin pool and the thin volumes on it.

    status: ``NAME: START LENGTH thin-pool TX META_USED/META DATA_USED/DATA ...``, and of a volume
    ``NAME: START LENGTH thin MAPPED_SECTORS ...``; table: ``... thin-pool META DATA BLOCK_SECTORS ...`` and
    ``... thin POOL_DEVICE ID``.
    """
    status, table = _by_name(run(["dmsetup", "status"])), _by_name(run(["dmsetup", "table"]))
    info = run(["dmsetup", "info", "-c", "--noheadings", "--separator", " ", "-o", "major,minor,open,name"])
    rows = [line.split(" ", 3) for line in info.splitlines() if line.strip()]
    numbers = {name: f"{major}:{minor}" for major, minor, _open, name in rows}
    opened = {name for _major, _minor, count, name in rows if int(count) > 0}
    words = status.get(source.device)
    if words is None or words[2] != "thin-pool":
        raise SpaceUnreadable(source.name, f"the device mapper has no thin pool {source.device}")
    if words[3] == "Fail":
        raise SpaceUnreadable(source.name, f"thin pool {source.device} has failed; repair it (thin_check)")
    block_bytes = int(table[source.device][5]) * SECTOR_BYTES
    (meta_used, meta), (data_used, data) = (map(int, word.split("/")) for word in words[4:6])
    own = numbers[source.device]
    names = [name for name, row in table.items() if row[2] == "thin" and row[3] == own]
    volumes = [
        FoundVolume(
            name,
            int(table[name][1]) * SECTOR_BYTES,
            int(status[name][3]) * SECTOR_BYTES if status[name][3].isdecimal() else None,
            name in opened,
            (f"/dev/mapper/{name}",),
        )
        for name in names
    ]
    return FoundPool(data * block_bytes, data_used * block_bytes, meta_used / meta if meta else None, volumes)


def _by_name(text: str) -> dict[str, list[str]]:
    """The words behind ``NAME:`` of each line; the first line of a device with several segments."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(": ")
        if rest:
            found.setdefault(name, rest.split())
    return found


# -- ZFS


def _zfs(source: SpaceSource, run: Run) -> FoundPool:
    columns = "name,type,volsize,used,available,referenced"
    said = run(["zfs", "list", "-Hp", "-r", "-t", "filesystem,volume", "-o", columns, source.dataset])
    rows = [line.split("\t") for line in said.splitlines()]
    top = next(row for row in rows if row[0] == source.dataset)
    used, available = int(top[3]), int(top[4])
    volumes = [
        FoundVolume(name, int(size), int(referenced), None, (f"/dev/zvol/{name}",))
        for name, kind, size, _used, _available, referenced in rows
        if kind == "volume"
    ]
    return FoundPool(used + available, used, None, volumes)


# -- SNMP

HR_STORAGE: Final = ".1.3.6.1.2.1.25.2.3.1"
_DESCRIPTION, _UNIT, _SIZE, _USED = "3", "4", "5", "6"
_SNMP: Final = ("-m", "", "-Onq", "-OUae", "-r", "1")  # no MIB files; numbers, one repetition
_WRAP: Final = 1 << 32


def _snmp(source: SpaceSource, run: Run) -> FoundPool:
    """A row of hrStorageTable: lines ``OID.COLUMN.INDEX VALUE``.

    Its sizes are signed numbers of 32 bits; agents that count beyond 2^31 units let them become negative.
    Source: RFC 2790, 4.
    """
    secrets = ["env", f"SNMPCONFPATH={source.settings}"] if source.settings else []
    said = run([*secrets, "snmpbulkwalk", *_SNMP, source.host, HR_STORAGE])
    rows: dict[str, dict[str, str]] = {}
    for line in said.splitlines():
        place, _, value = line.removeprefix(f"{HR_STORAGE}.").partition(" ")
        column, has_index, index = place.partition(".")
        if has_index:
            rows.setdefault(index, {})[column] = value.strip()
    named = {row[_DESCRIPTION].strip('"'): row for row in rows.values() if _DESCRIPTION in row}
    row = named.get(source.storage)
    if row is None:
        known = ", ".join(sorted(named)) or "none: it does not answer this table"
        raise SpaceUnreadable(source.name, f"{source.host} has no storage {source.storage}, but {known}")
    unit, size, used = (int(row[column]) for column in (_UNIT, _SIZE, _USED))
    return FoundPool(size % _WRAP * unit, used % _WRAP * unit)


_READERS: Final[Mapping[str, Callable[[SpaceSource, Run], FoundPool]]] = {
    "path": _path,
    "loop": _loop,
    "lvm": _lvm,
    "thin": _thin,
    "zfs": _zfs,
    "snmp": _snmp,
}


def kinds() -> Iterable[str]:
    """Kinds of source that can be read on any host."""
    return _READERS
