"""What other clients make of a sparse volume in file mode: maps, copies both ways, single operations.

The truth is what the file system says of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.planes import Processes

pytestmark = pytest.mark.e2e
MIB, GIB = 1 << 20, 1 << 30
SLACK_BYTES = MIB  # what a file system may allocate beside the data

Extents = list[tuple[int, int, bool]]
"""(offset, length, whether it reads as zeroes), no two neighbours alike."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """1 GiB with 6 MiB of data."""
    places = ((0, MIB), (100 * MIB, 5 * MIB), (GIB // 2 + 65_536, 65_536), (GIB - 4096, 4096))
    return sparse(tmp_path / "disk.img", GIB, *places)


def sparse(path: Path, size: int, *places: tuple[int, int]) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, length in places:
            file.seek(offset)
            file.write(os.urandom(length))
    return path


def merged(extents: Extents) -> Extents:
    found: Extents = []
    for offset, length, is_zero in extents:
        if found and found[-1][2] == is_zero:
            offset, before, _ = found.pop()
            length += before
        found.append((offset, length, is_zero))
    return found


def truth(path: Path) -> Extents:
    """What the file system says."""
    found: Extents = []
    with open(path, "rb") as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            try:
                data = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                data = size
            if data > at:
                found.append((at, data - at, True))
            if data < size:
                at = os.lseek(file.fileno(), data, os.SEEK_HOLE)
                found.append((data, at - data, False))
            else:
                at = size
    return merged(found)


def differs(one: Path, other: Path) -> str:
    """Where two sparse files differ; empty if they do not."""
    if one.stat().st_size != other.stat().st_size:
        return "in their sizes"
    with open(one, "rb") as first, open(other, "rb") as second:
        for offset, length, is_zero in (*truth(one), *truth(other)):
            first.seek(offset)
            second.seek(offset)
            if not is_zero and first.read(length) != second.read(length):
                return f"in {length} bytes at {offset}"
    return ""


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def serve(run: Processes, workers: int, *files: Path) -> list[str]:
    """Export each file; returns their URIs."""
    names = [f"vol-{number}" for number in range(1, len(files) + 1)]
    common = {"backend": "disk", "workers": workers}
    run.plane([common | {"volume": n, "file": str(f)} for n, f in zip(names, files, strict=True)])
    return [f"nbd+unix:///{name}?socket={run.folder}/gw.sock" for name in names]


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nbdinfo_map(uri: str) -> Extents:
    found: list[dict[str, Any]] = json.loads(output("nbdinfo", "--map", "--json", uri))
    assert {(each["type"], each["description"]) for each in found} <= {(0, "data"), (3, "hole,zero")}
    return merged([(each["offset"], each["length"], each["type"] == 3) for each in found])


@pytest.mark.parametrize("workers", [0, 2])
def test_maps_of_clients_are_those_of_the_file_system(run: Processes, disk: Path, workers: int) -> None:
    (uri,) = serve(run, workers, disk)
    assert nbdinfo_map(uri) == truth(disk)
    found: list[dict[str, Any]] = json.loads(output("qemu-img", "map", "-f", "raw", "--output=json", uri))
    assert merged([(each["start"], each["length"], each["zero"]) for each in found]) == truth(disk)
    totals = output("nbdinfo", "--map", "--totals", uri)
    data = sum(length for _, length, is_zero in truth(disk) if not is_zero)
    assert [line.split()[0] for line in totals.splitlines()] == [str(data), str(GIB - data)]


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_are_whole_and_as_sparse_as_the_original(
    run: Processes, tmp_path: Path, disk: Path, workers: int
) -> None:
    used = sparse(tmp_path / "used.img", GIB, (0, 2 * MIB), (99 * MIB, 3 * MIB), (700 * MIB, 4 * MIB))
    other = sparse(tmp_path / "other.img", GIB, (5 * MIB, MIB))
    source, target, second = serve(run, workers, disk, used, other)
    for number, command in enumerate((["nbdcopy"], ["qemu-img", "convert", "-f", "raw", "-O", "raw"])):
        copy = tmp_path / f"copy-{number}.img"
        output(*command, source, str(copy))
        assert not differs(disk, copy), command
        assert allocated(copy) <= allocated(disk) + SLACK_BYTES, command
    output("nbdcopy", "--flush", str(disk), target)
    output("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", str(disk), second)
    for written in (used, other):
        assert not differs(disk, written), written
        assert allocated(written) <= allocated(disk) + SLACK_BYTES, written
    output("qemu-img", "compare", "-f", "raw", "-F", "raw", source, target)
    output("nbdcopy", "--connections=4", source, second)
    assert not differs(disk, other)


def test_single_operations_of_qemu_are_seen_in_its_map(run: Processes, tmp_path: Path) -> None:
    (uri,) = serve(run, 0, sparse(tmp_path / "disk.img", 64 * MIB))
    said = output(
        "qemu-io", "-f", "raw", "--discard=unmap", *(part for command in (
            "write -P 7 0 4M", "write -z -u 1M 1M", "write -z 2M 64k", "discard 3M 512k", "flush",
            "read -P 7 0 1M", "read -P 0 1M 1M", "read -P 0 2M 64k", "read -P 7 3584k 512k",
            "read -P 0 32M 32M", "aio_read -P 7 512k 512k", "aio_flush",
        ) for part in ("-c", command)), uri,
    )  # fmt: skip
    assert "failed" not in said.lower()
    zero = [(offset, length) for offset, length, is_zero in nbdinfo_map(uri) if is_zero]
    assert (MIB, MIB) in [(at, min(length, MIB)) for at, length in zero]
    assert (3 * MIB, MIB // 2) in zero
    assert zero[-1] == (4 * MIB, 60 * MIB)


def test_what_an_export_says_of_itself(run: Processes, disk: Path) -> None:
    read_only = {"volume": "vol-2", "backend": "disk", "file": str(disk), "read_only": True}
    run.plane([read_only | {"volume": "vol-1", "read_only": False}, read_only])
    for name, is_read_only in (("vol-1", False), ("vol-2", True)):
        uri = f"nbd+unix:///{name}?socket={run.folder}/gw.sock"
        (export,) = json.loads(output("nbdinfo", "--json", uri))["exports"]
        assert export["export-name"] == name
        assert export["description"] == f"volume {name} on backend disk"
        assert export["contexts"] == ["base:allocation"]
        assert export["export-size"] == GIB
        offered = {key: value for key, value in export.items() if key.startswith(("can_", "is_"))}
        assert offered == {
            "is_rotational": False, "is_read_only": is_read_only,
            "can_cache": True, "can_df": True, "can_flush": True, "can_fua": True, "can_multi_conn": True,
            "can_fast_zero": not is_read_only, "can_trim": not is_read_only, "can_zero": not is_read_only,
        }  # fmt: skip


def test_a_volume_of_16_tib_is_mapped_read_and_written_to_its_end(run: Processes, tmp_path: Path) -> None:
    path, size = tmp_path / "large.img", (16 << 40) - MIB
    with open(path, "wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no files of 16 TiB")
    (uri,) = serve(run, 0, path)
    assert int(output("nbdinfo", "--size", uri)) == size
    last = size - 65_536
    output("qemu-io", "-f", "raw", "-c", f"write -P 5 {last} 64k", "-c", f"read -P 5 {last} 64k", uri)
    assert nbdinfo_map(uri) == [(0, last, True), (last, 65_536, False)]
