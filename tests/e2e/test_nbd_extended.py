"""Extended headers by QEMU 8.2 and newer, as client and as storage; Debian 12 has an older one.

Every wait is for an event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.planes import Processes, can_connect, upstream, wait_for

pytestmark = pytest.mark.e2e
SINCE = (8, 2)
GIB = 1 << 30


def version_of(tool: str) -> tuple[int, ...]:
    if not shutil.which(tool):
        return ()
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


@pytest.fixture
def run(run: Processes) -> Processes:
    for tool in ("qemu-nbd", "qemu-io", "qemu-img"):
        if version_of(tool) < SINCE:
            pytest.skip(f"{tool} has no extended headers here: they come with QEMU 8.2")
    return run


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_request_zeroes_more_than_four_gib_and_is_counted_once(run: Processes, tmp_path: Path) -> None:
    with open(tmp_path / "disk.img", "wb") as file:
        file.truncate(128 * GIB)
    image, far = str(tmp_path / "disk.img"), tmp_path / "up.sock"
    run.start("qemu-nbd", "-t", "-e", "0", "-f", "raw", "--discard=unmap", "-k", str(far), image)
    wait_for("qemu-nbd listens", lambda: far.exists() and can_connect(far))
    run.plane([upstream(tmp_path)], client_rule="address")
    link = run.link()
    uri = f"nbd+unix:///vol-1?socket={tmp_path}/gw.sock"
    wait_for("the upstream was asked", lambda: "volume-known" in run.logs())
    zeroes = "write -z -u -n 1G 100G"
    script = ("write -P 5 1M 1M", "write -P 5 2G 1M", "aio_write -P 6 120G 1M", "aio_flush", zeroes)
    script = (*script, "read -P 5 1M 1M", "read -P 0 2G 1M", "read -P 6 120G 1M")
    call("qemu-io", "-f", "raw", *(part for each in script for part in ("-c", each)), uri)
    ours = link.totals()["vol-1", "uid-0"]
    assert (ours["writes"], ours["write_bytes"], ours["reads"], ours["errors"]) == (3, 3 << 20, 3, 0)
    assert ours["others"] < 20, "beside some flushes; in requests below 4 GiB it would be 25 and more"
    # Zeroes are charged like data: 100 GiB of them, and nothing else here is large.
    assert 100 * GIB // 65_536 < ours["cost_milli"] // 1000 < 100 * GIB // 65_536 + 1000
    call("qemu-img", "compare", "-f", "raw", "-F", "raw", image, uri)
    with open(image, "rb") as file:
        file.seek(120 * GIB)
        assert file.read(1 << 20) == b"\6" * (1 << 20)
