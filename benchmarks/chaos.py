"""``make chaos``: the whole product under load while its processes die, its network and its disk fail.

Three agents: ``a`` (its link is killed; its data plane never, so that what its clients counted must be in SQL
exactly), ``b`` (link, data plane and parent are killed), ``c`` (a link alone with a spool of 6 KiB, so that
outages overflow it, and with a clock that is stepped). They reach the server through a proxy. From a seed,
about once a second, one of:

    kill -9     of one process: dbmanager, services, delivery, pmdaemon, pair, appserver, supervisor, link,
                plane, agent; each third time of any two of them at once
    cut, stall  of all connections, up to 8 s
    disk        the server's data directory (a tmpfs; needs root) is full for some seconds, its log with it
    log         the reader of the server's log pipe is killed, or reads nothing for some seconds
    freeze      one process is stopped (SIGSTOP) for up to 15 s
    memory      dbmanager or services gets no more address space for some seconds
    clock       of agent c, stepped by up to 30 s either way
    database    PostgreSQL is stopped, or dies, and is started again (--database postgresql)
    recipient   a webhook hangs, answers 500, 400 or slowly, closes in the middle, or is killed and comes back

Every event goes to that webhook, to one that is well and to a file (``chaos_recipients``). Then everything
is left alone until the agents' cuts are stored and events delivered, stopped in order, and proved
(``chaos_proof``, ``chaos_events``). Exit status 1 if a cut was lost, doubled or miscounted, or an event lost,
out of order or held up by another recipient. The sequence of faults follows from the seed; when each meets
what the processes are doing does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from benchmarks import harness, small_link
from benchmarks.chaos_clients import Clients
from benchmarks.chaos_events import prove_events, read_events
from benchmarks.chaos_faults import ProcessFaults
from benchmarks.chaos_proof import Gateway, Proof, has_stored, ledger, prove
from benchmarks.chaos_recipients import BROKEN, EVENTS_TOML, Recipients
from benchmarks.harness import machine_facts, rows_for, table
from pmdaemon.runtime.clock import STEP_FILE
from sla_server.db.config import DatabaseConfig
from tests.support.cutting_proxy import CuttingProxy
from tests.support.postgres import PostgresServer
from tests.support.stage import Agent, Stage, scratch

SPOOL_BYTES = 4 << 20
DATA_BYTES = 256 << 20
DEBUG = {"SLA_LOG_LEVEL": "debug"}
VICTIMS = {  # name: (fragment of its command line, weight)
    "dbmanager": ("sla_server.process dbmanager", 5),
    "pair": ("-m pmdaemon pair", 4),
    "services": ("sla_server.process services", 2),
    "delivery": ("sla_server.process delivery", 3),
    "pmdaemon": ("-m pmdaemon run", 2),
    "appserver": ("sla_server.process appserver", 1),
    "supervisor": ("-m sla_server start", 2),
    "link-a": ("gateway_agent.link.main --config {sockets}/a/", 3),
    "link-b": ("gateway_agent.link.main --config {sockets}/b/", 3),
    "link-c": ("benchmarks.small_link --config {folder}/c.toml", 4),
    "plane-b": ("gateway_agent.nbd.plane --config {sockets}/b/", 1),
    "agent-b": ("-m gateway_agent run --config {folder}/b.toml", 1),
}
OTHERS = {
    "cut": 2,
    "stall": 2,
    "disk": 1,
    "clock": 2,
    "database": 1,
    "log": 1,
    "freeze": 2,
    "memory": 1,
    "recipient": 4,
}
FROZEN = (
    "dbmanager",
    "services",
    "delivery",
    "pmdaemon",
    "pair",
    "appserver",
    "supervisor",
    "link-a",
    "link-b",
    "plane-b",
)
BLOCK_BYTES = 4096
STARVED = ("dbmanager", "services")
SETTLE_S = 120.0
KILLS = 220  # of a run that is recorded
BOTH_EVERY = 3
BOTH = "two-at-once"


def kill(pids: Iterable[int]) -> None:
    """Kill them with -9, one right behind the other."""
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Chaos:
    """One run. Attributes: ``faults``, what was done how often."""

    def __init__(self, folder: Path, seed: int, postgres: PostgresServer | None, say: bool = True) -> None:
        self.folder = folder
        self.faults: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._postgres = postgres
        self._say = say
        url = postgres.create("sla") if postgres else ""
        self.stage = Stage(folder, interval_s=0.5, database_url=url, slice_s=10, extra_toml=EVENTS_TOML)
        self._data = folder / "data"
        self._mounted = False
        self._step_file = folder / "step"
        self._link_c: subprocess.Popen[bytes] | None = None
        self._log_reader: subprocess.Popen[bytes] | None = None
        self._processes = ProcessFaults()
        self._recipients = Recipients(self.stage, self._data, self._rng)
        self._agents = [
            Agent(
                name,
                {f"vol-{name}": str(folder / f"{name}.img")},
                extra_toml=f"spool_bytes = {SPOOL_BYTES}\n[reconnect]\nmax_s = 0.5",
                environment=DEBUG,
            )
            for name in ("a", "b")
        ]

    def note(self, line: str) -> None:
        """Tell the person who watches."""
        if self._say:
            click.echo(line)

    # -- the product

    def run(self, duration_s: float, most_kills: int, pause_s: float) -> Proof:
        """Start everything, break it for a while, let it settle, stop it, prove."""
        self._mount()
        try:
            with self.stage as stage:
                proxy = CuttingProxy(stage.pm_port)
                stage.agents_port = proxy.port
                try:
                    return self._run(stage, proxy, duration_s, most_kills, pause_s)
                finally:
                    proxy.close()
        finally:
            if self._log_reader is not None:
                self._log_reader.kill()
                self._log_reader.wait()
            self._unmount()

    def _run(
        self, stage: Stage, proxy: CuttingProxy, duration_s: float, most_kills: int, pause_s: float
    ) -> Proof:
        self._start_server()
        stage.wait(stage.is_answering, "the server")
        for agent in self._agents:
            (self.folder / f"{agent.name}.img").write_bytes(bytes(8 << 20))
            stage.start_agent(agent)
        self._write_link_c(proxy.port)
        self._revive()
        stage.wait(stage.gateways_up, "the gateways")
        self._recipients.start()
        clients = Clients(stage, self._agents)
        clients.start()
        self._break(proxy, duration_s, most_kills, pause_s)
        self._heal(proxy)
        clients.finish()
        self._settle()
        span = self._recipients.settle(
            lambda: kill(self._pids("appserver")), self._revive, self.faults["disk"]
        )
        self._stop_all()
        proof = prove(self._database_config(), self._data, self._gateways())
        stored = read_events(self._database_config(), self._data)
        proof.events = prove_events(stored, self._recipients.all_arrivals(), span, BROKEN)
        proof.problems += proof.events.problems
        proof.compare("vol-a", clients.done("vol-a"), sum(load.errors for load in clients.loads["vol-a"]))
        self.note(proof.events.text())
        return proof

    def _write_link_c(self, port: int) -> None:
        directory = self.folder / "c"
        directory.mkdir()
        (directory / "gateway_id").write_text(str(uuid.UUID(int=self._rng.getrandbits(128), version=4)))
        (self.folder / "c.toml").write_text(
            f'name = "c"\nstate_dir = "{directory}"\nruntime_dir = "{directory}"\n'
            f'server = "127.0.0.1:{port}"\n[host]\nenabled = true\n[reconnect]\nmax_s = 0.5\n'
        )

    def _revive(self) -> None:
        """Start again what the product does not: the supervisor, agent b, link c, a receiver."""
        stage = self.stage
        self._recipients.revive()
        if not stage.pids("-m sla_server start"):
            self._start_server()
        if not stage.pids(f"-m gateway_agent run --config {self.folder}/b.toml"):
            stage.spawn(
                "b", "gateway_agent", "run", "--config", str(self.folder / "b.toml"), environment=DEBUG
            )
        if self._link_c is None or self._link_c.poll() is not None:
            environment = {**DEBUG, STEP_FILE: str(self._step_file)}
            config = str(self.folder / "c.toml")
            self._link_c = stage.spawn(
                "c", "benchmarks.small_link", "--config", config, environment=environment
            )

    def _start_server(self) -> None:
        """With its log in the data directory, written by itself or, as likely, by the reader of a pipe."""
        with (self._data / "server.log").open("ab") as log:
            if self._rng.random() < 0.5:
                self.stage.spawn_server(log.fileno())
                return
            read_end, write_end = os.pipe()
            if self._log_reader is not None:
                self._log_reader.kill()
                self._log_reader.wait()
            self._log_reader = subprocess.Popen(["cat"], stdin=read_end, stdout=log, stderr=log)
            os.close(read_end)
            self.stage.spawn_server(write_end)
            os.close(write_end)

    def _mount(self) -> None:
        """A data directory with a quota, where we may: as root."""
        self._data.mkdir(parents=True)
        if os.geteuid() == 0:
            command = ["mount", "-t", "tmpfs", "-o", f"size={DATA_BYTES},mode=0700", "tmpfs", str(self._data)]
            self._mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if not self._mounted:
            self.note("no tmpfs can be mounted here: the disk does not fill up in this run")

    def _unmount(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", str(self._data)], check=False)

    # -- faults

    def _break(self, proxy: CuttingProxy, duration_s: float, most_kills: int, pause_s: float) -> None:
        end_s = time.monotonic() + duration_s
        names = [*VICTIMS, *OTHERS]
        weights = [weight for _, weight in VICTIMS.values()] + list(OTHERS.values())
        kills = 0
        while time.monotonic() < end_s and kills < most_kills:
            [name] = self._rng.choices(names, weights)
            if name in VICTIMS:
                is_for_two = kills % BOTH_EVERY == BOTH_EVERY - 1 and kills + 2 <= most_kills
                kills += self._kill_some(name, is_for_two=is_for_two)
            elif getattr(self, f"_{name}")(proxy):
                self.faults[name] += 1
            time.sleep(self._rng.uniform(0.5, 1.5) * pause_s)
            self._revive()
            if kills and kills % 25 == 0:
                self.note(f"  {kills} kills, {end_s - time.monotonic():.0f} s left")

    def _pids(self, name: str) -> list[int]:
        return self.stage.pids(VICTIMS[name][0].format(sockets=self.stage.sockets, folder=self.folder))

    def _kill_some(self, name: str, *, is_for_two: bool) -> int:
        """Kill a victim, or it and another one at once; how many that were."""
        others = {other: weight for other, (_, weight) in VICTIMS.items() if other != name}
        names = [name, *(self._rng.choices([*others], [*others.values()]) if is_for_two else ())]
        found = {each: pids for each in names if (pids := self._pids(each))}
        kill(pid for pids in found.values() for pid in pids)
        self.faults.update(found.keys())
        self.faults[BOTH] += len(found) > 1
        return len(found)

    def _cut(self, proxy: CuttingProxy) -> bool:
        proxy.cut()
        return True

    def _stall(self, proxy: CuttingProxy) -> bool:
        proxy.stall(True)
        threading.Timer(self._rng.uniform(0.5, 8.0), proxy.stall, (False,)).start()
        return True

    def _disk(self, _proxy: CuttingProxy) -> bool:
        if not self._mounted:
            return False
        ballast = self._data / "ballast"
        free = os.statvfs(self._data)
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        with contextlib.suppress(OSError), (self._data / "server.log").open("ab", buffering=0) as log:
            for _ in range(BLOCK_BYTES):  # what is left of its last block
                log.write(b"\n")
        threading.Timer(self._rng.uniform(1.0, 4.0), ballast.unlink, (True,)).start()
        return True

    def _log(self, _proxy: CuttingProxy) -> bool:
        reader = self._log_reader
        if reader is None or reader.poll() is not None:
            return False
        if self._rng.random() < 0.5:
            reader.kill()
            reader.wait()
        else:
            self._processes.freeze(reader.pid, self._rng.uniform(0.5, 15.0))
        return True

    def _freeze(self, _proxy: CuttingProxy) -> bool:
        pids = self._pids(self._rng.choice(FROZEN))
        if pids:
            self._processes.freeze(pids[0], self._rng.uniform(0.5, 15.0))
        return bool(pids)

    def _memory(self, _proxy: CuttingProxy) -> bool:
        pids = self._pids(self._rng.choice(STARVED))
        if pids:
            self._processes.starve(pids[0], self._rng.uniform(1.0, 6.0))
        return bool(pids)

    def _clock(self, _proxy: CuttingProxy) -> bool:
        self._step_file.write_text(str(self._rng.randrange(-30_000_000, 30_000_000)))
        return True

    def _recipient(self, _proxy: CuttingProxy) -> bool:
        self.faults[f"recipient-{self._recipients.fail()}"] += 1
        return True

    def _database(self, _proxy: CuttingProxy) -> bool:
        if self._postgres is None:
            return False
        self._postgres.stop(self._rng.choice((signal.SIGINT, signal.SIGQUIT)))
        time.sleep(self._rng.uniform(0.0, 3.0))
        self._postgres.start()
        return True

    # -- the end

    def _heal(self, proxy: CuttingProxy) -> None:
        time.sleep(4.5)  # the longest disk fault ends by itself
        self._processes.thaw_all()
        (self._data / "ballast").unlink(missing_ok=True)
        proxy.stall(False)
        self._revive()

    def _gateways(self) -> list[Gateway]:
        found = []
        for name in ("a", "b"):
            state = self.folder / name
            gateway_id = (state / "gateway_id").read_text().strip()
            found.append(Gateway(gateway_id, self.folder / f"{name}.log", state / "spool", SPOOL_BYTES))
        gateway_id = (self.folder / "c" / "gateway_id").read_text().strip()
        small = Gateway(
            gateway_id, self.folder / "c.log", self.folder / "c" / "spool", small_link.SPOOL_BYTES, True
        )
        return [*found, small]

    def _settle(self) -> None:
        """Wait until what the clients did is in cuts, and these are stored or were dropped.

        Raises:
            StageError: it is not within SETTLE_S.
        """
        counted = self._gateways()[0]  # a: the newest I/Os are in the cut that is open now, or the next one
        made_by_now = len(ledger(counted.log, counted.gateway_id)[0])
        self.stage.wait(lambda: self._has_made(counted, made_by_now + 2), "new cuts of a", limit_s=SETTLE_S)
        made = [(gateway, ledger(gateway.log, gateway.gateway_id)[0]) for gateway in self._gateways()]

        def is_settled() -> bool:
            newest: dict[tuple[str, int], int] = {}
            for gateway, cuts in made:  # a full spool may drop some of them yet
                for gateway_id, epoch, seq in cuts - ledger(gateway.log, gateway.gateway_id)[1]:
                    newest[gateway_id, epoch] = max(seq, newest.get((gateway_id, epoch), 0))
            return self._stored(newest)

        self.stage.wait(is_settled, "the agents' cuts in SQL", limit_s=SETTLE_S)

    def _has_made(self, gateway: Gateway, cuts: int) -> bool:
        self._revive()
        return len(ledger(gateway.log, gateway.gateway_id)[0]) >= cuts

    def _stored(self, newest: dict[tuple[str, int], int]) -> bool:
        self._revive()
        return has_stored(self._database_config(), self._data, newest)

    def _database_config(self) -> DatabaseConfig:
        return DatabaseConfig(url=self.stage.database_url, rollup_s=self.stage.slice_s)

    def _stop_all(self) -> None:
        for process in (*self.stage.running("c"), *self.stage.running("a"), *self.stage.running("b")):
            self.stage.stop("agent", process)
        for process in self.stage.running("server"):
            self.stage.stop("server", process, limit_s=60)


def run(
    folder: Path,
    seed: int,
    duration_s: float,
    most_kills: int,
    pause_s: float,
    database: str,
    say: bool = True,
) -> tuple[Proof, Counter[str]]:
    """One chaos run in ``folder``, which must not exist."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(PostgresServer()) if database == "postgresql" else None
        chaos = Chaos(folder, seed, postgres, say)
        return chaos.run(duration_s, most_kills, pause_s), chaos.faults


