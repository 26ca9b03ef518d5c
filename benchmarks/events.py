"""Event delivery: what it accepts, how fast one event arrives, a dead recipient, and a kill in the middle.

*Accepted*: batches of events through intake into the queue, each synced, and in turn with each a bare append
and sync of the same bytes, which are made beforehand. Making and packing an event takes the processor some
5 us, a sync some 0.2 ms however much it writes: so the larger a batch, the more events a second, and the
smaller the ratio. Both goals are measured with one size; larger ones have rows of their own. *One event*:
raised in a process of its own, until the webhook has it, idle. *Dead recipient*: 100,000 events to ten
recipients in one process, and the same with one of them never confirming, twice in turn; the ratio of the
times of the nine that live, and the most memory that the second took, from before its queues were opened to
its end; then the start of another process behind that backlog (``events_flood``). *Partner*: batches of 100
with one that mirrors them (``events_mirror``) against without. *Kill*: 10,000 alerts to one webhook, ``kill
-9`` when half have arrived, restart; the share that arrives, for ours and for Alertmanager (Debian's package
``prometheus-alertmanager``; "missing" without it), which gets the alerts once, as a client that was answered
"accepted" would post them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.events_flood import FLOOD, KIND, RECIPIENTS, event, flood, in_process, start
from benchmarks.events_mirror import mirrored
from benchmarks.harness import Sample, main, version_of
from pmdaemon.reserve.raising import EventRaiser
from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.agreements.load import load_documents
from sla_server.events.intake import EventIntake
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable

BATCH, SMALL, ACCEPTED, SINGLE, ALERTS = 500, 100, 20_000, 100, 10_000
GOALS_BATCH = 8
LIMIT_S = 300.0
QUIET_S = 20.0
ALERTMANAGER = "prometheus-alertmanager"


class Arrivals:
    """A webhook on loopback: identities and times of what came."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.order: list[str] = []
        self._lock = threading.Lock()
        arrivals = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with suppress(ValueError):
                    arrivals.add(json.loads(content))
                with suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_args: Any) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that is killed is what this is about."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, body: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        with self._lock:
            for alert in body.get("alerts", ()):
                if alert["labels"]["alertname"] != KIND:  # the product raises some itself
                    continue
                name = alert["labels"].get("number") or alert["delivery"]["event"]["event_id"]
                if name not in self.times:
                    self.times[name] = now_s
                    self.order.append(name)

    def wait(self, count: int, limit_s: float = LIMIT_S, quiet_s: float = LIMIT_S) -> int:
        """Until so many have come, or none came for ``quiet_s``."""
        deadline, quiet, seen = Deadline(limit_s), Deadline(quiet_s), len(self.times)
        while seen < count and not deadline.passed and not quiet.passed:
            time.sleep(0.02)
            if len(self.times) != seen:
                seen, quiet = len(self.times), Deadline(quiet_s)
        return seen

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


# What is accepted.


def accepted(folder: Path) -> dict[str, float]:
    """Events a second, and against a bare append, in batches of each size."""
    values: dict[str, float] = {}
    for size in (GOALS_BATCH, SMALL, BATCH):
        ours, bare = accepted_in(folder / f"{size}", size)
        suffix = "" if size == GOALS_BATCH else f"_{size}"
        values |= {f"accept_rate{suffix}": ours, f"accept_vs_append{suffix}": ours / bare}
    return values


def in_batches(size: int) -> list[list[QueuedEvent]]:
    """The events that are accepted."""
    return [[QueuedEvent(event(n)) for n in range(at, at + size)] for at in range(0, ACCEPTED, size)]


def accepted_in(folder: Path, size: int) -> tuple[float, float]:
    """Events a second in batches of ``size``: into the queue, and bare."""
    initial, normal = (
        EventQueue(folder, name, room) for name, room in (("initial", 1 << 20), ("main", 64 << 20))
    )
    intake = EventIntake(folder, initial, normal, SystemClock())
    batches = in_batches(size)
    encoded = [b"".join(item.encode() for item in batch) for batch in batches]
    fd = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(fd, 0, 64 << 20)
    os.fsync(fd)
    ours_s = bare_s = 0.0
    for batch, content in zip(batches, encoded, strict=True):
        began_s = time.perf_counter()
        intake.accept(batch)
        between_s = time.perf_counter()
        os.write(fd, content)
        os.fdatasync(fd)
        ours_s += between_s - began_s
        bare_s += time.perf_counter() - between_s
    os.close(fd)
    for queue in (initial, normal):
        queue.close()
    return ACCEPTED / ours_s, ACCEPTED / bare_s


# The process.


