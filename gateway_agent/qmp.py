"""Connections to QEMU's monitors (QMP), in a thread of their own with a loop of their own.

    link's loop                       thread ``qmp``, asyncio
    post(name, request) ──────────►  queue of that monitor ──► commands, one after another
    inbox ◄── connected, answer, lost ◄───────────────────────┘

The link never waits: requests and answers pass through queues, and the descriptor of ``inbox`` is readable
while something is in it. A request is answered whole or not at all: when the connection ends, ``QmpLost``
comes instead of the answers that are still open. Every step has a limit of time; a lost monitor is dialled
again with backoff, for ever. A socket of QMP serves one client at a time: a second one is not refused, but
waits for its greeting until the first has gone.

``QmpConnected.daemon`` names the process behind the socket, so that a QEMU that was started again is not
taken for one that was away for a moment.

The protocol is that of the library ``qemu.qmp``. Its log lines are left out; what they say is in ``QmpLost``.
Threads: ``post`` and ``stop`` from the link's loop; all else in the thread ``qmp``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from qemu.qmp import ConnectError, ExecuteError, QMPClient, QMPError, Runstate

from gateway_agent.errors import QemuUnusable
from gateway_agent.qemu import (
    DRIVES,
    NO_LIMITS,
    Command,
    QmpAnswer,
    QmpConnected,
    QmpEvent,
    QmpLost,
    QmpRequest,
    Refusal,
    ThrottleGroup,
    drives_in,
)
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import printable
from pmdaemon.runtime.threads import ThreadGroup, ThreadInbox

CONNECT_S: Final = 5.0  # QEMU greets within milliseconds, unless its main loop hangs or serves another client
ANSWER_S: Final = 5.0  # for a request; each of its commands takes some 0.1 ms
CLOSE_S: Final = 1.0
RETRY_S: Final = (0.5, 5.0)  # a VM that starts is found within seconds; one that is off costs next to nothing
LOOK_S: Final = 1.0  # how soon an idle connection that has ended is noticed
BEAT_S: Final = 5.0
MOST_CHARACTERS: Final = 200  # of what QEMU says in words
MOST_ANSWER_BYTES: Final = 8 << 20  # of one line; the statistics of a drive with histograms take some 4 KB
STOP_S: Final = 3.0
RELEASE_S: Final = 3.0  # of one monitor; the agent's parent waits for it
GONE: Final = "QEMU has closed the connection"
_PEER: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Monitor:
    """One socket. State: the requests that wait, of this connection."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.requests: asyncio.Queue[QmpRequest] = asyncio.Queue()


class QmpThread:
    """See the module.

    Args:
        sockets: path of each monitor, by name.
        on_failure: called in the thread if it dies.
    """

    def __init__(
        self,
        sockets: Mapping[str, str],
        clock: Clock,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.inbox: ThreadInbox[QmpEvent] = ThreadInbox()
        self._sockets = dict(sockets)
        self._clock = clock
        self._threads = ThreadGroup(on_failure)
        self._monitors: dict[str, _Monitor] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._must_stop = False

    def start(self) -> None:
        """Begin to dial."""
        _be_quiet()
        self._threads.start("qmp", lambda: asyncio.run(self._main()))

    def post(self, name: str, request: QmpRequest) -> None:
        """Have a request carried out. Dropped if the monitor is not connected: ``QmpLost`` says so."""
        loop, monitor = self._loop, self._monitors.get(name)
        if loop is not None and monitor is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(monitor.requests.put_nowait, request)

    def stop(self) -> None:
        """End the connections and the thread.

        Raises:
            ThreadDidNotStop: it did not end in time.
        """
        self._must_stop = True  # before the loop is looked for: _main does it the other way round
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._threads.join(STOP_S)

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        self._monitors = {name: _Monitor(name, path) for name, path in self._sockets.items()}
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(monitor)) for monitor in self._monitors.values()]
            while not self._stopping.is_set() and not self._must_stop:
                watchdog.beat()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), BEAT_S)
            for task in tasks:
                task.cancel()

    async def _keep(self, monitor: _Monitor) -> None:
        """Dial, serve, and dial again."""
        backoff = Backoff(*RETRY_S, 0.2, random.Random())  # noqa: S311 - spreads retries, guards nothing
        while True:
            try:
                client, daemon = await connect(monitor.path)
            except QemuUnusable as exc:
                self.inbox.put(QmpLost(monitor.name, exc.problem, was_connected=False, is_off=is_off(exc)))
            else:
                monitor.requests = asyncio.Queue()  # what waits is of a connection before
                self.inbox.put(QmpConnected(monitor.name, daemon))
                backoff.succeeded()
                try:
                    reason = await self._serve(monitor, client)
                finally:
                    await close(client)
                self.inbox.put(QmpLost(monitor.name, reason, was_connected=True, is_off=reason == GONE))
            await asyncio.sleep(backoff.failed())

    async def _serve(self, monitor: _Monitor, client: QMPClient) -> str:
        """Carry out requests until the connection ends; returns why it did."""
        waiting = asyncio.ensure_future(monitor.requests.get())
        try:
            while client.runstate == Runstate.RUNNING:
                await asyncio.wait((waiting,), timeout=LOOK_S)
                if not waiting.done():
                    continue
                request = waiting.result()
                waiting = asyncio.ensure_future(monitor.requests.get())
                async with asyncio.timeout(ANSWER_S):
                    results = [await execute(client, command) for command in request.commands]
                at_ns = self._clock.monotonic_ns()
                self.inbox.put(QmpAnswer(monitor.name, request.number, at_ns, results))
        except TimeoutError:
            return f"no answer within {ANSWER_S:.0f} s: QEMU hangs, or its host is overloaded"
        except QMPError:  # what the library says names its own parts
            return GONE
        finally:
            waiting.cancel()
        return GONE


