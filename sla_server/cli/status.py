"""How a running server is: what ``sla-server status`` prints, and what a start in the background waits for.

The word of the API alone is not enough: rows of a run that has ended call processes running that are dead,
and a page may be served while the database manager cannot start. So each process named must be a
living child of the supervisor that holds the data directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pmdaemon.errors import SlaError
from pmdaemon.runtime.failures import failures
from sla_server.cli import formatting
from sla_server.cli.client import SOCKET_NAME, Client, local_uid
from sla_server.cli.errors import RequestRefused
from sla_server.config import ResolvedConfig
from sla_server.supervisor import PARTS

NO_ANSWER = "the application server does not answer"
_GENERATIONS = 4  # supervisor, pmdaemon, pair; one to spare


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What was found.

    Attributes:
        processes: rows of the API; ``state`` is ``dead`` where the process is none of this server's.
        trouble: why the states of the processes are unknown; "" if they are known.
        health: ``ok``, ``degraded`` or ``down``; "" without an answer.
        problems: what the parts report (``/api/v1/health``).
        failures: part -> why it ended at its last start.
    """

    processes: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""
    health: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Parts that do not run."""
        running = {row["name"] for row in self.processes if row["state"] == "running"}
        return [name for name in PARTS if name not in running]

    @property
    def is_ready(self) -> bool:
        """Every part runs, and live data come; there may be problems."""
        return self.health in ("ok", "degraded") and not self.missing and not self.failures

    @property
    def is_well(self) -> bool:
        """Ready, and nothing is in trouble."""
        return self.is_ready and not self.problems

    def lines(self) -> list[str]:
        """For people: states, then troubles."""
        told = [f"  states of the processes are unknown: {self.trouble}"] if self.trouble else []
        for row in self.processes:
            line = f"  {row['name']:<10} {row['state']:<11} pid {row['pid'] or '-':<8}"
            line += f" restarts {row['restarts']}"
            told.append(line + (f"  ({row['reason']})" if row["reason"] else ""))
        return told + self.troubles()

    def troubles(self) -> list[str]:
        """Only what is wrong, or not there yet."""
        told = [f"  {name} failed at its last start: {reason}" for name, reason in self.failures.items()]
        told += [
            f"  {name} does not run"
            for name in self.missing
            if not self.trouble and name not in self.failures
        ]
        for row in self.problems:
            since = f", since {formatting.when(row['since_us'])}" if row["since_us"] else ""
            told.append(f"  in trouble: {row['process']}{since}: {formatting.sentence(row['reason'])}")
        return told


@contextmanager
def connected(config: ResolvedConfig, path: Path | None) -> Iterator[Client | None]:
    """A client of this server; None while it does not listen."""
    local = config.data_dir / SOCKET_NAME
    try:
        port = (config.runtime_dir / "api.port").read_text().strip()
    except OSError:
        yield None
        return
    token = config.api.token_path(config.data_dir)
    is_there = local_uid(local) is not None
    with closing(
        Client(f"http://127.0.0.1:{port}", token, path, local=local if is_there else None)
    ) as client:
        yield client


def look(config: ResolvedConfig, client: Client | None, pid: int) -> ServerStatus:
    """Ask the server whose supervisor has this pid."""
    failed = failures(config.runtime_dir)
    if client is None:
        return ServerStatus(trouble=NO_ANSWER, failures=failed)
    told: dict[str, Any] = {}
    try:
        told = client.get("/health")
    except RequestRefused as exc:  # 503: down, and its body says why
        told = exc.problem
    except SlaError as exc:
        return ServerStatus(trouble=str(exc).splitlines()[0], failures=failed)
    rows: list[dict[str, Any]] = []
    trouble = ""
    try:
        rows = [_checked(row, pid) for row in client.get("/processes")["items"]]
    except SlaError as exc:
        trouble = str(exc).splitlines()[0]
    return ServerStatus(rows, trouble, str(told.get("status", "")), list(told.get("problems", [])), failed)


def another_at(listen: str) -> str:
    """The address of an SLA server that answers where this one would; "" if none does."""
    if listen.endswith(":0"):
        return ""
    with closing(Client(f"http://{listen}")) as client:
        try:
            client.get("/health")
        except RequestRefused:  # 503: it is one, and not well
            return client.server
        except SlaError:
            return ""
        return client.server


def page_of(client: Client | None) -> str:
    """A new one-time sign-in address; the plain address of the page where none can be had."""
    if client is None:
        return "(not listening yet)"
    try:
        return str(client.change("POST", "/logins")["address"])
    except (SlaError, OSError):
        return f"{client.server}/"


def _checked(row: dict[str, Any], supervisor: int) -> dict[str, Any]:
    if row["state"] == "running" and not is_below(row["pid"], supervisor):
        return {**row, "state": "dead", "reason": "of a run that has ended"}
    return row


def is_below(pid: int | None, ancestor: int) -> bool:
    """Whether the process lives and was started by ``ancestor``, or by one that was."""
    for _ in range(_GENERATIONS):
        if not pid or pid == ancestor:
            break
        pid = _parent_of(pid)
    return bool(pid) and pid == ancestor


def _parent_of(pid: int) -> int:
    """0 if there is no such process, or only its exit status is left."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)
