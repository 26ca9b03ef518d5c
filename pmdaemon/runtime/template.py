"""A template process: it has imported what children need, and forks each of them when asked.

    parent ──exec──► template: imports, then waits ──fork──► child (runs a module, as ``python -m`` would)

The parts of a server import nearly the same modules. Each by itself, that takes a second of processor and
tens of MB a part; forked from one process it is done once, and pages are shared until they are written to
(ADR 34).

A template is a program of its own (``open``), or a fork of its parent (``fork``), which then shares with it
and with the children what it has imported itself: the server's is one of its supervisor, and the PMDaemon
has one for its pairs.

The template uses no configuration and holds no descriptor but its socket, so that nothing of one child
is in another. It runs one thread, and refuses to fork otherwise. It remains the children's parent: it reaps
one when asked, so that the process id of a child that has ended is nobody else's until then. It ends when
its socket does; the children then have ``stop.ParentPipe`` as ever.

Messages (SOCK_SEQPACKET, JSON, one answer to each):

    (none)                                  -> {"ready": true}             once, after its imports
    {"command", "env", "fds", "session"}    -> {"pid"}, {"errno"}, {"refused"}; descriptors by SCM_RIGHTS
    {"reap": pid}                           -> {"status"} or {"errno"}     as ``subprocess`` gives it

The template says how a child has ended; if that is lost, the child itself: it writes its exit status to a
pipe, as the last thing that it does (``exit_status``). Only of one that was killed nobody knows then.

A child waits until the parent has its process id and lets it go, by a pipe of its own (the last descriptor).
A template that is lost between fork and answer would else leave a child that the parent knows nothing of,
beside the one that it starts instead: two parts would write to the same files.

Thread: the parent's only thread; the template has one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog

from pmdaemon.runtime import exit_status

log = structlog.get_logger("template")

ANSWER_S: Final = 2.0
"""A fork takes milliseconds; a template that does not answer by then is killed. The parent waits for it."""
MOST_BYTES: Final = 1 << 17
MOST_FDS: Final = 16
UNKNOWN_STATUS: Final = 255
"""Of a child that was killed when its template had ended, so that nobody can be asked for it."""
HARMLESS: Final = frozenset({"jemalloc_bg_thd"})
"""Threads of libraries that survive a fork: jemalloc, which Arrow brings, starts its own again."""
ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Of the template: numpy's library would start a thread a processor when it is imported."""


class NoTemplate(OSError):
    """It is not ready, or has ended: whoever asks starts the child by itself."""


