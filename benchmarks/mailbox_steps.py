"""What the steps of a message cost in this Python: why one at a time cannot be much faster than it is.

One process, everything in the cache, no reclaim and no second core in the way: lower bounds. Microseconds a
message, medians of the quickest half of many repetitions.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isal.isal_zlib import crc32

from pmdaemon.mailbox import Layout, Route, attach, create_segment

REPEATS = 200
BATCH = 64
PACK = struct.Struct("=8Q").pack


def quickest_us(action: Callable[[], object], times: int) -> float:
    """Median of the quicker half, microseconds each of ``times`` that ``action`` does at once."""
    took = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        action()
        took.append(time.perf_counter() - started_s)
    return statistics.median(sorted(took)[: REPEATS // 2]) / times * 1e6


def primitives(size: int) -> dict[str, float]:
    """The calls into C that no order of our own lines can avoid."""
    memory = mmap.mmap(-1, 1 << 20)
    words = memoryview(memory).cast("Q")
    payload = os.urandom(size)
    fence = threading.Lock()

    def loop(action: Callable[[], object]) -> float:
        def many() -> None:
            for _ in range(BATCH):
                action()

        return quickest_us(many, BATCH) - idle

    def store() -> None:
        memory[4096 : 4096 + size] = payload

    def slot() -> None:
        memory[64:128] = PACK(257, 0, 1 << 40, 1 << 20, 1 << 30, 12345, 0, 0)

    def link() -> None:
        words[9] = 1 << 33

    def fenced() -> None:
        fence.acquire()
        fence.release()

    idle = 0.0
    idle = loop(lambda: None)
    return {
        "checksum": loop(lambda: crc32(payload)),
        "payload_store": loop(store),
        "payload_load": loop(lambda: memory[4096 : 4096 + size]),
        "slot_fill": loop(slot),
        "three_words": 3 * loop(link),
        "fence": loop(fenced),
    }


def calls(size: int) -> dict[str, float]:
    """Our own calls, with nobody else at work."""
    with tempfile.TemporaryDirectory(prefix="sla-bench-") as place:
        path = Path(place) / "segment"
        create_segment(path, Layout(("a", "b"), (Route("a", "b", 1 << 20),), 2048))
        with attach(path, "a") as a, attach(path, "b") as b:
            data = [os.urandom(size) for _ in range(BATCH)]
            found: dict[str, list[float]] = {"post": [], "post_many": [], "take": [], "take_bundle": []}
            for number in range(REPEATS * 2):
                bundle = bool(number % 2)
                started_s = time.perf_counter()
                if bundle:
                    a.post_many("b", data)
                else:
                    for payload in data:
                        a.post("b", payload)
                posted_s = time.perf_counter()
                got = b.take(BATCH, 1 << 20)
                taken_s = time.perf_counter()
                assert len(got) == BATCH
                found["post_many" if bundle else "post"].append(posted_s - started_s)
                found["take_bundle" if bundle else "take"].append(taken_s - posted_s)
    return {
        name: statistics.median(sorted(took)[: REPEATS // 2]) / BATCH * 1e6 for name, took in found.items()
    }


def steps() -> dict[str, dict[str, float]]:
    """By size: what the steps and the calls cost, microseconds a message."""
    return {str(size): primitives(size) | calls(size) for size in (100, 4096)} | {
        "102400": primitives(102_400)
    }
