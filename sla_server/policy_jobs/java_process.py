"""What runs in Java's place until it becomes Java: see that it ends with the process that started it.

``java_process.py DRIVER_JAVA DROPPED [argument ...]``, a script run without any of our packages: it asks the
kernel for SIGKILL at its parent's death, looks whether the driver (``SLA_SPARK_DRIVER``, a pid) has died
meanwhile, and executes the real program, which keeps the request. Java's own way, to end when its standard
input does, was seen to fail: an interrupted job left a Java process that held the terminal for good.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(program: str, dropped: str, arguments: list[str]) -> None:
    """Become ``program``, without the argument ``dropped``; does not return."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    driver = os.environ.get("SLA_SPARK_DRIVER", "")
    if driver.isdecimal():
        try:
            os.kill(int(driver), 0)
        except ProcessLookupError:
            raise SystemExit(1) from None
    os.execv(program, [program, *(item for item in arguments if item != dropped)])  # noqa: S606 - meant


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
