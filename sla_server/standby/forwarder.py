"""Agents that dial a server that stands by are forwarded to the one that acts.

    agent ──► pmdaemon.listen of this server ──► pmdaemon.forwarded of the acting one

Bytes are passed on as they are: with TLS it is the agent and the acting server that prove who they are, and
nothing of it is read here. ``forwarded`` is a port of its own, which only a PMDaemon listens on: two servers
that each take the other for the acting one cannot send a connection in circles.

Whom to forward to is in ``lease.json``, which the node of the cluster keeps up to date. While the acting
server does not say where (``links``), none acts, or that one is not *reached*, this one does not listen. An
agent is refused then, at once, and by that knows that it may come again soon; a connection that is taken and
closed would look like a server in trouble. It is found to be reached by a connection of this process's own.

Connections end when another server acts than the one they lead to: their agents dial again, and meet that
one. When this server acts its supervisor ends the process, and with it all of them.

Without TLS only agents of this machine are served, and of them those of certain users
(``pmdaemon.agent_users``): the user is asked for here, for at the acting server the connection is this
process's own.

Thread: the main one, which runs the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Final

import structlog

from pmdaemon.runtime.client_user import client_uid
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.runtime.sockets import dial_error, open_listener
from sla_server.lease_file import LeaseState

log = structlog.get_logger("forwarder")
LOOK_S: Final = 0.1
CONNECT_S: Final = 1.0
"""Servers of one database are near each other; and while the acting one is dead, its agents are refused."""
PIECE_BYTES: Final = 1 << 16
BACKLOG: Final = 1024
AGAIN_S: Final = 0.5
NOTICED_S: Final = 0.2  # one that is gone as it is accepted is warned of there, as of an unknown user
SPARE_FILES: Final = 64
SILENCE_S: Final = 60.0
"""So long one side may be gone without a word, or read nothing of what waits for it. The acting server gives
an agent up long before, and an agent its server."""


class LinkForwarder:
    """See the module.

    Args:
        listen: of this server's agents.
        lease: what is known of the acting server.
        agent_uids: whose agents are served; None: all.
        most: connections at once.
        now_ns: for the log.
    """

    def __init__(
        self,
        listen: str,
        lease: Callable[[], LeaseState],
        agent_uids: frozenset[int] | None,
        most: int,
        now_ns: Callable[[], int],
    ) -> None:
        self._listen = parse_address(listen)
        self._lease = lease
        self._agent_uids = agent_uids
        self._most = most
        self._now_ns = now_ns
        self._log = LimitedLog("forwarder")
        self._server: asyncio.Server | None = None
        self._target = ""
        self._is_reached = False
        self._reach_again_ns = 0
        self._links = set[asyncio.Task[None]]()

    async def follow(self) -> None:
        """Listen, and let connections end, as the lease says; to be called again and again.

        Raises:
            ConfigError: this server's address cannot be listened on.
        """
        lease = self._lease()
        target = lease.links if lease.holder != lease.node and self._listen[1] else ""
        if target != self._target:
            self._target, self._is_reached, self._reach_again_ns = target, False, 0
            self._end_server()  # first: who comes while connections end would be led nowhere
            await self._end_links()
        if target and not self._is_reached and self._now_ns() >= self._reach_again_ns:
            self._is_reached = await _is_reached(target)
            self._reach_again_ns = self._now_ns() + round(AGAIN_S * 1e9)
        if not self._is_reached:
            self._end_server()
        elif self._server is None:
            listener = open_listener("pmdaemon.listen", *self._listen)
            self._server = await asyncio.start_server(self._serve, sock=listener, backlog=BACKLOG)
            log.info("forwarding", listen=listener.getsockname()[1], to=target, node=lease.holder)

    async def close(self) -> None:
        """End everything."""
        self._end_server()
        await self._end_links()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _end_links(self) -> None:
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            if self._target and self._may_pass(writer):
                await self._pass_on(reader, writer, self._target)
        except asyncio.CancelledError:  # its server acts no more, or this one does: no error of the task
            writer.transport.abort()
        finally:
            self._links.discard(link)
            writer.close()

    def _may_pass(self, writer: asyncio.StreamWriter) -> bool:
        sock = writer.get_extra_info("socket")
        if len(self._links) > self._most:
            self._log.warning(self._now_ns(), "too-many-connections", most=self._most)
            return False
        if self._agent_uids is None:
            return True
        uid = client_uid(sock)
        if uid in self._agent_uids:
            return True
        self._log.warning(self._now_ns(), "agent-of-another-user", uid=uid)
        return False

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
        try:
            far_reader, far_writer = await _dial(target)
        except OSError as exc:
            self._log.warning(self._now_ns(), "acting-server-not-reached", at=target, error=str(exc))
            if target == self._target:
                self._is_reached = False
                self._end_server()
            return
        for each in (writer, far_writer):
            _limit_silence(each.get_extra_info("socket"))
        ways = [
            asyncio.ensure_future(_pump(one, other))
            for one, other in ((reader, far_writer), (far_reader, writer))
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            far_writer.transport.abort()  # it may be gone with its machine: what waits for it would wait on
            raise
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.close()  # once what is written has left


async def _dial(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the acting server.

    Raises:
        OSError: it is not reached, within the limit or at all; or what it says of itself is no address.
    """
    try:
        host, port = parse_address(target)
    except ValueError as exc:  # of another release
        raise OSError(errno.EINVAL, str(exc)) from exc
    async with asyncio.timeout(CONNECT_S):  # whose TimeoutError is an OSError
        reader, writer = await asyncio.open_connection(host, port, limit=PIECE_BYTES)
    if code := dial_error(writer.get_extra_info("socket")):
        writer.transport.abort()
        raise OSError(code, os.strerror(code))
    return reader, writer


def _limit_silence(sock: socket.socket) -> None:
    """Have the system end a connection whose other side is gone, or has read nothing for ``SILENCE_S``."""
    with contextlib.suppress(OSError):  # it has ended while the acting server was dialled
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(SILENCE_S / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(SILENCE_S / 6)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(SILENCE_S * 1000))


async def _is_reached(target: str) -> bool:
    try:
        _, writer = await _dial(target)
    except OSError:
        return False
    await asyncio.sleep(NOTICED_S)
    writer.close()
    return True


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
