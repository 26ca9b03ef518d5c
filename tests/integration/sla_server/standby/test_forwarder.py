"""Agents' connections at a server that stands by: real sockets, a lease that the test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import boot_ns
from pmdaemon.runtime.stop import Stop
from sla_server.lease_file import LeaseState
from sla_server.standby import forwarder, process
from sla_server.standby.forwarder import LinkForwarder
from tests.support.ports import free_port

LIMIT_S = 60.0


class Acting:
    """A server that says its name, then what it hears."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name = name
        self.port = port
        self.ended = 0
        self.server: asyncio.Server | None = None

    async def __aenter__(self) -> Acting:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self.server is not None
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.name.encode())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        self.ended += 1
        writer.close()


class Bench:
    """A forwarder of node ``n1``."""

    def __init__(self, agent_uids: frozenset[int] | None = None, most: int = 100) -> None:
        self.lease = LeaseState("n1")
        self.port = free_port()
        self.forwarder = LinkForwarder(
            f"127.0.0.1:{self.port}", lambda: self.lease, agent_uids, most, boot_ns
        )

    async def acts(self, node: str, port: int, fence: int = 7) -> None:
        """Of this node, whose server takes agents at this port."""
        self.lease = LeaseState(
            "n1", node, fence, heard_ns=boot_ns(), links=f"127.0.0.1:{port}" if port else ""
        )
        await self.forwarder.follow()

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self) -> bytes:
        """What a new agent hears first; b"": its connection was ended."""
        reader, writer = await self.dial()
        try:
            return await reader.read(64)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def _run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


def test_bytes_go_both_ways_to_the_server_that_acts() -> None:
    async def body() -> None:
        bench = Bench()
        async with Acting("n2") as acting:
            await bench.acts("n2", acting.port)
            reader, writer = await bench.dial()
            assert await reader.readexactly(2) == b"n2"
            sent = os.urandom(3 << 20)
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()
            while not acting.ended:
                await asyncio.sleep(0.01)
        await bench.forwarder.close()

    _run(body)


