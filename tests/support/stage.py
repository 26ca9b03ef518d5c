"""Starts and stops the whole product on this machine: server, agents, modelled disk.

Used by the demonstration, the benchmarks and the end-to-end tests. Everything lives in one folder of its own
(sockets in a short one beside it, because a Unix socket's path is limited to 107 bytes), on loopback and on
ports that are held for it (``ports``). Everything started is stopped by pid, newest first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from pmdaemon.pki.authority import Authority
from tests.support.ports import free_port

# The set-up of the demonstration and of the end-to-end tests. All its times dwarf what a busy machine adds: a
# process waits for its turn of the processor for some milliseconds, five processes handle each request.
DISK_MS = 20.0  # with 8 requests at once: 400 I/Os a second
DISK_AT_ONCE = 8
PROMISE_MS = 100.0  # p95 alone is 20 ms; at 95 % of the disk's rate the queue adds some 50 ms
GOLD_IOPS = 60  # three windows' worth of I/Os a second (window_min_ios)
LIMIT_S = 180.0  # of a wait: a machine that stands still for a minute fails no test
LOOK_S = 0.25  # a wait looks again after a tenth of what it has waited, or after this: each look costs CPU
GREEDY_DEPTH = 128  # keeps the disk busy for a third of a second: p95 is 4 times the promise
AGREEMENTS = """\
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: erp-gold, labels: {customer: acme}}
spec:
  parties: {provider: storage-team, customer: acme, recipients: [oncall]}
  scope: {clients: ["*"], volumes: [erp-db], io: any}
  priority: gold
  guarantee: {floor_iops: 100}
  objectives:
  - name: latency
    indicator: {metric: latency, percentile: 95}
    demand_curve:
    - {up_to_iops: 150, value_ms: PROMISE}
    applicability: {min_ios_per_slice: 100}
    budgeting: {method: timeslices, slice: SLICE, target: 0.95}
  window: {type: calendar, period: month, tz: UTC}
---
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: batch-best-effort}
spec:
  parties: {provider: storage-team, customer: everyone}
  scope: {clients: ["*"], volumes: [batch], io: any}
  priority: best-effort
  guarantee: {floor_iops: 50}
  window: {type: calendar, period: month, tz: UTC}
