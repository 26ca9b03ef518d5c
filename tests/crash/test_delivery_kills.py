"""Events across kills: of who records, at every store, and of the process delivery, at random.

DELIVERY_KILLS is how often delivery is killed; `make crash-events` sets it to 1,000, some ten minutes. What
waits is bounded, since each life begins with reading it: else lives would have to grow with their number.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pmdaemon.reserve.layout import COUNT, DELIVERED, NUMBER, TAKEN_WORD
from pmdaemon.reserve.raising import EventRaiser
from pmdaemon.reserve.reader import ReserveReader
from sla_server.agreements.load import load_documents
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable
from tests.support.deliveries import event
from tests.support.event_deaths import EVENTS, RESERVES, SLOTS
from tests.support.forks import Children
from tests.support.receivers import HttpReceiver, Request, status

KILLS = int(os.environ.get("DELIVERY_KILLS", "12"))
LIMIT_S = 300.0 + KILLS  # for what had no time between kills
WAITING = 60  # the raiser pauses above it: what is folded has no order of its own
PER_KILL = 4
BACKLOG = 300  # so many events that the slowest recipient does not have; more are raised when there are less
SHORTEST_S, LONGER, SHORTER = 0.6, 1.2, 0.9


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("tests.support.event_deaths") as found:
        yield found


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("is_initial", [False, True])
def test_a_death_at_every_store_of_recording_and_taking_loses_no_accepted_event(
    children: Children, tmp_path: Path, is_initial: bool
) -> None:
    deaths = 0
    for kill_at in range(10_000):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        result, output = children.run("record", str(folder), kill_at, int(is_initial))
        assert result in (0, -9), output
        noticed, accepted = len(lines(folder / "noticed")), len(lines(folder / "accepted"))
        reader = ReserveReader(folder / RESERVES[is_initial])
        rest = reader.take(SLOTS)
        numbers = [json.loads(record.payload)["number"] for record in rest]
        assert numbers == sorted(numbers), kill_at
        left = sum(record.events for record in rest)
        left += sum(count.events for count in reader.take_counts())
        left += unseen(reader)
        found = left + sum(lines(folder / "taken"))
        assert found >= accepted, kill_at
        # What was taken and not released comes again, at most a batch of it.
        assert found <= noticed + EVENTS, kill_at
        assert reader.damaged == 0
        reader.close()
        if result == 0:
            assert found == EVENTS
            break
        deaths += 1
    assert deaths > 100


def unseen(reader: ReserveReader) -> int:
    """Counts raised in released records, which the writer's next life would count."""
    words, total = reader._file.words, 0
    for slot in range(SLOTS):
        at = reader._file.slot(slot)
        if 0 < words[at + NUMBER] <= words[TAKEN_WORD]:
            total += words[at + COUNT] - words[at + DELIVERED]
    return total


DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: first}}
spec: {{file: {{path: first.jsonl}}, batch: 7}}
---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: second}}
spec: {{file: {{path: second.jsonl}}, batch: 1}}
---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: moody}}
spec: {{webhook: {{url: "{url}"}}, batch: 5, timeout: 5s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [first, second, moody]}}
"""


class Raiser:
    """Raises events all the time, as another process does, and knows which were accepted."""

    def __init__(self, directory: Path) -> None:
        self._raiser = EventRaiser(directory, "raiser")
        self._raiser.initialized()
        self._lock = threading.Lock()
        self.accepted: list[str] = []
        self.backlog = 0

    @property
    def pauses(self) -> bool:
        return self._raiser._normal.waiting > WAITING

    def some(self, count: int) -> None:
        with self._lock:
            for _ in range(count):
                if self.pauses or self.backlog > BACKLOG:
                    return
                number = len(self.accepted)
                assert self._raiser.record(event(number, subject=f"gw-{number % 7}").row()) is not None
                self.accepted.append(f"e{number}")


def moody(chance: random.Random) -> HttpReceiver:
    """Answers 200 mostly, 500 now and then."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        status(200 if chance.random() < 0.7 else 500)(handler)

    return HttpReceiver(answer)


