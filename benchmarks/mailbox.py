"""``make bench-mailbox``: the mailbox against the queues of Python's world, in one run, medians of 5.

One or three producer processes send the same bytes to one consumer; all variants are interleaved within
each round, and a ratio is the median of the ratios within the rounds. Sizes 100 B, 4 KB, 100 KB. The peers'
waits are their own; the mailbox's consumer sleeps on its doorbell, its producers sleep for a moment when it
is full.

Variants of the mailbox: ``lanes`` and ``shared`` (post, take), ``*_many`` (post_many of 64, take of 64),
``*_views`` (post_many of up to 16, take_views: payloads are used where they lie) and ``*_single_views``
(post, take_views). Peers: multiprocessing's Queue, SimpleQueue and Pipe (with a lock, as several producers
need), faster-fifo as it comes (pickle) and in its fastest form (raw bytes, batches of 64 both ways), pyzmq
PUSH/PULL over ipc (one producer only).

Goals are counted on the streaming form (post_many) and, beside it, on one post a message. The mailbox checks
every byte of every payload on both sides (ADR 20); no peer has a checksum.

Also: slots inspected per take behind 10,000 foreign messages, kills with everything acknowledged accounted
for (tests/support/mailbox_chaos.py), and the round trip of two sleeping processes.
"""

from __future__ import annotations

import importlib.metadata
import os
import select
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import harness
from benchmarks.mailbox_steps import steps
from benchmarks.mailbox_transports import BATCH, VARIANTS, Transport
from pmdaemon.mailbox import Layout, LookAhead, Mailbox, Route, attach, create_segment
from tests.support import mailbox_chaos

ROUNDS = 5
MESSAGES = {100: 120_000, 4096: 120_000, 102_400: 9_000}  # a variant and round: 0.04 s to 1 s
KILLS = 1_050
FOREIGN = 10_000


def payloads(size: int) -> list[bytes]:
    """Different objects and bytes, so that nobody profits from seeing the same one again."""
    return [os.urandom(size) for _ in range(BATCH if size < 100_000 else 16)]


@contextmanager
def folder() -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sla-bench-", dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


def cell(kind: type[Transport], size: int, producers: int) -> float:
    """Microseconds a message, from the start signal to the last one received."""
    count = MESSAGES[size] // producers
    data = payloads(size)
    with folder() as place:
        transport = kind(place, producers, size)
        readable, writable = os.pipe()
        ready, tell = os.pipe()
        pids = []
        for number in range(producers):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.close(writable)
                    transport.open_sender(number)
                    os.write(tell, b"!")
                    os.read(readable, 1)  # end of file is the start signal
                    transport.send_all(count, data)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        transport.open_receiver()
        for _ in pids:
            os.read(ready, 1)
        for fd in (readable, ready, tell):
            os.close(fd)
        left = count * producers
        started_s = time.perf_counter()
        os.close(writable)
        while left > 0:
            left -= transport.receive()
        took_s = time.perf_counter() - started_s
        for pid in pids:
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError(f"a producer of {kind.__name__} failed")
        transport.close()
    return took_s / (count * producers) * 1e6


def inspected(look: LookAhead, form: str, takes: int) -> float:
    """Slots inspected per take of a message that stands behind FOREIGN messages to somebody else."""
    routes = (Route("a", "other", 1 << 20), Route("a", "me", 1 << 20))
    with folder() as place:
        create_segment(place / "segment", Layout(("a", "me", "other"), routes, 4 * FOREIGN, form))
        with attach(place / "segment", "a") as a, attach(place / "segment", "me", look) as me:
            for _ in range(FOREIGN):
                a.post("other", b"")
            me.take()  # not counted: somebody who was there all the time has seen them come
            before = me.stats()["slots_inspected"]
            for _ in range(takes):
                a.post("me", b"x" * 100)
                assert len(me.take(1)) == 1
            return float(me.stats()["slots_inspected"] - before) / takes


