"""The proof of event delivery behind the chaos run: what reached each recipient against what SQL holds.

    sent       events in SQL from the time when the recipients were in force to the end of the faults; a route
               without a match sends all of them to each recipient
    arrived    notices in the journals of the receivers, and lines of the file
    taken      arrived and answered with 200, or in the file

Lost: sent, and neither arrived nor left out by the stages on purpose (``_left_out``). Never taken: only with
an event that says so, as each dead letter has one. The first arrival of each notice has a greater number
than the one before it, but once for each time that the disk was full: then delivery sends what it cannot
write down, and a death gives its numbers to others. Nothing arrived that is not in SQL.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.chaos_receiver import TAKEN
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.events import catalogue
from sla_server.events.event import SEVERITIES, Event, from_row
from sla_server.events.intake import folded_identity
from sla_server.events.recipients.base import Status
from sla_server.events.stages.fallback import OWN

FAILED = "delivery-failed"


@dataclass(frozen=True)
class Arrival:
    """One notice that reached a recipient; ``mode`` of the receiver says how it was answered."""

    number: int
    delivery_id: str
    event: Event
    repeats: int
    mode: str

    @classmethod
    def of(cls, notice: Mapping[str, Any], mode: str) -> Arrival:
        """From ``Notice.as_json``."""
        event = from_row(notice["event"])
        return cls(notice["number"], notice["delivery_id"], event, notice["repeats"], mode)

    @property
    def event_id(self) -> str:
        """Of its event."""
        return self.event.event_id


@dataclass(frozen=True)
class EventsSpan:
    """Which events count, and what happened meanwhile.

    Attributes:
        overtaken: the others had an event that still waited for the failing one.
        full_disks: how often the server's disk was full.
    """

    began_us: int
    ended_us: int
    overtaken: bool
    full_disks: int = 0


@dataclass
class StoredEvents:
    """What SQL holds; ``dead`` are (recipient, delivery_id)."""

    events: list[Event] = field(default_factory=list)
    dead: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class EventsProof:
    """What was found; ``problems`` is empty if all is well."""

    sent: int = 0
    arrived: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    dead: int = 0
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The counts, for people."""
        counts = ("arrived", "repeated", "left_out")
        said = "; ".join(f"{name.replace('_', ' ')} {dict(getattr(self, name))}" for name in counts)
        return f"events: {self.sent} sent; {said}; {self.dead} dead letters"


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON; one without its end was cut off by a death."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def journal(path: Path) -> list[Arrival]:
    """What a receiver wrote down."""
    return [Arrival.of(notice, line["mode"]) for line in lines_of(path) for notice in line["notices"]]


def read_events(config: DatabaseConfig, data_dir: Path) -> StoredEvents:
    """Events and dead letters of SQL."""
    engine = make_engine(config, data_dir)
    try:
        with engine.connect() as connection:
            rows = connection.execute(text("select * from events")).mappings().all()
            dead = connection.execute(
                text("select recipient, delivery_id from deliveries where state = 'dead-letter'")
            ).all()
    finally:
        engine.dispose()
    return StoredEvents(
        [from_row({str(key): value for key, value in row.items()}) for row in rows],
        [(row[0], row[1]) for row in dead],
    )


def prove_events(
    stored: StoredEvents, arrivals: Mapping[str, Sequence[Arrival]], span: EventsSpan, failing: str
) -> EventsProof:
    """Compare; ``failing`` is the recipient that may have dead letters."""
    proof = EventsProof(dead=len(stored.dead))
    sent = [event for event in stored.events if span.began_us <= event.at_us <= span.ended_us]
    proof.sent = len(sent)
    named = {
        (event.subject, delivery_id)
        for event in stored.events
        if event.kind == FAILED
        for delivery_id in event.details.get("events", ())
    }
    known = {event.event_id for event in stored.events}
    for name, found in arrivals.items():
        first = {each.delivery_id: each for each in reversed(found)}  # the first of each: set last
        proof.arrived[name] = len(first)
        proof.repeated[name] = len(found) - len(first)
        proof.problems += _missing(proof, name, sent, found)
        disordered = _disordered(name, found)
        proof.problems += disordered if len(disordered) > span.full_disks else []
        taken = {each.delivery_id for each in found if each.mode in TAKEN}
        for delivery_id in first.keys() - taken:
            if (name, delivery_id) not in named and first[delivery_id].event.at_us <= span.ended_us:
                proof.problems.append(f"{name}: {delivery_id} was not taken, and no event says so")
        proof.problems += [
            f"{name}: {each.event_id} ({each.event.kind}) arrived and is not in SQL"
            for each in first.values()
            if each.event_id not in known and each.event.at_us <= span.ended_us
        ]
    proof.problems += [f"dead letter without an event: {each}" for each in sorted(set(stored.dead) - named)]
    proof.problems += [
        f"dead letter of {name}, which did not fail: {delivery_id}"
        for name, delivery_id in sorted(named | set(stored.dead))
        if name != failing
    ]
    if not span.overtaken:
        proof.problems.append(f"no event was with the others before it was with {failing}")
    return proof


def _missing(proof: EventsProof, name: str, sent: Sequence[Event], found: Sequence[Arrival]) -> list[str]:
    arrived = {each.event_id for each in found}
    folded: Counter[tuple[str, str, str]] = Counter()
    ids: dict[tuple[str, str, str], list[str]] = {}
    for event in sent:
        ids.setdefault(_alike(event), []).append(event.event_id)
    for each in {each.delivery_id: each for each in found}.values():
        alike, at_us = _alike(each.event), each.event.at_us
        others = (folded_identity(one, at_us, each.repeats) for one in ids.get(alike, ()))
        folded[alike] += each.repeats - (each.event_id not in others)
    problems = []
    for event in sent:
        if event.event_id in arrived:
            continue
        if _left_out(event, name, found):
            proof.left_out[name] += 1
        elif folded[_alike(event)] > 0:
            folded[_alike(event)] -= 1
        else:
            problems.append(f"{name}: {event.event_id} ({event.kind} of {event.subject}) did not arrive")
    return problems


def _alike(event: Event) -> tuple[str, str, str]:
    return event.kind, event.element, event.subject


def _left_out(event: Event, name: str, found: Sequence[Arrival]) -> bool:
    """Whether a stage may leave it out: own trouble, a gateway that is gone, a condition that is known."""
    if event.kind in OWN and event.subject == name:
        return True
    status = catalogue.status_of(event)
    others = [each.event for each in found if catalogue.status_of(each.event) is Status.FIRING]
    if status is Status.FIRING:
        key, rank = catalogue.condition_key(event), SEVERITIES.index(event.severity)
        if any(
            catalogue.condition_key(each) == key and SEVERITIES.index(each.severity) >= rank
            for each in others
        ):
            return True
    if event.severity == "critical" or status is Status.RESOLVED or not event.gateway:
        return False
    return any(
        each.element == "gateway" and each.subject == event.gateway and each.severity == "critical"
        for each in others
    )


def _disordered(name: str, found: Sequence[Arrival]) -> list[str]:
    problems, before = [], 0
    seen: set[str] = set()
    for each in found:
        if each.delivery_id in seen:
            continue
        seen.add(each.delivery_id)
        if each.number <= before:
            problems.append(
                f"{name}: {each.delivery_id} ({each.event.kind}) first came as {each.number}, after {before}"
            )
        before = each.number
    return problems
