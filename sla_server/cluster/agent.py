"""The agent of a node: carries out commands, and keeps what the nodes share up to date (C13, C14).

It is connected to this node's own engine, as the product's user and as the one of the system account, and
connects again when that engine is started again. What another node has changed it takes at once, by a
command; every ``REFRESH_S`` it reads the bucket as well, for commands that did not come.

What it takes is on disk before it is in force: file, engine's file, the engine's own reload. A reload that
fails is reported in the answer and tried again with the next round.

State: ``documents`` (files); nothing else outlives it. Thread ``node-agent``, started and joined by
``NodeProcess``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.cluster import accounts, admin, commands, documents, essentials, parameters, shared
from sla_server.cluster.access import PRODUCT_USER
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import ClusterError, ClusterRefused
from sla_server.cluster.membership import Membership
from sla_server.cluster.messages.catalogue import BUCKET, Destination
from sla_server.cluster.messages.link import end_loop
from sla_server.cluster.node import Node, SharedSettings
from sla_server.cluster.server_conf import SYSTEM_USER
from sla_server.cluster.shared import NodeDocuments, SharedDocument

log = structlog.get_logger("cluster")
REFRESH_S: Final = 5.0
AGAIN_S: Final = 0.5
ANSWER_S: Final = 2.0
ROUND_S: Final = 30.0
"""For one round with the bucket, whatever the engine does."""
STOP_S: Final = 15.0
DESTINATIONS: Final = "destinations.json"
Task = Callable[[Client], Awaitable[None]]


class NodeAgent:
    """See the module.

    Args:
        config: of the node.
        member: its secrets.
        node: whose engine is to have what is in force.
        held: its documents.

    Attributes:
        table: of commands; register before ``start``.
    """

    def __init__(self, config: ClusterConfig, member: Membership, node: Node, held: NodeDocuments) -> None:
        self._config = config
        self._member = member
        self._node = node
        self._held = held
        self._known = load_destinations(node.directory)
        self._in_force = settings(held, self._known.values(), member)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._enforcing = asyncio.Lock()
        self._threads = ThreadGroup()
        self._tasks: list[Task] = []
        self._farewells: list[Callable[[], Awaitable[None]]] = []
        self._system: Client | None = None
        self.table = commands.CommandTable(config.node)
        self.table.register("ping", self._ping)
        self.table.register(documents.GET, self._get)
        self.table.register(documents.TAKE, self._take)

    def add_task(self, task: Task) -> None:
        """Run ``task`` with each connection, until that ends; before ``start``."""
        self._tasks.append(task)

    def add_farewell(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Call it when the tasks have ended, before the connection does; before ``start``."""
        self._farewells.append(farewell)

    def start(self) -> None:
        """Start the thread."""
        self._threads.start("node-agent", self._run)

    def close(self) -> None:
        """End the thread.

        Raises:
            ThreadDidNotStop: it goes on after ``STOP_S``.
        """
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._threads.join(STOP_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            end_loop(self._loop)  # a connection that broke while it was made has tasks of its own

    async def _main(self) -> None:
        beats = asyncio.create_task(self._beat())
        while not self._stopping.is_set():
            try:
                await self._serve()
            except (ClusterError, OSError, TimeoutError, nats.errors.Error) as exc:
                log.debug("cluster-agent-waits", problem=str(exc) or type(exc).__name__)
            except Exception:  # of the library's insides, as when a connection breaks
                log.exception("cluster-agent-failed")
            await self._wait(AGAIN_S)
        beats.cancel()

    async def _beat(self) -> None:
        while True:
            watchdog.beat()
            await asyncio.sleep(1.0)

    async def _wait(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), limit_s)

    async def _serve(self) -> None:
        """Until the stop, or the end of a connection."""
        own = [self._config.listen]
        async with contextlib.AsyncExitStack() as ends:
            product = await admin.connect(self._config, self._member, own, PRODUCT_USER)
            ends.push_async_callback(_close, product)
            self._system = await admin.connect(self._config, self._member, own, SYSTEM_USER)
            ends.push_async_callback(_close, self._system)
            for subject in (commands.ALL, commands.subject_of(self._config.node)):
                await product.subscribe(subject, cb=self._command)
            ends.push_async_callback(self._say_farewell)
            tasks = [asyncio.create_task(self._repeat(task, product)) for task in (*self._tasks, self._round)]
            ends.push_async_callback(_cancel, tasks)
            while product.is_connected and self._system.is_connected and not self._stopping.is_set():
                await self._wait(AGAIN_S)

    async def _say_farewell(self) -> None:
        if self._stopping.is_set():
            for farewell in self._farewells:
                await farewell()

    async def _repeat(self, task: Task, product: Client) -> None:
        """Go on whatever becomes of one round: no majority, a node that hangs."""
        while True:
            try:
                await task(product)
            except (ClusterError, OSError, TimeoutError, nats.errors.Error) as exc:
                log.debug("cluster-round-failed", problem=str(exc) or type(exc).__name__)
            except Exception:
                log.exception("cluster-round-failed")
            await asyncio.sleep(AGAIN_S)

    async def _round(self, product: Client) -> None:
        await asyncio.wait_for(self._reconcile(product), ROUND_S)
        await asyncio.sleep(REFRESH_S)

    async def _reconcile(self, product: Client) -> None:
        """Files and bucket come to the higher revision of both."""
        for name in shared.NAMES:
            stored, number = await documents.read(product, name)
            self._held.take(name, stored)
            if (own := self._held.get(name)).revision > stored.revision:
                replicas = min(self._config.replicas, len(self._config.peers) + 1)
                if await documents.write(product, name, own, number, replicas):
                    log.warning("cluster-document-restored", document=name, revision=own.revision)
        await self._learn(product)
        await self._enforce()

    async def _learn(self, product: Client) -> None:
        """Read destinations that are new, if there are accounts that they may matter to."""
        if not self._held.get(accounts.DOCUMENT).body:
            return
        found = await read_destinations(product, self._known)
        if found != self._known:
            self._known = found
            texts = [destination.encode().decode() for destination in found.values()]
            write_whole(self._node.directory / DESTINATIONS, json.dumps(texts, indent=1))

    async def _enforce(self) -> None:
        """Have the engine read what holds; nothing if it has.

        Raises:
            ClusterRefused: it does not.
        """
        async with self._enforcing:
            wanted = settings(self._held, self._known.values(), self._member)
            if wanted == self._in_force:
                return
            self._node.write_conf(wanted)
            await self._reload()
            self._in_force = wanted
            revisions = {name: self._held.get(name).revision for name in shared.NAMES}
            log.info("cluster-documents-in-force", accounts_allowed=len(wanted.users), **revisions)

    async def _reload(self) -> None:
        server = (await self._own_answer())["server"]
        assert self._system is not None
        answer = await self._system.request(f"$SYS.REQ.SERVER.{server['id']}.RELOAD", b"", timeout=ANSWER_S)
        if error := json.loads(answer.data).get("error"):
            raise ClusterRefused(f"the engine keeps its former settings: {error.get('description', error)}")

    async def _own_answer(self) -> dict[str, Any]:
        """What this node's engine says of itself."""
        assert self._system is not None
        body = json.dumps({"server_name": self._config.node, "exact_match": True}).encode()
        inbox = await self._system.subscribe(self._system.new_inbox())
        try:
            await self._system.publish(admin.PING, body, reply=inbox.subject)
            while True:
                found = json.loads((await inbox.next_msg(timeout=ANSWER_S)).data)
                if found["server"]["name"] == self._config.node:
                    return dict(found)
        finally:
            await inbox.unsubscribe()

    async def _command(self, message: Msg) -> None:
        if not commands.is_asked(message.reply):
            log.warning("cluster-command-ignored", reply=message.reply)
            return
        try:
            expected = admin.running_nodes((await self._own_answer()).get("statsz", {}))
        except (OSError, TimeoutError, nats.errors.Error):
            expected = len(self._config.peers) + 1
        answer = await self.table.carry_out(message.data, expected)
        with contextlib.suppress(OSError, nats.errors.Error):  # who asked asks again
            await message.respond(answer.encode())

    async def _ping(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "digest": essentials.digest(essentials.of(self._config)),
            "revisions": {name: self._held.get(name).revision for name in shared.NAMES},
        }

    async def _get(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._held.encoded()

    async def _take(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        name = str(arguments["name"])
        self._held.take(name, SharedDocument.parse(str(arguments["document"])))
        await self._enforce()
        return {"revision": self._held.get(name).revision}


def settings(held: NodeDocuments, destinations: Iterable[Destination], member: Membership) -> SharedSettings:
    """What the engine is to be given."""
    found = accounts.accounts_of(held.get(accounts.DOCUMENT).body)
    users = accounts.users(found.values(), list(destinations), member.secrets)
    values = parameters.values(held.get(parameters.DOCUMENT).body)
    return SharedSettings(values, tuple(user.as_conf() for user in users))


def load_destinations(directory: Path) -> dict[str, Destination]:
    """Destinations as they were last seen: until the engine runs there are no others to ask for."""
    try:
        texts = json.loads((directory / DESTINATIONS).read_bytes())
        found = [Destination.parse(text) for text in texts]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # they are read again from the catalogue
        return {}
    return {destination.name: destination for destination in found}


async def read_destinations(client: Client, known: Mapping[str, Destination]) -> dict[str, Destination]:
    """All destinations of the catalogue; those known are not read again, for they do not change."""
    stream = client.jetstream(timeout=ANSWER_S)
    try:
        bucket = await stream.key_value(BUCKET)
    except nats.js.errors.BucketNotFoundError:
        return {}
    info = await stream.stream_info(f"KV_{BUCKET}", subjects_filter=f"$KV.{BUCKET}.>")
    found = {}
    for name in sorted(subject.removeprefix(f"$KV.{BUCKET}.") for subject in info.state.subjects or {}):
        try:
            found[name] = known.get(name) or Destination.of_key(name, (await bucket.get(name)).value or b"")
        except (nats.js.errors.KeyNotFoundError, ValueError):
            continue  # removed by hand, or of a later release
    return found


async def _close(client: Client) -> None:
    with contextlib.suppress(OSError, TimeoutError, nats.errors.Error):
        await client.close()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
