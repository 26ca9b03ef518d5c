"""A scripted QEMU: answers commands of QMP as QEMU's QAPI schema (qapi/block*.json, qom.json) has them.

Not QEMU: no I/O passes, and ``Disk`` is told what it did. ``serve`` puts it behind a Unix socket, with the
greeting and the lines of QMP, for tests of a virtual machine's drives, which no storage daemon has.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_agent.qemu import Command, Refusal

GROUP_KINDS = ("bps-total", "bps-read", "bps-write", "iops-total", "iops-read", "iops-write")
DRIVE_KINDS = ("bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr")
GREETING = {
    "QMP": {
        "version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "fake"},
        "capabilities": ["oob"],
    }
}


@dataclass
class Disk:
    """A drive of a virtual machine."""

    device: str = ""
    qdev: str = ""
    node: str = ""
    limits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRIVE_KINDS, 0))
    stats: dict[str, int] = field(default_factory=dict)
    boundaries: dict[str, list[int]] = field(default_factory=dict)
    bins: dict[str, list[int]] = field(default_factory=dict)

    def io(
        self, kind: str, count: int = 1, size: int = 4096, latency_us: int = 1000, *, fails: bool = False
    ) -> None:
        """``kind``: rd, wr or flush. As QEMU counts it: failed I/O is timed, and moves no bytes."""
        self._add(f"failed_{kind}_operations" if fails else f"{kind}_operations", count)
        self._add(f"{kind}_total_time_ns", count * latency_us * 1000)
        if not fails and kind != "flush":
            self._add(f"{kind}_bytes", count * size)
        if kind in self.bins:
            self.bins[kind][bisect.bisect_right(self.boundaries[kind], latency_us * 1000)] += count

    def _add(self, name: str, value: int) -> None:
        self.stats[name] = self.stats.get(name, 0) + value

    def statistics(self) -> dict[str, Any]:
        """A row of query-blockstats."""
        names = [f"{kind}_{what}" for kind in ("rd", "wr") for what in ("bytes", "operations")]
        names += [f"{kind}_{what}" for kind in ("rd", "wr", "flush") for what in ("total_time_ns",)]
        names += [f"failed_{kind}_operations" for kind in ("rd", "wr", "flush", "unmap")]
        stats: dict[str, Any] = {name: self.stats.get(name, 0) for name in [*names, "flush_operations"]}
        for kind, bins in self.bins.items():
            stats[f"{kind}_latency_histogram"] = {"boundaries": self.boundaries[kind], "bins": bins}
        row = {"device": self.device, "node-name": self.node, "stats": stats}
        return {**row, **({"qdev": self.qdev} if self.qdev else {})}

    def block(self) -> dict[str, Any]:
        """A row of query-block."""
        row: dict[str, Any] = {"device": self.device, "inserted": {"node-name": self.node, **self.limits}}
        return {**row, **({"qdev": self.qdev} if self.qdev else {})}


class FakeQemu:
    """See the module.

    Attributes:
        disks, groups: what it has; a group is the value of its property ``limits``.
        commands: what it was asked, in order.
        refuses: commands that it answers with an error of this text.
        is_stubborn: limits are accepted and not kept.
    """

    def __init__(self, *disks: Disk, groups: tuple[str, ...] = ()) -> None:
        self.disks = list(disks)
        self.groups = {name: _no_limits() for name in groups}
        self.commands: list[Command] = []
        self.refuses: dict[str, str] = {}
        self.is_stubborn = False

    def execute(self, command: Command) -> Any:
        """What it returns, or a refusal."""
        self.commands.append(command)
        if command.name in self.refuses:
            return Refusal("GenericError", self.refuses[command.name])
        known = {
            "query-blockstats": lambda _a: [disk.statistics() for disk in self.disks],
            "query-block": lambda _a: [disk.block() for disk in self.disks],
            "block_set_io_throttle": self._set_drive,
            "block-latency-histogram-set": self._set_histogram,
            "qom-get": self._get_group,
            "qom-set": self._set_group,
            "qmp_capabilities": lambda _a: {},
        }
        if command.name not in known:
            return Refusal("CommandNotFound", f"The command {command.name} has not been found")
        return known[command.name](command.arguments)

    def _disk(self, arguments: dict[str, Any]) -> Disk | Refusal:
        wanted = arguments.get("id") or arguments["device"]
        found = (disk for disk in self.disks if wanted in (disk.qdev if "id" in arguments else disk.device))
        return next(found, Refusal("DeviceNotFound", f"Device '{wanted}' not found"))

    def _set_drive(self, arguments: dict[str, Any]) -> Any:
        disk = self._disk(arguments)
        if isinstance(disk, Refusal):
            return disk
        missing = [kind for kind in DRIVE_KINDS if kind not in arguments]
        if missing:
            return Refusal("GenericError", f"Parameter '{missing[0]}' is missing")
        if not self.is_stubborn:
            disk.limits = {kind: arguments[kind] for kind in DRIVE_KINDS}
        return {}

    def _set_histogram(self, arguments: dict[str, Any]) -> Any:
        disk = self._disk(arguments)
        if isinstance(disk, Refusal):
            return disk
        for kind, name in (("rd", "boundaries-read"), ("wr", "boundaries-write")):
            disk.boundaries[kind] = arguments[name]
            disk.bins[kind] = [0] * (len(arguments[name]) + 1)
        return {}

    def _group(self, arguments: dict[str, Any]) -> str | Refusal:
        name = arguments["path"].removeprefix("/objects/")
        return name if name in self.groups else Refusal("DeviceNotFound", f"Device '{name}' not found")

    def _get_group(self, arguments: dict[str, Any]) -> Any:
        name = self._group(arguments)
        return name if isinstance(name, Refusal) else dict(self.groups[name])

    def _set_group(self, arguments: dict[str, Any]) -> Any:
        name = self._group(arguments)
        if isinstance(name, Refusal):
            return name
        wanted = self.groups[name] | arguments["value"]  # QEMU keeps what is not named
        for way in ("iops", "bps"):
            if wanted[f"{way}-total"] and (wanted[f"{way}-read"] or wanted[f"{way}-write"]):
                return Refusal("GenericError", "total values and read/write values cannot be used together")
        if not self.is_stubborn:
            self.groups[name] = wanted
        return {}

    @contextlib.contextmanager
    def serve(self, path: Path) -> Iterator[None]:
        """Behind a socket of QMP until the end of the block; connections that are open then are cut."""
        started, loops = threading.Event(), []
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(path, started, loops)))
        thread.start()
        started.wait(60)
        try:
            yield
        finally:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(60)

    async def _serve(self, path: Path, started: threading.Event, loops: list[Any]) -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        open_ones: list[asyncio.StreamWriter] = []

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            open_ones.append(writer)
            writer.write(json.dumps(GREETING).encode() + b"\r\n")
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                async for asked in _messages(reader):
                    found = self.execute(Command(asked["execute"], asked.get("arguments", {})))
                    if isinstance(found, Refusal):
                        answer = {"error": {"class": found.kind, "desc": found.text}}
                    else:
                        answer = {"return": found}
                    writer.write(json.dumps(answer | {"id": asked.get("id")}).encode() + b"\r\n")
                    await writer.drain()

        server = await asyncio.start_unix_server(client, path)
        started.set()
        await stop.wait()
        server.close()
        for writer in open_ones:
            writer.close()
        path.unlink(missing_ok=True)


def _no_limits() -> dict[str, int]:
    found = dict.fromkeys(GROUP_KINDS, 0) | {f"{kind}-max": 0 for kind in GROUP_KINDS}
    return found | {f"{kind}-max-length": 1 for kind in GROUP_KINDS} | {"iops-size": 0}


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON as it comes: QMP needs no line ends."""
    text, decoder = "", json.JSONDecoder()
    while data := await reader.read(65_536):
        text += data.decode()
        while text := text.lstrip():
            try:
                found, end = decoder.raw_decode(text)
            except ValueError:  # a part of a message
                break
            text = text[end:]
            yield found
