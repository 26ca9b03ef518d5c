"""``sla simulate``: what the control loop would do, without a gateway, a disk or a server.

It asks no server. ``--stored`` reads the server's own database and files, as ``sla storage`` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from pydantic import ValidationError
from rich.text import Text

from pmdaemon.runtime.config import describe
from sla_server.agreements.document import Agreement
from sla_server.agreements.volume_labels import label_book
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import CONFIG, Column, FiniteRange, build, console, pass_client
from sla_server.services.control.settings import ControlSettings
from sla_server.services.plans import from_rows as plans_of
from sla_server.simulate.device import DeviceModel
from sla_server.simulate.errors import SimulationError, TooManyIos
from sla_server.simulate.figures import ModeFigures, PromiseFigures, figures_of
from sla_server.simulate.loads import MOST_SPAN_S, Arrival
from sla_server.simulate.page import as_html
from sla_server.simulate.report import Result, as_csv, as_json, headline, promised_text, verdicts
from sla_server.simulate.run import MODES, Feed, GeneratedFeed, Plan, TraceFeed, run_mode
from sla_server.simulate.setup import (
    SETUP_FILE,
    Placement,
    SetupFile,
    Stream,
    check_clients,
    check_faults,
    check_placement,
    contract_of,
    parse_fault,
    parse_load,
    read_device,
    read_directory,
    read_policy,
)
from sla_server.simulate.stored import stored_plan
from sla_server.simulate.traces import NO_CLIENT, read_trace
from sla_server.simulate.within import slots_of, with_cuts

GENERATED_S: Final = 120.0
"""Length of a simulation of generated loads alone: two slices of a minute."""
MOST_IOS: Final = 2_000_000
"""Each mode takes some 20 us an I/O: two minutes for all three."""
MOST_PROMISES: Final = 20
MOST_VOLUMES: Final = 12  # rows of the table that a person reads; CSV has all
STATES_THEN: Final = {
    "no_data": "without data",
    "not_applicable": "not applicable",
    "excluded": "excluded",
}
"""State of a slice that is neither good nor bad, in words."""
HOUR_US: Final = 3_600_000_000
MONDAY_US: Final = 1_800_000_000_000_000 // (168 * HOUR_US) * 168 * HOUR_US + 96 * HOUR_US
EXISTING: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


def _limits(p: PromiseFigures) -> str:
    if p.percentile is None:
        return promised_text(p)
    values = [formatting.latency(value * 1e3) for value in (p.thresholds_ms[0], p.thresholds_ms[-1])]
    return f"p{p.percentile:g} {'-'.join(dict.fromkeys(values))}"


def _ms(value: float | None) -> str:
    return formatting.latency(None if value is None else value * 1e3)


def _measured(p: PromiseFigures) -> str:
    if p.unit == "ms" or p.measured is None:
        return _ms(p.measured)
    return f"{p.measured:.4g} {p.unit}"


PROMISE_COLUMNS: Final = (
    Column("AGREEMENT", lambda row, _now: row["p"].name),
    Column("MODE", lambda row, _now: row["mode"]),
    Column("PROMISED", lambda row, _now: _limits(row["p"])),
    Column("MEASURED", lambda row, _now: _measured(row["p"]), number=True),
    Column("BAD S", lambda row, _now: _bad(row["p"]), number=True),
    Column("OF S", lambda row, _now: formatting.count(row["p"].judged_s), number=True),
    Column("COMPLIANCE", lambda row, _now: formatting.percent(row["p"].compliance), number=True),
)
VOLUME_COLUMNS: Final = (
    Column("VOLUME", lambda row, _now: row["v"].volume),
    Column("PRIORITY", lambda row, _now: row["v"].priority),
    Column("MODE", lambda row, _now: row["mode"]),
    Column("IOPS", lambda row, _now: formatting.count(row["v"].iops), number=True),
    Column("KEPT", lambda row, _now: formatting.percent(row["v"].kept_ratio), number=True),
    Column("P95", lambda row, _now: _ms(row["v"].p95_ms), number=True),
    Column("LEAST CAP", lambda row, _now: formatting.count(row["v"].least_cost), number=True),
    Column("TURNS", lambda row, _now: formatting.count(row["v"].turns), number=True),
    Column("A MIN", lambda row, _now: formatting.count(row["v"].turns_a_minute), number=True),
)


def _bad(p: PromiseFigures) -> str | Text:
    return Text(formatting.count(p.bad_s), formatting.BAD if p.bad_s else formatting.GOOD)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--slas",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of agreements and simulation.yaml.",
)
@click.option("--trace", "traces", multiple=True, type=EXISTING, help="Recorded I/O; several are merged.")
@click.option(
    "--load",
    "loads",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="volume=V,iops=N (or depth=N),shape=square,...",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="kind=hangs (or fails),from_s=30,until_s=60[,backend=B]: storage that does not serve.",
)
@click.option("--stored", metavar="TIME", help="Replay what the server stored of the last 24h, 7d, ...")
@click.option("--until", metavar="TIME", help="End of --stored, as 2026-11-20T08:00 UTC [now].")
@click.option("--every", is_flag=True, help="Simulate the quiet minutes of --stored, too.")
@click.option("--sample", is_flag=True, help="Of --stored with too many I/Os, simulate a part.")
@click.option("--policy", "policy_file", type=EXISTING, help="Caps by hour of the week, as JSON.")
@click.option("--hour", type=click.IntRange(0, 167), default=0, help="Hour of the week at the start [0].")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), help="One of them [all].")
@click.option("--seed", type=click.IntRange(0, 2**32), default=1, help="Of everything random [1].")
@click.option("--servers", type=click.IntRange(1, 4096), help="Requests that a device serves at once.")
@click.option("--device", "device_file", type=EXISTING, help="Device as YAML or TOML, for all backends.")
@click.option("--duration", metavar="TIME", help="Length, as 90s or 10m [that of the trace, else 120s].")
@click.option("--stretch", type=FiniteRange(0.001, 1e6), default=1.0, help="Slow a trace down [1].")
@click.option("--poll", "poll_s", type=FiniteRange(0.05, 60), default=1.0, help="Poll interval, s [1].")
@click.option("--lag", "lag_s", type=FiniteRange(0, 60), default=0.01, help="Delay each way, s [0.01].")
@click.option(
    "--budget-left",
    type=FiniteRange(0, 1),
    default=1.0,
    help="Error budget left, 0 to 1 [1]; below 0.25 control is more urgent.",
)
@click.option("--most-ios", type=click.IntRange(1), default=MOST_IOS, help=f"Refuse more I/Os [{MOST_IOS}].")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "csv", "json", "html"]),
    default="table",
    show_default=True,
    help="Form of the result; html and FILE: one page with charts.",
)
@CONFIG
@pass_client
def simulate(client: Client, /, file: Path | None, output: str, config: Path | None, **given: Any) -> None:
    """Simulate what control does with recorded, generated or stored load.

    The real control code runs against a model of the storage (a queue), faster than time, in the modes off,
    observe and enforce. The result goes to FILE, or to standard output.

    \b
    sla simulate --slas DIR --load volume=gold,iops=80 --load volume=big,depth=32
    sla simulate --slas DIR --trace io.csv --servers 4 -o html result.html
    sla simulate --stored 24h          what enforce would have done yesterday
    sla simulate --stored 7d --sample  and last week, on a part of a busy one
    """  # noqa: D301 - \b is for click: it keeps these lines as they are
    if not given["stored"]:
        for name, option in (("until", "--until"), ("every", "--every"), ("sample", "--sample")):
            if given[name]:
                raise BadUsage(f"{option} goes with --stored, which is not given")
    modes = [mode for mode in MODES if not given["modes"] or mode in given["modes"]]
    plan = _stored_plan(client, config, given) if given["stored"] else _plan(given)
    began = time.monotonic()
    result = _run(plan, modes)
    simulated = formatting.span(plan.seconds * len(modes))
    click.echo(f"{simulated} simulated in {time.monotonic() - began:.1f} s", err=True)
    form = {"csv": as_csv, "html": as_html, "json": _json}.get(output, _table)
    if file is None:
        click.echo(form(result), nl=False)
        return
    file.write_text(form(result), encoding="utf-8")
    click.echo(f"written to {file}", err=True)


def _run(plan: Plan, modes: Sequence[str]) -> Result:
    found: list[ModeFigures] = []
    for mode in modes:
        run = run_mode(plan, mode)
        found.append(figures_of(plan, run, found[0] if found and found[0].mode == "off" else None))
    return Result(plan, found)


def _plan(given: dict[str, Any]) -> Plan:
    """From traces and generated loads."""
    if given["slas"] is None:
        raise BadUsage("--slas DIR is needed: the agreements to keep (or --stored 24h takes those in force)")
    folder = read_directory(given["slas"])
    setup = folder.setup
    loads = [*setup.loads, *map(parse_load, given["loads"])]
    feeds: list[Feed] = [GeneratedFeed(load) for load in loads]
    traced, names, last_s = _traces(given, setup)
    feeds += traced
    contract = folder.contract({feed.stream.volume for feed in feeds})
    check_clients(contract, [feed.stream for feed in traced if feed.stream.client == NO_CLIENT])
    if not feeds:
        raise BadUsage(
            "there is no load: give --trace FILE, --load KEY=VALUE,... or loads in simulation.yaml"
        )
    check_placement(feed.stream for feed in feeds)
    length_s = (
        formatting.duration_s(given["duration"], "--duration") if given["duration"] else last_s or GENERATED_S
    )
    if length_s > MOST_SPAN_S:
        raise BadUsage(f"--duration {given['duration']} is longer than 7 days; choose a shorter one")
    expected = sum(round(load.iops * length_s) for load in loads) + sum(len(f.found) for f in traced)
    if expected > given["most_ios"]:
        raise TooManyIos(expected, given["most_ios"], "Choose a shorter --duration, or raise the limit")
    devices = _devices(given, setup, {feed.stream.backend for feed in feeds})
    faults = [*setup.faults, *map(parse_fault, given["faults"])]
    check_faults(faults, devices)
    title = ", ".join([*names, *(["generated loads"] if loads else [])])
    made = Plan(contract, feeds, devices, [(0.0, length_s)], faults=faults, title=title)
    return _with_options(made, given)


def _with_options(plan: Plan, given: dict[str, Any]) -> Plan:
    settings = ControlSettings(poll_interval_s=given["poll_s"])
    policy, bursts = read_policy(given["policy_file"]) if given["policy_file"] else ({}, {})
    return dataclasses.replace(
        plan,
        seed=given["seed"],
        settings=settings,
        lag_s=given["lag_s"],
        budget_left=given["budget_left"],
        policy=policy,
        bursts=bursts,
        notes=[*plan.notes, *plan.contract.notes],
        start_unix_us=plan.start_unix_us if given["stored"] else MONDAY_US + given["hour"] * HOUR_US,
    )


def _traces(given: dict[str, Any], setup: SetupFile) -> tuple[list[TraceFeed], list[str], float]:
    """A feed for each stream of the traces, the files' names, and when the last request ends."""
    by_stream: dict[Stream, list[Arrival]] = {}
    names, last_s, left = [], 0.0, given["most_ios"]
    for path in given["traces"]:
        found = read_trace(path, given["stretch"], left)
        left -= len(found)
        names.append(
            path.name + (f" slowed down {given['stretch']:g} times" if given["stretch"] != 1 else "")
        )
        last_s = max(last_s, math.ceil(found[-1].at_s + 1e-9))
        for io in found:
            place = setup.streams.get(io.volume, Placement())
            client = place.client or io.client if io.client == NO_CLIENT else io.client
            stream = Stream(io.volume, client, place.gateway, place.backend)
            by_stream.setdefault(stream, []).append(Arrival(io.at_s, io.is_write, io.size_bytes))
    return [TraceFeed(stream, sorted(found)) for stream, found in by_stream.items()], names, float(last_s)


