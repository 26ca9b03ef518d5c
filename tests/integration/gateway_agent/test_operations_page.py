"""The commands of docs/operations/gateway.md do what the page says, in the order in which it has them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port

PAGE = ROOT / "docs" / "operations" / "gateway.md"
LIMIT_S = 600
GRACE_S = 120
PIDS = ("front.pid", "nbdkit.pid", "agent.pid")


def tried_blocks():
    return re.findall(r"^```sh tried\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_commands_of_the_page_work_one_after_another(tmp_path):
    blocks = tried_blocks()
    assert len(blocks) >= 10
    commands = Path(sys.executable).parent
    script = "set -eu -o pipefail\n" + "".join(
        f"echo '--- block {number}'\n{block}" for number, block in enumerate(blocks)
    )
    script = script.replace("/srv/", f"{tmp_path}/").replace("10809", str(free_port()))
    environment = {**os.environ, "PATH": f"{commands}:/usr/sbin:{os.environ['PATH']}"}
    # A session of its own: what a failed page leaves running is ended with it.
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", script], stdout=said, stderr=said, env=environment, start_new_session=True
        )
    try:
        status = process.wait(LIMIT_S)
    finally:
        left = [name for name in PIDS if end(tmp_path / name)]
        if process.poll() is None:
            process.kill()
            process.wait()
        shown = (tmp_path / "said").read_text()
        print(shown, (tmp_path / "agent.log").read_text() if (tmp_path / "agent.log").exists() else "")
    assert status == 0
    assert left == [], "the page ends what it starts"
    assert f"--- block {len(blocks) - 1}" in shown
    assert "Pattern verification failed" not in shown
    assert "upgrade  done" in shown
    assert shown.count("67108864") == 2, "the volume has the size of its storage"


def end(file):
    """End what the page has started; whether it had not done so itself, some seconds ago."""
    if not file.exists():
        return False
    program = Path(f"/proc/{int(file.read_text())}/cmdline")
    for _ in range(GRACE_S * 20):
        said = program.read_bytes() if program.exists() else b""
        if b"nbdkit" not in said and b"gateway" not in said:
            return False
        time.sleep(0.05)
    os.kill(int(file.read_text()), signal.SIGTERM)
    return True


@pytest.mark.parametrize("name", ["README.md", "docs/operations/install.md", "docs/operations/agent.md"])
def test_the_page_is_found(name):
    assert "gateway.md" in (ROOT / name).read_text()
