"""The recipients of events of a chaos run: a webhook that fails, a webhook that is well, a file.

The one that fails is ``benchmarks.chaos_receiver``, which hangs, answers 500 or 400, slowly or twice, closes
in the middle, or is killed and comes back. At the end it fails while an event is raised: that event has to be
with the others (nothing waits for them) while it still waits for this one. Then it is well again, and
everything has to arrive. ``chaos_events`` has the proof.

Thread: the caller's.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.chaos_events import Arrival, EventsSpan, journal, lines_of
from benchmarks.chaos_receiver import TAKEN
from sla_server.events.delivery_state import read_delivery_state
from sla_server.events.stages.fallback import OWN
from tests.support.ports import free_port
from tests.support.stage import Stage

BROKEN: Final = "broken"
HEALTHY: Final = "healthy"
FILE: Final = "file"
EVENTS_TOML: Final = "[events]\nretry_first_s = 0.2\nretry_max_s = 2.0\n"
WEIGHTS: Final = {"well": 2, "slow": 2, "twice": 2, "fail": 2, "refuse": 1, "hang": 2, "close": 2, "kill": 3}
MOST_AWAY_S: Final = 6.0
SETTLE_S: Final = 120.0
DOCUMENTS: Final = """\
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: broken}}
spec: {{webhook: {{url: "http://127.0.0.1:{broken}"}}, timeout: 2s, batch: 5}}
---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: healthy}}
spec: {{webhook: {{url: "http://127.0.0.1:{healthy}"}}}}
---
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: file}}
spec: {{file: {{path: events.jsonl}}}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [broken, healthy, file]}}
"""


class Recipients:
    """See the module."""

    def __init__(self, stage: Stage, data_dir: Path, rng: random.Random) -> None:
        self._stage = stage
        self._rng = rng
        self._file = data_dir / "notices" / "events.jsonl"
        self._ports = {name: free_port() for name in (BROKEN, HEALTHY)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._back_s = 0.0
        self._began_us = 0

    def start(self) -> None:
        """Start the receivers and name them and the file to the server."""
        for name in self._ports:
            self._set_mode(name, "well")
            self._spawn(name)
        path = self._stage.folder / "recipients.yaml"
        path.write_text(DOCUMENTS.format(**self._ports))
        self._stage.sla("apply", "-f", str(path))
        self._stage.wait(lambda: len(self._waiting()) == len((BROKEN, HEALTHY, FILE)), "the recipients")
        self._began_us = time.time_ns() // 1000

    def fail(self) -> str:
        """Let the receiver fail in another way, or be well; returns how."""
        [how] = self._rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        if how == "kill":
            self._processes[BROKEN].kill()
            self._processes[BROKEN].wait()
            self._back_s = time.monotonic() + self._rng.uniform(0.5, MOST_AWAY_S)
        else:
            self._set_mode(BROKEN, how)
        return how

    def revive(self) -> None:
        """Start a receiver again that was killed and has been away for long enough."""
        process = self._processes.get(BROKEN)
        if process is not None and process.poll() is not None and time.monotonic() >= self._back_s:
            self._spawn(BROKEN)

    def settle(
        self, raise_one: Callable[[], object], revive: Callable[[], None], full_disks: int
    ) -> EventsSpan:
        """See the module; call while the server runs and nothing else fails.

        Args:
            raise_one: does something that becomes an event.
            revive: starts again what has died.
            full_disks: how often the disk was full.

        Raises:
            StageError: events are not there within SETTLE_S.
        """
        self._back_s = 0.0
        self.revive()
        self._set_mode(BROKEN, "fail")
        began = len(self.arrivals(HEALTHY))
        raise_one()

        def raised() -> set[str]:
            new = self.arrivals(HEALTHY)[began:]
            return {each.event_id for each in new if each.event.kind not in OWN}

        def only_broken_waits() -> bool:
            revive()
            waiting = self._waiting()
            is_ahead = bool(raised()) and waiting.get(BROKEN, 0) > 0
            return is_ahead and waiting[HEALTHY] == waiting[FILE] == 0

        self._stage.wait(only_broken_waits, "events of the others while one fails", limit_s=SETTLE_S)
        taken = {each.event_id for each in self.arrivals(BROKEN) if each.mode in TAKEN}
        overtaken = bool(raised() - taken)
        ended_us = time.time_ns() // 1000
        self._set_mode(BROKEN, "well")

        def nothing_waits() -> bool:
            revive()
            waiting = self._waiting()
            return len(waiting) == len((BROKEN, HEALTHY, FILE)) and not any(waiting.values())

        self._stage.wait(nothing_waits, "everything undelivered", limit_s=SETTLE_S)
        return EventsSpan(self._began_us, ended_us, overtaken, full_disks)

    def arrivals(self, name: str) -> list[Arrival]:
        """What reached a recipient, in the order of arrival."""
        if name == FILE:
            older = sorted(self._file.parent.glob("events.jsonl.*"), reverse=True)
            return [Arrival.of(notice, "well") for path in (*older, self._file) for notice in lines_of(path)]
        return journal(self._journal(name))

    def all_arrivals(self) -> dict[str, list[Arrival]]:
        """By recipient."""
        return {name: self.arrivals(name) for name in (BROKEN, HEALTHY, FILE)}

    def _waiting(self) -> dict[str, int]:
        found = read_delivery_state(self._stage.sockets / "run" / "metrics")
        if found is None:
            return {}
        recipients, undelivered = found
        held = [row["recipient"] for row in undelivered]
        return {row["name"]: max(int(row["waiting"]), held.count(row["name"])) for row in recipients}

    def _journal(self, name: str) -> Path:
        return self._stage.folder / f"{name}.journal"

    def _set_mode(self, name: str, mode: str) -> None:
        path = self._stage.folder / f"{name}.mode"
        new = path.with_suffix(".new")
        new.write_text(mode)
        new.replace(path)

    def _spawn(self, name: str) -> None:
        paths = [self._journal(name), self._stage.folder / f"{name}.mode"]
        arguments = ["--port", self._ports[name], "--journal", paths[0], "--mode", paths[1]]
        self._processes[name] = self._stage.spawn(
            f"receiver-{name}", "benchmarks.chaos_receiver", *(str(each) for each in arguments)
        )
