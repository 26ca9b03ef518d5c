"""The first steps of the README, as a reader takes them: each file written, each command run, in its order.

They run on a machine on which nothing of ours ever ran: with a network of its own, so that the ports which
the README names are free, and with empty directories in place of those in which former runs may have left
something. ``.venv`` of the reader's directory has the programs of this checkout. What a reader waits for is
waited for: a command that shows something is given again until it is there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from tests.support.paths import ROOT

LIMIT_S = 300
LOOK_S = 1.0  # between two tries: each is a process, and takes from what it waits for
NEEDED = ("unshare", "nsenter", "ip", "nbdkit", "nbdinfo")
EMPTY = ("/run", "/dev/shm", "/var/lib", "/var/tmp", "/root", "/home", "/etc/sla")
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


class Reader:
    """Types what the README says, in a directory and a network of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._background: list[subprocess.Popen[bytes]] = []
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        for name, target in scripts.items():
            module, function = target.split(":")
            text = (
                f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            )
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        kept = [Path(each).resolve() for each in (ROOT, folder, sys.prefix, sys.base_prefix)]
        empty = [
            each
            for each in EMPTY
            if Path(each).is_dir() and not any(path.is_relative_to(each) for path in kept)
        ]
        self._machine = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-euc", CLEAN, "sh", *empty], stdout=subprocess.PIPE
        )
        assert self._machine.stdout is not None
        assert self._machine.stdout.readline() == b"up\n"

    @property
    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLA", "XDG"))}
        return {**kept, "PYTHONPATH": str(ROOT), "HOME": str(self.folder), "COLUMNS": "200"}

    def _inside(self, command: str) -> list[str]:
        spaces = (
            f"--{kind}=/proc/{self._machine.pid}/ns/{name}"
            for kind, name in (("net", "net"), ("mount", "mnt"))
        )
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]  # with the mounts the place is lost
        return ["nsenter", *spaces, *there, *shlex.split(command)]

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            self._inside(command),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    def start(self, command: str, log: str) -> None:
        """A command that stays in the foreground, in a terminal of its own."""
        with (self.folder / log).open("wb") as output:
            self._background.append(
                subprocess.Popen(
                    self._inside(command),
                    cwd=self.folder,
                    env=self._environment,
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

    def close(self) -> None:
        """End what runs, newest first."""
        for process in reversed(self._background):
            process.send_signal(signal.SIGINT)  # Ctrl-C
            process.wait(LIMIT_S)
        self._machine.kill()
        self._machine.communicate()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root for a network of its own, and {', '.join(missing) or 'nothing else'}")
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def test_each_line_of_the_first_steps_does_what_it_says(reader: Reader) -> None:
    reader.start("nbdkit -f -i 127.0.0.1 -p 10900 memory 64M", "upstream.log")  # "any NBD server"
    for name, text in files().items():
        (reader.folder / name).write_text(text)
    for command in commands():
        if command.endswith("sla-server start"):
            reader.start(command, "server.log")
            reader.until(".venv/bin/sla-server status", "page http://127.0.0.1:")
        elif " run --config agent.toml" in command:
            reader.start(command, "agent.log")
            reader.until("nbdinfo nbd://127.0.0.1:10809/vol-17", "export-size: 67108864")
        elif command in SHOWN:
            reader.until(command, SHOWN[command])
        else:
            done = reader.run(command)
            if command in NOT_YET and done.returncode:
                assert NOT_YET[command] in done.stdout.lower(), done.stdout
                assert "Traceback" not in done.stdout
            else:
                assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"


def test_the_steps_are_found() -> None:
    """Were the README written in another way, the test above would run nothing."""
    assert list(files()) == ["agent.toml", "gold.yaml"]
    programs = [command.split()[0].rpartition("/")[2] for command in commands()]
    assert programs == ["sla-server", "sla-server", "gateway-agent", *["sla"] * 10]