def test_an_agent_that_is_gone_before_the_acting_server_answers_leaves_no_connection_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dial, may_pass = forwarder._dial, LinkForwarder._may_pass
    agents: list[asyncio.StreamWriter] = []  # as the forwarder has them: nothing else says when one is gone

    def noted(self: LinkForwarder, writer: asyncio.StreamWriter) -> bool:
        agents.append(writer)
        return may_pass(self, writer)

    async def body() -> None:
        bench = Bench()
        async with Acting("n2") as acting:
            await bench.acts("n2", acting.port)
            while acting.ended < 1:  # the look whether it is reached
                await asyncio.sleep(0.01)
            agent = socket.create_connection(("127.0.0.1", bench.port))

            async def slow(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                found = await dial(target)
                agent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                agent.close()
                while agents[0].get_extra_info("socket").fileno() >= 0:
                    await asyncio.sleep(0.01)
                return found

            monkeypatch.setattr(forwarder, "_dial", slow)
            while acting.ended < 2:
                await asyncio.sleep(0.01)
        await bench.forwarder.close()

    monkeypatch.setattr(LinkForwarder, "_may_pass", noted)
    _run(body)


def test_it_listens_only_while_another_server_says_where_it_takes_agents() -> None:
    async def body() -> None:
        bench = Bench()
        async with Acting("n2") as acting:
            for node, port in (("", 0), ("n2", 0), ("n1", acting.port)):
                await bench.acts(node, port)
                with pytest.raises(ConnectionRefusedError):
                    await bench.answer()
            await bench.acts("n2", acting.port)
            assert await bench.answer() == b"n2"
            await bench.acts("", 0)
            with pytest.raises(ConnectionRefusedError):
                await bench.answer()
            await bench.acts("n2", acting.port)
            assert await bench.answer() == b"n2"
        await bench.forwarder.close()

    _run(body)


def test_connections_end_when_another_server_acts_and_new_ones_lead_to_it() -> None:
    async def body() -> None:
        bench = Bench()
        async with Acting("n2") as first, Acting("n3") as second:
            await bench.acts("n2", first.port)
            reader, writer = await bench.dial()
            assert await reader.readexactly(2) == b"n2"
            await bench.acts("n2", first.port, fence=9)  # the same one, again
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            await bench.acts("n3", second.port, fence=10)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert await bench.answer() == b"n3"
            writer.close()
        await bench.forwarder.close()

    _run(body)


def test_agents_are_refused_while_the_acting_server_is_not_reached_and_taken_again_when_it_is() -> None:
    async def body() -> None:
        bench = Bench()
        async with Acting("n2") as acting:
            await bench.acts("n2", acting.port)
            assert await bench.answer() == b"n2"
            port = acting.port
        with contextlib.suppress(ConnectionRefusedError):
            assert await bench.answer() == b""  # this one finds that it is gone
        for _ in range(3):
            await bench.forwarder.follow()
            with pytest.raises(ConnectionRefusedError):
                await bench.answer()
        async with Acting("n2", port):
            heard = b""
            while heard != b"n2":
                await bench.forwarder.follow()
                with contextlib.suppress(ConnectionRefusedError):
                    heard = await bench.answer()
                await asyncio.sleep(0.01)
        await bench.forwarder.close()

    _run(body)


def test_two_servers_that_each_take_the_other_for_the_acting_one_send_no_connection_in_circles() -> None:
    """A port for forwarded connections has a listener at the acting server alone."""

    async def body() -> None:
        one, other = Bench(), Bench()
        forwarded = free_port(), free_port()
        await one.acts("n2", forwarded[1])
        other.lease = replace(LeaseState("n2", "n1", 8), links=f"127.0.0.1:{forwarded[0]}")
        await other.forwarder.follow()
        for bench in (one, other):
            with pytest.raises(ConnectionRefusedError):
                await bench.answer()
            await bench.forwarder.close()

    _run(body)


def test_users_whose_agents_are_not_served_are_not_forwarded_either() -> None:
    async def body() -> None:
        async with Acting("n2") as acting:
            for uids, heard in ((frozenset({os.geteuid()}), b"n2"), (frozenset({os.geteuid() + 1}), b"")):
                bench = Bench(uids)
                await bench.acts("n2", acting.port)
                assert await bench.answer() == heard
                await bench.forwarder.close()

    _run(body)


def test_more_connections_than_descriptors_allow_are_turned_away() -> None:
    async def body() -> None:
        bench = Bench(most=2)
        async with Acting("n2") as acting:
            await bench.acts("n2", acting.port)
            kept = [await bench.dial() for _ in range(2)]
            for reader, _ in kept:
                assert await reader.readexactly(2) == b"n2"
            assert await bench.answer() == b""
            for _, writer in kept:
                writer.close()
        await bench.forwarder.close()

    _run(body)


def test_an_address_that_another_program_has_is_an_error_that_names_it() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            bench = Bench()
            bench.forwarder = LinkForwarder(
                f"127.0.0.1:{taken.getsockname()[1]}", lambda: bench.lease, None, 10, boot_ns
            )
            async with Acting("n2") as acting:
                with pytest.raises(ConfigError, match=r"pmdaemon\.listen"):
                    await bench.acts("n2", acting.port)

    _run(body)


def _full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """One that answers no dial any more, as a machine without power."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = []
    for _ in range(4):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(listener.getsockname())
    return listener, waiting


def test_a_dial_of_a_server_that_is_gone_holds_no_takeover_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended as its server begins to act, and just then it dials the one that is gone."""
    monkeypatch.setattr(forwarder, "CONNECT_S", 2 * LIMIT_S)

    async def body() -> None:
        listener, waiting = _full_listener()
        bench, stop = Bench(), Stop()
        bench.lease = LeaseState("n1", "n2", 7, links=f"127.0.0.1:{listener.getsockname()[1]}")
        running = asyncio.ensure_future(process._forward(bench.forwarder, stop))
        await asyncio.sleep(0.05)  # it dials; without that the test is only easier
        stop.set()
        await running
        for each in (listener, *waiting):
            each.close()

    _run(body)


def test_what_waits_for_a_server_that_acts_no_more_is_let_go_of() -> None:
    """A machine that is gone reads nothing: what waits for it would hold a descriptor."""

    async def body() -> None:
        bench = Bench()
        with socket.create_server(("127.0.0.1", 0)) as listener:  # which accepts and reads nothing
            port = listener.getsockname()[1]
            await bench.acts("n2", port)
            _, writer = await bench.dial()
            while not writer.transport.get_write_buffer_size():
                writer.write(bytes(1 << 20))
                await asyncio.sleep(0.01)
            assert port in _dialled_ports()
            await bench.acts("", 0)
            writer.transport.abort()
            while port in _dialled_ports():
                await asyncio.sleep(0.01)
        await bench.forwarder.close()

    _run(body)


def _dialled_ports() -> set[int]:
    """Ports of the other ends of this process's connections."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if duplicate.family == socket.AF_INET:
                        found.add(duplicate.getpeername()[1])
    return found


def test_an_agent_that_reads_nothing_keeps_no_connection_when_its_server_has_closed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarder, "SILENCE_S", 1.0)

    async def body() -> None:
        bench = Bench(most=1)
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                if await reader.read(1) == b"m":
                    while not ended.is_set():
                        writer.write(bytes(1 << 20))
                        await asyncio.wait_for(writer.drain(), LIMIT_S)
            writer.close()
            ended.set()

        acting = await asyncio.start_server(serve, "127.0.0.1", 0)
        await bench.acts("n2", acting.sockets[0].getsockname()[1])
        with socket.create_connection(("127.0.0.1", bench.port)) as agent:
            agent.sendall(b"m")  # and reads nothing
            await ended.wait()
        acting.close()
        await bench.forwarder.close()

    _run(body)


def test_an_address_that_this_release_cannot_read_is_not_reached() -> None:
    async def body() -> None:
        bench = Bench()
        bench.lease = LeaseState("n1", "n2", 7, links="sla-2.example.org:7412")
        await bench.forwarder.follow()
        with pytest.raises(ConnectionRefusedError):
            await bench.answer()
        await bench.forwarder.close()

    _run(body)


def test_a_dial_that_meets_itself_reaches_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of the ephemeral range that no process listens on may be given to the dial itself."""
    opened = asyncio.open_connection
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def from_its_own_port(host: str, to: int, **how: Any) -> Any:
        return await opened(host, to, local_addr=("127.0.0.1", to), **how)

    async def body() -> None:
        bench = Bench()
        monkeypatch.setattr(forwarder.asyncio, "open_connection", from_its_own_port)
        await bench.acts("n2", port)
        monkeypatch.setattr(forwarder.asyncio, "open_connection", opened)
        with pytest.raises(ConnectionRefusedError):
            await bench.answer()
        await bench.forwarder.close()

    _run(body)
