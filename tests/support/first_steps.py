"""The first steps of the README: its files, its commands, and a reader who takes them in their order.

The reader is somewhere: ``OwnNetwork`` is this machine with a network and empty directories of its own
(tests/e2e/test_first_steps.py), ``BareRoot`` a Debian in which nothing of ours ever ran
(tests/bare_machine.py).
What a reader waits for is waited for: a command that shows something is given again until it is there.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pmdaemon.runtime.clock import Deadline
from tests.support.paths import ROOT

LIMIT_S = 300
LOOK_S = 1.0  # between two tries: each is a process, and takes from what it waits for
EMPTY = ("/run", "/dev/shm", "/var/lib", "/var/tmp", "/root", "/home", "/etc/sla")
UPSTREAM = "nbdkit -f -i 127.0.0.1 -p 10900 memory 64M"  # "any NBD server"
CLIENT = "nbdinfo nbd://127.0.0.1:10809/vol-17"
CLEAN = """
for folder in "$@"; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
ip link set lo up
echo up
exec sleep infinity
"""
SHOWN = {  # what a command shows when the steps before it have taken effect
    ".venv/bin/sla get volumes": "vol-17",
    ".venv/bin/sla top": "vol-17",
    ".venv/bin/sla get slas": "erp-gold",
    ".venv/bin/sla why vol-17": "vol-17",
}
NOT_YET = {  # there is too little to learn from in the first minutes, and no policy to enforce: each says so
    ".venv/bin/sla policy run": "nothing",
    ".venv/bin/sla mode enforce --policy": "policy",
}


def section() -> str:
    """The README's first steps."""
    found = re.search(
        r"^## First steps.*?(?=^## )", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    return found[0]


def commands() -> list[str]:
    """All commands of the steps, in the order in which they are read."""
    return [found.strip() for found in re.findall(r"(\.venv/bin/[a-z-]+ [^`\n#]+)", section())]


def files() -> dict[str, str]:
    """The files that the reader writes: a comment in their first line names them."""
    blocks = re.findall(r"^ *```\w+\n(.*?)^ *```", section(), re.MULTILINE | re.DOTALL)
    texts = [textwrap.dedent(block) for block in blocks]
    return {text.split("\n", 1)[0].removeprefix("# "): text for text in texts}


class Place(Protocol):
    """Where a reader sits: a directory, as seen from here, and how a command is run in it."""

    folder: Path

    def product(self, command: Sequence[str]) -> list[str]:
        """The command as it is started from here, to run in the directory."""
        ...

    def neighbour(self, command: Sequence[str]) -> list[str]:
        """The same for storage and clients of the reader, which have the place's network only."""
        ...

    def environment(self) -> dict[str, str]: ...

    def close(self) -> None: ...


class OwnNetwork:
    """This machine with a network of its own, and empty directories where former runs may have left files."""

    def __init__(self, folder: Path, kept: Sequence[Path] = ()) -> None:
        self.folder = folder
        stay = [path.resolve() for path in (ROOT, folder, *kept)]
        empty = [
            each
            for each in EMPTY
            if Path(each).is_dir() and not any(path.is_relative_to(each) for path in stay)
        ]
        self._machine = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-euc", CLEAN, "sh", *empty], stdout=subprocess.PIPE
        )
        assert self._machine.stdout is not None
        assert self._machine.stdout.readline() == b"up\n"

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLA", "XDG"))}
        return {**kept, "PYTHONPATH": str(ROOT), "HOME": str(self.folder), "COLUMNS": "200"}

    def product(self, command: Sequence[str]) -> list[str]:
        spaces = (
            f"--{kind}=/proc/{self._machine.pid}/ns/{name}"
            for kind, name in (("net", "net"), ("mount", "mnt"))
        )
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]  # with the mounts the place is lost
        return ["nsenter", *spaces, *there, *command]

    def neighbour(self, command: Sequence[str]) -> list[str]:
        return self.product(command)

    def close(self) -> None:
        self._machine.kill()
        self._machine.communicate()


class Reader:
    """Types what the README says, in the order in which it is read."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._background: list[subprocess.Popen[bytes]] = []

    def _inside(self, command: str) -> list[str]:
        words = shlex.split(command)
        return self.place.product(words) if words[0].startswith(".venv/") else self.place.neighbour(words)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            self._inside(command),
            cwd=self.place.folder,
            env=self.place.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def start(self, command: str, log: str) -> None:
        """A command that stays in the foreground, in a terminal of its own."""
        with (self.place.folder / log).open("wb") as output:
            self._background.append(
                subprocess.Popen(
                    self._inside(command),
                    cwd=self.place.folder,
                    env=self.place.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def until(self, command: str, text: str) -> str:
        """Give a command until it ends well and shows the text."""
        deadline = Deadline(LIMIT_S)
        while (done := self.run(command)).returncode != 0 or text not in done.stdout:
            assert not deadline.passed, f"{command}: {done.returncode}\n{done.stdout}"
            time.sleep(LOOK_S)
        return done.stdout

    def take(self) -> None:
        """Write each file of the first steps, run each command, and check what it shows."""
        self.start(UPSTREAM, "upstream.log")
        for name, text in files().items():
            (self.place.folder / name).write_text(text)
        for command in commands():
            if command.endswith("sla-server start"):
                self.start(command, "server.log")
                self.until(".venv/bin/sla-server status", "page http://127.0.0.1:")
            elif " run --config agent.toml" in command:
                self.start(command, "agent.log")
                self.until(CLIENT, "export-size: 67108864")
            elif command in SHOWN:
                self.until(command, SHOWN[command])
            else:
                done = self.run(command)
                if command in NOT_YET and done.returncode:
                    assert NOT_YET[command] in done.stdout.lower(), done.stdout
                    assert "Traceback" not in done.stdout
                else:
                    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"

    def close(self) -> list[int]:
        """End what runs, newest first: the statuses."""
        for process in reversed(self._background):
            process.send_signal(signal.SIGINT)  # Ctrl-C
            process.wait(LIMIT_S)
        self.place.close()
        return [process.returncode for process in self._background]
