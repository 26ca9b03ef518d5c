"""``sla-server start | status | stop``: the server as an operator handles it.

``ServerStatus`` is what ``status`` prints and what a start in the background waits for. The word of the API
alone is not enough: rows of a run that has ended call processes running that are dead, and a page may be
served while the database manager cannot start. So each process named must be a living child of the supervisor
that holds the data directory.
"""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.runtime import config as files
from pmdaemon.runtime import logs
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.failures import failures
from pmdaemon.runtime.hangup import blocked
from pmdaemon.runtime.sockets import open_listener
from pmdaemon.runtime.stop import Stop, end_with_parent
from pmdaemon.runtime.template import Template
from pmdaemon.runtime.threads import set_os_thread_name, watch
from sla_server import config as configuration
from sla_server import directories
from sla_server.cli.errors import RequestRefused
from sla_server.cli.main import CommandGroup
from sla_server.cli.output import DATA_OUTPUT, print_json
from sla_server.cli.relay import relay
from sla_server.directories import leave_runtime_dir, prepare_runtime_dir
from sla_server.errors import ServerNotRunning, ServerRunning
from sla_server.lease_file import LeaseFile
from sla_server.schedule import MODULES, STEPS, arguments_of, together
from sla_server.topology import PARTS, app_layout, later_pairs, main_layout, parts_of, takes_over

if TYPE_CHECKING:  # imported where it is used: a server in the foreground needs no HTTP client
    from sla_server.cli.client import Client

CONFIG = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's TOML file (default: built-in values, data in ./sla-data).",
)
READY_LIMIT_S = 60
LAST_LINES = 5  # of the log, where a start fails
STATUS_INTERVAL_S = 0.5  # each question makes a client of its own, which costs more than the question
EX_TEMPFAIL = 75
NO_ANSWER = "the application server does not answer"
STANDS_BY = "this server stands by: SQL has the processes of the one that acts"
OF_BEFORE = "they are stored in the database, and dbmanager cannot store them now"
LEFTOVER_LIMIT_S = 5.0  # parts whose supervisor was killed end within this
GENERATIONS = 5  # supervisor, template, pmdaemon, its template, pair


class ServerCommands(CommandGroup):
    """Reports errors under this program's name."""

    program = "sla-server"


@click.group(cls=ServerCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="storage-sla-server")
def cli() -> None:
    """The SLA server: keeps latency promises on shared block storage."""


@cli.command()
@CONFIG
@click.option(
    "--background", is_flag=True, help="Return when all parts are ready; log to DATA_DIR/server.log."
)
@click.option(
    "--limit",
    "limit_s",
    type=click.IntRange(0, 86_400),
    default=READY_LIMIT_S,
    help="With --background: seconds to wait until all are ready.",
)
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Check the file and exit.")
def start(path: Path | None, background: bool, limit_s: int, show_config: bool, check_config: bool) -> None:
    """Start the server (in the foreground unless --background)."""
    config = configuration.load(path)
    if config.pmdaemon.tls.enabled and not show_config:
        from pmdaemon.pki.authority import Authority
        from pmdaemon.pki.errors import PkiError

        authority = Authority(config.ca_dir)
        authority.fingerprint()  # or say how to make one
        try:
            authority.check_key()
        except PkiError as exc:
            if check_config:
                raise
            # Gateways that are enrolled go on with their certificates until these must be renewed.
            click.echo(f"warning: {exc}\nUntil then no certificate can be made or renewed.", err=True)
    if config.api.tls.certificate is not None and not show_config:
        from sla_server.api.tls import load_context

        load_context(config.api.tls.certificate, config.api.tls.key)  # or say what is wrong with it
    if check_config:
        click.echo("configuration is good")
        return
    if show_config:
        click.echo(files.show(config), nl=False)
        click.echo(mailbox_sizes(config))
        return
    if (pid := directories.running_pid(config.data_dir)) is not None:
        raise ServerRunning(config.data_dir, pid)
    prepare_runtime_dir(config.runtime_dir)
    with ExitStack() as stack:
        stack.callback(leave_runtime_dir, config.runtime_dir)
        check_addresses(config)
        _check_room(config)
        directories.prepare_data_dir(config.data_dir)
        for failure in config.runtime_dir.glob("*.failed"):  # of a former run
            failure.unlink()
        if background:
            _start_in_background(config, path, limit_s)
            return
        started = stack.pop_all()  # a fork has nothing to do on its way out
    # Other commands do without it. The template shares what is imported before the fork.
    from sla_server.supervisor import Supervisor, imported

    template = Template(imported(config))
    with blocked():
        template.fork(has_session=True)
    with started:
        logs.configure("supervisor")
        stop = Stop()
        stop.install_signals()
        stop.watch_parent()
        supervisor = Supervisor(config, path.absolute() if path else None, stop, template=template)
        supervisor.hangup.install()
        status = supervisor.run()
    raise SystemExit(status)


