"""``make demo``: the whole cycle on this machine, told as it happens.

Real: server, gateway agents, I/O, database, page, Spark job. Modelled (and labelled): the disk behind both
gateways, one FIFO queue with 2 ms a request. The figures at the end are computed from the load generator's
own latencies and timestamps, never from what the server says.

Phases: gold alone; a greedy neighbour joins while the server only observes; the server enforces; gold
stops; the policy job turns what was stored into a policy. With ``--for SECONDS`` the first four take about
that long, the last line is a JSON summary, and the exit status says whether the cycle closed. Without it
everything stays up, under load, until interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.load import Load, between, percentile_ms
from benchmarks.stage import PROMISE_MS, Agent, Stage, StageError, free_port

PAGE_PORT = 8411
# Shares of the whole: gold alone, greedy joins (observe), enforce, gold stopped.
SHARES = (0.15, 0.2, 0.45, 0.2)
SHORTEST_S = 30


@dataclass
class Times:
    """Moments of the run, seconds on the monotonic clock; ``released_s`` is None until it happened."""

    greedy_s: float = 0.0
    enforce_s: float = 0.0
    gold_stop_s: float = 0.0
    end_s: float = 0.0
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
    policy: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> dict[str, Any]:
        """All phases; returns the summary."""
        await asyncio.to_thread(self._set_up)
        stop_gold, stop_greedy = asyncio.Event(), asyncio.Event()
        gold_agent, greedy_agent = self.stage.agents
        self.gold = Load(gold_agent.socket(self.stage), "erp-db", seed=1, rate_iops=80)
        self.greedy = Load(greedy_agent.socket(self.stage), "batch", seed=2, depth=32)
        self.started_s = time.monotonic()
        lengths = [share * self.seconds for share in SHARES]
        async with asyncio.TaskGroup() as tasks:
            narrator = tasks.create_task(self._narrate())
            tasks.create_task(self.gold.run(stop_gold))
            self._say("1. gold alone: erp-db does 80 I/O/s and was promised p95 <= 12 ms")
            await asyncio.sleep(lengths[0])
            self._say("2. a greedy neighbour joins on the same disk; the server only observes")
            self.times.greedy_s = time.monotonic()
            tasks.create_task(self.greedy.run(stop_greedy))
            await asyncio.sleep(lengths[1])
            self._say("3. enforce: the server may now slow the neighbour down")
            self.times.enforce_s = time.monotonic()
            await asyncio.to_thread(self.stage.set_mode, "enforce")
            await asyncio.sleep(max(0.0, self.times.enforce_s + lengths[2] - time.monotonic()))
            self._say("4. gold stops: nobody needs protection, the neighbour is released")
            self.times.gold_stop_s = time.monotonic()
            stop_gold.set()
            await self._released(lengths[3])
            self.times.end_s = time.monotonic()
            stop_greedy.set()
            narrator.cancel()
        self._say("5. policy job: PySpark turns the stored statistics into a policy (some 30 s)")
        self.policy = await asyncio.to_thread(self._policy_job)
        return self.summary()

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

    async def _released(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if self.times.released_s is None:
                live = await asyncio.to_thread(self.stage.live)
                if live and not live["throttles"]:
                    self.times.released_s = time.monotonic()
            await asyncio.sleep(0.25)

    def _policy_job(self) -> dict[str, Any]:
        done = self.stage.sla("policy", "run", check=False)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
            return {"ok": False}
        print("".join(f"   {line}\n" for line in done.stdout.splitlines()[-8:]), end="", flush=True)

        def in_force() -> bool:
            return bool((self.stage.live().get("policy") or {}).get("version"))

        with contextlib.suppress(StageError):
            self.stage.wait(in_force, "the policy in force", limit_s=30)
            version = self.stage.live()["policy"]["version"]
            print(f"   policy version {version} is in force", flush=True)
            return {"ok": True, "version": version}
        return {"ok": False}

    def _say(self, text: str) -> None:
        print(f"\n{time.monotonic() - self.started_s:5.1f} s  {text}", flush=True)

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
            caps = [row["cost_per_s"] for row in live.get("throttles", []) if row["state"] != "observed"]
            cap = f"{min(caps):7.0f}" if caps and None not in caps else f"{'-':>7}"
            states = [row["state"] for row in live.get("slas", []) if row["name"] == "erp-gold"]
            latency = f"{p95:7.1f} ms" if p95 is not None else f"{'idle':>10}"
            rates = f"{len(gold):>10} {len(greedy):>12}"
            state = states[0] if states else "?"
            at_s = now_s - self.started_s
            print(f"{at_s:5.1f} s{latency} {PROMISE_MS:5.0f} ms {rates} {cap}  {state}", flush=True)

    def summary(self) -> dict[str, Any]:
        """Figures from the client's own records; ``ok`` says whether the cycle closed."""
        times = self.times
        observed = between(self.gold.done, times.greedy_s + 2, times.enforce_s)
        violation = (percentile_ms(observed, 95) or 0.0) / PROMISE_MS
        restore_s = time_to_restore(self.gold, times.enforce_s, times.gold_stop_s)
        after_s = times.enforce_s + (restore_s if restore_s is not None else 0.0)
        bad = bad_seconds_ratio(self.gold, after_s, times.gold_stop_s)
        free = rate(self.greedy, times.greedy_s + 2, times.enforce_s)
        kept = rate(self.greedy, after_s, times.gold_stop_s) / free if free else 0.0
        released_s = times.released_s - times.gold_stop_s if times.released_s else None
        checks = {
            "violated": violation >= 3.0,
            "restored": restore_s is not None and restore_s <= 10.0,
            "kept_promise": bad <= 0.10,
            "neighbour_kept": kept >= 0.60,
            "released": released_s is not None,
            "policy": bool(self.policy.get("ok")),
            "no_io_errors": not self.gold.errors and not self.greedy.errors,
        }
        return {
            "violation_ratio": round(violation, 2),
            "restore_s": None if restore_s is None else round(restore_s, 2),
            "bad_seconds_ratio": round(bad, 3),
            "neighbour_kept_ratio": round(kept, 3),
            "release_s": None if released_s is None else round(released_s, 2),
            "policy_version": self.policy.get("version"),
            "failed": sorted(name for name, passed in checks.items() if not passed),
            "ok": all(checks.values()),
        }


