"""Log lines of real processes, whatever their stderr is: none waits, none dies of it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

LIMIT_S = 60

UNREAD = """
import os, sys
from pmdaemon.runtime import logs
read, write = os.pipe()
os.dup2(write, 2)
taken = [logs._write_if_ready(b"x" * 6000) for _ in range(100)]
print(sum(taken), taken[-1], len(os.read(read, 1 << 20)))
"""


def test_a_long_line_does_not_wait_for_a_reader_of_a_pipe_that_may_not_be_opened_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    total, last, held = map(int, done.stdout.split())
    assert (last, total) == (0, held)


WRITER = """
import sys, warnings
from pmdaemon.runtime import logs
import structlog, click
logs.configure("writer")
log = structlog.get_logger("w")
for number in range(2000):
    log.warning("line", number=number, filler="x" * 100)
print("bare print", file=sys.stderr)
sys.stderr.write("without an end of line")
warnings.warn("a warning")
click.echo("an echo", err=True)
sys.stdout.write("went on")
sys.stdout.flush()
sys.exit(int(sys.argv[1]))
"""


def run_writer(stderr: int, status: int = 7) -> tuple[int, bytes]:
    """Run the program above with that stderr; its exit status and stdout."""
    command = [sys.executable, "-c", WRITER, str(status)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout


def test_a_process_lives_with_a_full_disk() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert run_writer(full) == (7, b"went on")
    os.close(full)


def test_a_process_lives_with_a_pipe_without_reader() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert run_writer(write_end) == (7, b"went on")
    os.close(write_end)


def test_a_process_does_not_wait_for_a_pipe_that_is_not_read() -> None:
    read_end, write_end = os.pipe()
    assert run_writer(write_end) == (7, b"went on")  # 200 KB into a pipe of 64 KiB
    assert os.get_blocking(write_end), "others share this pipe, and expect it as it was"
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        numbers = [int(number) for number in re.findall(rb"number=(\d+)", pipe.read())]
    assert numbers == list(range(len(numbers)))


def test_a_process_does_not_wait_for_a_socket_that_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert run_writer(theirs.fileno()) == (7, b"went on")


def test_a_process_without_stderr_writes_its_lines_nowhere() -> None:
    script = f'exec "{sys.executable}" -c "$0" 3 2>&-'
    done = subprocess.run(["sh", "-c", script, WRITER], stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (3, b"went on")


def test_a_service_of_systemd_writes_entries_of_the_journal(tmp_path: Path) -> None:
    """stderr is the stream that systemd names: the journal's socket gets fields, stderr nothing."""
    program = (
        "import sys, structlog\n"
        "from pmdaemon.runtime import journal, logs\n"
        "journal.SOCKET = sys.argv[1]\n"
        "logs.configure('dbmanager')\n"
        "structlog.get_logger('x').error('file-damaged', path='/srv/a', bytes=7)\n"
        "print('a word of a library', file=sys.stderr)\n"
    )
    address = str(tmp_path / "journal")
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal, ours, theirs:
        journal.bind(address)
        journal.settimeout(LIMIT_S)
        status = os.fstat(theirs.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-c", program, address]
        done = subprocess.run(command, stderr=theirs.fileno(), env=environment, check=False, timeout=LIMIT_S)
        entry, printed = journal.recv(65_536).decode(), journal.recv(65_536).decode()
        theirs.close()
        assert (done.returncode, ours.recv(1)) == (0, b"")
    lines = entry.splitlines()
    assert lines[:3] == [
        "MESSAGE=file-damaged path=/srv/a bytes=7",
        "PRIORITY=3",
        "SYSLOG_IDENTIFIER=sla-dbmanager",
    ]
    assert lines[4:] == ["SLA_EVENT=file-damaged", "SLA_PATH=/srv/a", "SLA_BYTES=7"]
    assert printed == "MESSAGE=a word of a library\nPRIORITY=5\nSYSLOG_IDENTIFIER=sla-dbmanager\n"