def round_trip_us(trips: int) -> float:
    """Two processes that sleep in a selector and wake each other, microseconds there and back."""
    with folder() as place:
        routes = (Route("a", "b", 4096), Route("b", "a", 4096))
        create_segment(place / "segment", Layout(("a", "b"), routes, 64))
        pid = os.fork()
        if pid == 0:
            try:
                with attach(place / "segment", "b") as b:
                    while True:
                        echo(b, "a")
            finally:
                os._exit(1)
        with attach(place / "segment", "a") as a:
            times = []
            for _ in range(trips):
                started_s = time.perf_counter()
                a.post("b", b"ping")
                await_one(a)
                times.append(time.perf_counter() - started_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statistics.median(times) * 1e6


def await_one(box: Mailbox) -> None:
    poll = select.poll()
    poll.register(box, select.POLLIN)
    while not box.take():
        if box.prepare_sleep():
            poll.poll(50)
            box.awake()


def echo(box: Mailbox, to: str) -> None:
    await_one(box)
    box.post(to, b"pong")


def measure() -> harness.Sample:
    """One whole run."""
    rows: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for size in MESSAGES:
            for producers in (1, 3):
                for name, kind in VARIANTS.items():
                    if name == "zmq_ipc" and producers > 1:
                        continue  # its receiver stalled with three producers of 100 B, whoever bound
                    rows.setdefault(f"{name}.{size}.{producers}", []).append(cell(kind, size, producers))
    values = goals(rows)
    no_resets = LookAhead(threshold=None)
    values["inspected_without_resets"] = inspected(no_resets, "shared", 20_000)
    values["inspected_with_resets"] = inspected(LookAhead(), "shared", 20_000)
    values["inspected_without_look_ahead"] = inspected(LookAhead(enabled=False), "shared", 20)
    values["round_trip_us"] = round_trip_us(3_000)
    outcomes = {form: mailbox_chaos.run(form, KILLS // 2, 120, 7) for form in ("lanes", "shared")}
    values["chaos_kills"] = sum(outcome.kills for outcome in outcomes.values())
    values["chaos_faults"] = sum(o.lost + o.doubled + o.disordered for o in outcomes.values())
    raw = {
        "us_per_message": rows,
        "chaos": {form: vars(outcome) for form, outcome in outcomes.items()},
        "values": values,
        "steps_us": steps(),
    }
    names = ("faster-fifo", "pyzmq")
    return harness.Sample(values, raw, {name: importlib.metadata.version(name) for name in names})


def goals(rows: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within each round, which cancels the machine's mood."""

    def times(ours: str, peer: str, size: int, producers: int = 1) -> float:
        pairs = zip(rows[f"{peer}.{size}.{producers}"], rows[f"{ours}.{size}.{producers}"], strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    return {
        "mp_queue_100": times("lanes_many", "mp_queue", 100),
        "mp_queue_4k": times("lanes_many", "mp_queue", 4096),
        "mp_queue_100_3p": times("lanes_many", "mp_queue", 100, 3),
        "mp_queue_4k_3p": times("lanes_many", "mp_queue", 4096, 3),
        "mp_queue_100k": times("lanes_views", "mp_queue", 102_400),
        "fifo_100": times("lanes_many", "fifo", 100),
        "fifo_4k": times("lanes_many", "fifo", 4096),
        "fifo_100k": times("lanes_views", "fifo", 102_400),
        "fifo_many_100": times("lanes_many", "fifo_many", 100),
        "fifo_many_4k": times("lanes_many", "fifo_many", 4096),
        "fifo_many_100k": times("lanes_views", "fifo_many", 102_400),
        "shared_mp_queue_100": times("shared_many", "mp_queue", 100),
        "shared_mp_queue_4k": times("shared_many", "mp_queue", 4096),
        "single_mp_queue_100": times("lanes", "mp_queue", 100),
        "single_mp_queue_4k": times("lanes", "mp_queue", 4096),
        "single_mp_queue_100_3p": times("lanes", "mp_queue", 100, 3),
        "single_mp_queue_4k_3p": times("lanes", "mp_queue", 4096, 3),
        "single_mp_queue_100k": times("lanes_single_views", "mp_queue", 102_400),
        "single_fifo_100": times("lanes", "fifo", 100),
        "single_fifo_4k": times("lanes", "fifo", 4096),
        "single_shared_mp_queue_100": times("shared", "mp_queue", 100),
        "single_shared_mp_queue_4k": times("shared", "mp_queue", 4096),
    }


if __name__ == "__main__":
    harness.main("mailbox", measure)
