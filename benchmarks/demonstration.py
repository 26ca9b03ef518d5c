"""``make demo``: the whole cycle on this machine, told as it happens.

Real: server, gateway agents, I/O, database, page, Spark job. Modelled (and labelled): the disk behind both
gateways, one FIFO queue before eight requests at once of 20 ms each. The figures at the end are computed from
the load generator's own latencies and timestamps, never from what the server says.

Phases: gold alone; a greedy neighbour joins while the server only observes, until the promise is seen broken;
the server enforces, until the promise holds again and then for a fixed time; gold stops, until the neighbour
is released; the policy job turns what was stored into a policy. Each wait has a generous deadline, after
which the run goes on and says at its end what it did not see (``verdict``).

With ``--for SECONDS`` the first four take about that long, the last line is a JSON summary, and the exit
status says whether the cycle closed. Without it everything stays up, under load, until interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.verdict import Figures, bad_seconds_ratio, keeps, rate, summary, time_to_restore, told
from tests.support.load import Load, between, percentile_ms
from tests.support.ports import free_port
from tests.support.stage import (
    GOLD_IOPS,
    GREEDY_DEPTH,
    PROMISE_MS,
    Agent,
    Stage,
    StageError,
)

PAGE_PORT = 8411
# Least shares of the whole: gold alone, greedy joins (observe), enforced after the promise holds again, gold
# stopped. What is left of 1 is for the waiting: some 4 s until it holds again, some 6 s until the release.
SHARES = (0.12, 0.15, 0.45, 0.12)
PHASES = 5
SHORTEST_S = 30
DEADLINE_S = 60.0  # of each wait for something that takes seconds on a quiet machine
POLICY_LIMIT_S = 900.0  # half a minute of work of one processor, which others may want, too
POLICY_TOML = '[policy]\npublish = "always"\nback_test_ios = 2000\n'
"""A minute of history is too short for the back-test to find that a policy helps: shown, not followed."""
WORD_EACH_S = 15.0  # while the policy job says nothing
SETTLED_S = 2.0  # a greedy neighbour has filled the disk's queue
RECENT_S = 1.0  # I/Os due before that have ended, unless they take longer than is promised by far


def plan(seconds: float, endless: bool) -> str:
    """What will happen and how long it takes, said before anything starts."""
    rest = "everything stays up, under load, until Ctrl-C" if endless else "it ends by itself"
    text = (
        f"The demonstration has {PHASES} phases. The server and two gateways start first, in some seconds. "
        f"Four phases take about {seconds:.0f} s together, the policy job at the end half a minute to two "
        f"minutes; then {rest}."
    )
    return textwrap.fill(text, 80)


@dataclass
class Times:
    """Moments of the run, seconds on the monotonic clock; ``released_s`` is None until it happened."""

    greedy_s: float = 0.0
    enforce_s: float = 0.0
    gold_stop_s: float = 0.0
    released_s: float | None = None


@dataclass
class Demo:
    """The running demonstration."""

    stage: Stage
    seconds: float
    endless: bool
    gold: Load = field(init=False)
    greedy: Load = field(init=False)
    times: Times = field(default_factory=Times)
    started_s: float = 0.0
    throttled: bool = False
    policy_version: int | None = None
    policy_s: float | None = None
    spark_start_s: float | None = None

    async def run(self) -> Figures:
        """All phases; returns the figures."""
        print(plan(self.seconds, self.endless), flush=True)
        await asyncio.to_thread(self._set_up)
        stop_gold, stop_greedy = asyncio.Event(), asyncio.Event()
        gold_agent, greedy_agent = self.stage.agents
        self.gold = Load(gold_agent.socket(self.stage), "erp-db", seed=1, rate_iops=GOLD_IOPS)
        self.greedy = Load(greedy_agent.socket(self.stage), "batch", seed=2, depth=GREEDY_DEPTH)
        self.started_s = time.monotonic()
        alone_s, joined_s, enforced_s, stopped_s = (share * self.seconds for share in SHARES)
        async with asyncio.TaskGroup() as tasks:
            narrator = tasks.create_task(self._narrate())
            tasks.create_task(self.gold.run(stop_gold))
            self._say_phase(
                1, alone_s, f"gold alone: erp-db does {GOLD_IOPS} I/O/s, promised p95 <= {PROMISE_MS:g} ms"
            )
            await self._until(lambda: self._kept(2.0) is True, alone_s)
            self._say_phase(
                2, joined_s, "a greedy neighbour joins on the same disk; the server only observes"
            )
            self.times.greedy_s = time.monotonic()
            tasks.create_task(self.greedy.run(stop_greedy))
            await self._until(lambda: self._kept(1.0) is False, max(joined_s, SETTLED_S + 1))
            self._say_phase(3, enforced_s, "enforce: the server may now slow the neighbour down")
            self.times.enforce_s = time.monotonic()
            await asyncio.to_thread(self.stage.set_mode, "enforce")
            await self._until(self._held_again, 0.0)
            await asyncio.sleep(enforced_s)
            self._say_phase(4, stopped_s, "gold stops: nobody needs protection, the neighbour is released")
            self.times.gold_stop_s = time.monotonic()
            stop_gold.set()
            await self._until(lambda: self.times.released_s is not None, stopped_s)
            stop_greedy.set()
            narrator.cancel()
        self._say_phase(PHASES, 60.0, "policy job: PySpark turns what was stored into a policy")
        job = asyncio.create_task(asyncio.to_thread(self._policy_job))
        begun_s = time.monotonic()
        while not (await asyncio.wait([job], timeout=WORD_EACH_S))[0]:
            print(f"   {time.monotonic() - begun_s:.0f} s: the policy job is at work", flush=True)
        self.policy_version = await job
        return self.figures()

    async def _until(self, ready: Callable[[], bool], least_s: float) -> None:
        """Wait until ``ready``, ``DEADLINE_S`` at most, and ``least_s`` in any case."""
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < least_s or (waited_s < DEADLINE_S and not ready()):
            await asyncio.sleep(0.25)

    def _kept(self, seconds: float) -> bool | None:
        """Whether the I/Os due in the newest ``seconds`` of which nearly all have ended kept the promise."""
        end_s = time.monotonic() - RECENT_S
        return keeps(self.gold.done, end_s - seconds, end_s)

    def _held_again(self) -> bool:
        end_s = time.monotonic() - RECENT_S
        return time_to_restore(self.gold, self.times.enforce_s, end_s) is not None

    def _set_up(self) -> None:
        stage = self.stage
        print("starting the modelled disk, the server and two gateway agents ...", flush=True)
        stage.start_disk()
        stage.start_server()
        disk = stage.disk_uri
        stage.start_agent(Agent("gateway-a", {"erp-db": disk.format("erp-db")}))
        stage.start_agent(Agent("gateway-b", {"batch": disk.format("batch")}))
        stage.wait(stage.gateways_up, "both gateways in the server's view")
        stage.sla("apply", "-f", str(stage.folder / "agreements.yaml"))
        print(f"\n  the page: {stage.sla('login').stdout.strip()}\n", flush=True)

    def _policy_job(self) -> int | None:
        """Run it as an operator would; the version in force then, None if it failed."""
        begun_s = time.monotonic()
        try:
            done = self.stage.sla("policy", "run", limit_s=POLICY_LIMIT_S)
        except StageError as exc:
            print(exc, flush=True)
            return None
        self.policy_s = time.monotonic() - begun_s
        job: dict[str, Any] = next((row["job"] for row in self.stage.get("policies")["items"]), {})
        self.spark_start_s = job.get("spark_start_s")
        print("".join(f"   {line}\n" for line in done.stdout.splitlines()[-8:]), end="", flush=True)

        def in_force() -> int | None:
            return (self.stage.live().get("policy") or {}).get("version")

        with contextlib.suppress(StageError):
            version = int(self.stage.wait(in_force, "the policy in force", limit_s=DEADLINE_S))
            print(f"   policy version {version} is in force", flush=True)
            return version
        return None

    def _say_phase(self, number: int, about_s: float, text: str) -> None:
        at_s = time.monotonic() - self.started_s
        print(f"\n{at_s:5.1f} s  {number} of {PHASES} (about {about_s:.0f} s): {text}", flush=True)

    async def _narrate(self) -> None:
        print(
            f"{'':7}{'gold p95':>10} {'promise':>8} {'gold IOPS':>10} {'greedy IOPS':>12} {'cap':>7}  state"
        )
        while True:
            await asyncio.sleep(1.0)
            now_s = time.monotonic()
            # I/Os due up to half a second ago have nearly all ended; younger ones would flatter.
            gold = between(self.gold.done, now_s - 1.5, now_s - 0.5)
            greedy = [io for io in self.greedy.done if now_s - 1.0 <= io.end_s]
            p95 = percentile_ms(gold, 95)
            live = await asyncio.to_thread(self.stage.live)
            self._note(live)
            caps = [row["cost_per_s"] for row in live.get("throttles", []) if row["state"] != "observed"]
            cap = f"{min(caps):7.0f}" if caps and None not in caps else f"{'-':>7}"
            states = [row["state"] for row in live.get("slas", []) if row["name"] == "erp-gold"]
            latency = f"{p95:7.1f} ms" if p95 is not None else f"{'idle':>10}"
            rates = f"{len(gold):>10} {len(greedy):>12}"
            state = states[0] if states else "?"
            at_s = now_s - self.started_s
            print(f"{at_s:5.1f} s{latency} {PROMISE_MS:5.0f} ms {rates} {cap}  {state}", flush=True)

    def _note(self, live: dict[str, Any]) -> None:
        """What the server shows of throttles; an empty view (the server did not answer) shows nothing."""
        if not live:
            return
        confirmed = [row for row in live["throttles"] if row["state"] in ("confirmed", "seen")]
        self.throttled |= any(row["volume"] == "batch" and row["source"] == "control" for row in confirmed)
        if self.times.gold_stop_s and self.times.released_s is None and not live["throttles"]:
            self.times.released_s = time.monotonic()

    def figures(self) -> Figures:
        """Computed from the clients' own records."""
        times = self.times
        settled_s = times.greedy_s + SETTLED_S
        observed = between(self.gold.done, settled_s, times.enforce_s)
        restore_s = time_to_restore(self.gold, times.enforce_s, times.gold_stop_s)
        after_s = times.enforce_s + (restore_s or 0.0)
        free = rate(self.greedy, settled_s, times.enforce_s)
        return Figures(
            violation_ratio=(percentile_ms(observed, 95) or 0.0) / PROMISE_MS,
            restore_s=restore_s,
            bad_seconds_ratio=bad_seconds_ratio(self.gold, after_s, times.gold_stop_s),
            neighbour_kept_ratio=rate(self.greedy, after_s, times.gold_stop_s) / free if free else 0.0,
            release_s=times.released_s - times.gold_stop_s if times.released_s else None,
            throttled=self.throttled,
            policy_version=self.policy_version,
            io_errors=self.gold.errors + self.greedy.errors,
            policy_s=self.policy_s,
            spark_start_s=self.spark_start_s,
        )