def mailbox_sizes(config: configuration.ResolvedConfig) -> str:
    """What the mailbox segments take, as a comment line."""
    pairs = config.pmdaemon.most_pairs
    layout, app_bytes = main_layout(pairs), app_layout().total_bytes
    now, most = layout.reserved_bytes(later_pairs(pairs)) + app_bytes, layout.total_bytes + app_bytes
    return (
        f"# mailbox segments: {now / (1 << 20):.0f} MiB of shared memory under {config.runtime_dir} with one "
        f"pair and little to carry, {most / (1 << 20):.0f} MiB with {pairs}, the most, when all of it is used"
    )


def check_addresses(config: configuration.ResolvedConfig) -> None:
    """Check that the server's ports are free, before parts are started that would only try again and again.

    The port files are removed by an orderly stop. Where one is left, the parts of a server that was killed
    may still be ending, so their ports are waited for.

    Raises:
        ConfigError: one is taken; names port and setting.
    """
    for setting, (host, port), left in (
        ("api.listen", parse_address(config.api.listen), "api.port"),
        ("pmdaemon.listen", parse_address(config.pmdaemon.listen), "pmdaemon.port"),
        *(
            ("pmdaemon.forwarded", parse_address(value), "pmdaemon.port")
            for value in (config.pmdaemon.forwarded,)
            if value
        ),
        *(
            (f"cluster.{key}", parse_address(getattr(config.cluster, key)), "main.mbx")
            for key in (("listen", "routes") if config.cluster else ())
        ),
    ):
        deadline = Deadline(LEFTOVER_LIMIT_S if (config.runtime_dir / left).exists() else 0)
        while True:
            try:
                open_listener(setting, host, port).close()
                break
            except ConfigError:
                if deadline.passed:
                    raise
            time.sleep(0.1)


def _check_room(config: configuration.ResolvedConfig) -> None:
    from sla_server.db.ingest.queue import check_room  # numpy and the queue, for this check only

    check_room(config.database.resolved_queue_dir(config.data_dir), config.database.queue_bytes)


def _start_in_background(config: configuration.ResolvedConfig, path: Path | None, limit_s: int) -> None:
    """Start the server as a process of its own and wait until all of it is ready."""
    (config.runtime_dir / "api.port").unlink(missing_ok=True)
    command = [sys.executable, "-m", "sla_server", "start"]
    if path:
        command += ["--config", str(path.absolute())]
    log_path = config.data_dir / "server.log"
    with log_path.open("ab") as log_file:
        former_bytes = log_file.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
        )
    deadline = Deadline(limit_s)
    while True:
        with connected(config, path) as client:
            found = ask_status(config, client, process.pid)
            page = page_of(client) if found.is_ready else ""
        if found.is_ready:
            break
        ended = process.poll()
        if ended is not None or deadline.passed:
            what = (
                "did not start"
                if ended is not None
                else f"is not ready after {limit_s} s and goes on trying (pid {process.pid}); "
                "'sla-server status' says more"
            )
            with log_path.open(errors="replace") as log_file:
                log_file.seek(former_bytes)
                lines = log_file.read().splitlines()
            # The reason is rarely at the end: the other parts say after it that they stop.
            tail = [line for line in lines[:-LAST_LINES] if " level=error " in line][-LAST_LINES:]
            tail += lines[-LAST_LINES:]
            reasons = "".join(f"{line}\n" for line in found.troubles())
            said = printable_lines("\n".join((f"{reasons}the end of {log_path}:", *tail)))
            click.echo(f"sla-server: {what}\n{said}", err=True)
            raise SystemExit(EX_TEMPFAIL if ended is None else max(ended, 1))
        time.sleep(STATUS_INTERVAL_S)
    click.echo(f"server started (pid {process.pid}), page: {page}")


@cli.command()
@CONFIG
@DATA_OUTPUT
def status(path: Path | None, output: str) -> None:
    """Say whether the server runs, its processes, its page, and what is in trouble.

    Ends with status 0 if all is well, 1 if something is in trouble, 69 if no server runs.
    """
    config = configuration.load(path)
    pid = directories.running_pid(config.data_dir)
    if pid is None:
        raise ServerNotRunning(config.data_dir, another_at(config.api.listen))
    with connected(config, path) as client:
        found, page = ask_status(config, client, pid), page_of(client)
    if output == "json":
        print_json({"pid": pid, "page": page, "is_well": found.is_well, **asdict(found)})
    else:
        lines = "\n".join(found.lines())
        click.echo(f"running, pid {pid}, page {page}\n{printable_lines(lines)}")
    if not found.is_well:
        raise SystemExit(1)


