"""``gateway-agent status``, ``reload``, ``upgrade``: what the agent on this host does, without the server.

    runtime_dir/agent.json   the parent: children, the newest reload       a lock says whether the agent runs
    runtime_dir/link.json    the link: session to the server, spool
    runtime_dir/NAME.sock    each data plane, asked with DP_STATUS: volumes, clients, caps

A part that does not answer is shown so; the others are shown all the same. ``reload`` is SIGHUP to the
parent, ``upgrade`` SIGUSR2, and the record of what came of it. Of the agent's file only ``runtime_dir`` and
``state_dir`` are used, so all work while the file has a mistake.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gateway_agent.config import AgentConfig, load_agent
from gateway_agent.errors import (
    AgentNotRunning,
    AlreadyRunning,
    PlaneLost,
    ReloadFailed,
    StateFileBroken,
    UpgradeFailed,
)
from gateway_agent.link import state_files
from pmdaemon.errors import ConfigError, WireError
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.failures import failures
from pmdaemon.runtime.toml_file import read_toml
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.plane_report import DpReport, PlaneReport, ReportedStream, ReportedVolume
from pmdaemon.wire.messages.planes import DpStatus
from pmdaemon.wire.rates import Rates

ANSWER_S: Final = 2.0  # a plane answers within milliseconds; one that is stopped does not
RELOAD_S: Final = 30.0
UPGRADE_S: Final = 240.0  # the check, a link that ends, and two minutes for a plane
_LOOK_S: Final = 0.05
WIDTH: Final = 80
_FIGURES: Final = ("READ/S", "WRITE/S", "MB/S", "LATENCY", "HELD", "DEPTH", "OLDEST")
DASH: Final = "-"
TO_START: Final = "Start it: gateway-agent run --config FILE"


@dataclass(frozen=True, slots=True)
class PlaneProblem:
    """A data plane that does not answer, and why."""

    plane: str
    problem: str

    def document(self) -> dict[str, Any]:
        """What ``status -o json`` shows in the place of a report."""
        return asdict(self)


# -- finding out


def runtime_dir_of(path: Path) -> Path:
    """Where the agent of this file runs, also if the file is not valid now, or names another place since.

    Raises:
        ConfigError: it cannot be read, or is not TOML, and no agent that runs with it was found.
    """
    try:
        config = load_agent(path)
        runtime_dir, state_dir = config.runtime_dir, config.state_dir
    except ConfigError:
        try:
            said = read_toml(path)
        except ConfigError as exc:
            return _running_with(path, exc)
        runtime_dir, state_dir = _directory(said, "runtime_dir"), _directory(said, "state_dir")
    return _started_in(state_dir) or runtime_dir


def _running_with(path: Path, problem: ConfigError) -> Path:
    """Where an agent runs that says it was started with this file, by those lines that can be read.

    Raises:
        ConfigError: none was found.
    """
    said: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                said |= tomllib.loads(line)
    runtime_dir = _directory(said, "runtime_dir")
    place = _started_in(_directory(said, "state_dir")) or runtime_dir
    with contextlib.suppress(AgentNotRunning, StateFileBroken, KeyError, TypeError):
        if Path(parent(place)["config"]).resolve() == path.resolve():
            return place
    fix = "Correct it; which agent runs with it could not be found"
    raise ConfigError(problem.where, problem.problem, fix) from problem


def _directory(said: dict[str, Any], key: str) -> Path:
    path = Path(str(said.get(key, AgentConfig.model_fields[key].default)))
    with contextlib.suppress(RuntimeError):  # ~ of a user who is not there
        path = path.expanduser()
    return path.absolute()


def _started_in(state_dir: Path) -> Path | None:
    """runtime_dir of the agent with this state_dir, if it runs there: a reload does not change it."""
    try:
        place = Path(str(state_files.read_json(state_dir / state_files.PLACE, "")["runtime_dir"]))
        is_ours = parent(place)["gateway_id"] == state_files.gateway_id(state_dir, may_make=False)
    except (AgentNotRunning, StateFileBroken, TypeError, KeyError, ValueError):
        return None
    return place if is_ours else None


def parent(runtime_dir: Path) -> dict[str, Any]:
    """What the agent's parent says of itself.

    Raises:
        AgentNotRunning: there is none, or it belongs to another user.
    """
    try:
        if not runtime_dir.exists():
            raise AgentNotRunning(str(runtime_dir), "there is no such directory. " + TO_START)
        os.close(state_files.lock_directory(runtime_dir))
    except AlreadyRunning:
        pass
    except StateFileBroken as exc:
        raise AgentNotRunning(str(runtime_dir), str(exc)) from exc
    else:
        raise AgentNotRunning(str(runtime_dir), "no process holds its lock. " + TO_START)
    said = state_files.read_json(runtime_dir / "agent.json", "Restart the agent")
    if not isinstance(said, dict):
        raise AgentNotRunning(str(runtime_dir), "it is starting and has not said anything yet")
    return said


def gather(runtime_dir: Path) -> dict[str, Any]:
    """All parts: ``{agent, link, planes: {name: PlaneReport | PlaneProblem}, failures: {name: text}}``.

    Raises:
        AgentNotRunning: see ``parent``.
    """
    said = parent(runtime_dir)
    link = state_files.read_json(runtime_dir / "link.json", "Restart the agent")
    names = [name for name in said["children"] if name != "link"]
    planes = {name: _ask(str(runtime_dir / f"{name}.sock"), name) for name in names}
    return {"agent": said, "link": link, "planes": planes, "failures": failures(runtime_dir)}


def _ask(path: str, name: str) -> PlaneReport | PlaneProblem:
    try:
        return plane_status(path, name)
    except (OSError, PlaneLost) as exc:
        problem = getattr(exc, "strerror", None) or getattr(exc, "reason", None) or str(exc) or "timed out"
        return PlaneProblem(name, f"does not answer: {problem}")


def plane_status(path: str, name: str) -> PlaneReport:
    """The report of one data plane.

    Raises:
        OSError: it is not there, or does not answer in time.
        PlaneLost: what it says is not the protocol, or it is of a release without status.
    """
    deadline, reader = Deadline(ANSWER_S), frame.FrameReader()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(path)
        sock.sendall(DpStatus().encode())
        while not deadline.passed:
            data = sock.recv(65_536)
            if not data:
                raise PlaneLost(name, "it closed the connection")
            try:
                for received in reader.feed(data):
                    if received.kind == Kind.DP_REPORT:
                        return DpReport.parse(received, name).report
                    if received.kind == Kind.UNSUPPORTED:
                        raise PlaneLost(name, "it is of a release without status; restart the agent")
            except WireError as exc:
                raise PlaneLost(name, str(exc)) from exc
    raise TimeoutError


def reload(runtime_dir: Path) -> dict[str, Any]:
    """Ask the agent to read its file again, and wait for the result: the record in ``agent.json``.

    Raises:
        AgentNotRunning: see ``parent``.
        ReloadFailed: it says nothing in time, or is of a release that would end.
    """
    said = parent(runtime_dir)
    if "reload" not in said:
        raise ReloadFailed("the agent that runs is of a release without reload. Restart it")
    number, deadline = said["reload"]["number"], Deadline(RELOAD_S)
    try:
        os.kill(said["pid"], signal.SIGHUP)
    except OSError as exc:
        raise ReloadFailed(
            f"process {said['pid']}: {exc.strerror}. Run this as the agent's user, or root"
        ) from exc
    while not deadline.passed:
        time.sleep(_LOOK_S)
        record: dict[str, Any] = parent(runtime_dir)["reload"]
        if record["number"] > number and record["state"] != "pending":
            return record
    raise ReloadFailed(f"the agent has said nothing for {RELOAD_S:.0f} s. See its log")


def upgrade(runtime_dir: Path) -> dict[str, Any]:
    """Ask the agent to let the release that is installed now take its place, and wait: ``agent.json`` then.

    Raises:
        AgentNotRunning: see ``parent``; it has ended since.
        UpgradeFailed: it says nothing in time, is at it already, or is of a release that would end.
    """
    said = parent(runtime_dir)
    if "upgrade" not in said:
        raise UpgradeFailed("the agent that runs is of a release without upgrade. Restart it")
    if said["upgrade"]["state"] == "pending":
        raise UpgradeFailed("an upgrade is under way. See gateway-agent status")
    number, deadline = said["upgrade"]["number"], Deadline(UPGRADE_S)
    try:
        os.kill(said["pid"], signal.SIGUSR2)
    except OSError as exc:
        raise UpgradeFailed(
            f"process {said['pid']}: {exc.strerror}. Run this as the agent's user, or root"
        ) from exc
    while not deadline.passed:
        time.sleep(_LOOK_S)
        said = parent(runtime_dir)
        if said["upgrade"]["number"] > number and said["upgrade"]["state"] != "pending":
            return said
    raise UpgradeFailed(f"the agent has said nothing for {UPGRADE_S:.0f} s. See its log")


# -- for people


def lines(found: dict[str, Any], now_unix_us: int) -> Iterator[str]:
    """The status in at most ``WIDTH`` columns; names that are longer are broken."""
    yield from _agent_lines(found["agent"], now_unix_us)
    yield from _link_lines(found["link"], found["agent"], now_unix_us)
    yield from _pressure_lines((found["link"] or {}).get("pressure"))
    yield from reload_lines(found["agent"].get("reload"), now_unix_us)
    if found["agent"].get("upgrade", {}).get("number"):
        yield from upgrade_lines(found["agent"], now_unix_us)
    yield ""
    yield from _process_lines(found)
    reports = [report for report in found["planes"].values() if isinstance(report, PlaneReport)]
    volumes = [
        (report, volume)
        for report in reports
        for volume in report.volumes
        if volume.streams or report.handed_over is None
    ]
    if volumes:
        yield ""
        yield from _volume_lines(volumes)
    if any(volume.streams for _, volume in volumes):
        yield ""
        yield from _client_lines(volumes)
    yield from _cap_lines(volumes)
    yield from _beside_lines(found["link"] or {})
    for report in reports:
        for volume, connections in report.leaving.items():
            yield f"leaving  {volume}: {connections} connections use what was removed or replaced"


def _agent_lines(agent: dict[str, Any], now_us: int) -> Iterator[str]:
    since_us = agent.get("since_unix_us")
    age = f", up {span((now_us - since_us) / 1e6)}" if since_us else ""
    yield f"agent    {agent.get('name', '')}  pid {agent['pid']}{age}"
    yield f"         {agent['gateway_id']}"


def _link_lines(link: dict[str, Any] | None, agent: dict[str, Any], now_us: int) -> Iterator[str]:
    server = (link or {}).get("server")
    if link is None or server is None or agent["children"].get("link") is None:
        yield "server   the link does not run; planes go on, and keep their counts"
        return
    polled_us = server["polled_unix_us"]
    polled = f"polled {span((now_us - polled_us) / 1e6)} ago" if polled_us else "not polled yet"
    state = server["state"]
    state = "not connected" if state == "closed" else state
    words = polled if state == "polling" else f"{state} for {span((now_us - server['since_unix_us']) / 1e6)}"
    yield f"server   {server['address']}{' (TLS)' if server['tls'] else ''}  {words}"
    spool = link["spool"]
    share = spool["bytes"] / spool["limit_bytes"]
    dropped = f"{spool['dropped']:,} dropped in its life"
    yield f"spool    {spool['cuts']:,} cuts, {share:.0%} of its room; {dropped}"
    if now_us - link["at_unix_us"] > 60_000_000:
        yield f"         the link said so {span((now_us - link['at_unix_us']) / 1e6)} ago"


def reload_lines(record: dict[str, Any] | None, now_us: int) -> Iterator[str]:
    """What came of the newest reload."""
    if not record or record["state"] == "none":
        yield "reload   none since the start"
        return
    age = span(max(now_us - record["at_unix_us"], 0) / 1e6)
    yield f"reload   {record['state']} {age} ago ({record['cause']})"
    details = [*record["changes"], *([record["text"]] if record["text"] else [])]
    if record["needs_restart"]:
        details.append(f"needs a restart of the agent: {', '.join(record['needs_restart'])}")
    for detail in details:
        yield from _folded("         ", detail)


def upgrade_lines(agent: dict[str, Any], now_us: int) -> Iterator[str]:
    """What came of the newest upgrade; ``agent``: as ``parent`` returns it."""
    record = agent["upgrade"]
    age = span(max(now_us - record["at_unix_us"], 0) / 1e6)
    releases = f" ({record['former']} to {record['release']})" if record["release"] else ""
    yield f"upgrade  {record['state']} {age} ago{releases}"
    if record["text"]:
        yield from _folded("         ", record["text"])
    if agent.get("leaving"):
        yield from _folded("         ", f"these let their clients go: {', '.join(agent['leaving'])}")


def _process_lines(found: dict[str, Any]) -> Iterator[str]:
    agent = found["agent"]
    rows: list[tuple[str, ...]] = [("PROCESS", "PID", "RESTARTS", "LISTENS ON")]
    for name, pid in agent["children"].items():
        words = _listens_on(found["planes"].get(name)) if pid is not None else "does not run"
        rows.append((name, str(pid or DASH), str(agent["restarts"].get(name, 0)), words))
    yield from _table(rows, right=(1, 2))
    for name, text in found.get("failures", {}).items():
        if name in agent["children"]:
            yield from _folded("         ", f"{name} ended: {text}")


def _listens_on(report: PlaneReport | PlaneProblem | None) -> str:
    if report is None:
        return ""
    if isinstance(report, PlaneProblem):
        return report.problem
    if (handed := report.handed_over) is None:
        return "; ".join([*report.hello.listening, *report.hello.problems])
    left = f"asked to go in {span(handed.drain_left_s)}" if handed.drain_left_s else "asked to go"
    return f"no more; {handed.connections} connections stay, {left}"


def _volume_lines(volumes: list[tuple[PlaneReport, ReportedVolume]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("VOLUME", "BACKEND", "CLIENTS", *_FIGURES)]
    for report, volume in volumes:
        streams = volume.streams
        is_former = report.handed_over is not None
        marks = [mark for mark, is_so in (("ro", volume.read_only), ("former", is_former)) if is_so]
        ages = [each.oldest_s for each in streams if each.oldest_s is not None]
        rows.append(
            (
                volume.volume + (f" ({', '.join(marks)})" if marks else ""),
                volume.backend,
                str(sum(each.connections for each in streams)),
                *_rates_of(streams),
                str(sum(each.inflight + each.held for each in streams)),
                seconds(max(ages)) if ages else DASH,
            )
        )
    yield from _table(rows, right=tuple(range(2, 10)))
    for _, volume in volumes:
        if volume.size_bytes is None:
            if "://" in volume.storage:
                asked = (
                    f"{volume.volume}: its storage {volume.storage} did not answer when it was last asked."
                )
                check = "Check that it runs and that its address is right; the next client asks again"
            else:
                asked = f"{volume.volume}: its storage {volume.storage} could not be opened when last tried."
                check = "Check that it is there and that the agent's user may read and write it"
            yield from _folded("  ", f"{asked} {check}")


def _client_lines(volumes: list[tuple[PlaneReport, ReportedVolume]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("VOLUME", "CLIENT", "CONN", *_FIGURES)]
    for _, volume in volumes:
        for each in volume.streams:
            oldest = DASH if each.oldest_s is None else seconds(each.oldest_s)
            depth, conn = str(each.inflight + each.held), str(each.connections)
            rows.append((volume.volume, each.client, conn, *_rates_of([each]), depth, oldest))
    yield from _table(rows, right=tuple(range(2, 10)))
    for _, volume in volumes:
        for each in volume.streams:
            if each.members:  # a plane of before does not say it
                more = each.member_count - len(each.members)
                listed = ", ".join(each.members) + (f" and {more:,} more" if more else "")
                yield from _folded("  ", f"{each.client} of {volume.volume}: {listed}")
            if each.errors_per_s:  # rates and latency look as ever while each I/O fails at once
                failing = f"{each.errors_per_s:,.1f} requests a second end with an error"
                yield from _folded("  ", f"{each.client} of {volume.volume}: {failing}")


def _rates_of(streams: Sequence[ReportedStream]) -> tuple[str, str, str, str, str]:
    """Reads, writes and MB a second, mean latency and mean time held by the throttle."""
    reads, writes = (sum(each.reads_per_s for each in streams), sum(each.writes_per_s for each in streams))
    ios = reads + writes

    def mean(values_us: Iterable[float | None]) -> str:
        weighted = zip(values_us, streams, strict=True)
        total = sum((value or 0) * (each.reads_per_s + each.writes_per_s) for value, each in weighted)
        return seconds(total / ios / 1e6) if ios else DASH

    moved = sum(each.bytes_per_s for each in streams) / 1e6
    latency, delay = mean(each.latency_us for each in streams), mean(each.delay_us for each in streams)
    return f"{reads:,.0f}", f"{writes:,.0f}", f"{moved:,.1f}", latency, delay


def _cap_lines(volumes: list[tuple[PlaneReport, ReportedVolume]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("CAP ON", "OPERATIONS/S", "MB/S", "WEIGHTED IOPS", "LEASE")]
    for report, volume in volumes:
        lease = "configured"
        if report.caps.lease_left_s is not None:
            lease = f"{report.caps.lease_left_s:.0f} s, generation {report.caps.generation}"
        targets = {f"client {client}": caps for client, caps in report.whole_clients.items()}
        targets[volume.volume] = volume.caps
        targets |= {f"{volume.volume}/{client}": caps for client, caps in volume.client_caps.items()}
        if volume.group is not None:  # a plane of before does not say it
            targets[f"group {volume.group.group}"] = volume.group.caps
        found = [(name, *_caps_of(caps, lease)) for name, caps in targets.items() if not caps.is_open]
        if (group := volume.configured_group) is not None:
            found.append((f"group {group.group}", *_caps_of(group.caps, "configured")))
        rows += [row for row in found if row not in rows]
    if len(rows) > 1:
        yield ""
        yield from _table(rows, right=(1, 2, 3))


def _caps_of(caps: Rates, lease: str) -> tuple[str, str, str, str]:
    ops, cost = (DASH if rate is None else f"{rate:,.0f}" for rate in (caps.ops_per_s, caps.cost_per_s))
    size = DASH if caps.bytes_per_s is None else f"{caps.bytes_per_s / 1e6:,.1f}"
    return ops, size, cost, lease if caps.burst_s is None else f"{lease}, burst {seconds(caps.burst_s)}"


def _pressure_lines(said: dict[str, float] | None) -> Iterator[str]:
    if said is not None:
        ten, sixty = said["some_10s"], said["some_60s"]
        waited = f"{ten:.1f}% of the last 10 s, {sixty:.1f}% of the last 60 s"
        yield f"I/O      tasks waited for it {waited}"


def _beside_lines(link: dict[str, Any]) -> Iterator[str]:
    """Control groups and QEMU: what limits them, and what is wrong with them."""
    rows: list[tuple[str, ...]] = [("BESIDE THE PATH", "WHERE", "OPERATIONS/S", "MB/S", "WAITED")]
    problems: list[str] = []
    for each in link.get("cgroups", []):
        limits, pressure = each["limits"], each["pressure"]
        waited = f"{pressure['some_10s']:.1f}%" if pressure else DASH
        ops = _two(limits["read_iops"], limits["write_iops"], 1)
        size = _two(limits["read_bps"], limits["write_bps"], 1e6)
        where = each["group"].rpartition("/")[2] or "not there"
        rows.append((each["volume"], where, ops, size, waited))
        problems += [f"{each['volume']}: {each['problem']}"] if each["problem"] else []
    for name, monitor in link.get("qemu", {}).items():
        for each in monitor["volumes"]:
            limits = each["limits"]
            where = f"drive {each['drive']}" if each["drive"] else f"group {each['group']}"
            ops, size = _one(limits.get("iops"), 1), _one(limits.get("bytes_per_s"), 1e6)
            rows.append((each["volume"], where if each["is_there"] else "not there", ops, size, DASH))
            problems += [f"{each['volume']}: {each['problem']}"] if each["problem"] else []
        problems += [f"{name} ({monitor['socket']}): {monitor['problem']}"] if monitor["problem"] else []
    if len(rows) > 1:
        yield ""
        yield from _table(rows, right=(2, 3, 4))
    for problem in problems:
        yield from _folded("         ", problem)


def _one(limit: float | None, unit: float) -> str:
    return DASH if limit is None else f"{limit / unit:,.{0 if unit == 1 else 1}f}"


def _two(reads: float | None, writes: float | None, unit: float) -> str:
    """Limits of reads and of writes."""
    return DASH if reads is None and writes is None else f"{_one(reads, unit)}+{_one(writes, unit)}"


# -- forms


def seconds(value: float) -> str:
    """A latency or an age in the unit that a person would use."""
    if value < 0.000_995:
        return f"{value * 1e6:.0f}us"
    if value < 0.995:
        return f"{value * 1e3:.{1 if value < 0.0995 else 0}f}ms"
    return f"{value:.1f}s" if value < 99.5 else span(value)


def span(value: float) -> str:
    """How long: two units at most."""
    left = max(int(value), 0)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2])


def _table(rows: list[tuple[str, ...]], right: tuple[int, ...]) -> Iterator[str]:
    """Rows in columns; the first one or two, which are names, are broken where the table is too wide."""
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    flexible = [column for column in range(count) if column not in right]
    while sum(widths) + count - 1 > WIDTH and max(widths[column] for column in flexible) > 8:
        widest = max(flexible, key=lambda column: widths[column])
        widths[widest] -= 1
    for row in rows:
        pieces = [_pieces(text, width) for text, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, pieces))):
            texts = [each[line] if line < len(each) else "" for each in pieces]
            cells = [
                text.rjust(width) if column in right else text.ljust(width)
                for column, (text, width) in enumerate(zip(texts, widths, strict=True))
            ]
            yield " ".join(cells).rstrip()


def _pieces(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)] or [""]


def _folded(indent: str, text: str) -> Iterator[str]:
    """Whole words in lines of ``WIDTH`` columns; a longer word is broken."""
    line, room = "", WIDTH - len(indent)
    for word in text.split():
        for piece in _pieces(word, room):
            if line and len(line) + 1 + len(piece) > room:
                yield indent + line
                line = ""
            line = f"{line} {piece}" if line else piece
    yield indent + line


@contextlib.contextmanager
def as_one_line() -> Iterator[None]:
    """A file of the agent that another program wrote is a plain error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as exc:
        text = f"its files are not what this release writes ({exc!r}). Restart the agent"
        raise ReloadFailed(text) from exc
