"""One run of another program with a time limit: what it wrote, or why that is of no use.

The program runs in a session of its own, with few variables of the environment, "/" as its directory and
nothing on its standard input. At the limit, or once ``cancelled`` says so, its whole process group is killed.
One that does not end even then (its I/O hangs in the kernel) is left alone and is not run a second time
beside itself: see ``CommandRunner``.

Thread: a runner belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pmdaemon.errors import SlaError
from pmdaemon.runtime.children import describe_status
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import printable

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REASON_CHARACTERS: Final = 300
_TURN_S: Final = 0.2  # between two looks at ``cancelled``
_REAPED_S: Final = 2.0


class CommandFailed(SlaError):
    """A program did not start, did not end in time, or ended with another status than 0."""

    retryable = True

    def __init__(self, program: str, problem: str) -> None:
        self.program = program
        self.problem = problem
        super().__init__(f"{program}: {problem}")


class CommandRunner:
    """See the module. State: the program of the last run, while it has not ended although it was killed."""

    def __init__(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._cancelled = cancelled
        self._stuck: subprocess.Popen[str] | None = None

    def run(
        self, argv: Sequence[str], limit_s: float, variables: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Standard output of a program that ends with status 0; ``variables`` of its environment.

        Raises:
            CommandFailed: it did not; the text says why, with the end of its standard error.
        """
        if self._stuck is not None and self._stuck.poll() is None:
            raise CommandFailed(
                argv[0], f"the run before, process {self._stuck.pid}, hangs and cannot be killed"
            )
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd="/",
                env={"PATH": PATH, "LC_ALL": "C.UTF-8", **variables},
                start_new_session=True,
            )
        except FileNotFoundError as exc:
            raise CommandFailed(argv[0], "there is no such program; install it") from exc
        except OSError as exc:
            raise CommandFailed(argv[0], f"it does not start: {exc.strerror}") from exc
        said = self._converse(process, Deadline(limit_s))
        if said is None:
            self._kill(process)
            why = "the process stops" if self._cancelled() else f"it did not end within {limit_s:g} s"
            raise CommandFailed(argv[0], f"{why}, and was killed")
        out, problem = said
        if process.returncode:
            words = printable(" ".join(problem.split())[-REASON_CHARACTERS:], REASON_CHARACTERS)
            raise CommandFailed(
                argv[0], f"{describe_status(process.returncode)}: {words or 'it said nothing'}"
            )
        return out

    def _converse(self, process: subprocess.Popen[str], deadline: Deadline) -> tuple[str, str] | None:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=min(max(deadline.left_s(), 0.0), _TURN_S))
            if deadline.passed or self._cancelled():
                return None

    def _kill(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_REAPED_S)
        except subprocess.TimeoutExpired:
            self._stuck = process
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