@cli.command()
@CONFIG
@click.option("--limit", "limit_s", default=60.0, help="Seconds to wait for an orderly stop.")
def stop(path: Path | None, limit_s: int) -> None:
    """Stop the server in order and wait until it is gone."""
    config = configuration.load(path)
    pid = directories.running_pid(config.data_dir)
    if not pid:
        raise ServerNotRunning(config.data_dir)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # it has just ended by itself
        pass
    except PermissionError as exc:
        raise ConfigError(
            "data_dir", f"its server, process {pid}, belongs to another user", "Run this as that user"
        ) from exc
    if not directories.wait_stopped(config.data_dir, limit_s):
        click.echo(f"sla-server: still running after {limit_s:g} s; see its log, or kill {pid}", err=True)
        raise SystemExit(1)
    click.echo("server stopped")


cli.add_command(relay)


@cli.command()
@CONFIG
def node(path: Path | None) -> None:
    """Run only this machine's node of the cluster, [cluster] of the file, in the foreground.

    For a machine that has no server of its own, such as the third of a pair.
    """
    config = configuration.load(path)
    if config.cluster is None:
        raise ConfigError(
            str(path or "configuration"),
            "has no table [cluster]",
            "docs/operations/cluster.md has an example",
        )
    from sla_server.cluster.process import run

    logs.configure("cluster")
    set_os_thread_name("sla-cluster")
    stop = Stop()
    stop.install_signals()
    stop.watch_parent()
    watch(stop)
    raise SystemExit(run(config, stop, is_alone=True))


@cli.group()
def jobs() -> None:
    """Work that a timer or a schedule of the file starts: policies and what they rest on, reports."""


