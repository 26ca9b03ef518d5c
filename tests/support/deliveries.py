"""Event delivery without threads: queues on a disk that breaks, and recipients that answer when asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from pmdaemon.runtime.clock import FakeClock
from sla_server.agreements.load import load_documents
from sla_server.events import catalogue
from sla_server.events.engine import DeliveryEngine, EngineParts
from sla_server.events.event import Event
from sla_server.events.lane import LaneSettings
from sla_server.events.later import LaterQueue
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Answer, Held, Notice, Routed, Router
from sla_server.events.routing import DocumentRouter, NotificationInForce, RoutingTable
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.stages.send import SentBatch
from tests.support.faulty_disk import FaultDisk

QUEUE_BYTES = 1 << 20


def event(number: int, kind: str = "services-started", subject: str = "gw", **changed: Any) -> Event:
    values: dict[str, Any] = {
        "event_id": f"e{number}",
        "at_us": 1_800_000_000_000_000 + number,
        "kind": kind,
        "severity": "info",
        "element": "gateway",
        "subject": subject,
        "text": f"event {number}",
    }
    return Event(**{**values, **changed})


RECIPIENTS = {
    "oncall": "webhook: {url: 'https://a.example/x'}",
    "mail": "smtp: {server: mail.example, sender: a@b.example, to: [c@d.example]}",
    "log": "syslog: {unix: /dev/log}",
    "page": "inbox: {}",
    "pulse": "heartbeat: {url_file: ping}",
    "customer": "smtp: {server: mail.example, sender: a@b.example, to: [e@f.example]}",
}


def router(*routes: str, names: str = "oncall mail log page pulse", **fallback: str) -> DocumentRouter:
    """Recipients of these names, with routes and fallbacks; the agreement erp-gold names ``customer``."""
    texts = [
        _text("Recipient", name, f"{{{RECIPIENTS[name]}, fallback: [{fallback.get(name, '')}]}}")
        for name in names.split()
    ]
    texts += [_text("Route", f"r{number}", spec) for number, spec in enumerate(routes)]
    held = [NotificationInForce(each.document, 1, 0) for each in load_documents("---\n".join(texts), 60)]
    return DocumentRouter(RoutingTable.of(held, {"erp-gold": ["customer"]}))


def _text(kind: str, name: str, spec: str) -> str:
    return f"apiVersion: storage-sla/v1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n"


class InlineSender:
    """Keeps the batch until the test lets the recipient answer.

    Attributes:
        batches: all that were handed over. answer: given at once when it is set.
    """

    def __init__(self, name: str, answer: Answer | None = CONFIRMED) -> None:
        self.name = name
        self.answer = answer
        self.batches: list[Sequence[Notice]] = []
        self.tokens: list[int] = []
        self.back: list[SentBatch] = []
        self.abandoned = 0
        self.is_open = True
        self.hangs = False

    def start(self, token: int, notices: Sequence[Notice], timeout_s: float) -> bool:
        if self.hangs:
            return False
        self.batches.append(notices)
        self.tokens.append(token)
        if self.answer is not None:
            self.back.append(SentBatch(self.name, token, self.answer))
        return True

    def reply(self, answer: Answer) -> SentBatch:
        """The answer for the newest batch."""
        return SentBatch(self.name, self.tokens[-1], answer)

    def abandon(self) -> None:
        self.abandoned += 1

    def close(self) -> None:
        self.is_open = False

    def got(self) -> list[str]:
        """Identities of all notices handed over."""
        return [notice.delivery_id for batch in self.batches for notice in batch]


class ToAll:
    """Routes every event to these recipients; ``holds`` says what is kept back."""

    def __init__(self, *recipients: str | Routed) -> None:
        self.routed = [Routed(each, "all") if isinstance(each, str) else each for each in recipients]
        self.holds: Callable[[Event, str, int], Held | None] = lambda _event, _recipient, _now: None

    def route(self, event: Event) -> Sequence[Routed]:
        return self.routed

    def held(self, event: Event, recipient: str, now_us: int) -> Held | None:
        return self.holds(event, recipient, now_us)

    def escalates(self, recipient: str) -> bool:
        return any(each.recipient == recipient and each.escalate_to for each in self.routed)


class Rig:
    """An engine with its queues.

    Attributes:
        raised: (kind, recipient) of events about recipients. rows: reports.
        unknown: see ``DeliveryEngine.set_recipients``; for the next engine.
    """

    def __init__(
        self,
        folder: Path,
        router: Router,
        senders: Iterable[InlineSender],
        disk: FaultDisk | None = None,
        rules: RetryRules | None = None,
        clock: FakeClock | None = None,
        runbook_url: str = catalogue.PAGE,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.runbook_url = runbook_url
        self.disk = disk or FaultDisk()
        self.clock = clock or FakeClock()
        self.router = router
        self.senders = {sender.name: sender for sender in senders}
        self.settings = settings
        self.unknown: Collection[str] | None = ()
        self.rules = rules or RetryRules(jitter_ratio=0.0)
        self.raised: list[tuple[str, str]] = []
        self.rows: list[dict[str, Any]] = []
        self.initial, self.main = self.queue("initial"), self.queue("main")
        self.later = LaterQueue(self.queue("later"))
        self.engine = self.make()

    def queue(self, name: str) -> EventQueue:
        storage = self.disk.open(name), self.disk.open(f"{name}.index")
        return EventQueue(self.folder, name, QUEUE_BYTES, storage, self.clock)

    def make(self) -> DeliveryEngine:
        queues = (self.initial, self.main)
        ids = {queue.name: queue.queue_id for queue in queues}
        parts = EngineParts(queues, self.later, self.folder / "state.json", ids)
        engine = DeliveryEngine(
            parts, self.router, self.rules, self.clock, self._raised, self.rows.extend, random.Random(1),
            self.runbook_url,
        )  # fmt: skip
        engine.set_recipients(
            [LaneSettings(name, each, **self.settings) for name, each in self.senders.items()],
            unknown=self.unknown,
        )
        return engine

    def _raised(self, kind: str, severity: str, name: str, text: str, details: dict[str, Any]) -> None:
        self.raised.append((kind, name))

    def add(self, *events: Event, queue: str = "main") -> None:
        target = self.initial if queue == "initial" else self.main
        now_us = self.clock.unix_us()
        target.append([QueuedEvent(each) for each in events], now_us)

    def answers(self) -> bool:
        """Hand the engine what came back; whether there was anything."""
        found = [sent for sender in self.senders.values() for sent in sender.back]
        for sender in self.senders.values():
            sender.back.clear()
        for sent in found:
            self.engine.answered(sent)
        return bool(found)

    def run(self, seconds: float = 0.0) -> None:
        """Step until nothing comes back any more, then let time pass, one second a step, and go on."""
        for _ in range(int(seconds) + 1):
            self.engine.step()
            while self.answers():
                self.engine.step()
            if seconds:
                self.clock.advance(1.0)

    def restart(self) -> None:
        """As the next process finds it after a kill: the disk's cache is whole."""
        self.disk = self.disk.after_kill()
        self.initial, self.main = self.queue("initial"), self.queue("main")
        self.later = LaterQueue(self.queue("later"))
        self.engine = self.make()
