"""Children of crash tests, made as copies of a process that has already imported what they need.

A new interpreter spends two seconds of CPU on SQLAlchemy and pyarrow before it does anything that a test
could kill; a copy spends none. ``python forks.py MODULE`` imports the module, starts no thread, and forks for
each line of its standard input: the child calls ``main`` of the module with the arguments in that line, and
ends. The line of the answer is its exit status, negative where a signal (its own SIGKILL) ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 600.0  # ends a child that hangs; on a machine with other work one takes a minute and more


class Children:
    """Runs ``main`` of a module of tests in one child after the other. Use as a context manager.

    Attributes:
        limit_s: a child that has not ended after so long is killed.
    """

    def __init__(self, module: str) -> None:
        self.limit_s = LIMIT_S
        command = [sys.executable, __file__, module]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.communicate()  # closes its standard input: it ends

    def run(self, *arguments: str | float) -> tuple[int, str]:
        """One child; returns its exit status as ``subprocess`` gives it, and what it wrote."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            limit = threading.Timer(self.limit_s, os.killpg, (self._server.pid, signal.SIGKILL))
            limit.start()
            try:
                print(json.dumps([output.name, arguments]), file=self._server.stdin, flush=True)
                answer = self._server.stdout.readline()
            finally:
                limit.cancel()
                limit.join()
            assert answer, f"the child did not end within {self.limit_s:g} s: {output.read()}"
            return int(answer), output.read()


def serve(name: str) -> None:
    """Fork for each line until there are no more."""
    module = importlib.import_module(name)
    for line in sys.stdin:
        path, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            live(module, path, arguments)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def live(module: Any, path: str, arguments: list[Any]) -> None:
    """The child's life; does not return."""
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        module.main(*arguments)
        status = 0
    except BaseException:  # noqa: BLE001 - a child must not go on as the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve(sys.argv[1])
