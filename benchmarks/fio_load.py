"""A closed loop of real fio on one export, through its NBD engine: what greedy neighbours of ``sla`` are.

fio writes a line for each I/O when it ends. So ``done`` is there once ``run`` has returned, and not before.
Its times are of the wall clock in whole milliseconds; they are moved to the monotonic clock by what the two
differ at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tests.support.load import Timed

FINISH_S: Final = 20.0
"""How long it may take to end; what waits for storage that hangs is then given up."""
LONGEST_S: Final = 3600
SIZE: Final = "64M"


@dataclass
class FioLoad:
    """Random I/Os of 4 KiB, 7 of 10 reads, ``depth`` outstanding, until the end.

    Attributes:
        done: as ``tests.support.load.Load`` has them.
        errors: 1 if fio ended with an error, by itself.
    """

    socket_path: Path
    export: str
    seed: int
    depth: int
    done: list[Timed] = field(default_factory=list)
    hung: list[Timed] = field(default_factory=list)
    errors: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Drive the load until ``stop``; then let what is outstanding finish."""
        with tempfile.TemporaryDirectory(prefix="sla-fio-") as folder:
            ahead_s = time.time() - time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self.command(Path(folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
                self.errors = int(ended.done() and not stop.is_set())
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    process.send_signal(signal.SIGINT)
                    await asyncio.wait_for(asyncio.shield(ended), FINISH_S)
            finally:
                stopped.cancel()
                if process.returncode is None:
                    process.kill()
                await ended
            for path in Path(folder).glob("io_lat*.log"):
                self.done += ios_of(path.read_text(), ahead_s)

    def command(self, folder: Path) -> list[str]:
        """The call of fio; its log goes into ``folder``."""
        return [
            "fio",
            "--name=greedy",
            "--ioengine=nbd",
            f"--uri=nbd+unix:///{quote(self.export)}?socket={self.socket_path}",
            "--rw=randrw",
            "--rwmixread=70",
            "--bs=4k",
            f"--size={SIZE}",
            f"--iodepth={self.depth}",
            f"--randseed={self.seed}",
            "--time_based",
            f"--runtime={LONGEST_S}",
            "--continue_on_error=all",
            f"--write_lat_log={folder}/io",
            "--disable_clat=1",
            "--disable_slat=1",
            "--log_unix_epoch=1",
        ]


def ios_of(log: str, ahead_s: float) -> list[Timed]:
    """I/Os of a latency log: lines of the time of an end in ms, the latency in ns, and more.

    Args:
        log: as fio wrote it.
        ahead_s: how far the wall clock is ahead of the monotonic one.
    """
    found = []
    for line in log.splitlines():
        end_ms, latency_ns = (int(part) for part in line.split(",")[:2])
        end_s = end_ms / 1000 - ahead_s
        found.append(Timed(end_s - latency_ns / 1e9, end_s))
    return found
