"""The first steps of the README, as a reader takes them: each file written, each command run, in its order.

They run on a machine on which nothing of ours ever ran: with a network of its own, so that the ports which
the README names are free, and with empty directories in place of those in which former runs may have left
something. ``.venv`` of the reader's directory has the programs of this checkout. ``make first-steps-try``
takes them in a bare Debian, with what comes before them: tests/bare_machine.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bare_machine import before
from tests.support.first_steps import OwnNetwork, Reader, commands, files
from tests.support.paths import ROOT

NEEDED = ("unshare", "nsenter", "ip", "nbdkit", "nbdinfo")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root for a network of its own, and {', '.join(missing) or 'nothing else'}")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, function = target.split(":")
        text = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    reader = Reader(OwnNetwork(tmp_path, (Path(sys.prefix), Path(sys.base_prefix))))
    yield reader
    reader.close()


def test_each_line_of_the_first_steps_does_what_it_says(reader: Reader) -> None:
    reader.take()


def test_the_steps_are_found() -> None:
    """Were the README written in another way, the test above would run nothing."""
    assert list(files()) == ["agent.toml", "gold.yaml"]
    programs = [command.split()[0].rpartition("/")[2] for command in commands()]
    assert programs == ["sla-server", "sla-server", "gateway-agent", *["sla"] * 10]


def test_what_comes_before_the_steps_is_found() -> None:
    """The same for a bare machine: what the README installs, and the command that sets up."""
    assert before() == ["apt-get update && apt-get install make", 'make demo ARGS="--for 60"']
