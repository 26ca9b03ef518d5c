"""``sla policy``: run the Spark job here and now, look at what it published, choose what is in force.

The job is a command of its own, as under a timer; this one starts it, shows its output as it comes, and asks
the server afterwards to load the new version at once (it does so by itself within ten seconds).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.stop import end_with_parent
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError, JobFailed, PolicyNotPublished
from sla_server.cli.formatting import (
    CONFIG,
    DATA_OUTPUT,
    OUTPUT,
    Column,
    build,
    console,
    pass_client,
    print_json,
)
from sla_server.cli.get import get
from sla_server.rows import Row
from sla_server.schedule import arguments_of

NOT_PUBLISHED: Final = 81  # the job's exit status: what it computed does not help
MOST_VOLUMES: Final = 20
PAGE: Final = 5000
VOLUMES_A_PAGE: Final = 1000
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
IN_FORCE: Final = "in-force,pinned,rejected-pinned"
"""States of a version that is in force."""


class _Version(click.IntRange):
    """A number, called by what it is: click says that a text "is not a valid integer range"."""

    name = "version number"


VERSION: Final = _Version(1, (1 << 31) - 1)


@click.group(cls=Commands)
def policy() -> None:
    """Compute policies from what was stored, and list them."""


def command_of(job: str, config: Path | None) -> list[str]:
    """The job's command line."""
    command = [sys.executable, *arguments_of(job)]
    return [*command, "--config", str(config)] if config else command


def _status_of_job(command: list[str], unchanged: str) -> int:
    """Run a job. It has a session of its own: Ctrl-C reaches this command alone, and the job ends with it."""
    try:
        return subprocess.run(
            command, check=False, start_new_session=True, preexec_fn=end_with_parent
        ).returncode
    except KeyboardInterrupt:
        click.echo(f"interrupted; {unchanged}", err=True)
        raise SystemExit(130) from None


@policy.command("run")
@CONFIG
@pass_client
def run(client: Client, config: Path | None) -> None:
    """Run the policy job and have its result put in force."""
    click.echo("policy job: starting Spark; this takes a minute at most on small data", err=True)
    status = _status_of_job(command_of("policy", config or client.config), "the policy in force stays")
    if status == NOT_PUBLISHED:
        raise PolicyNotPublished
    if status:
        raise JobFailed(status)
    version = _announced(client)
    if version is not None:
        click.echo(
            f"policy version {version} announced" if version else "no new policy version to put in force"
        )


@policy.command("rollup")
@CONFIG
@pass_client
def rollup(client: Client, config: Path | None) -> None:
    """Make hourly and daily rollups of what has left SQL; the policy job reads them."""
    command = command_of("rollup", config or client.config)
    if status := _status_of_job(command, "the days before are rolled up"):
        raise JobFailed(status, "rollup", "what was rolled up before stays")


def _announced(client: Client) -> int | None:
    """Let the server look at once, and say which version is in force: 0 for none, None if it is silent."""
    try:
        answer = client.change("POST", "/policies/announce")
    except CliError as exc:
        # What was done is stored, and the server finds it by itself.
        click.echo(f"it is stored; the server will look for it within 10 s by itself ({exc})", err=True)
        return None
    return int((answer or {}).get("version") or 0)


@policy.command("pin")
@click.argument("version", type=VERSION)
@DATA_OUTPUT
@pass_client
def pin(client: Client, version: int, output: str) -> None:
    """Keep VERSION in force until it is unpinned, whatever is published meanwhile."""
    client.change("PUT", "/policies/pin", json={"version": version})
    _say_in_force(client, output, f"policy version {version} is pinned", {"pinned": version})


@policy.command("unpin")
@DATA_OUTPUT
@pass_client
def unpin(client: Client, output: str) -> None:
    """Let the newest policy version be in force again."""
    client.change("DELETE", "/policies/pin")
    _say_in_force(client, output, "no policy version is pinned", {"pinned": None})


@policy.command("rollback")
@click.option("--version", type=VERSION, help="Only if this version is in force.")
@DATA_OUTPUT
@pass_client
def rollback(client: Client, version: int | None, output: str) -> None:
    """Put the version before the one in force in force; a version published later takes its place."""
    body = {} if version is None else {"version": version}
    answer = client.change("POST", "/policies/rollback", json=body)
    undone = answer.get("rolled_back")
    _say_in_force(client, output, f"policy version {undone} is rolled back", {"rolled_back": undone})


