"""One run of another program with a time limit: what it wrote, or why that is of no use.

The program runs in a session of its own, with few variables of the environment, "/" as its directory and
nothing on its standard input. At the limit, or once ``cancelled`` says so, its whole process group is killed.
Of what it writes ``MOST_BYTES`` are kept; one that writes more is killed, too, unless its end is enough.
One that does not end even then (its I/O hangs in the kernel) is left alone and is not run a second time
beside itself: see ``CommandRunner``.

Thread: a runner belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
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
MOST_BYTES: Final = 32 << 20  # the names of a million volumes
_READ_BYTES: Final = 1 << 16
_TURN_S: Final = 0.2  # between two looks at ``cancelled``
_REAPED_S: Final = 2.0
_LATE: Final = "late"


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
        self._stuck: subprocess.Popen[bytes] | None = None

    def run(
        self,
        argv: Sequence[str],
        limit_s: float,
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        is_end_enough: bool = False,
    ) -> str:
        """Standard output of a program that ends with status 0.

        Args:
            argv: the program and its arguments.
            limit_s: how long it may take.
            variables: of its environment.
            is_end_enough: of much output the last ``MOST_BYTES`` are returned, and it is not killed.

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
                cwd="/",
                env={"PATH": PATH, "LC_ALL": "C.UTF-8", **variables},
                start_new_session=True,
            )
        except FileNotFoundError as exc:
            raise CommandFailed(argv[0], "there is no such program; install it") from exc
        except OSError as exc:
            raise CommandFailed(argv[0], f"it does not start: {exc.strerror}") from exc
        except ValueError as exc:
            raise CommandFailed(argv[0], f"it does not start: {exc}") from exc
        out, errors, why = bytearray(), bytearray(), ""
        try:
            why = self._converse(process, Deadline(limit_s), out, errors, is_end_enough)
        except BaseException:
            why = "it cannot be followed"
            raise
        finally:
            self._end(process, is_killed=bool(why))
        if why:
            why = f"it did not end within {limit_s:g} s" if why == _LATE else why
            raise CommandFailed(argv[0], f"{why}, and was killed")
        if process.returncode:
            problem = errors.decode(errors="replace")
            words = printable(" ".join(problem.split())[-REASON_CHARACTERS:], REASON_CHARACTERS)
            raise CommandFailed(
                argv[0], f"{describe_status(process.returncode)}: {words or 'it said nothing'}"
            )
        return out.decode(errors="replace")

    def _converse(
        self,
        process: subprocess.Popen[bytes],
        deadline: Deadline,
        out: bytearray,
        errors: bytearray,
        is_end_enough: bool,
    ) -> str:
        """Fill ``out`` and ``errors`` until it ends; why it must be killed, or nothing."""
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, out)
            selector.register(process.stderr, selectors.EVENT_READ, errors)
            while selector.get_map():
                for key, _ in selector.select(min(deadline.left_s(), _TURN_S)):
                    if piece := os.read(key.fd, _READ_BYTES):
                        key.data.extend(piece)
                    else:
                        selector.unregister(key.fileobj)
                if len(out) > MOST_BYTES and not is_end_enough:
                    return f"it wrote more than {MOST_BYTES >> 20} MiB"
                for kept, most in ((out, MOST_BYTES), (errors, _READ_BYTES)):
                    if len(kept) > 2 * most:
                        del kept[:-most]
                if why := self._why_over(deadline):
                    return why
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(deadline.left_s(), _TURN_S))
                return ""
            if why := self._why_over(deadline):
                return why

    def _why_over(self, deadline: Deadline) -> str:
        if self._cancelled():
            return "the process stops"
        return _LATE if deadline.passed else ""

    def _end(self, process: subprocess.Popen[bytes], *, is_killed: bool) -> None:
        if is_killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_REAPED_S)
            except subprocess.TimeoutExpired:
                self._stuck = process
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
