"""Debian's qemu-storage-daemon with one disk behind a throttle group, exported by NBD, and clients of it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

SIZE_BYTES = 16 << 20
START_S = 60.0


class StorageDaemon:
    """Use as a context manager; every block of the disk is written, as reads of holes pass its throttle.

    Attributes:
        monitor: its QMP socket, which no other program uses.
        export: its NBD socket; the export is called vol0.
    """

    def __init__(self, folder: Path) -> None:
        self.monitor = folder / "qmp.sock"
        self.export = folder / "nbd.sock"
        self._image = folder / "qsd.img"
        self._log = folder / "qsd.log"
        self._ready = folder / "qsd.pid"
        self._image.write_bytes(os.urandom(1 << 16) * (SIZE_BYTES >> 16))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StorageDaemon:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait for its pid file: it is there when the volume is, sockets are before that."""
        command = [
            "qemu-storage-daemon",
            *("--chardev", f"socket,path={self.monitor},server=on,wait=off,id=c0", "--monitor", "chardev=c0"),
            *("--object", "throttle-group,id=tg0"),
            *("--blockdev", f"driver=file,node-name=f0,filename={self._image},locking=off"),
            *("--blockdev", "driver=raw,node-name=r0,file=f0"),
            *("--blockdev", "driver=throttle,node-name=t0,throttle-group=tg0,file=r0"),
            *("--nbd-server", f"addr.type=unix,addr.path={self.export},max-connections=0"),
            *("--export", "type=nbd,id=e0,node-name=t0,name=vol0,writable=on"),
            *("--pidfile", str(self._ready)),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while not self._ready.exists():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, self._log.read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it; its sockets go, too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for path in (self.monitor, self.export, self._ready):
            path.unlink(missing_ok=True)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def read(self, depth: int, times: int = 0) -> subprocess.Popen[bytes]:
        """A client that reads 4 KiB blocks so often, at this queue depth; 0: until it is killed."""
        uri = f"nbd+unix:///vol0?socket={self.export}"
        size = f"--number_ios={times}" if times else "--time_based=1"
        command = ["fio", "--name=r", "--ioengine=nbd", f"--uri={uri}", "--rw=randread", "--bs=4k"]
        command += [f"--iodepth={depth}", "--norandommap", "--runtime=600", "--thread", size]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
