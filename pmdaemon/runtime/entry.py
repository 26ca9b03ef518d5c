"""The begin and end of every command: ``sla``, ``sla-server``, ``pmdaemon`` and ``gateway-agent``.

Ctrl-C ends a command without a traceback at any moment, also during its imports, which take most of a short
command's time: until the command itself runs, the signal has its plain effect. Everything a command makes is
closed to other users (umask 077); what is meant for others is opened explicitly. Processes of ours that it
starts (``python -m``) import nothing from the directory in which it was started: that may be /tmp, where
any user can put a module of a library's name.

Imports nothing of ours at its top, so that it acts first.
"""

from __future__ import annotations

import importlib
import os
import signal

PRIVATE_UMASK = 0o077


def run(module: str, program: str) -> None:
    """Run ``cli`` of the named module as the command ``program``; does not return."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # nohup, or a job in the background
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(PRIVATE_UMASK)
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads do nothing for us, and hinder forks
    command = importlib.import_module(module).cli
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(prog_name=program)
    finally:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