def rate(load: Load, start_s: float, end_s: float) -> float:
    """Completed I/Os a second in [start_s, end_s)."""
    span_s = end_s - start_s
    return sum(start_s <= io.end_s < end_s for io in load.done) / span_s if span_s > 0 else 0.0


def time_to_restore(load: Load, enforce_s: float, end_s: float) -> float | None:
    """Seconds from enforcing to the end of the first second whose p95 kept the promise and whose next did."""
    step_s = 0.25
    start_s = enforce_s
    while start_s + 2 <= end_s:
        first = percentile_ms(between(load.done, start_s, start_s + 1), 95)
        second = percentile_ms(between(load.done, start_s + 1, start_s + 2), 95)
        if first is not None and second is not None and max(first, second) <= PROMISE_MS:
            return start_s + 1 - enforce_s
        start_s += step_s
    return None


def bad_seconds_ratio(load: Load, start_s: float, end_s: float) -> float:
    """Share of whole seconds in [start_s, end_s) whose p95 was over the promise; 1.0 for no whole second."""
    seconds = bad = 0
    while start_s + 1 <= end_s:
        p95 = percentile_ms(between(load.done, start_s, start_s + 1), 95)
        if p95 is not None:
            seconds += 1
            bad += p95 > PROMISE_MS
        start_s += 1
    return bad / seconds if seconds else 1.0


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
        runs: list[Callable[[], Awaitable[None]]] = [lambda load=load: load.run(stop) for load in loads]
        for run in runs:
            tasks.create_task(run())  # type: ignore[arg-type]
        forgetting = tasks.create_task(forget())
        await stop.wait()
        forgetting.cancel()


async def _main(demo: Demo) -> dict[str, Any]:
    summary = await demo.run()
    if demo.endless:
        print(json.dumps(summary), flush=True)
        await _stay(demo)
    return summary


def measure(seconds: float, folder: Path, endless: bool = False, api_port: int = 0) -> dict[str, Any]:
    """One whole demonstration; returns its summary."""
    if folder.exists():
        shutil.rmtree(folder)
    with Stage(folder, api_port=api_port) as stage:
        return asyncio.run(_main(Demo(stage, seconds, endless)))


def _page_port() -> int:
    """The usual port of the page if it is free, else any."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", PAGE_PORT))
            return PAGE_PORT
    return free_port()


@click.command()
@click.option(
    "--for", "seconds", type=click.IntRange(min=SHORTEST_S), help="End by itself after about SECONDS."
)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("demo-data"), help="Where it keeps its data."
)
def main(seconds: int | None, folder: Path) -> None:
    """The whole cycle on this machine: promise, greedy neighbour, throttle, release, policy."""
    try:
        summary = measure(seconds or 60, folder.absolute(), seconds is None, _page_port())
    except StageError as exc:
        click.echo(f"demo: {exc}", err=True)
        raise SystemExit(1) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if seconds is not None:
        print(json.dumps(summary), flush=True)
        sys.exit(0 if summary["ok"] else 1)


if __name__ == "__main__":
    main()
