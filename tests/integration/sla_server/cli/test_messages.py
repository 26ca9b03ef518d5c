"""Messages on a real terminal: folded between words; in a file or a pipe they stay as they are."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "sla_server.cli", "get", "slices")
"""It is refused before any server is asked."""


def said_on_a_terminal(columns: int) -> list[str]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    with subprocess.Popen(COMMAND, stderr=theirs, stdout=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        text = b""
        while piece := _read(ours):
            text += piece
        assert process.wait() == 2
    os.close(ours)
    return text.decode().replace("\r", "").splitlines()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed
        return b""


def test_a_message_is_as_wide_as_the_terminal_and_whole_in_a_file(tmp_path: Path) -> None:
    lines = said_on_a_terminal(60)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    path = tmp_path / "said"
    with path.open("wb") as file:
        assert subprocess.run(COMMAND, stderr=file, check=False).returncode == 2
    (whole,) = path.read_text().splitlines()
    assert whole.split() == " ".join(lines).split()