@jobs.command(
    "run",
    context_settings={"ignore_unknown_options": True},
    help=f"""Run the jobs NAME here and now, with OPTIONS of their own (`--help` after -- lists them).

    The names: {", ".join(MODULES)}; or all. Several run one after the other, in the order given;
    {", ".join(STEPS)} share a start of Spark if they follow each other. The exit status is that of the first
    that did not end with 0; `sla get jobs` lists runs with their rows and how long they took. A second run of
    a job beside the first ends with 79.""",
)
@CONFIG
@click.argument("words", metavar="NAME... [OPTIONS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def run_jobs(path: Path | None, words: tuple[str, ...]) -> None:
    """Run jobs; see ``help``."""
    names = list(takewhile(lambda word: word in MODULES or word == "all", words))
    options = words[len(names) :]
    if not names or (options and not options[0].startswith("-")):
        raise click.BadParameter(f"{words[len(names)]!r} is no job; there are {', '.join(MODULES)}, or all")
    config = ["--config", str(path)] if path else []
    every = list(MODULES) if "all" in names else names
    commands = [[sys.executable, *arguments_of(*some), *config, *options] for some in together(every)]
    if len(commands) == 1:
        os.execv(commands[0][0], commands[0])  # noqa: S606 - the job in this one's place: signals, status
    statuses = [
        subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode for command in commands
    ]
    raise SystemExit(next((status for status in statuses if status), 0))


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The state of a running server.

    Attributes:
        processes: rows of the API; ``state`` is ``dead`` where the process is none of this server's.
        trouble: why the states of the processes are unknown; "" if they are known.
        health: ``ok``, ``degraded`` or ``down``; "" without an answer.
        problems: what the parts report (``/api/v1/health``).
        failures: part -> why it ended at its last start.
        parts: those that it should have.
        acting: node of the server that acts while this one stands by; "" if this one acts.
        gave_up: why this one gave the lease up to it by itself; "": it did not.
    """

    processes: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""
    health: str = ""
    problems: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = PARTS
    acting: str = ""
    gave_up: str = ""

    @property
    def missing(self) -> list[str]:
        """Parts that do not run."""
        running = {row["name"] for row in self.processes if row["state"] == "running"}
        return [name for name in self.parts if name not in running]

    @property
    def is_ready(self) -> bool:
        """Every part runs, and live data come; there may be problems."""
        if self.acting:
            return not self.failures
        return self.health in ("ok", "degraded") and not self.missing and not self.failures

    @property
    def is_well(self) -> bool:
        """Ready, and nothing is in trouble."""
        return self.is_ready and not self.problems

    def lines(self) -> list[str]:
        """For people: states, then troubles."""
        if self.acting:
            why = [f"  it gave the lease up, as it {self.gave_up}"] if self.gave_up else []
            return [f"  stands by: the server of node {self.acting} acts", *why, *self.troubles()]
        lines = [f"  states of the processes are unknown: {self.trouble}"] if self.trouble else []
        for row in self.processes:
            line = f"  {row['name']:<10} {row['state']:<11} pid {row['pid'] or '-':<8}"
            line += f" restarts {row['restarts']}"
            lines.append(line + (f"  ({row['reason']})" if row["reason"] else ""))
        return lines + self.troubles()

    def troubles(self) -> list[str]:
        """Only what is wrong, or not there yet."""
        from sla_server.cli import formatting

        lines = [f"  {name} failed at its last start: {reason}" for name, reason in self.failures.items()]
        lines += [
            f"  {name} does not run"
            for name in self.missing
            if not self.trouble and name not in self.failures
        ]
        for row in self.problems:
            since = f", since {formatting.when(row['since_us'])}" if row["since_us"] else ""
            lines.append(f"  in trouble: {row['process']}{since}: {formatting.sentence(row['reason'])}")
        return lines


@contextmanager
def connected(config: configuration.ResolvedConfig, path: Path | None) -> Iterator[Client | None]:
    """A client of this server; None while it does not listen."""
    from sla_server.cli.client import SOCKET_NAME, Client, local_uid

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


def ask_status(config: configuration.ResolvedConfig, client: Client | None, pid: int) -> ServerStatus:
    """Ask the server whose supervisor has this pid."""
    failed, parts = failures(config.runtime_dir), parts_of(config)
    if takes_over(config):
        lease = LeaseFile(config.runtime_dir).read()
        if lease.holder not in ("", lease.node):
            standing_by = parts_of(config, is_acting=False)
            why = lease.why if lease.gave_up == lease.node else ""
            return ServerStatus(
                trouble=STANDS_BY, failures=failed, parts=standing_by, acting=lease.holder, gave_up=why
            )
    if client is None:
        return ServerStatus(trouble=NO_ANSWER, failures=failed, parts=parts)
    health: dict[str, Any] = {}
    try:
        health = client.get("/health")
    except RequestRefused as exc:  # 503: down, and its body says why
        health = exc.problem
    except SlaError as exc:
        return ServerStatus(trouble=str(exc).splitlines()[0], failures=failed, parts=parts)
    rows: list[dict[str, Any]] = []
    trouble = ""
    try:
        rows = _checked(client.get("/processes")["items"], pid)
    except SlaError as exc:
        trouble = str(exc).splitlines()[0]
    problems = list(health.get("problems", []))
    if any(row["state"] == "dead" for row in rows) and any(row["process"] == "dbmanager" for row in problems):
        rows, trouble = [], OF_BEFORE
    return ServerStatus(rows, trouble, str(health.get("status", "")), problems, failed, parts)


def another_at(listen: str) -> str:
    """The address of an SLA server that answers where this one would; "" if none does."""
    if listen.endswith(":0"):
        return ""
    from sla_server.cli.client import Client

    with closing(Client(f"http://{listen}")) as client:
        try:
            client.get("/alive")
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


def _checked(rows: list[dict[str, Any]], supervisor: int) -> list[dict[str, Any]]:
    """The rows; those of processes that are none of this server's are ``dead``."""
    said = [row["pid"] for row in rows if row["state"] == "running"]
    ours = {pid for pid in said if is_below(pid, supervisor)}
    # A pair whose template has ended shares nothing with the supervisor, but a pipe with the PMDaemon.
    ours |= {pid for pid in said if pid not in ours and any(is_below(pid, part) for part in ours)}
    return [
        row
        if row["state"] != "running" or row["pid"] in ours
        else {**row, "state": "dead", "reason": "of a run that has ended"}
        for row in rows
    ]


def is_below(pid: int | None, ancestor: int) -> bool:
    """Whether the process lives and was started by ``ancestor``, or by one that was.

    Parts whose template has ended have another parent; the pipe of theirs (``stop.ParentPipe``) they keep.
    """
    known = _pipes_of(ancestor)
    for _ in range(GENERATIONS):
        if not pid or pid == ancestor:
            break
        pid = ancestor if (parent := _parent_of(pid)) and known & _pipes_of(pid) else parent
    return bool(pid) and pid == ancestor


def _pipes_of(pid: int) -> set[str]:
    """Those that it holds, but for its standard ones; none that this user may not see."""
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if int(path.name) > 2 and (target := os.readlink(path)).startswith("pipe:"):
                    found.add(target)
    return found


def _parent_of(pid: int) -> int:
    """0 if there is no such process, or only its exit status is left."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)