def _record(seed: int, database: str, proof: Proof, faults: Counter[str], killed: int) -> None:
    """Print the goals and write the JSON beside those of the benchmarks."""
    values = {"kills": killed, "lost": len(proof.lost), "doubled": len(proof.doubled)}
    events = len(proof.events.problems)
    rows = rows_for("chaos", {**values, "problems": len(proof.problems) - events, "events": events})
    click.echo(table(rows))
    result = {
        "benchmark": "chaos",
        "rows": rows,
        "seed": seed,
        "database": database,
        "faults": dict(faults.most_common()),
        "cuts": {name: getattr(proof, name) for name in ("made", "delivered", "held", "dropped")},
        "machine": machine_facts(),
        "finished_unix_s": int(time.time()),
    }
    harness.store("chaos", result, "" if killed >= KILLS else f"{killed} kills, the record has {KILLS}")


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Fixes the sequence of faults.")
@click.option("--for", "duration_s", type=float, default=420.0, show_default=True, help="Seconds of faults.")
@click.option("--kills", type=int, default=KILLS, show_default=True, help="End after so many kills.")
@click.option("--pause", "pause_s", type=float, default=1.0, show_default=True, help="Mean seconds between.")
@click.option(
    "--database", type=click.Choice(["postgresql", "sqlite"]), default="postgresql", show_default=True
)
@click.option("--keep", is_flag=True, help="Keep the folder with data and logs.")
def main(seed: int, duration_s: float, kills: int, pause_s: float, database: str, keep: bool) -> None:
    """Break the running product for a while and prove that no cut was lost or doubled."""
    began_s = time.monotonic()
    with scratch("sla-chaos-", keep) as base:
        proof, faults = run(base / "run", seed, duration_s, kills, pause_s, database)
    killed = sum(count for name, count in faults.items() if name in VICTIMS)
    click.echo(
        f"seed {seed}, {time.monotonic() - began_s:.0f} s, {killed} kills: {dict(faults.most_common())}"
    )
    _record(seed, database, proof, faults, killed)
    proof.report()


if __name__ == "__main__":
    main()