"""


class StageError(RuntimeError):
    """Something did not come up; the text holds the end of its log."""


@contextlib.contextmanager
def scratch(prefix: str, keep: bool) -> Iterator[Path]:
    """A folder for a program's run, removed at its end unless it is to be kept.

    Raises:
        SystemExit: something did not come up.
    """
    base = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield base
    except StageError as exc:
        raise SystemExit(str(exc)) from exc
    finally:
        if keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)


@dataclass
class Agent:
    """One gateway agent of the stage: its name and its volumes (name -> upstream URI, or a file path)."""

    name: str
    volumes: dict[str, str]
    backend: str = "disk-1"
    extra_toml: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def socket(self, stage: Stage) -> Path:
        """The Unix socket on which its NBD clients connect."""
        return stage.sockets / f"{self.name}.nbd"


@dataclass
class Stage:
    """The running product. Use as a context manager.

    Attributes:
        folder: data, logs and configuration; created.
        interval_s: poll interval.
        slice_s: slice and rollup length; short, so that a short run shows judged slices.
        agents_port: where agents connect if not to the PMDaemon itself: a proxy.
        other_ports: of PMDaemons that agents know as well.
        database_toml: more lines of its table.
        database_url: empty for SQLite in the folder.
        tls: agents enrol and speak TLS.
        queue_bytes: of the ingest queue.
        schema_file: an empty database of this release, which the server finds; None: it makes one.
        environment: of the server and of commands, beside this process's own.
    """

    folder: Path
    agents: list[Agent] = field(default_factory=list)
    interval_s: float = 1.0
    slice_s: int = 10
    database_url: str = ""
    mode: str = "observe"
    api_port: int = 0
    tls: bool = False
    extra_toml: str = ""
    agents_port: int = 0
    other_ports: list[int] = field(default_factory=list)
    database_toml: str = ""
    queue_bytes: int = 32 << 20
    environment: dict[str, str] = field(default_factory=dict)
    schema_file: ClassVar[Path | None] = None
    sockets: Path = field(init=False)
    pm_port: int = field(init=False, default=0)
    _processes: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)
    _client: httpx.Client | None = None

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="sla-"))
        self.api_port = self.api_port or free_port()
        self._write_config()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._client is not None:
            self._client.close()
        with contextlib.ExitStack() as stopping:  # newest first; all of them, also when one has to be killed
            stopping.callback(shutil.rmtree, self.sockets, ignore_errors=True)
            for name, process in self._processes:
                stopping.callback(self.stop, name, process)

    @property
    def config_path(self) -> Path:
        """The server's TOML file."""
        return self.folder / "server.toml"

    @property
    def disk_uri(self) -> str:
        """Start of the URI of the modelled disk; the export's name goes between the slashes."""
        return f"nbd+unix:///{{}}?socket={self.sockets}/disk.sock"

    @property
    def authority(self) -> Authority:
        """The certificate authority of the running server, read from its files."""
        return Authority(self.folder / "data" / "ca")

    def _write_config(self) -> None:
        pm_port = free_port()
        self.config_path.write_text(
            f'data_dir = "{self.folder}/data"\nruntime_dir = "{self.sockets}/run"\n'
            f'[pmdaemon]\nlisten = "127.0.0.1:{pm_port}"\ninterval_s = {self.interval_s}\n'
            f'[services]\nmode = "{self.mode}"\n'
            f'[database]\nurl = "{self.database_url}"\nrollup_s = {self.slice_s}\n'
            f"queue_bytes = {self.queue_bytes}\n{self.database_toml}"
            f'[api]\nlisten = "127.0.0.1:{self.api_port}"\n'
            f"[pmdaemon.tls]\nenabled = {str(self.tls).lower()}\n{self.extra_toml}"
        )
        self.pm_port = pm_port
        text = AGREEMENTS.replace("SLICE", f"{self.slice_s}s").replace("PROMISE", f"{PROMISE_MS:g}")
        (self.folder / "agreements.yaml").write_text(text)

    def _agent_config(self, agent: Agent) -> Path:
        servers = [f"127.0.0.1:{port}" for port in (self.agents_port or self.pm_port, *self.other_ports)]
        lines = [
            f'name = "{agent.name}"',
            f'state_dir = "{self.folder}/{agent.name}"',
            f'runtime_dir = "{self.sockets}/{agent.name}"',
            f"server = {json.dumps(servers if self.other_ports else servers[0])}",
            f"tls = {str(self.tls).lower()}",
            agent.extra_toml,
            "[[plane]]",
            'name = "nbd-0"',
            f'listen = ["unix:{agent.socket(self)}"]',
        ]
        for volume, where in agent.volumes.items():
            kind = "upstream" if where.startswith("nbd") else "file"
            lines += [
                "[[export]]",
                f'volume = "{volume}"',
                f'backend = "{agent.backend}"',
                'plane = "nbd-0"',
                f'{kind} = "{where}"',
            ]
        path = self.folder / f"{agent.name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def spawn(
        self,
        name: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``python -m arguments``; its output goes to ``output``, or to ``<folder>/<name>.log``."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=log if output is None else output,
                stderr=log if output is None else output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self._processes.append((name, process))
        return process

    def running(self, name: str) -> list[subprocess.Popen[bytes]]:
        """Processes spawned under that name that have not ended."""
        return [process for known, process in self._processes if known == name and process.poll() is None]

    @staticmethod
    def stop(name: str, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> int:
        """Stop one process in order, by pid; kill it if it does not."""
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]  # always a pipe: see spawn
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise StageError(f"{name} had to be killed: it did not stop within {limit_s:g} s") from None

    def start_disk(
        self, service_ms: float = DISK_MS, at_once: int = DISK_AT_ONCE, file: Path | None = None
    ) -> None:
        """Start the modelled disk, also in the place of one that has ended, and wait for its socket.

        With a ``file`` its time is that of real I/O on it.
        """
        path = self.sockets / "disk.sock"
        path.unlink(missing_ok=True)
        how = ["--service-ms", str(service_ms), "--at-once", str(at_once)]
        how += ["--file", str(file)] if file is not None else []
        process = self.spawn("disk", "tests.support.modelled_disk", str(path), *how)
        self.wait(path.exists, "the modelled disk", process)

    def start_server(self) -> None:
        """Start the server and wait until its API answers."""
        if self.tls and not (self.folder / "data" / "ca").exists():
            self.sla("ca", "init")
        self.wait(self.is_answering, "the server", self.spawn_server())

    def spawn_server(self, output: int | None = None) -> subprocess.Popen[bytes]:
        """Start the server; see ``spawn``."""
        database = self.folder / "data" / "sla.db"
        if self.schema_file is not None and not self.database_url and not database.exists():
            database.parent.mkdir(mode=0o700, exist_ok=True)
            shutil.copy(self.schema_file, database)
        command = ("sla_server", "start", "--config", str(self.config_path))
        return self.spawn("server", *command, environment=self.environment, output=output)

    def start_agent(self, agent: Agent) -> subprocess.Popen[bytes]:
        """Start one gateway agent and wait until its clients can connect."""
        path = self._agent_config(agent)
        if self.tls and not (self.folder / agent.name / "tls" / "gateway.pem").exists():
            self.enrol(agent)
        process = self.spawn(
            agent.name, "gateway_agent", "run", "--config", str(path), environment=agent.environment
        )
        if agent not in self.agents:
            self.agents.append(agent)
        self.wait(agent.socket(self).exists, agent.name, process)
        return process

    def enrol(self, agent: Agent) -> str:
        """Give an agent its certificate, as an operator would; returns the token, which is spent."""
        token = self.sla("ca", "token", agent.name, "-q").stdout.strip()
        fingerprint = self.authority.fingerprint()
        command = [sys.executable, "-m", "gateway_agent", "enrol", "--token", token]
        command += ["--config", str(self.folder / f"{agent.name}.toml"), "--fingerprint", fingerprint]
        command += ["--server", f"127.0.0.1:{self.pm_port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise StageError(f"enrolling {agent.name} failed: {done.stdout}{done.stderr}")
        return token

    def wait(
        self, ready: Any, what: str, process: subprocess.Popen[bytes] | None = None, limit_s: float = LIMIT_S
    ) -> Any:
        """Wait until ``ready()`` is true and return its value.

        An API that cannot answer now, because its process was killed or is busy, is asked again.

        Raises:
            StageError: it was not within the limit, or the process ended; holds the end of its log.
        """
        began_s, refusal = time.monotonic(), ""
        while True:
            try:
                value = ready()
            except httpx.TransportError as exc:
                value, refusal = None, f"; {exc!r}"
            except httpx.HTTPStatusError as exc:
                if exc.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    raise
                value, refusal = None, f"; {exc!r}"
            if value:
                return value
            ended = process is not None and process.poll() is not None
            waited_s = time.monotonic() - began_s
            if ended or waited_s > limit_s:
                why = "its process ended" if ended else f"not within {limit_s:g} s{refusal}"
                raise StageError(f"{what} did not come up ({why}):\n{self.tail()}")
            time.sleep(min(max(0.05, waited_s / 10), LOOK_S))

    def tail(self, lines: int = 12) -> str:
        """The last lines of every log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {path.name}\n" + "\n".join(text))
        return "\n".join(parts)

    def is_answering(self) -> bool:
        """Whether the API says that the server is well."""
        try:
            return self.client.get("/api/v1/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def client(self) -> httpx.Client:
        """HTTP client of the API, with the token once there is one."""
        if self._client is None:
            self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.api_port}", timeout=60.0)
        token = self.folder / "data" / "api.token"
        if "Authorization" not in self._client.headers and token.exists():
            self._client.headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        return self._client

    def get(self, path: str) -> Any:
        """JSON of ``GET /api/v1/path``; raises for an error status."""
        answer = self.client.get(f"/api/v1/{path}")
        answer.raise_for_status()
        return answer.json()

    def live(self) -> dict[str, Any]:
        """The newest live snapshot; empty while the server is coming up."""
        try:
            answer = self.client.get("/api/v1/live")
            return dict(answer.json()) if answer.status_code == 200 else {}
        except httpx.HTTPError:
            return {}

    def snapshot(self) -> dict[str, Any]:
        """The newest live snapshot; waits for one: for what is asserted of it, or indexed in it."""
        found: dict[str, Any] = self.wait(
            lambda: live if (live := self.live()).get("at_us") else None, "a live snapshot"
        )
        return found

    def sla(
        self, *arguments: str, check: bool = True, limit_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the ``sla`` command as a user would.

        Raises:
            StageError: it did not end within the limit, or failed and ``check`` is set.
        """
        environment = {
            **os.environ,
            "SLA_SERVER": f"http://127.0.0.1:{self.api_port}",
            "SLA_CONFIG": str(self.config_path),
        }
        command = [sys.executable, "-m", "sla_server.cli", *arguments]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise StageError(f"sla {' '.join(arguments)} did not end within {limit_s:g} s") from exc
        if check and done.returncode:
            raise StageError(
                f"sla {' '.join(arguments)} failed ({done.returncode}):\n{done.stdout}{done.stderr}"
            )
        return done

    def set_mode(self, mode: str) -> None:
        """Observe or enforce."""
        self.sla("mode", mode)

    def gateways_up(self) -> bool:
        """Whether every agent of the stage is known and up."""
        up = {row["name"] for row in self.live().get("gateways", []) if row["state"] == "up"}
        return {agent.name for agent in self.agents} <= up

    def pids(self, fragment: str) -> list[int]:
        """Pids of our own processes whose command line contains ``fragment``."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if fragment not in line:
                    continue
                # A pair has no path on its command line; its environment names our runtime directory.
                around = line + path.with_name("environ").read_bytes().decode(errors="replace")
                if f"{self.folder}/" in around or str(self.sockets) in around:
                    found.append(int(path.parent.name))
        return found

    def pid(self, fragment: str) -> int:
        """The pid of our one process with ``fragment``; waits while there is none, or a second one.

        One that starts a program, or a successor that is being started, makes two for a moment.
        """
        found: list[int] = self.wait(
            lambda: pids if len(pids := self.pids(fragment)) == 1 else None, f"one process of {fragment}"
        )
        return found[0]

    def kill(self, fragment: str) -> list[int]:
        """Kill -9 every own process whose command line contains ``fragment``; returns the pids."""
        pids = self.pids(fragment)
        for pid in pids:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it ends with its parent, which was killed before it
                os.kill(pid, signal.SIGKILL)
        return pids


def pretty(data: object) -> str:
    """JSON for error texts."""
    return json.dumps(data, indent=1, default=str)[:4000]