class Template:
    """The parent's side.

    Args:
        modules: what it imports; one that cannot be imported is left to the child that needs it.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._lost = ""
        self._has_session = True

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Start it, if the host can; it is ready when it has imported everything."""
        self.close()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:
            log.warning("template-not-started", problem=exc.strerror)
            return
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pmdaemon.runtime.template", str(theirs.fileno()), *self._modules],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **ENVIRONMENT},
                    start_new_session=self._has_session,
                )
            except OSError as exc:
                ours.close()
                log.warning("template-not-started", problem=exc.strerror)
                return
        self._socket = ours

    def fork(self, *, has_session: bool) -> None:
        """Start it as a fork of this process; by ``open`` if this one runs threads.

        For the begin of a process, before it has signal handlers, logs or threads. So it logs nothing: where
        the host cannot fork just now, the next ``start`` says so. In the fork this call ends with SystemExit,
        as it does in the children: no frame around it may have work to do then.

        Args:
            has_session: else it, and those of its children that have no session of their own, are in the
                session and the process group of this process.
        """
        self._has_session = has_session
        if _other_threads():
            self.open()
            return
        self.close()
        gc.collect()
        gc.freeze()  # as in the template: it shares pages with us
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # it was closed when this program was started
                stream.flush()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return
        try:
            pid = _fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            ours.close()
            _become_template(theirs.detach(), self._modules, has_session=has_session)
        theirs.close()
        self._process, self._socket = _Fork(pid), ours

    def wait_ready(self, limit_s: float, *others: int) -> bool:
        """Wait until it is ready or has ended, or one of the others can be read; whether it is ready."""
        if self._socket is not None and not self._is_ready:
            poller = select.poll()
            for fd in (self._socket.fileno(), *others):
                poller.register(fd, select.POLLIN)
            if self._socket.fileno() in [fd for fd, _ in poller.poll(limit_s * 1000)]:
                try:
                    self._is_ready = bool(self._receive().get("ready"))
                except NoTemplate:
                    self.close()
        return self._is_ready

    def check(self) -> str:
        """Now and then: replace it if it has ended or does not run; returns what was wrong with it, or ""."""
        # One that fails at its imports is not tried again.
        if self._process is not None and self.wait_ready(0):
            status = self._process.poll()
            if status is not None or self._is_stopped():
                self._lose("it was stopped" if status is None else f"it ended with status {status}")
        lost, self._lost = self._lost, ""
        if lost and self._process is None:
            self.open()
        return lost

    def _lose(self, problem: str) -> None:
        log.error("template-lost", problem=problem, effect="children are executed until there is a new one")
        self._lost = problem
        self.close()

    def _is_stopped(self) -> bool:
        """Whether somebody has sent it SIGSTOP: it would never answer."""
        assert self._process is not None  # its callers look
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False  # it has ended, and says so by its socket
        return state in ("T", "t")

    def start(
        self, command: Sequence[str], env: Mapping[str, str], fds: Sequence[int], *, has_session: bool
    ) -> ForkedProcess:
        """Fork a child that runs ``python -m MODULE ...`` with this environment and these descriptors.

        Raises:
            NoTemplate: it is not ready, or the command is of another kind.
            OSError: the host cannot just now.
        """
        if command[:2] != [sys.executable, "-m"]:
            raise NoTemplate(f"{command[:2]} is no module of Python")
        if self._socket is None:
            self.open()  # for the next start
        if not self.wait_ready(0):
            raise NoTemplate("it is not ready")
        request = {
            "command": list(command),
            "env": dict(env),
            "fds": list(fds),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "session": has_session,
        }
        made: list[int] = []
        try:
            waits, go = ends = os.pipe2(os.O_CLOEXEC)
            made += ends
            status_fd, report_fd = ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            made += ends
            answer = self._ask(request, (*fds, report_fd, waits))
            if "refused" in answer:
                raise NoTemplate(answer["refused"])
            if "errno" in answer:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            process = ForkedProcess(self, answer["pid"], status_fd)
            made.remove(status_fd)  # the process's from now on
            os.write(go, b"\0")
            return process
        finally:
            for fd in made:
                os.close(fd)

    def reap(self, pid: int) -> int:
        """The exit status of a child that has ended."""
        try:
            return int(self._ask({"reap": pid}).get("status", UNKNOWN_STATUS))
        except NoTemplate:
            return UNKNOWN_STATUS

    def close(self) -> None:
        """End it; children that run go on."""
        self._is_ready = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        if self._socket is None:
            raise NoTemplate("it has ended")
        try:
            if self._is_stopped():
                raise NoTemplate("it was stopped")
            self._socket.settimeout(ANSWER_S)
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            return self._receive()
        except OSError as exc:
            self._lose(str(exc) or type(exc).__name__)
            raise NoTemplate("it has ended") from exc

    def _receive(self) -> dict[str, Any]:
        assert self._socket is not None  # its callers look
        data = self._socket.recv(MOST_BYTES)
        if not data:
            raise NoTemplate("it has ended")
        answer: dict[str, Any] = json.loads(data)
        return answer