def _devices(given: dict[str, Any], setup: SetupFile, backends: set[str]) -> dict[str, DeviceModel]:
    """The device of each backend: of the command line, of simulation.yaml, or the default."""
    named = read_device(given["device_file"]) if given["device_file"] else None
    devices = {name: named or setup.devices.get(name, DeviceModel()) for name in sorted(backends)}
    if given["servers"]:
        devices = {n: d.model_copy(update={"servers": given["servers"]}) for n, d in devices.items()}
    return devices


def _promise_rows(result: Result) -> list[dict[str, Any]]:
    """By name; of very many those with the most bad seconds in some mode."""
    worst: dict[str, int] = {}
    for each in result.modes:
        for p in each.promises:
            worst[p.name] = max(worst.get(p.name, 0), p.bad_s)
    shown = sorted(worst, key=lambda name: (-worst[name], name))[:MOST_PROMISES]
    rows = [{"mode": each.mode, "p": p} for each in result.modes for p in each.promises if p.name in shown]
    return sorted(rows, key=lambda row: str(row["p"].name))


def _volume_rows(result: Result) -> list[dict[str, Any]]:
    """Volumes with caps and with the most I/Os; mode observe does to them what off does."""
    capped = {v.volume for each in result.modes for v in each.users if v.caps}
    ranked = sorted(result.modes[0].users, key=lambda v: (v.volume not in capped, -v.ios, v.volume))
    shown = {v.volume for v in ranked[:MOST_VOLUMES]}
    modes = [each for each in result.modes if each.mode != "observe" or result.mode("off") is None]
    rows = [{"mode": each.mode, "v": v} for each in modes for v in each.users if v.volume in shown]
    return sorted(rows, key=lambda row: str(row["v"].volume))


