"""The engine: finds nats-server, and says what the one found can do.

Order: ``[cluster] engine``; PATH; the directory of this Python's programs, where the wheel puts it (ADR 33).
What an engine can do is probed, not taken from its version: ``nats-server -t`` reads a configuration with the
feature in question and refuses what it does not know.

    feature        without it
    sync always    an acknowledged message may be lost in a power cut of all that have it (2.9)
    atomic batch   a transaction over several destinations takes two phases (before 2.12)

``atomic batch`` is a property of streams that no configuration file mentions, so there the version decides.
State: none. Thread: any; ``probe`` starts the program twice and takes some 50 ms.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sla_server.cluster.errors import EngineMissing, EngineTooOld

PROGRAM: Final = "nats-server"
PROBE_S: Final = 60.0
ATOMIC_BATCH: Final = (2, 12)
OLDEST: Final = (2, 9)
SYNC_PROBE: Final = 'jetstream {{ store_dir: "{directory}", sync_interval: always }}\n'
REDUCED: Final = (
    "the engine has no sync_interval: what it acknowledges survives processes that are killed, but a power "
    "cut only where another node kept its power"
)
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(\S*)")


@dataclass(frozen=True, slots=True)
class Engine:
    """A nats-server and what it can do.

    Attributes:
        version: three numbers.
        text: the version as the program writes it.
        can_sync_always: whether each acknowledged message can be on disk first.
    """

    path: Path
    version: tuple[int, int, int]
    text: str
    can_sync_always: bool

    @property
    def has_atomic_batch(self) -> bool:
        """Whether it stores messages for several subjects of a stream all or none."""
        return self.version[:2] >= ATOMIC_BATCH

    @property
    def reduced(self) -> str:
        """What it cannot guarantee, in words; "" if nothing."""
        return "" if self.can_sync_always else REDUCED

    def check(self, sync: str) -> None:
        """See that it can do what ``[cluster] sync`` asks for.

        Raises:
            EngineTooOld: it cannot.
        """
        if self.version[:2] < OLDEST:
            raise EngineTooOld(self.path, self.text, "is older than 2.9", "Install 2.12 or newer")
        if sync == "always" and not self.can_sync_always:
            raise EngineTooOld(
                self.path,
                self.text,
                "cannot write each message to disk before it acknowledges it (sync_interval)",
                'Install 2.12 or newer; or set sync = "if-possible" in [cluster], if losing acknowledged '
                "messages in a power cut of several nodes is acceptable",
            )


def choose(configured: Path | None, sync: str) -> Engine:
    """The engine to run: the first that can do what ``sync`` asks for.

    Raises:
        EngineMissing: there is none, or the configured one cannot be run.
        EngineTooOld: none of those there can do it; names the first.
    """
    if configured is not None:
        path = configured.expanduser().absolute()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise EngineMissing(f"[cluster] engine: {path} is not a program that this user may run")
        found = [probe(path)]
    else:
        found = []
        for path in candidates():
            found.append(probe(path))
            if found[-1].can_sync_always:
                return found[-1]
    if not found:
        raise EngineMissing("there is no nats-server on PATH or among the programs of this Python")
    found[0].check(sync)
    return found[0]


def candidates(search_path: str | None = None) -> list[Path]:
    """The programs of this name: on PATH, beside this Python, where Debian puts it.

    Args:
        search_path: in place of PATH.
    """
    places = (search_path, str(Path(sys.executable).parent), "/usr/sbin")
    found = (shutil.which(PROGRAM, path=place) for place in places)
    return list(dict.fromkeys(Path(path) for path in found if path))


def parse_version(text: str) -> tuple[tuple[int, int, int], str]:
    """Numbers and text of ``nats-server: v2.15.1``.

    Raises:
        ValueError: no version is in it.
    """
    found = _VERSION.search(text)
    if found is None:
        raise ValueError(f"{text.strip()[:80]!r} names no version")
    major, minor, patch = (int(found[index]) for index in (1, 2, 3))
    return (major, minor, patch), found[0].removeprefix("v")


def probe(path: Path) -> Engine:
    """Run the program to find out what it is and can do.

    Raises:
        EngineMissing: it cannot be run, or is no nats-server.
    """
    try:
        version, text = parse_version(_output([str(path), "--version"])[1])
    except ValueError as exc:
        raise EngineMissing(f"{path} is no nats-server: {exc}") from exc
    with tempfile.TemporaryDirectory(prefix="sla-engine-") as directory:
        file = Path(directory) / "probe.conf"
        file.write_text(SYNC_PROBE.format(directory=directory))
        status, _ = _output([str(path), "-t", "-c", str(file)])
    return Engine(path, version, text, can_sync_always=status == 0)


def _output(command: Sequence[str]) -> tuple[int, str]:
    """Exit status, and standard output with errors.

    Raises:
        EngineMissing: it cannot be run or does not end.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise EngineMissing(f"{command[0]} cannot be run: {exc}") from exc
    return done.returncode, done.stdout.decode(errors="replace")
