"""``make demo-cluster``: three nodes on this machine; one is killed, and nothing acknowledged is lost.

Everything is the product's own: three files with ``[cluster]``, ``sla cluster init``, ``invite`` and
``join``, three processes ``sla-server node``, all on loopback and in one folder, which is removed at the end.
Three producers send numbered messages, one after the other, until each is acknowledged; a message that was
not is sent again under the same identity.

Phases: three nodes run; the node that leads the stream is killed (SIGKILL, node and engine) and the others go
on; it comes back and has every message again; a leader hands over as planned. At the end the stream is read
from its first message to its last, and compared with what was acknowledged. Exit status 0: each acknowledged
message is there exactly once and in the order of its producer, and messages were acknowledged in each phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamConfig
from rich.console import Console
from rich.table import Table

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Deadline
from sla_server import config as configuration
from sla_server.cluster import membership
from sla_server.cluster.admin import Admin, ClusterState, connect
from sla_server.cluster.config import ClusterConfig
from tests.support.cluster import configurations

PRODUCERS: Final = 3
STREAM: Final = "demo"
LIMIT_S: Final = 120.0  # of each wait; an election takes 4 to 9 s by itself
PAUSE_S: Final = 0.002  # between two messages of a producer: some hundred a second are enough to see
RETRY_S: Final = 0.05
ANSWER_S: Final = 2.0
BATCH: Final = 500


@dataclass
class Phase:
    """What producers saw while one state lasted."""

    name: str
    acknowledged: int = 0
    longest_gap_s: float = 0.0


@dataclass
class Run:
    """The nodes, and what was sent."""

    directory: Path
    paths: list[Path]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(PRODUCERS), 0))
    is_ending: bool = False

    def config(self, index: int = 0) -> tuple[ClusterConfig, membership.Membership]:
        """Of one node."""
        found = configuration.load(self.paths[index])
        assert found.cluster is not None
        return found.cluster, membership.load(found.cluster, found.cluster.directory(found.data_dir))

    def start(self, name: str) -> None:
        """Start a node as its operator would."""
        path = next(path for path in self.paths if path.parent.name == name)
        command = [sys.executable, "-m", "sla_server", "node", "--config", str(path)]
        with (path.parent / "log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """SIGKILL the node's process and its engine."""
        process = self.processes.pop(name)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [*map(int, children), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all nodes in order."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()


def sla(path: Path, *words: str) -> None:
    """Run a command of the product and show it."""
    shown = [Path(word).name if "/" in word else word for word in words]
    click.echo(f"  {path.parent.name}$ sla cluster {' '.join(shown)}")
    command = [sys.executable, "-m", "sla_server.cli", "--config", str(path), "cluster", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr.strip() or done.stdout.strip())


async def produce(run: Run, stream: JetStreamContext, number: int) -> None:
    """Send messages of one producer until the run ends."""
    newest = time.monotonic()
    while not run.is_ending:
        index = run.sent[number]
        headers = {"Nats-Msg-Id": f"{number}:{index}"}
        try:
            await stream.publish(f"{STREAM}.p{number}", str(index).encode(), headers=headers)
        except (OSError, TimeoutError, nats.errors.Error):
            await asyncio.sleep(RETRY_S)
            continue
        now = time.monotonic()
        run.sent[number] += 1
        phase = run.phases[-1]
        phase.acknowledged += 1
        phase.longest_gap_s = max(phase.longest_gap_s, now - newest)
        newest = now
        await asyncio.sleep(PAUSE_S)


async def stored(client: Client) -> dict[int, list[int]]:
    """Every message of the stream by producer, in the order of the stream."""
    stream = client.jetstream(timeout=30)
    found: dict[int, list[int]] = {number: [] for number in range(PRODUCERS)}
    left = (await stream.stream_info(STREAM)).state.messages
    reader = await stream.pull_subscribe(
        f"{STREAM}.>", durable="check", config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    )
    while left:
        batch = await reader.fetch(min(left, BATCH), timeout=LIMIT_S)
        for message in batch:
            found[int(message.subject.rpartition(".p")[2])].append(int(message.data))
            await message.ack()
        left -= len(batch)
    return found


async def until(state: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until something is so.

    Raises:
        ClickException: it is not within ``LIMIT_S``.
    """
    deadline = Deadline(LIMIT_S)
    while not await state():
        if deadline.passed:
            raise click.ClickException(f"{what}: not seen within {LIMIT_S:g} s")
        await asyncio.sleep(0.1)


async def look(run: Run) -> ClusterState | None:
    """The state of the cluster; None while no node answers."""
    config, member = run.config()
    try:
        async with Admin(config, member) as admin:
            return await admin.state()
    except SlaError:
        return None


async def is_whole(run: Run) -> bool:
    """Whether all three nodes run, and every copy has everything."""
    state = await look(run)
    return state is not None and state.is_well and len(state.nodes) == len(run.paths)


async def leader(run: Run) -> str:
    """The node that leads the stream; "" while there is none."""
    state = await look(run)
    return next((row.leader for row in state.streams if row.name == STREAM), "") if state else ""


async def play(run: Run, seconds: float) -> dict[int, list[int]]:
    """All phases; returns what is stored in the end."""

    def begin(name: str) -> Phase:
        run.phases.append(Phase(name))
        click.echo(f"  {name}")
        return run.phases[-1]

    async def phase_of(found: Phase) -> None:
        await asyncio.sleep(seconds)

        async def goes_on() -> bool:
            return found.acknowledged > PRODUCERS

        await until(goes_on, f"messages acknowledged while {found.name}")

    await until(lambda: is_whole(run), "a cluster of three nodes")
    config, member = run.config()
    addresses = [config.listen, *(peer.listen for peer in config.peers)]
    clients = [await connect(config, member, addresses) for _ in range(PRODUCERS)]
    maker = clients[0].jetstream(timeout=30)
    await maker.add_stream(StreamConfig(name=STREAM, subjects=[f"{STREAM}.>"], num_replicas=3))
    producers: list[asyncio.Task[None]] = []
    try:
        found = begin("three nodes run")
        producers = [
            asyncio.create_task(produce(run, client.jetstream(timeout=ANSWER_S), number))
            for number, client in enumerate(clients)
        ]
        await phase_of(found)
        killed = await leader(run)
        found = begin(f"{killed}, which leads the stream, is killed")
        run.kill(killed)
        await phase_of(found)
        found = begin(f"{killed} comes back")
        run.start(killed)
        await phase_of(found)
        await until(lambda: is_whole(run), f"{killed} with every message")
        found = begin("a leader hands over")
        async with Admin(config, member) as admin:
            await admin.stepdown(STREAM)
        await phase_of(found)
        run.is_ending = True
        await asyncio.gather(*producers)
        return await stored(clients[0])
    finally:
        for task in producers:
            task.cancel()
        for client in clients:
            await client.close()


def verdict(sent: dict[int, int], found: dict[int, list[int]]) -> tuple[int, int, bool]:
    """Messages lost, messages doubled, and whether each producer's are in order."""
    lost = sum(len(set(range(count)) - set(found[number])) for number, count in sent.items())
    doubled = sum(len(numbers) - len(set(numbers)) for numbers in found.values())
    return lost, doubled, all(numbers == sorted(numbers) for numbers in found.values())


def show(run: Run, found: dict[int, list[int]]) -> bool:
    """Print the table; returns whether all is as promised."""
    table = Table(title=None, width=80)
    table.add_column("phase")
    table.add_column("acknowledged", justify="right")
    table.add_column("longest gap", justify="right")
    for phase in run.phases:
        table.add_row(phase.name, f"{phase.acknowledged:,}", f"{phase.longest_gap_s:.3f} s")
    Console(width=80).print(table)
    lost, doubled, in_order = verdict(run.sent, found)
    is_kept = not lost and not doubled and in_order and all(phase.acknowledged for phase in run.phases)
    click.echo(
        f"{sum(run.sent.values()):,} messages acknowledged, {sum(map(len, found.values())):,} stored: "
        f"{lost} lost, {doubled} doubled, {'in order' if in_order else 'OUT OF ORDER'}"
    )
    return is_kept


@click.command()
@click.option("--for", "seconds", type=click.FloatRange(0.5, 600), default=4.0, help="Seconds of each phase.")
@click.option("--tls", is_flag=True, help="With mutual TLS of the product's authority.")
def main(seconds: float, tls: bool) -> None:
    """Run three nodes, kill one, and prove that nothing acknowledged is lost."""
    directory = Path(tempfile.mkdtemp(prefix="sla-demo-cluster-"))
    run = Run(directory, configurations(directory, tls=tls))
    try:
        first, *others = run.paths
        if tls:
            command = [sys.executable, "-m", "sla_server.cli", "--config", str(first), "ca", "init"]
            subprocess.run(command, check=True, capture_output=True)
        sla(first, "init")
        for path in others:
            name = path.parent.name
            sla(first, "invite", name, str(path.parent / f"{name}.invitation"))
            sla(path, "join", str(path.parent / f"{name}.invitation"))
        for path in run.paths:
            click.echo(f"  {path.parent.name}$ sla-server node --config config.toml &")
            run.start(path.parent.name)
        is_kept = show(run, asyncio.run(play(run, seconds)))
    finally:
        run.close()
        shutil.rmtree(directory, ignore_errors=True)
    raise SystemExit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