def _say_in_force(client: Client, output: str, done: str, answer: Row) -> None:
    """Say what was done, and which version is in force now."""
    if output != "json":
        click.echo(done)
    version = _announced(client)
    if output == "json":
        print_json({**answer, "in_force": version})
        return
    if version is not None:
        click.echo(f"policy version {version} is in force" if version else "no policy is in force")


@policy.command("show")
@click.argument("version", type=VERSION, required=False)
@OUTPUT
@pass_client
def show(client: Client, version: int | None, output: str) -> None:
    """Show the report of VERSION: capacities, costs, who hurt whom, back-test, caps [the newest]."""
    row = client.get(f"/policies/{_newest(client) if version is None else version}")
    if output == "json":
        print_json({**row, "volumes": list(_volumes(client, row["version"]))})
        return
    for line in _described(row):
        click.echo(line)
    capped = _lowest_caps(client, row["version"])
    if not capped:
        click.echo("no volume is capped")
        return
    rows = sorted(capped.values(), key=lambda each: each["cost_per_s"])
    console().print(build(CAP_COLUMNS, rows[:MOST_VOLUMES], 0))
    if len(rows) > MOST_VOLUMES:
        click.echo(f"and {len(rows) - MOST_VOLUMES:,} more: sla policy explain VOLUME")


def _newest(client: Client, states: str = "") -> int:
    """The newest version, of those in some states if there are such."""
    rows = client.get("/policies", limit=1, state=states)["items"] if states else []
    rows = rows or client.get("/policies", limit=1)["items"]
    if not rows:
        raise BadUsage("no policy was computed yet: sla policy run")
    return int(rows[0]["version"])


def _described(row: Row) -> Iterator[str]:
    report, job = row.get("report") or {}, row.get("job") or {}
    yield f"policy version {row['version']}: {row['state']}, of {formatting.when(row['created_us'])}"
    if job:
        rows = formatting.count(job.get("rollups"))
        yield f"computed from {rows} rollups of {job.get('window_days')} days in {job.get('seconds')} s"
    tested = report.get("back_test")
    if isinstance(tested, dict):
        yield f"back-test: {tested['reason']}"
        yield from (f"  {note}" for note in tested.get("notes") or ())
    for each in report.get("capacity") or ():
        value = "unknown" if each["cost_per_s"] is None else f"{each['cost_per_s']:,.0f} weighted IOPS"
        yield f"capacity of {each['backend']} for {promise_words(each)}: {value}"
        yield f"  {each['reason']}"
    yield from _found_beside(report)


def promise_words(row: Row) -> str:
    """The promise that a capacity is for, with the step of its curve if it is not the first."""
    step = f" step {row['step'] + 1}" if row.get("step") else ""
    return f"{row['sla']}/{row['objective']}{step}"


def _found_beside(report: Row) -> Iterator[str]:
    """Costs of an I/O, who hurt whom, and usual bursts: as the job says them when it ends."""
    from sla_server.policy_jobs import attribution, cost_model  # numpy: not for every command

    costs, harms, bursts = (report.get(name) or () for name in ("cost_model", "harms", "bursts"))
    for lines in (
        *map(cost_model.describe, costs),
        *map(attribution.describe, harms[:MOST_VOLUMES]),
    ):
        yield from (line.removeprefix("  ") for line in lines)
    if len(harms) > MOST_VOLUMES:
        yield f"and {len(harms) - MOST_VOLUMES:,} more that hurt others: -o json"
    for each in bursts[:MOST_VOLUMES]:
        yield (
            f"usual bursts of {each['volume']} on {each['backend']}: {each['cost_per_s']:,.0f} "
            f"weighted IOPS and "
            f"{each['burst_cost']:,.0f} at once (learnt of {each['days']} days)"
        )
    if len(bursts) > MOST_VOLUMES:
        yield f"and {len(bursts) - MOST_VOLUMES:,} more with bursts: -o json"


