"""A flood of events to ten recipients, one of which may be dead; and the start of the next process behind it.

Each is a process of its own, so that its memory is: the peak of its resident set (``VmHWM``) over all that it
does, above what it had when its modules were loaded. *Flood*: open empty queues, record the events, deliver
them. *Start*: open the queue that holds all of them, because one recipient has none; read it as a start does,
and try that recipient again. Pages of mapped files count as long as they are mapped, so nothing is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pmdaemon.runtime.clock import Deadline, SystemClock
from pmdaemon.runtime.threads import ThreadGroup, ThreadInbox
from sla_server.events.engine import DeliveryEngine, EngineParts
from sla_server.events.event import Event
from sla_server.events.first_reading import FirstReading
from sla_server.events.intake import EventIntake
from sla_server.events.lane import LaneSettings
from sla_server.events.later import LATER_BYTES, LaterQueue
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Answer, Held, Notice, Routed, retry
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.stages.send import SentBatch, ThreadSender

FLOOD, RECIPIENTS = 100_000, 10
SIZES = {"initial": 1 << 20, "main": 128 << 20, "later": LATER_BYTES}
KIND = "clock-skew"


def event(number: int) -> Event:
    """An event of usual size."""
    return Event(
        f"event-{number:08d}", time.time_ns() // 1000, KIND, "warning", "gateway", f"gw-{number}",
        f"gateway gw-{number}: its clock is 2.4 s ahead of the server's", {"offset_us": 2_400_000 + number},
    )  # fmt: skip


class Counting:
    """A recipient that only counts, or never confirms."""

    kind, timeout_s, most_notices = "bench", 10.0, 500

    def __init__(self, name: str, *, is_dead: bool) -> None:
        self.name = name
        self._is_dead = is_dead

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        return retry("it is dead") if self._is_dead else CONFIRMED

    def close(self) -> None:
        """Nothing is open."""


class ToTen:
    """Routes each event to all."""

    def __init__(self) -> None:
        self._routed = [Routed(f"r{index}", "all") for index in range(RECIPIENTS)]

    def route(self, _event: Event) -> Sequence[Routed]:
        return self._routed

    def held(self, _event: Event, _recipient: str, _now_us: int) -> Held | None:
        return None

    def escalates(self, _recipient: str) -> bool:
        return False


class Delivering:
    """What the process delivery makes at its start, with recipients that only count.

    Args:
        folder: of the queues. dead: so many of the first recipients never confirm.
    """

    def __init__(self, folder: Path, dead: int) -> None:
        clock, self._threads = SystemClock(), ThreadGroup()
        self._inbox: ThreadInbox[SentBatch] = ThreadInbox()
        self.initial, self.main, later = (EventQueue(folder, name, size) for name, size in SIZES.items())
        queues, self._later = (self.initial, self.main), LaterQueue(later)
        reading = FirstReading(self.main, self._later)
        self.intake = EventIntake(folder, *queues, clock, queued=reading.identities)
        ids = {queue.name: queue.queue_id for queue in queues}
        parts = EngineParts(queues, self._later, folder / "state.json", ids, reading)
        self.engine = DeliveryEngine(parts, ToTen(), RetryRules(), clock, lambda *_event: None)
        self.names = [f"r{index}" for index in range(RECIPIENTS)]
        senders = {
            name: ThreadSender(name, self._maker(name, index < dead), self._inbox.put, self._threads)
            for index, name in enumerate(self.names)
        }
        self.engine.set_recipients(LaneSettings(name, sender, 500, 10.0) for name, sender in senders.items())

    @staticmethod
    def _maker(name: str, is_dead: bool) -> Callable[[], Counting]:
        return lambda: Counting(name, is_dead=is_dead)

    def until(self, is_so: Callable[[], bool]) -> float:
        """Deliver until then; returns the seconds that it took."""
        began_s = time.perf_counter()
        while not is_so():
            for sent in self._inbox.drain():
                self.engine.answered(sent)
            self.engine.step()
        return time.perf_counter() - began_s

    def close(self) -> None:
        """End the threads, let go of the files."""
        self.engine.close()
        self._threads.join(60.0)
        self.intake.close()
        for queue in (self.initial, self.main, self._later):
            queue.close()


def flood(folder: Path, dead: int) -> float:
    """Seconds until all that live have everything."""
    delivering = Delivering(folder, dead)
    for first in range(0, FLOOD, 1000):
        delivering.main.append([QueuedEvent(event(number)) for number in range(first, first + 1000)])
    lanes = [delivering.engine.lanes[name] for name in delivering.names[dead:]]
    took_s = delivering.until(lambda: all(lane.confirmed >= FLOOD for lane in lanes))
    delivering.close()
    return took_s


def start(folder: Path, dead: int) -> float:
    """Seconds until the next process has tried those that confirm nothing."""
    began_s = time.perf_counter()
    delivering = Delivering(folder, dead)
    assert delivering.main.newest_seq - delivering.main.done_seq == FLOOD
    lanes = [delivering.engine.lanes[name] for name in delivering.names[:dead]]
    delivering.until(lambda: all(lane.last_answer for lane in lanes))
    delivering.close()
    return time.perf_counter() - began_s


def in_process(what: Callable[[Path, int], float], folder: Path, dead: int) -> tuple[float, float]:
    """Seconds that it took, and the MiB that its process grew by at most."""
    command = [sys.executable, "-m", "benchmarks.events_flood", what.__name__, str(folder), str(dead)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found = json.loads(said.splitlines()[-1])  # behind the log
    return found["took_s"], found["peak_bytes"] / 2**20


def rss_bytes(name: str) -> int:
    """``VmRSS``, or its peak ``VmHWM``, of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def run(what: str, folder: str, dead: str) -> None:
    """One process; the last line that it prints says what it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before_bytes = rss_bytes("VmRSS")
    took_s = {"flood": flood, "start": start}[what](Path(folder), int(dead))
    print(json.dumps({"took_s": took_s, "peak_bytes": rss_bytes("VmHWM") - before_bytes}))


if __name__ == "__main__":
    run(*sys.argv[1:])