class _Fork:
    """A template that is a fork of this process: what ``Template`` needs of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status if it has ended; it is reaped then."""
        return self._reap(os.WNOHANG)

    def kill(self) -> None:
        """Send SIGKILL; its id is no other process's until it is reaped."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Reap it."""
        self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # whoever started us ignores SIGCHLD, and so do we: the kernel reaps
                self._status = UNKNOWN_STATUS
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class ForkedProcess:
    """A child of the template. See ``children.Process``.

    Raises:
        OSError: it cannot be followed, and was killed.

    Args:
        template: its parent.
        pid: its process id.
        status_fd: where it says its exit status when it ends; closed here at its end.
    """

    def __init__(self, template: Template, pid: int, status_fd: int) -> None:
        self.pid = pid
        self._template = template
        self._parent = template.pid
        self._status_fd = status_fd
        self._status: int | None = None
        try:
            self._pid_fd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            template.reap(pid)
            raise

    def wait(self) -> int:
        """See ``Process``."""
        if self._status is None:
            poller = select.poll()
            poller.register(self._pid_fd, select.POLLIN)
            poller.poll()
            # One that was made since is no parent of it, and may still import.
            is_there = self._template.pid == self._parent
            status = self._template.reap(self.pid) if is_there else UNKNOWN_STATUS
            if status == UNKNOWN_STATUS:
                status = exit_status.read(self._status_fd, UNKNOWN_STATUS)
            self._status = status
            os.close(self._pid_fd)
            os.close(self._status_fd)
        return self._status

    def kill(self) -> None:
        """Send SIGKILL if it has not been reaped."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, /) -> None:
        """See ``Process``."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, number)


def main(fd: int, modules: Sequence[str]) -> None:
    """The template: imports, then serves until its socket ends; in a child, runs what was asked for."""
    from setproctitle import setproctitle

    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends it with its parent
    # A SIGTERM to all of a group does so, too; one to a child just forked waits until it can take it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for module in modules:
        with contextlib.suppress(Exception):  # the child that needs it says what is wrong with it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would write to every object, so that no page stayed shared
    with socket.socket(fileno=fd) as link:
        try:
            request = _serve(link)
        except ConnectionError:  # the parent was killed, with an answer unread
            request = None
    if request is not None:
        *received, report_fd, waits = request["received"]
        if not os.read(waits, 1):  # nobody knows of this child
            os._exit(UNKNOWN_STATUS)
        os.close(waits)
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])  # the template was made before
        above = max((*received, *request["fds"], report_fd, 2)) + 1
        exit_status.report_to(fcntl.fcntl(report_fd, fcntl.F_DUPFD_CLOEXEC, above))
        os.close(report_fd)
        _place(received, request["fds"])
        signal.signal(signal.SIGINT, on_interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        setproctitle(" ".join(request["command"]))
        with exit_status.reported():
            _run(request)


def _become_template(fd: int, modules: Sequence[str], *, has_session: bool) -> NoReturn:
    """In a fork of the parent: keep nothing of it but what it has imported."""
    from setproctitle import setproctitle

    os.closerange(3, fd)
    os.closerange(max(3, fd + 1), os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)
    if has_session:
        os.setsid()
    setproctitle(" ".join([sys.executable, "-m", "pmdaemon.runtime.template", *modules]))
    try:
        main(fd, modules)
        sys.exit()
    finally:  # one that has waited all the time would end it now: a frame above unblocks it (``blocked``)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _serve(link: socket.socket) -> dict[str, Any] | None:
    """Answer until the parent is gone: None; or, in a child, its request."""
    link.send(json.dumps({"ready": True}).encode())
    while True:
        data, fds, *_ = socket.recv_fds(link, MOST_BYTES, MOST_FDS)
        if not data:
            return None
        request = json.loads(data)
        answer: dict[str, Any]
        try:
            if "reap" in request:
                answer = {"status": os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])}
            elif threads := _other_threads():
                answer = {"refused": f"it runs threads: {', '.join(threads)}"}
            elif (pid := _fork()) == 0:
                return {**request, "received": fds}
            else:
                answer = {"pid": pid}
        except OSError as exc:
            answer = {"errno": exc.errno or 0}
        for each in fds:
            os.close(each)
        link.send(json.dumps(answer).encode())


def _other_threads() -> list[str]:
    """Names of the threads that would be missing in a child."""
    tasks = Path("/proc/self/task")
    names = {task.name: (task / "comm").read_text(errors="replace").strip() for task in tasks.iterdir()}
    del names[str(os.getpid())]
    return sorted(name for name in names.values() if name not in HARMLESS)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the harmless thread, too
        return os.fork()


def _place(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Give descriptors the numbers that the environment names."""
    above = max((*received, *wanted, 2)) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def _run(request: Mapping[str, Any]) -> None:
    """Become the child: session, environment, module."""
    _python, _m, module, *arguments = request["command"]
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