def _lowest_caps(client: Client, version: int) -> dict[str, Row]:
    """Volume to its lowest cap, the hour of that, and in how many hours it is capped."""
    found: dict[str, Row] = {}
    for row in _caps(client, version):
        if row["cost_per_s"] is None:
            continue
        known = found.setdefault(row["volume"], {**row, "hours": 0})
        hours = known["hours"] + 1
        if row["cost_per_s"] < known["cost_per_s"]:
            known.update(row)
        known["hours"] = hours
    return found


def _volumes(client: Client, version: int) -> Iterator[Row]:
    """Its volumes: in how many hours each has a cap, the lowest of them, and the highest usual demand."""
    query: Row = {"limit": VOLUMES_A_PAGE}
    while True:
        page = client.get(f"/policies/{version}/volumes", **query)
        yield from page["items"]
        if not page["next"]:
            return
        query["after"] = page["next"]


def _caps(client: Client, version: int) -> Iterator[Row]:
    try:
        page = client.get(f"/policies/{version}/caps", limit=PAGE)
    except CliError as exc:
        if getattr(exc, "status", 0) != 404:
            raise
        return
    yield from page["items"]
    while page["next"] is not None:
        page = client.get(f"/policies/{version}/caps", limit=PAGE, after=page["next"])
        yield from page["items"]


def hour_words(hour: int) -> str:
    """An hour of the week as people say it: Mon 08 UTC."""
    return f"{DAYS[hour // 24]} {hour % 24:02d} UTC"


CAP_COLUMNS: Final = (
    Column("VOLUME", lambda row, _now: str(row["volume"])),
    Column("LOWEST CAP", lambda row, _now: f"{row['cost_per_s']:,.0f} weighted IOPS", number=True),
    Column("IN HOUR", lambda row, _now: hour_words(row["hour_of_week"])),
    Column("DEMAND P95", lambda row, _now: formatting.count(row.get("demand_p95")), number=True),
    Column("HOURS CAPPED", lambda row, _now: formatting.count(row["hours"]), number=True),
)


@policy.command("diff")
@click.argument("before", type=VERSION)
@click.argument("after", type=VERSION)
@DATA_OUTPUT
@pass_client
def diff(client: Client, before: int, after: int, output: str) -> None:
    """Show what differs between the versions BEFORE and AFTER: caps by volume, capacities."""
    path = f"/policies/{before}/diff/{after}"
    page = client.get(path, limit=PAGE)
    rows: list[Row] = page["items"]
    while page["next"] is not None:
        page = client.get(path, limit=PAGE, after=page["next"])
        rows += page["items"]
    capacity = _capacity_changes(client.get(f"/policies/{before}"), client.get(f"/policies/{after}"))
    if output == "json":
        print_json({"before": before, "after": after, "volumes": rows, "capacity": capacity})
        return
    for each in capacity:
        click.echo(
            f"capacity of {each['backend']} for {promise_words(each)}: "
            f"{formatting.count(each['before'])} -> {formatting.count(each['after'])} weighted IOPS"
        )
    if not rows:
        click.echo(f"versions {before} and {after} cap the same")
        return
    console().print(build(DIFF_COLUMNS, rows[:MOST_VOLUMES], 0))
    if len(rows) > MOST_VOLUMES:
        click.echo(f"and {len(rows) - MOST_VOLUMES:,} more volumes: -o json")


def _capacity_changes(before: Row, after: Row) -> list[Row]:
    names = ("backend", "sla", "objective", "step")

    def known(row: Row) -> dict[tuple[Any, ...], Any]:
        found = (row.get("report") or {}).get("capacity") or ()
        return {tuple(each.get(name, 0) for name in names): each["cost_per_s"] for each in found}

    one, two = known(before), known(after)
    return [
        {**dict(zip(names, key, strict=True)), "before": one.get(key), "after": two.get(key)}
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
    ]


def _hours(key: str) -> Column:
    return Column(key.upper(), lambda row, _now: formatting.count(row[key]), number=True)


DIFF_COLUMNS: Final = (
    Column("VOLUME", lambda row, _now: str(row["volume"])),
    _hours("hours"),
    _hours("added"),
    _hours("removed"),
    _hours("lowered"),
    _hours("raised"),
    Column("LOWEST", lambda row, _now: formatting.count(row["lowest_before"]), number=True),
    Column("NOW", lambda row, _now: formatting.count(row["lowest_after"]), number=True),
)


