"""``make bench-sla``: agreements kept by a real server and gateways, in the scenarios of ``sla_scenarios``.

Each scenario, in one run on one backend: no control; the best static cap, found by bisection over manual
throttles; observe; enforce. Figures rest on the load generators' own records: greedy closed loops are fio
(``fio_load``), victims and traces our own open loop, which counts from when an I/O was due. Real: server,
gateways, I/O, database. Modelled and labelled so: the disk, except where nbdkit serves, or a file with
O_DIRECT. The same scenarios run on the simulator (``sla_simulated``), whose figures have no goals.

What neighbours keep is compared with the best static cap; of a disk that becomes slower with that of each
half; of storage that hangs or fails not at all. A second is bad when the p95 of any victim's I/Os due in it
is above the promise. Back under the promise is the first second that is followed by another good one. Whether
neighbours are left alone when no agreement is at risk is asked twice: beside victims, of neighbours that ask
for little, and of greedy ones when the victims have gone: enforced, and then only observed.

Options: ``--only NAME``, ``--seconds 60`` (of enforcing), ``--backend NAME`` (modelled, nbdkit or direct, or
several: each scenario on each of them; those that have another one of their own have no goals there),
``--simulated`` (the simulator alone). Some four minutes a scenario.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import operator
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import harness, sla_simulated
from benchmarks.fio_load import FioLoad
from benchmarks.sla_scenarios import (
    DISK_IOPS,
    FAULT_S,
    PROMISES_MS,
    SCENARIOS,
    Client,
    Scenario,
    matrix,
)
from benchmarks.verdict import rate
from tests.support.direct_file import DirectFile
from tests.support.load import Load, between, percentile_ms
from tests.support.stage import Agent, Stage, StageError

NONE_S: Final = 12.0
STATIC_S: Final = {False: 14.0, True: 27.0}
"""Of a step of the search, by whether the scenario is bursty: 8 % of 25 seconds are two, of 12 none."""
STATIC_STEPS: Final = 5
IDLE_S: Final = 8.0
MODEST_S: Final = 10.0
ANSWERED_S: Final = 1.0  # an I/O that nothing holds back is answered long before
OBSERVE_S: Final = 6.0
ENFORCE_S: Final = 60.0
SETTLED_S: Final = 2.0  # a greedy neighbour has filled the disk's queue
DRAIN_S: Final = 3.0
RELEASE_LIMIT_S: Final = 60.0
SAMPLE_S: Final = 0.5
STEP_S: Final = 0.1
FAULTS: Final[dict[str, tuple[signal.Signals, signal.Signals]]] = {
    "hangs": (signal.SIGSTOP, signal.SIGCONT),
    "fails": (signal.SIGUSR2, signal.SIGUSR2),
}
"""How the modelled disk is brought to it, and back. An nbdkit fails while a file is there."""
FAILS_FILE: Final = "disk-fails"
MOST_BAD: Final = {False: 0.03, True: 0.08}  # of seconds, by whether the scenario is bursty: for a static cap


@dataclass
class Result:
    """What one scenario showed; seconds are of the monotonic clock, None where it did not happen.

    Attributes:
        violation_ratio: worst victim's p95 over the promise without control.
        free_iops: of all greedy neighbours without control.
        static_iops: of all of them under the best static cap; of storage that becomes slower the mean of
            before and after, as long as each lasted.
        observe_throttles: caps in force while the server only observed.
        restores_s: from the first bad second to back under the promise, once a disturbance.
        bad_ratio: bad seconds of all others under control.
        kept_iops: of all greedy neighbours in those seconds.
        changes_per_min: direction changes of the cap that changed most.
        modest_ratio: what neighbours that ask for little get beside the victims, of what they ask for.
        modest_throttles: caps seen meanwhile.
        idle_ratio: the neighbours' rate once no agreement is at risk, of that without any control just then.
        fault: what a hang, or I/Os that fail, led to.
    """

    violation_ratio: float = 0.0
    free_iops: float = 0.0
    static_iops: float = 0.0
    observe_throttles: int = 0
    restores_s: list[float | None] = field(default_factory=list)
    bad_ratio: float = 1.0
    kept_iops: float = 0.0
    changes_per_min: float = 0.0
    modest_ratio: float | None = None
    modest_throttles: int = 0
    idle_ratio: float | None = None
    fault: dict[str, Any] = field(default_factory=dict)


@dataclass
class Victims:
    """Loads with a promise."""

    loads: Sequence[Load | FioLoad]
    promise_ms: float

    def are_bad(self, start_s: float) -> bool:
        """Whether a promise was broken in the second from ``start_s``; I/Os that never ended count."""
        for load in self.loads:
            p95 = percentile_ms(between(load.done + load.hung, start_s, start_s + 1), 95)
            if p95 is not None and p95 > self.promise_ms:
                return True
        return False

    def restored(self, from_s: float, to_s: float) -> tuple[float, float] | None:
        """(start of the first bad second, start of the first good one of two) in the span; None: never bad.

        Never good again is the end of the span.
        """
        at_s = from_s
        while at_s + 1 <= to_s and not self.are_bad(at_s):
            at_s += STEP_S
        if at_s + 1 > to_s:
            return None
        first_s = at_s
        while at_s + 2 <= to_s:
            if not self.are_bad(at_s) and not self.are_bad(at_s + 1):
                return first_s, at_s
            at_s += STEP_S
        return first_s, to_s

    def bad_ratio(self, starts_s: list[float]) -> float:
        """Share of the seconds from these moments that are bad; 1.0 of none."""
        return sum(map(self.are_bad, starts_s)) / len(starts_s) if starts_s else 1.0

    def worst_ratio(self, start_s: float, end_s: float) -> float:
        """The highest p95 of the I/Os due in the span, over the promise."""
        found = (percentile_ms(between(load.done, start_s, end_s), 95) for load in self.loads)
        return max(p95 or 0.0 for p95 in found) / self.promise_ms


def direction_changes(values: list[float | None]) -> int:
    """How often a cap that was lowered is raised next, or the other way round; None: no cap just then."""
    changes, before, direction = 0, None, 0
    for value in values:
        if value is None:
            before, direction = None, 0
            continue
        if before is not None and value != before:
            now = 1 if value > before else -1
            changes += direction == -now
            direction = now
        before = value
    return changes


def agreements(scenario: Scenario) -> str:
    """The documents: gold with a promise for victims, best-effort for the others."""
    documents = []
    for client in scenario.victims:
        documents.append(_document(client, "gold", scenario.promise_ms))
    documents += [_document(client, "best-effort", None) for client in scenario.greedy]
    return "---\n".join(documents)


def _document(client: Client, priority: str, promise_ms: float | None) -> str:
    volume, _, name = client.volume.partition("@")
    text = (
        f"apiVersion: storage-sla/v1\nkind: SLA\nmetadata: {{name: {priority}-{volume}{name}}}\nspec:\n"
        f'  scope: {{clients: ["{name or "*"}"], volumes: [{volume}], io: any}}\n  priority: {priority}\n'
        f"  guarantee: {{floor_iops: {10 if promise_ms else 5}}}\n"
    )
    if promise_ms:
        text += (
            "  objectives:\n  - name: latency\n    indicator: {metric: latency, percentile: 95}\n"
            f"    demand_curve:\n    - {{up_to_iops: {DISK_IOPS // 2}, value_ms: {promise_ms:g}}}\n"
            "    applicability: {min_ios_per_slice: 20}\n"
            "    budgeting: {method: timeslices, slice: 10s, target: 0.95}\n"
        )
    return text


class Run:
    """One scenario on its stage."""

    def __init__(self, scenario: Scenario, stage: Stage, enforce_s: float, disk_pid: int = 0) -> None:
        """``disk_pid``: of storage that runs already."""
        self.scenario = scenario
        self.stage = stage
        self.result = Result()
        self._enforce_s = enforce_s
        self._victims = Victims([], scenario.promise_ms)
        self._disk_pid = disk_pid
        self._caps: dict[str, list[float | None]] = {}
        self._seed = 0

    async def measure(self) -> Result:
        """All phases."""
        await asyncio.to_thread(self._set_up)
        async with self._loads(self.scenario.victims) as self._victims.loads:
            await asyncio.sleep(SETTLED_S)
            await self._uncontrolled()
            await self._static()
            await self._observed()
            spans_s = await self._enforced()
            if self.scenario.event == "slower":
                await self._static_after(spans_s)
        if not self.scenario.event:
            await self._idle()
        return self.result

    def _set_up(self) -> None:
        stage, scenario = self.stage, self.scenario
        if scenario.backend != "nbdkit":
            stage.start_disk(file=stage.folder / "direct" if scenario.backend == "direct" else None)
            [self._disk_pid] = stage.pids("tests.support.modelled_disk")
        stage.start_server()
        for gateway, volumes in scenario.gateways.items():
            exports = {volume: stage.disk_uri.format(volume) for volume in volumes}
            rule = 'client_rule = "export-suffix"' if scenario.names_clients else ""
            stage.start_agent(Agent(gateway, exports, extra_toml=rule))
        stage.wait(stage.gateways_up, "the gateways in the server's view")

    @contextlib.asynccontextmanager
    async def _loads(self, clients: Iterable[Client]) -> AsyncIterator[list[Load | FioLoad]]:
        """Loads of these clients, until the end of the block; fio's records are complete behind it."""
        stop = asyncio.Event()
        loads: list[Load | FioLoad] = []
        for client in clients:
            self._seed += 1
            path = self.stage.sockets / f"{client.gateway}.nbd"
            if client.depth:
                loads.append(FioLoad(path, client.volume, self._seed, client.depth))
                continue
            loads.append(Load(path, client.volume, self._seed, client.rate_iops, gaps_s=client.gaps_s()))
        async with asyncio.TaskGroup() as tasks:
            for load in loads:
                tasks.create_task(load.run(stop))
            try:
                yield loads
            finally:
                stop.set()

    async def _uncontrolled(self) -> None:
        async with self._loads(self.scenario.greedy) as greedy:
            start_s = time.monotonic() + SETTLED_S
            await asyncio.sleep(NONE_S)
            end_s = time.monotonic() - 1
        found = self.result
        found.violation_ratio = self._victims.worst_ratio(start_s, end_s)
        found.free_iops = sum(rate(load, start_s, end_s) for load in greedy)
        await asyncio.sleep(DRAIN_S)

    async def _static(self) -> None:
        """The highest cap, the same for all neighbours, under which as good as no second is bad."""
        self.result.static_iops = 0.0
        lowest, highest = 0.0, self.result.free_iops
        count = len(self.scenario.greedy)
        for step in range(STATIC_STEPS):
            total = (lowest + highest) / 2
            for client in self.scenario.greedy:
                if step:  # the lowest of several holds
                    await self._sla("throttle", "release", *client.target)
                await self._sla("throttle", "set", *client.target, "--iops", f"{total / count:.2f}")
            async with self._loads(self.scenario.greedy) as greedy:
                start_s = time.monotonic() + SETTLED_S
                await asyncio.sleep(STATIC_S[self.scenario.is_bursty])
                end_s = time.monotonic()
            seconds = [start_s + at for at in range(int(end_s - start_s))]
            if self._victims.bad_ratio(seconds) <= MOST_BAD[self.scenario.is_bursty]:
                lowest = total
                self.result.static_iops = max(
                    self.result.static_iops, sum(rate(load, start_s, end_s) for load in greedy)
                )
            else:
                highest = total
            await asyncio.sleep(DRAIN_S)
        for client in self.scenario.greedy:
            await self._sla("throttle", "release", *client.target)

    async def _static_after(self, spans_s: list[float]) -> None:
        """The same on storage as it is now; a fixed cap would have to be another after the change.

        Args:
            spans_s: how long what the neighbours kept was measured before it, and after.
        """
        before = self.result.static_iops
        await self._sla("mode", "observe")
        await asyncio.sleep(DRAIN_S)
        await self._static()
        rates, whole_s = (before, self.result.static_iops), sum(spans_s)
        self.result.static_iops = sum(map(operator.mul, rates, spans_s)) / whole_s if whole_s else 0.0

    async def _observed(self) -> None:
        path = self.stage.folder / "scenario.yaml"
        path.write_text(agreements(self.scenario))
        await self._sla("apply", "-f", str(path))
        async with self._loads(self.scenario.greedy):
            await asyncio.sleep(OBSERVE_S)
            self.result.observe_throttles = sum(cap is not None for cap in (await self._sample()).values())
        await asyncio.sleep(DRAIN_S)

    async def _enforced(self) -> list[float]:
        """How long each of the spans lasted in which the promise was held."""
        await self._sla("mode", "enforce")
        await asyncio.sleep(DRAIN_S)
        if self.scenario.is_steady:
            await self._modest()
        moments_s: list[float] = []
        async with self._loads(self.scenario.greedy) as greedy:
            moments_s.append(time.monotonic())
            half_s = self._enforce_s / 2 if self.scenario.event else self._enforce_s
            await self._watch(half_s)
            end_s = time.monotonic() - 1
            if self.scenario.has_fault:
                await self._fault()
            elif self.scenario.event == "slower":
                os.kill(self._disk_pid, signal.SIGUSR1)
                moments_s.append(time.monotonic())
                await self._watch(half_s)
                end_s = time.monotonic() - 1
        return self._judge(greedy, moments_s, end_s)

    async def _modest(self) -> None:
        """What neighbours get that ask for so little that no agreement is at risk."""
        async with self._loads(self.scenario.modest) as modest:
            start_s = time.monotonic() + SETTLED_S
            end_s = start_s + MODEST_S
            while time.monotonic() < end_s:
                caps = (await self._sample()).values()
                self.result.modest_throttles += sum(cap is not None for cap in caps)
                await asyncio.sleep(SAMPLE_S)
        last_s = end_s - ANSWERED_S  # of two counts with ends of their own, one percent is chance
        asked = [io for load in modest for io in between(load.done + load.hung, start_s, last_s)]
        self.result.modest_ratio = sum(io.end_s < end_s for io in asked) / len(asked) if asked else 0.0
        await asyncio.sleep(DRAIN_S)

    async def _idle(self) -> None:
        """The neighbours' rate when all victims have stopped and the server has released its caps."""
        async with self._loads(self.scenario.greedy) as greedy:
            until_s = time.monotonic() + RELEASE_LIMIT_S
            while time.monotonic() < until_s:
                await asyncio.sleep(SAMPLE_S)
                if all(cap is None for cap in (await self._sample()).values()):
                    break
            kept_s = time.monotonic() + SETTLED_S
            await asyncio.sleep(SETTLED_S + IDLE_S)
            await self._sla("mode", "observe")
            free_s = time.monotonic() + SETTLED_S
            await asyncio.sleep(SETTLED_S + IDLE_S)
        kept, free = (
            sum(rate(load, start_s, start_s + IDLE_S) for load in greedy) for start_s in (kept_s, free_s)
        )
        self.result.idle_ratio = kept / free if free else 0.0

    async def _watch(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for volume, cap in (await self._sample()).items():
                self._caps.setdefault(volume, []).append(cap)
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self) -> dict[str, float | None]:
        """The cap of each greedy client, or of its volume, cost a second."""
        live = await asyncio.to_thread(self.stage.live)
        caps = {
            "@".join(filter(None, (row["volume"], row["client"]))): row["cost_per_s"]
            for row in live.get("throttles", [])
            if row["state"] != "observed"
        }
        return {client.volume: caps.get(client.volume) for client in self.scenario.greedy}

    def _judge(self, greedy: list[Load | FioLoad], moments_s: list[float], end_s: float) -> list[float]:
        found, spans = self.result, []
        moments_s[0] = min(
            (io.due_s for load in greedy for io in load.done), default=moments_s[0]
        )  # fio starts
        for moment_s, until_s in zip(moments_s, [*moments_s[1:], end_s], strict=True):
            span = self._victims.restored(moment_s, until_s)
            found.restores_s.append(None if span is None else span[1] - span[0])
            spans.append((moment_s, moment_s if span is None else span[1], until_s))
        good = [after_s + at for _, after_s, until_s in spans for at in range(int(until_s - after_s))]
        found.bad_ratio = self._victims.bad_ratio(good)
        lasted_s = sum(until_s - after_s for _, after_s, until_s in spans)
        done = sum(
            rate(load, after_s, until_s) * (until_s - after_s)
            for load in greedy
            for _, after_s, until_s in spans
        )
        found.kept_iops = done / lasted_s if lasted_s else 0.0
        minutes = (end_s - moments_s[0]) / 60
        found.changes_per_min = max(direction_changes(caps) for caps in self._caps.values()) / minutes
        return [until_s - after_s for _, after_s, until_s in spans]

    async def _fault(self) -> None:
        """Let the disk hang or fail: when does an episode open, does a cap fall, what do slices say."""
        before = await self._sample()
        self._set_fault(True)
        stopped_s, shown_s = time.monotonic(), None
        throttled = False
        names = {f"gold-{client.volume}" for client in self.scenario.victims}
        try:
            while time.monotonic() < stopped_s + FAULT_S:
                await asyncio.sleep(SAMPLE_S)
                live = await asyncio.to_thread(self.stage.live)
                states = {row["state"] for row in live.get("slas", []) if row["name"] in names}
                if shown_s is None and states == {"violating"}:  # an episode opens with this state
                    shown_s = time.monotonic()
                for volume, cap in (await self._sample()).items():
                    known = before[volume]
                    throttled |= cap is not None and (known is None or cap < 0.9 * known)
        finally:
            self._set_fault(False)
        windows = None if shown_s is None else (shown_s - stopped_s) / self.stage.interval_s
        self.result.fault = {"shown_after_windows": windows, "throttled": throttled}
        await asyncio.sleep(2 * self.stage.slice_s)
        rows = [
            row
            for name in sorted(names)
            for row in (await asyncio.to_thread(self.stage.get, f"slas/{name}/slices"))["items"]
        ]
        elapsed_s = time.monotonic() - stopped_s
        inside = [
            row
            for row in rows
            if row["start_us"] / 1e6 > time.time() - elapsed_s
            and row["start_us"] / 1e6 + self.stage.slice_s < time.time() - elapsed_s + FAULT_S
        ]
        self.result.fault["slices"] = [row["state"] for row in inside]

    def _set_fault(self, is_on: bool) -> None:
        """Let the storage hang or fail, or no more."""
        if self.scenario.backend == "nbdkit" and self.scenario.event == "fails":
            path = self.stage.folder / FAILS_FILE
            path.touch() if is_on else path.unlink()
            return
        begin, end = FAULTS[self.scenario.event]
        os.kill(self._disk_pid, begin if is_on else end)

    async def _sla(self, *arguments: str) -> None:
        if arguments[0] == "throttle":
            arguments += ("--reason", "bench-sla") if arguments[1] == "set" else ()
        await asyncio.to_thread(self.stage.sla, *arguments)