@contextmanager
def served(folder: Path, url: str) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the process delivery with one webhook; again with each call."""
    (folder / "run").mkdir(mode=0o700)
    (folder / "data" / "events" / "reserve").mkdir(parents=True, mode=0o700)
    head = "apiVersion: storage-sla/v1\nkind: {}\nmetadata: {{name: {}}}\nspec: {}\n"
    text = head.format("Recipient", "hook", f'{{webhook: {{url: "{url}"}}, batch: 100}}') + "---\n"
    text += head.format("Route", "all", "{recipients: [hook]}")
    held = [NotificationInForce(each.document, 1, 0) for each in load_documents(text, 60)]
    RoutingFile(folder / "data").publish(RoutingTable.of(held, {}))
    config = folder / "server.toml"
    config.write_text(f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n')
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sla_server.process", "delivery", "--config", str(config)]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        state, deadline = folder / "run" / "metrics" / "delivery.json", Deadline(LIMIT_S)
        state.unlink(missing_ok=True)
        while not (state.exists() and '"hook"' in state.read_text()) and not deadline.passed:
            time.sleep(0.05)
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.terminate()
            process.wait()


def raised(raiser: EventRaiser, numbers: Sequence[int]) -> dict[str, float]:
    """Raise events, never more than the reserve holds without folding; returns when each was raised."""
    times = {}
    for number in numbers:
        while raiser._normal.waiting > 100:
            time.sleep(0.002)
        found = event(number)
        times[found.event_id] = time.perf_counter()
        raiser.record(found.row())
    return times


def one_event(folder: Path) -> dict[str, float]:
    """Milliseconds from raising to arrival, idle."""
    arrivals = Arrivals()
    with served(folder, arrivals.url) as start:
        start()
        raiser = EventRaiser(folder / "data" / "events" / "reserve", "bench")
        raiser.initialized()
        raised(raiser, [SINGLE])  # the reserve is new: it is found within a second
        arrivals.wait(1)
        taken = []
        for number in range(SINGLE):
            times = raised(raiser, [number])
            arrivals.wait(number + 2)
            taken += [1000 * (arrivals.times[name] - at_s) for name, at_s in times.items()]
            time.sleep(0.05 + 0.001 * (number % 50))
        raiser.close()
    arrivals.close()
    return {"latency_p99": statistics.quantiles(taken, n=100)[98], "latency_p50": statistics.median(taken)}


def killed(folder: Path) -> dict[str, float]:
    """Share of the alerts that arrive although delivery is killed in the middle, and whether in order."""
    arrivals = Arrivals()
    with served(folder, arrivals.url) as start:
        process = start()
        raiser = EventRaiser(folder / "data" / "events" / "reserve", "bench")
        raiser.initialized()

        def kill_in_the_middle() -> None:
            arrivals.wait(ALERTS // 2)
            process.send_signal(signal.SIGKILL)
            process.wait()
            start()

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        times = raised(raiser, range(ALERTS))
        killer.join()
        arrivals.wait(ALERTS, quiet_s=QUIET_S)
        raiser.close()
    arrivals.close()
    in_order = arrivals.order == [name for name in times if name in arrivals.times]
    return {"kill_ours": 100 * len(arrivals.times) / ALERTS, "kill_order": float(in_order)}


# Alertmanager.

CONFIG = """
route: {{receiver: hook, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 12h}}
receivers: [{{name: hook, webhook_configs: [{{url: "{url}", send_resolved: false}}]}}]
"""


def killed_alertmanager(folder: Path) -> dict[str, float]:
    """The same with Alertmanager, without the order, which it does not promise."""
    if (program := shutil.which(ALERTMANAGER)) is None:
        return {}
    arrivals = Arrivals()
    (folder / "am.yml").write_text(CONFIG.format(url=arrivals.url))
    port = 19_093
    command = [
        program, f"--config.file={folder}/am.yml", f"--storage.path={folder}/am", "--cluster.listen-address=",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = Deadline(60.0)
        while not deadline.passed:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready").close()
                break
            time.sleep(0.05)
        return process

    process = start()
    for first in range(0, ALERTS, BATCH):
        alerts = [{"labels": {"alertname": KIND, "number": f"{n}"}} for n in range(first, first + BATCH)]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/v2/alerts",
            json.dumps(alerts).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request).close()
    at_kill = arrivals.wait(ALERTS // 2, quiet_s=QUIET_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = start()
    found = arrivals.wait(ALERTS, quiet_s=QUIET_S)
    process.terminate()
    process.wait()
    arrivals.close()
    print(f"  Alertmanager had delivered {at_kill} of {ALERTS} when it was killed, {found} in the end")
    return {"kill_alertmanager": 100 * found / ALERTS}


# Ten recipients, one of them dead.


def floods(root: Path) -> dict[str, float]:
    """All alive and one dead, twice in turn; after the second, the start behind a dead one's backlog."""
    alive_s, dead_s, grown = list[float](), list[float](), list[float]()
    for index in range(2):
        for dead, took_s in ((0, alive_s), (1, dead_s)):
            folder = root / f"flood{index}{dead}"
            folder.mkdir(mode=0o700)
            found = in_process(flood, folder, dead)
            took_s.append(found[0])
            if dead:
                grown.append(found[1])
                if index:
                    start_s, start_grown = in_process(start, folder, dead)
            shutil.rmtree(folder)
    return {
        "dead_ratio": sum(dead_s) / sum(alive_s),
        "flood_rate": 2 * FLOOD * RECIPIENTS / sum(alive_s),
        "flood_memory": max(grown),
        "start_memory": start_grown,
        "start_s": start_s,
    }


def measure() -> Sample:
    """One whole run."""
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-events-") as name:
        root = Path(name)
        runs = []
        for index in range(3):
            (root / f"accepted{index}").mkdir()
            (root / f"mirrored{index}").mkdir(mode=0o700)
            own, both = (
                accepted(root / f"accepted{index}"),
                mirrored(root / f"mirrored{index}", in_batches(SMALL)),
            )
            runs.append(own | both)
        values |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for part in (one_event, killed, killed_alertmanager):
            (root / part.__name__).mkdir(mode=0o700)
            values |= part(root / part.__name__)
        values |= floods(root)
    for key, value in values.items():
        print(f"  {key:<20} {value:>14,.2f}")
    return Sample(values, {}, {ALERTMANAGER: version_of(ALERTMANAGER)})


if __name__ == "__main__":
    main("events", measure)