def _be_quiet() -> None:
    """The library logs each failed dial as an error, once a try."""
    logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)


async def connect(path: str) -> tuple[QMPClient, str]:
    """A session with the monitor at a path, and the identity of its process.

    Raises:
        QemuUnusable: there is none, or it does not greet.
    """
    client = QMPClient(readbuflen=MOST_ANSWER_BYTES)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as exc:  # out of descriptors: the other monitors go on
        raise QemuUnusable(path, _in_words(exc)) from exc
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, path)
            daemon = _process_behind(sock)
            await client.connect(sock)
    except TimeoutError:
        sock.close()
        raise QemuUnusable(
            path,
            f"no greeting within {CONNECT_S:.0f} s: another program may use this monitor, which serves one "
            "at a time. Give the agent one of its own",
        ) from None
    except (OSError, ConnectError) as exc:
        sock.close()
        raise QemuUnusable(path, _in_words(exc)) from exc
    # Nothing here listens to events, and the library would keep them all.
    client.events.event_filter = lambda _event: False
    return client, daemon


def _in_words(exc: OSError | ConnectError) -> str:
    cause = exc.exc if isinstance(exc, ConnectError) else exc
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        return "no QEMU process listens there"
    if isinstance(cause, PermissionError):
        return "not permitted: run the agent as root, or as the user of QEMU"
    if isinstance(cause, EOFError):
        return GONE
    return (
        getattr(cause, "strerror", None) or f"it does not speak QMP: {printable(str(cause), MOST_CHARACTERS)}"
    )


def is_off(error: QemuUnusable) -> bool:
    """Whether no QEMU process listens at a socket that could not be used."""
    return isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)


def _process_behind(sock: socket.socket) -> str:
    """Of the process that listens at a Unix socket: its pid and when it was started."""
    pid, _uid, _gid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    try:
        words = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        return f"{pid} {words[19]}"  # starttime, the 22nd field
    except (OSError, IndexError):  # another namespace
        return str(pid)


async def execute(client: QMPClient, command: Command) -> Any:
    """What QEMU returns for a command, or a ``Refusal``.

    Raises:
        QMPError: the connection ended.
    """
    try:
        return await client.execute(command.name, command.arguments or None)
    except ExecuteError as exc:
        error = exc.error.error
        return Refusal(printable(exc.error_class, MOST_CHARACTERS), printable(error.desc, MOST_CHARACTERS))


async def close(client: QMPClient) -> None:
    """End a session, whatever state it is in."""
    with contextlib.suppress(Exception):  # it says again how the connection ended
        async with asyncio.timeout(CLOSE_S):
            await client.disconnect()


# -- without the thread: at the agent's stop, and in `gateway-agent release`

Place = tuple[str, str, str]
"""Socket, ``drive`` or ``group``, name."""


def release(places: Iterable[Place]) -> list[str]:
    """Take the limits away from drives and groups; returns what could not be.

    Where no QEMU process is, there is no limit, and no problem. Takes some seconds at most.
    """
    _be_quiet()
    by_socket: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_socket[place[0]].append(place)
    return asyncio.run(_release_all(by_socket)) if by_socket else []


async def _release_all(by_socket: Mapping[str, list[Place]]) -> list[str]:
    found = await asyncio.gather(*(_release(path, places) for path, places in by_socket.items()))
    return [problem for problems in found for problem in problems]


async def _release(path: str, places: list[Place]) -> list[str]:
    if not os.path.exists(path):
        return []
    try:
        async with asyncio.timeout(RELEASE_S):
            return await _lift_all(path, places)
    except TimeoutError:
        return [f"{path}: no answer within {RELEASE_S:.0f} s"]
    except QemuUnusable as exc:
        return [] if is_off(exc) else [str(exc)]
    except (QMPError, ValueError) as exc:
        return [f"{path}: {str(exc) or 'the connection ended'}"]


async def _lift_all(path: str, places: list[Place]) -> list[str]:
    client, _daemon = await connect(path)
    try:
        answers = {(kind, name): await _lift(client, kind, name) for _, kind, name in places}
    finally:
        await close(client)
    return [
        f"{path}: {kind} {name}: {answer.text}"
        for (kind, name), answer in answers.items()
        if isinstance(answer, Refusal) and not answer.is_absence
    ]


async def _lift(client: QMPClient, kind: str, name: str) -> Any:
    if kind == "group":
        return await execute(client, ThrottleGroup(name).set_command(NO_LIMITS))
    answer = await execute(client, Command(DRIVES, {}))
    if isinstance(answer, Refusal):
        return answer
    drive = next((each for each, _ in drives_in(answer) if name in each.names), None)
    return None if drive is None else await execute(client, drive.set_command(NO_LIMITS))