@contextlib.contextmanager
def _nbdkit(stage: Stage) -> Iterator[int]:
    """The pid of an nbdkit instead of the modelled disk: one request at a time, of all connections."""
    filters = [f"--filter={name}" for name in ("noparallel", "delay", "error")]
    command = ["nbdkit", "--foreground", "--log=null", "--threads=32", *filters]
    command += ["--unix", f"{stage.sockets}/disk.sock", "memory", "64M", "serialize=all-requests"]
    command += ["rdelay=3ms", "wdelay=3ms", "error=EIO", "error-rate=100%"]
    process = subprocess.Popen([*command, f"error-file={stage.folder / FAILS_FILE}"])
    try:
        stage.wait((stage.sockets / "disk.sock").exists, "nbdkit")
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)  # one that hangs takes no other signal
        process.terminate()
        process.wait(10)


def why_not_direct() -> str:
    """Why files with O_DIRECT cannot be measured where scenarios run; "" if they can."""
    with tempfile.TemporaryDirectory(prefix="sla-bench-") as folder:
        try:
            DirectFile(Path(folder) / "direct").close()
        except OSError as exc:
            return f"O_DIRECT in {Path(folder).parent}: {exc.strerror}; set TMPDIR to a directory on a disk"
    return ""


def run(scenario: Scenario, enforce_s: float) -> Result:
    """One scenario from nothing to nothing."""
    folder = Path(tempfile.mkdtemp(prefix="sla-bench-"))
    try:
        with contextlib.ExitStack() as stack:
            stage = stack.enter_context(Stage(folder / "stage", interval_s=scenario.interval_s))
            pid = stack.enter_context(_nbdkit(stage)) if scenario.backend == "nbdkit" else 0
            return asyncio.run(Run(scenario, stage, enforce_s, pid).measure())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def line(scenario: Scenario, found: Result) -> str:
    """One scenario in words of 80 columns."""
    restores = ", ".join("-" if each is None else f"{each:.1f}" for each in found.restores_s)
    kept = found.kept_iops / found.static_iops if found.static_iops else 0.0
    text = (
        f"{scenario.name}: {scenario.title}\n"
        f"  without control p95 is {found.violation_ratio:.1f} of the promise; neighbours "
        f"{found.free_iops:.0f}/s, best static {found.static_iops:.0f}/s\n"
        f"  enforced: back after {restores} s, {found.bad_ratio:.1%} bad, neighbours "
        f"{found.kept_iops:.0f}/s ({kept:.0%} of static), {found.changes_per_min:.1f} turns/min"
    )
    return text + (f"\n  {scenario.event}: {found.fault}" if found.fault else "")