@policy.command("would-hold")
@OUTPUT
@pass_client
def would_hold(client: Client, output: str) -> None:
    """List volumes above caps that are only observed: what the policy would hold back.

    Since this version is in force, or the services were restarted. What is above a cap is the most it would
    hold back: a volume that is held has less demand later.
    """
    live = client.get("/live") or {}
    rows = (live.get("policy_stage") or {}).get("would_hold") or []
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo("no volume is above a policy's cap that is only observed")
        return
    console().print(build(HOLD_COLUMNS, rows, 0))


HOLD_COLUMNS: Final = (
    Column("VOLUME", lambda row, _now: str(row["volume"])),
    Column("BACKEND", lambda row, _now: str(row["backend"])),
    Column("CAP", lambda row, _now: f"{row['cap_cost_per_s']:,.0f} weighted IOPS", number=True),
    Column("USES", lambda row, _now: f"{row['cost_per_s']:,.0f} weighted IOPS", number=True),
    Column("ABOVE FOR", lambda row, _now: formatting.span(row["above_s"]), number=True),
    Column("OF", lambda row, _now: formatting.span(row["watched_s"]), number=True),
    Column("ABOVE BY", lambda row, _now: formatting.count(row["above_cost"]), number=True),
)


@policy.command("explain")
@click.argument("volume")
@click.option("--version", type=VERSION, help="Of this version [the one in force, else the newest].")
@DATA_OUTPUT
@pass_client
def explain(client: Client, volume: str, version: int | None, output: str) -> None:
    """Say what the policy means for VOLUME: its caps by hour of the week, and what they rest on."""
    if version is None:
        version = _newest(client, IN_FORCE)
    found = client.get(f"/policies/{version}/volumes/{quote(volume, safe='')}")
    if output == "json":
        print_json(found)
        return
    for line in _explained(found):
        click.echo(line)


def _explained(found: Row) -> Iterator[str]:
    name, version, hours = found["volume"], found["version"], found["hours"]
    capped = [row for row in hours if row["cost_per_s"] is not None]
    where = found["backend"] or formatting.DASH
    yield f"policy version {version} ({found['state']}) and volume {name} on backend {where}:"
    if not capped:
        yield f"  it is not capped in any of the {len(hours)} hours of the week in which it did I/O"
    for each in found["capacity"]:
        value = "unknown" if each["cost_per_s"] is None else f"{each['cost_per_s']:,.0f} weighted IOPS"
        yield f"  {each['backend']} can take {value} for {promise_words(each)}: {each['reason']}"
    tested = found.get("back_test")
    if isinstance(tested, dict):
        yield f"  back-test: {tested['reason']}"
    for first, last, cap, demand, burst in _ranges(capped):
        words = hour_words(first) if first == last else f"{hour_words(first)} to {hour_words(last)}"
        asked = "" if demand is None else f"; its demand (p95) was up to {demand:,.0f}"
        at_once = f", {burst:,.0f} at once after a quiet time" if burst else ""
        yield f"  {words}: at most {cap:,.0f} weighted IOPS{at_once}{asked}"


def _ranges(capped: list[Row]) -> Iterator[tuple[int, int, float, float | None, float]]:
    """Neighbouring hours with the same cap and burst (cost units): the highest demand in them, the burst."""
    known: tuple[int, int, float, float | None, float] | None = None
    for row in capped:
        hour, cap, demand = row["hour_of_week"], row["cost_per_s"], row["demand_p95"]
        burst = (row.get("burst_s") or 0.0) * cap
        is_next = known is not None and known[1] == hour - 1
        if known is not None and is_next and (round(known[2]), round(known[4])) == (round(cap), round(burst)):
            highest = max(filter(None, (known[3], demand)), default=None)
            known = known[0], hour, known[2], highest, known[4]
            continue
        if known is not None:
            yield known
        known = hour, hour, cap, demand, burst
    if known is not None:
        yield known


@policy.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Versions shown.")
@OUTPUT
@click.pass_context
def list_policies(context: click.Context, limit: int, output: str) -> None:
    """List policy versions, newest first."""
    context.invoke(get, kind="policies", limit=limit, output=output)