async def _stay(demo: Demo) -> None:
    """Keep both loads running until interrupted."""
    print("\neverything stays up, under load, until Ctrl-C", flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loads = (demo.gold, demo.greedy)
    for load in loads:
        load.done.clear()

    async def forget() -> None:
        while True:
            await asyncio.sleep(60)
            for load in loads:
                load.done.clear()

    async with asyncio.TaskGroup() as tasks:
        runs: list[Callable[[], Awaitable[None]]] = [functools.partial(load.run, stop) for load in loads]
        for run in runs:
            tasks.create_task(run())  # type: ignore[arg-type]
        forgetting = tasks.create_task(forget())
        await stop.wait()
        forgetting.cancel()


async def _main(demo: Demo) -> Figures:
    figures = await demo.run()
    print(f"\n{told(figures, str(demo.stage.folder))}\n", flush=True)
    if demo.endless:
        await _stay(demo)
    return figures


def measure(seconds: float, folder: Path, endless: bool = False, api_port: int = 0) -> dict[str, Any]:
    """One whole demonstration; returns its summary (``verdict.summary``)."""
    if folder.exists():
        shutil.rmtree(folder)
    with Stage(folder, api_port=api_port, extra_toml=POLICY_TOML) as stage:
        found = summary(asyncio.run(_main(Demo(stage, seconds, endless))))
    print(f"data and logs of this run stay in {folder}", flush=True)
    return found


def _page_port() -> int:
    """The usual port of the page if it is free, else any."""
    try:
        return free_port(PAGE_PORT)
    except OSError:
        return free_port()


def _words(exc: Exception) -> str:
    """What went wrong; a group of tasks wraps it."""
    if isinstance(exc, ExceptionGroup):
        return "; ".join(_words(each) for each in exc.exceptions)
    return str(exc) or type(exc).__name__


@click.command()
@click.option(
    "--for", "seconds", type=click.IntRange(min=SHORTEST_S), help="End by itself after about SECONDS."
)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("demo-data"), help="Where it keeps its data."
)
def main(seconds: int | None, folder: Path) -> None:
    """The whole cycle on this machine: promise, greedy neighbour, throttle, release, policy."""
    # As Ctrl-C does: server, agents and disk are ended, which would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        result = measure(seconds or 60, folder.absolute(), seconds is None, _page_port())
    except (StageError, OSError, ExceptionGroup) as exc:
        click.echo(f"demo: it did not come to its end: {_words(exc)}", err=True)
        raise SystemExit(1) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if seconds is not None:
        print(json.dumps(result), flush=True)
        sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