def delivered(path: Path) -> list[str]:
    if not path.exists():
        return []
    return raised_here(json.loads(line)["event"] for line in path.read_text().split("\n")[:-1])


class Notices:
    """What a recipient that is a file has; read on at each look, as there are thousands of kills."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.arrived = set[str]()

    def look(self) -> None:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            self.arrived.update(raised_here(json.loads(line)["event"] for line in whole.splitlines()))


def raised_here(events: Iterable[dict[str, str]]) -> list[str]:
    """Identities, without those that delivery raises itself: of the webhook that fails."""
    return [each["event_id"] for each in events if each["source"] == "raiser"]


def of_webhook(requests: Sequence[Request]) -> list[str]:
    """What came whole: a body that ends in its middle is of a process that was killed while it sent."""
    return raised_here(
        alert["delivery"]["event"]
        for _, _, headers, body in requests
        if len(body) == int(headers["Content-Length"])
        for alert in json.loads(body)["alerts"]
    )


def test_delivery_that_is_killed_again_and_again_delivers_every_event_in_order(
    children: Children, tmp_path: Path
) -> None:
    chance = random.Random(7)
    data, reserves = tmp_path / "data", tmp_path / "data" / "events" / "reserve"
    for folder in (reserves, tmp_path / "run", data / "notices"):
        folder.mkdir(parents=True, mode=0o700)
    with moody(chance) as receiver:
        text = DOCUMENTS.format(url=receiver.url)
        held = [NotificationInForce(each.document, 1, 0) for each in load_documents(text, 60)]
        assert RoutingFile(data).publish(RoutingTable.of(held, {}))
        state, life_s = tmp_path / "run" / "metrics" / "delivery.json", 3.0
        while not (state.exists() and '"moody"' in state.read_text()):  # recipients are known from here on
            children.run("deliver", str(tmp_path), life_s)
            assert life_s < LIMIT_S
            life_s *= 2
        raiser, stop = Raiser(reserves), threading.Event()
        notices = [Notices(data / "notices" / f"{name}.jsonl") for name in ("first", "second")]

        def keep_raising() -> None:
            while not stop.wait(0.03):
                raiser.some(1)

        thread = threading.Thread(target=keep_raising)
        thread.start()
        longest_s, arrived, read = SHORTEST_S, set[str](), 0
        try:
            for _ in range(KILLS):
                raiser.some(PER_KILL)
                result, output = children.run("deliver", str(tmp_path), chance.uniform(0.02, longest_s))
                assert result == -14, output
                new = receiver.requests[read:]
                arrived.update(of_webhook(new))
                read += len(new)
                for each in notices:
                    each.look()
                slowest = min(len(found) for found in (arrived, *(each.arrived for each in notices)))
                raiser.backlog = len(raiser.accepted) - slowest
                # On a slow machine some lives have to be long enough to take anything, not all that follow.
                is_stuck = raiser.pauses or raiser.backlog > BACKLOG
                longest_s = longest_s * LONGER if is_stuck else max(SHORTEST_S, longest_s * SHORTER)
        finally:
            stop.set()
            thread.join()
        names, lives, life_s = ("first", "second"), KILLS, longest_s
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            longest_s = 1.5 * max(5.0, longest_s)
            lives += 1
            children.run("deliver", str(tmp_path), longest_s)
            found = {name: delivered(data / "notices" / f"{name}.jsonl") for name in names}
            found["moody"] = of_webhook(list(receiver.requests))
            if all(len(set(got)) >= len(raiser.accepted) for got in found.values()):
                break
    assert len(raiser.accepted) > KILLS
    for name, got in found.items():
        assert list(dict.fromkeys(got)) == raiser.accepted, name
        repeats = sum(Counter(got).values()) - len(raiser.accepted)
        if name != "moody":  # to which a refused batch comes again, also without a kill
            assert repeats <= {"first": 7, "second": 1}[name] * (lives + 1), name
    print(f"{KILLS} kills, lives of up to {life_s:.1f} s at last")
    print(f"{len(raiser.accepted)} events accepted and delivered to 3 recipients in order")