def _json(result: Result) -> str:
    return json.dumps(as_json(result), indent=2) + "\n"


def _table(result: Result) -> str:
    """Tables and sentences at the width of the console."""
    printer = console()
    with printer.capture() as captured:
        for line in headline(result):
            printer.print(line)
        printer.print()
        printer.print(build(PROMISE_COLUMNS, _promise_rows(result), 0))
        more = len(result.modes[0].promises) - MOST_PROMISES
        if more > 0:
            printer.print(f"{more} further promises, with fewer bad seconds: -o csv has all")
        printer.print()
        printer.print(build(VOLUME_COLUMNS, _volume_rows(result), 0))
        more = len(result.modes[0].users) - MOST_VOLUMES
        if more > 0:
            printer.print(f"{more} further volumes or clients, with fewer I/Os: -o csv has all")
        printer.print()
        for line in [*verdicts(result), *result.plan.notes]:
            printer.print(line)
    return captured.get()


def _stored_plan(client: Client, config: Path | None, given: dict[str, Any]) -> Plan:
    """From the server's own database and files."""
    from sla_server import config as configuration
    from sla_server.db.queries.reader import open_reader
    from sla_server.db.queries.replay import read_slots
    from sla_server.db.queries.replay_cuts import read_cuts

    for name, option in (
        ("traces", "--trace"),
        ("loads", "--load"),
        ("faults", "--fault"),
        ("duration", "--duration"),
    ):
        if given[name]:
            raise BadUsage(f"{option} does not go with --stored, which brings its own load and length")
    resolved = configuration.load(config or client.config)
    slot_us = resolved.database.rollup_s * 1_000_000
    until_us = _time_us(given["until"]) if given["until"] else time.time_ns() // 1000
    until_us = until_us // slot_us * slot_us
    from_us = until_us - round(formatting.duration_s(given["stored"], "--stored") * 1e6) // slot_us * slot_us
    if from_us >= until_us:
        raise BadUsage(f"--stored {given['stored']} is shorter than a slot ({resolved.database.rollup_s} s)")
    found = read_slots(resolved.database, resolved.data_dir, from_us, until_us)
    reader = open_reader(resolved.database, resolved.data_dir)
    try:
        book = label_book(*reader.pages.label_rows())
        notes = list[str]()
        if given["slas"] is not None:
            folder = read_directory(given["slas"])
            contract = folder.contract((), book)
            if folder.setup != SetupFile():
                notes.append(
                    f"{SETUP_FILE} is not used: --stored brings loads and where they are. See --device"
                )
        else:
            plans, _unread = plans_of(reader.documents(), until_us)
            contract = contract_of([_agreement(row) for row in reader.agreements()], plans, book)
            keys = [promise.key for promise in contract.promises][:MOST_PROMISES]
            counted = {"/".join(key): reader.slice_counts(*key, from_us, until_us) for key in keys}
            notes += _judged_then({name: counts for name, counts in counted.items() if counts})
    finally:
        reader.close()
    device = read_device(given["device_file"]) if given["device_file"] else None
    if device is not None and given["servers"]:
        device = device.model_copy(update={"servers": given["servers"]})
    plan = stored_plan(
        found,
        contract,
        from_us,
        given["most_ios"],
        servers=given["servers"],
        device=device,
        every=given["every"],
        sample=given["sample"],
    )
    cuts = read_cuts(resolved.database, resolved.data_dir, *slots_of(plan), slot_us)
    plan = with_cuts(plan, cuts, fits=device is None and not given["servers"])
    if given["every"] and plan.seconds > MOST_SPAN_S:
        problem = f"--stored {given['stored']} with --every is {formatting.span(plan.seconds)}, the limit 7d"
        raise BadUsage(f"{problem}; choose a shorter time, or leave the quiet minutes out")
    times = f"{_utc(from_us)} to {_utc(until_us)} UTC"
    notes = [*plan.notes, *notes]
    return _with_options(dataclasses.replace(plan, title=f"{plan.title}, {times}", notes=notes), given)


