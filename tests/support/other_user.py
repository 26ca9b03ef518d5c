"""A listener, or a client, of another user of this machine: for root, who alone can start such a process."""

from __future__ import annotations

import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NOBODY: Final = "nobody"
UID: Final = pwd.getpwnam(NOBODY).pw_uid
_LISTENS: Final = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = [listener.accept()] if sys.argv[2] == "accepts" else []
if kept:
    print("accepted", flush=True)
sys.stdin.read()
"""
_DIALS: Final = """
import encodings.idna, os, socket, sys
os.setuid(int(sys.argv[1]))
with socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=60) as connection:
    try:
        print(len(connection.recv(64)))
    except ConnectionError:
        print(0)
"""


@contextmanager
def listening(*, accepts: bool = False) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Port, and the process; with ``accepts`` it prints a line when it has taken a connection."""
    command = [sys.executable, "-I", "-S", "-c", _LISTENS, str(UID), "accepts" if accepts else "listens"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


def dialling(port: int) -> subprocess.Popen[str]:
    """A process that dials, and prints how many bytes came."""
    command = [sys.executable, "-I", "-S", "-c", _DIALS, str(UID), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