def values(found: dict[str, tuple[Scenario, Result]]) -> dict[str, float]:
    """Goal key to figure, from the scenarios that were run."""
    made: dict[str, float] = {}
    results = [each for each in found.values() if each[0].has_goals]
    if not results:
        return made
    made["violation_ratio"] = min(result.violation_ratio for _, result in results)
    for is_quick in (False, True):
        mine = [result for scenario, result in results if (scenario.interval_s < 1) is is_quick]
        restores = [each for result in mine for each in result.restores_s if each is not None]
        if restores and is_quick:
            made["restore_quick_s"] = max(restores)
        elif restores:
            made["restore_median_s"], made["restore_worst_s"] = statistics.median(restores), max(restores)
    made["observe_throttles"] = sum(result.observe_throttles for _, result in results)
    made["changes_per_min"] = max(result.changes_per_min for _, result in results)
    for is_bursty, name in ((False, "steady"), (True, "bursty")):
        some = [result for scenario, result in results if scenario.is_bursty is is_bursty]
        if some:
            made[f"bad_{name}_ratio"] = max(result.bad_ratio for result in some)
        kept = [r for each, r in results if each.is_bursty is is_bursty and not each.has_fault]
        if kept:
            made[f"kept_{name}_ratio"] = min(
                result.kept_iops / result.static_iops if result.static_iops else 0.0 for result in kept
            )
    modest = [result for _, result in results if result.modest_ratio is not None]
    if modest:
        made["modest_ratio"] = min(result.modest_ratio or 0.0 for result in modest)
        made["modest_throttles"] = sum(result.modest_throttles for result in modest)
    idle = [result.idle_ratio for _, result in results if result.idle_ratio is not None]
    if idle:
        made["idle_ratio"] = min(idle)
    for scenario, result in results:
        if result.fault:
            name, windows = (
                {"hangs": "hang", "fails": "fail"}[scenario.event],
                result.fault["shown_after_windows"],
            )
            made[f"{name}_windows"] = FAULT_S if windows is None else windows
            made[f"{name}_throttled"] = float(result.fault["throttled"])
            slices = result.fault["slices"]
            made[f"{name}_bad_slices_ratio"] = slices.count("bad") / len(slices) if slices else 0.0
    return made


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--seconds", type=float, default=ENFORCE_S)
    parser.add_argument("--backend", action="append", choices=list(PROMISES_MS), default=[])
    parser.add_argument("--simulated", action="store_true", help="on the simulator alone")
    chosen = parser.parse_args()

    def measure() -> harness.Sample:
        found: dict[str, tuple[Scenario, Result]] = {}
        simulated: dict[str, sla_simulated.Simulated] = {}
        failed: list[str] = []
        for scenario, problem in matrix(chosen.only or (), chosen.backend):
            if problem:
                print(f"{scenario.name}: left out: {problem}", flush=True)
                continue
            simulated[scenario.name] = sla_simulated.run(scenario, chosen.seconds, agreements(scenario))
            print(simulated[scenario.name].text(scenario), flush=True)
            if chosen.simulated:
                continue
            if scenario.backend == "direct" and (reason := why_not_direct()):
                print(f"{scenario.name}: left out: {reason}", flush=True)
                continue
            try:
                found[scenario.name] = scenario, run(scenario, chosen.seconds)
            except (StageError, OSError, ExceptionGroup) as exc:  # the others may be worth half an hour
                failed.append(scenario.name)
                print(f"{scenario.name}: failed: {exc}", flush=True)
                continue
            print(line(*found[scenario.name]), flush=True)
        raw = {name: vars(result) for name, (_, result) in found.items()}
        raw["simulated"] = {name: vars(result) for name, result in simulated.items()}
        versions = {name: harness.version_of(name) for name in ("nbdkit", "fio")}
        lacks = f"failed: {', '.join(failed)}" if failed else ""
        return harness.Sample(values(found), raw, versions, lacks=lacks)

    harness.main("sla", measure, most_runs=1, options=harness.Options.of(parser, chosen))


if __name__ == "__main__":
    main()
