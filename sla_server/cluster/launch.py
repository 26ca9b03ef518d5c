"""Becomes the engine, after asking the kernel to end it with the process that started it.

    python -m sla_server.cluster.launch PARENT_PID PROGRAM ARGUMENT...

nats-server cannot watch a pipe as our own processes do. Without this a supervisor that is killed would leave
an engine behind that holds the ports and the store.
"""

from __future__ import annotations

import os
import sys

from pmdaemon.runtime.stop import end_with_parent


def main() -> None:
    """See the module."""
    parent, program, *arguments = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(parent):  # it died before the kernel was asked
        raise SystemExit(1)
    os.execv(program, [program, *arguments])  # noqa: S606 - the program that ``engine`` has found


if __name__ == "__main__":
    main()
