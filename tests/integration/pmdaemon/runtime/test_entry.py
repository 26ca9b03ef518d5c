"""Begin and end of a command: no traceback at Ctrl-C at any moment, and nothing open to others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
COMMAND = "import click\n@click.command()\ndef cli():\n    pass\n"


def run(folder: Path, module: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "victim.py").write_text(module)
    code = f"{before}\nfrom pmdaemon.runtime import entry\nentry.run('victim', 'victim')"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "status"),
    [
        (INTERRUPT + COMMAND, -signal.SIGINT),  # while it imports
        (COMMAND.replace("pass", INTERRUPT.replace("\n", "; ")), 1),  # while it runs: click says "Aborted!"
        (
            COMMAND.replace(
                "    pass", "    import atexit, signal\n    atexit.register(signal.raise_signal, 2)"
            ),
            -2,
        ),
    ],
)
def test_an_interrupt_leaves_no_traceback(tmp_path: Path, module: str, status: int) -> None:
    done = run(tmp_path, module)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


def test_processes_of_a_command_import_nothing_from_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anybody can put a module that an administrator's command, or the server's user, would run."""
    foreign, own = tmp_path / "tmp", tmp_path / "own"
    foreign.mkdir()
    own.mkdir()
    (foreign / "planted.py").write_text("print('it runs')")
    monkeypatch.chdir(foreign)
    start = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'planted'])"
    done = run(own, COMMAND.replace("pass", start))
    assert done.stdout == ""
    assert "No module named planted" in done.stderr


def test_an_interrupt_that_the_shell_ignores_stays_ignored(tmp_path: Path) -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run(tmp_path, INTERRUPT + COMMAND, before=ignored).returncode == 0


def test_what_a_command_makes_is_closed_to_others(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert run(tmp_path, COMMAND.replace("pass", f"open({str(made)!r}, 'w').close()")).returncode == 0
    assert made.stat().st_mode & 0o777 == 0o600


def test_no_process_imports_what_it_never_uses() -> None:
    """rich is installed with the command line; structlog would bring it into every process."""
    mains = ("pmdaemon.cli", "gateway_agent.link.main", "gateway_agent.nbd.plane", "sla_server.process")
    said = "print([name for name in ('rich', 'sqlalchemy') if name in sys.modules])"
    code = f"import sys, {', '.join(mains)}; {said}; import structlog, rich; sys.exit(not rich)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    agent = f"import sys, gateway_agent.cli; {said.replace('sqlalchemy', 'numpy')}"
    assert subprocess.run([sys.executable, "-c", agent], capture_output=True, check=True).stdout == b"[]\n"


BESIDE = """
import threading
from pmdaemon.runtime import logs
logs.configure("beside")
thread = threading.Thread(target=lambda: 1 // 0, name="apprise")
thread.start()
thread.join()
class Broken:
    def __del__(self):
        raise ValueError("no end")
Broken()
"""


def test_what_a_thread_of_a_library_or_the_interpreter_meets_is_a_line_and_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BESIDE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    died, ignored = done.stderr.splitlines()
    assert 'event=thread-died thread=apprise error="ZeroDivisionError: ' in died
    assert 'event=exception-ignored where=Broken.__del__ error="ValueError: no end"' in ignored
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert all("Traceback" in file.read_text() for file in files)