def _judged_then(counted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """How the server judged that time; ``counted``: of each promise the number of slices by state."""
    parts = []
    for name, counts in counted.items():
        others = ", ".join(
            f"{number} {words}" for state, words in STATES_THEN.items() if (number := counts.get(state))
        )
        parts.append(f"{name} {counts.get('bad', 0)} bad of {sum(counts.values())} slices"
                     + (f" ({others})" if others else ""))  # fmt: skip
    said = "by the versions and caps in force then, all of that time; a simulation has its part of it"
    return [f"Judged then: {'; '.join(parts)}: {said}."] if parts else []


def _agreement(row: dict[str, Any]) -> Agreement:
    try:
        return Agreement.from_spec(row["spec"])
    except ValidationError as exc:
        where = f"agreement {row['name']} version {row['version']}"
        raise SimulationError(
            where, describe(exc), "Apply its document again, or name a directory with --slas"
        ) from exc


def _time_us(text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadUsage(f"--until {text[:40]!r} is not a time; write for example 2026-11-20T08:00") from None
    return round(found.replace(tzinfo=found.tzinfo or UTC).timestamp() * 1e6)


def _utc(at_us: int) -> str:
    return f"{datetime.fromtimestamp(at_us / 1e6, UTC):%Y-%m-%d %H:%M}"
