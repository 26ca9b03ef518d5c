"""A cooperating pair without its sockets: is the partner there, and what follows from it.

    there ──nothing heard for silence_s──► lost ──HELLO or WELCOME──► there

A server that begins is there for the other until proved otherwise, and remembers over its own restarts that
it was lost. A partner that died and one behind a cut network look the same, so nothing is decided by which
it is: while it is lost its events are delivered here, in the order in which it has recorded them, after
those that wait here already. A partition therefore costs repeats, never an event: at its end both say what
they have delivered for the other (``pair_ledger``), and the rest is left to the server whose event it is.

*Taking over* is ``pair_replay``. If the partner's disk was set back (a snapshot, a restored copy), what it
had behind that is a queue that it has lost, under an id of its own. ``pair_history`` sees it, also when the
partner has more events again than it lost.

What a crash leaves: taking over begins again from the store; what was confirmed here is known from the notes,
but for the last second. A partner that was set back has numbers in the notes that are too high, by which new
events would count as confirmed: they are lower on disk before the store changes, and the openings by which it
was seen are on disk after that. So a crash between the two sees it again, and gives the same id.

Thread: ``ev-pair``; ``status`` any.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.mirror import MirrorConfirmed, MirrorHello
from sla_server.events.engine import DeliveryEngine
from sla_server.events.lane import Lane
from sla_server.events.pair_history import Opening, lost_queue_id, openings_in, shared_through
from sla_server.events.pair_ledger import PartnerLedger
from sla_server.events.pair_replay import PartnerReplay
from sla_server.events.pair_session import (
    KeeperSession,
    MirrorEnded,
    MirrorSession,
    MirrorState,
    OriginSession,
    PartnerNames,
    Reached,
)
from sla_server.events.pair_store import MirrorStore
from sla_server.events.queue import EventQueue
from sla_server.events.sql_link import NAME

log = structlog.get_logger("pair")
SETTLE_S: Final = 2.0
"""At the start the partner is waited for so long: what it has delivered for us is not sent again."""
AGAIN_NS: Final = 1_000_000_000
REFUSED_NS: Final = 600_000_000_000
"""An event of the same reason is raised once in so long."""
CERTIFICATE_NS: Final = 86_400_000_000_000
"""The certificate is looked at once a day."""
EXPIRING_S: Final = 14 * 86_400.0
PAUSE: Final = 10
"""The notes are written for a tenth of the time at most."""
QUIET_CODES: Final = ("closed", "not-tls", "handshake", "tls-version")
"""Connections that never showed a certificate: a port scan is no event."""
PAIR: Final = "pair"
UNWRITTEN: Final = "event-state"
"""Conditions of the partner, by their names in the catalogue."""
STATES: Final = ("silent", "partly connected", "connected")
"""By how many of the two connections there are."""
Raise = Callable[[str, str, str, dict[str, Any]], None]
"""Raises an event about the partner: kind, severity, text, details."""


class PairCore:
    """See the module.

    Args:
        names: ours, the partner's, and after which silence it is lost.
        directory: of the notes.
        queues: ours, in the order of a replay; the last one takes what is taken over.
        later: ours of what is due later; the partner's is handed to the main loop (``later_items``).
        openings: of all these, the oldest first.
        store: the partner's events.
        ledger: shared with the main loop.
        raise_event: for trouble with the partner.
        clock: both time bases.
        arrived: called when something was taken over.
        settled: called when the partner has said what it delivered, or cannot be reached for ``SETTLE_S``.
        certificate_ends_us: when ours ends; None while its file cannot be read.
    """

    def __init__(
        self,
        names: PartnerNames,
        directory: Path,
        queues: Sequence[EventQueue],
        later: EventQueue,
        openings: Sequence[Opening],
        store: MirrorStore,
        ledger: PartnerLedger,
        raise_event: Raise,
        clock: Clock,
        arrived: Callable[[], None] = lambda: None,
        settled: Callable[[], None] = lambda: None,
        certificate_ends_us: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._names = names
        self._directory = directory
        self._queues = list(queues)
        self._mirrored = [*queues, later]
        self._openings = openings
        self._store = store
        self._ledger = ledger
        self._raise = raise_event
        self._clock = clock
        self._settled = settled
        self._certificate_ends_us = certificate_ends_us
        self._origin: OriginSession | None = None
        self._keeper: KeeperSession | None = None
        self._heard_ns, self._has_heard = clock.monotonic_ns(), False
        self._settle_ns = self._heard_ns + round(SETTLE_S * 1e9)
        self._since_us = clock.unix_us()
        self._replay = PartnerReplay(queues, later, store, ledger, clock, arrived)
        self._notes_ns = self._prune_ns = 0
        self._certificate_ns = 0
        self._until_us: int | None = None
        self._refused: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._most_events = store.most_events
        self._is_unwritten, self._was_behind = False, ledger.is_behind
        self._has_ended = set[str]()  # conditions whose end this process has raised
        self._is_lowered = False  # numbers in the notes, and that is not on disk
        self.later_items = self._replay.later_items
        """What the partner has held back, or has to remind of; the main loop takes it over."""
        self.reached: Reached | None = None
        """How far our recipients have come; the main loop sets it."""
        for queue_id in store.queue_ids:
            store.discard_through(queue_id, ledger.done_seq(queue_id))

    # What the link reports.

    def dialled(self) -> OriginSession:
        """We have reached the partner."""
        self._origin = OriginSession(self._names, self._clock, self._mirrored, self._openings, self._ledger)
        return self._origin

    def accepted(self) -> KeeperSession:
        """The partner has reached us."""
        self._keeper = KeeperSession(self._names, self._clock, self._store, self._ledger, self._greeted)
        return self._keeper

    def ended(self, session: MirrorSession) -> None:
        """A connection is gone."""
        if session is self._origin:
            self._kept = dict(self._origin.kept) or self._kept
            self._origin = None
        if session is self._keeper:
            self._keeper = None
            self._ledger.stop_sending()

    def heard(self) -> None:
        """The partner, which has said who it is, has sent something."""
        self._heard_ns, self._has_heard = self._clock.monotonic_ns(), True
        if self._ledger.is_lost:
            self._ledger.back()
            self._is_back()
        if self._origin is not None and self._origin.state is MirrorState.MIRRORING:
            self._most_events = self._origin.most_events
            self._settled()

    def dial_failed(self) -> None:
        """We cannot reach the partner for now; at the start it may begin in the same moment as we do."""
        if self._clock.monotonic_ns() >= self._settle_ns:
            self._settled()

    def refused(self, code: str, reason: str) -> None:
        """What dialled us, or answered, is not the partner, or not as it should be."""
        log.warning("partner-refused", code=code, reason=reason)
        now_ns = self._clock.monotonic_ns()
        if code in QUIET_CODES or now_ns < self._refused.get(code, 0):
            return
        self._refused[code] = now_ns + REFUSED_NS
        text = f"a connection to or from partner {self._names.partner} was refused ({code}): {reason}"
        self._raise("pair-refused", "warning", text, {"code": code, "reason": reason})

    # One turn.

    def step(self) -> int:
        """Do what is due; returns when there is more to do (monotonic)."""
        now_ns = self._clock.monotonic_ns()
        silence_ns = self._heard_ns + round(self._names.silence_s * 1e9)
        if not self._ledger.is_lost and now_ns >= silence_ns:
            self._is_lost_now()
        due_ns = now_ns + AGAIN_NS if self._ledger.is_lost else silence_ns
        if self._replay.step(now_ns, self.reached):
            due_ns = now_ns
        if self._keeper is not None:
            self._keeper.step()
        if self._origin is not None:
            self._origin.step(self.reached)
            if self._origin.state is MirrorState.MIRRORING:
                due_ns = min(due_ns, self._origin.due_ns())
        if now_ns >= self._certificate_ns:
            self._watch_certificate(now_ns)
        if self._ledger.is_prunable and now_ns >= self._prune_ns:
            self._prune_ns = now_ns + AGAIN_NS
            self._ledger.prune()
            self._replay.prune()
        self._watch_mirror()
        self._end_what_began_before()
        if self._ledger.is_dirty:
            if now_ns >= self._notes_ns:
                self._write_notes()
            due_ns = min(due_ns, self._notes_ns)
        return due_ns

    def close(self) -> None:
        """Keep what is known."""
        if self._ledger.is_dirty:
            self._write_notes()

    def behind(self) -> int:
        """How many of our events, at most, the partner does not have that a recipient may still need."""
        return sum(
            max(0, queue.newest_seq - max(done, self._kept_seq(queue.queue_id)))
            for queue, done in zip(self._mirrored, self._done(self._mirrored), strict=True)
        )

    def status(self) -> dict[str, Any]:
        """For people and figures."""
        origin, keeper = self._origin, self._keeper
        is_mirroring = origin is not None and origin.state is MirrorState.MIRRORING
        is_keeping = keeper is not None and keeper.state is MirrorState.MIRRORING
        lost, behind = self._ledger.is_lost, self.behind()
        newest, done = sum(queue.newest_seq for queue in self._queues), self._done(self._queues)
        unconfirmed = max(0, newest - sum(done) - self._replay.copies_behind(done[-1]))
        return {
            "name": self._names.name,
            "partner": self._names.partner,
            "state": "lost" if lost else STATES[is_mirroring + is_keeping],
            "since_us": self._since_us,
            "mirroring": is_mirroring,
            "keeping": is_keeping,
            "unconfirmed": unconfirmed,
            "mirrored": max(0, unconfirmed - behind),
            "behind": behind,
            "partner_full": is_mirroring and origin is not None and origin.is_full,
            "kept": len(self._store),
            "store_fullness": self._store.fullness_ratio,
            "replaying": lost and len(self._store) > 0,
            "taken_over": self._replay.taken_over,
            "certificate_until_us": self._until_us,
        }

    def _done(self, queues: Sequence[EventQueue]) -> list[int]:
        """Up to where no recipient needs our queues."""
        done = self.reached.confirmed.done if self.reached is not None else {}
        return [max(queue.done_seq, done.get(queue.queue_id, 0)) for queue in queues]

    def _kept_seq(self, queue_id: str) -> int:
        kept = self._origin.kept if self._origin is not None and self._origin.kept else self._kept
        return kept.get(queue_id, 0)

    # The partner comes and goes.

    def _greeted(self, hello: MirrorHello) -> None:
        was_lost, known, said = self._ledger.is_lost, self._ledger.openings, openings_in(hello)
        lost = 0
        for queue_id, newest_seq in ((queue.queue_id, queue.newest_seq) for queue in hello.queues):
            through = shared_through(known, said, queue_id, newest_seq)
            if max(self._store.newest_seq(queue_id), self._ledger.newest_seq(queue_id)) > through:
                lost += self._set_back(queue_id, through, lost_queue_id(known, queue_id, through))
        for queue_id in self._ledger.greeted(hello.queues, said):
            self._replay.queue_gone(queue_id)
            lost += self._store.count(queue_id)
            log.warning("partner-lost-its-queue", queue=queue_id, events=self._store.count(queue_id))
        if not self._write_notes() and self._is_lowered:
            raise MirrorEnded(f"what is known of {self._names.partner} cannot be written")
        if lost:
            text = (
                f"the disk of partner {self._names.partner} was set back, or lost; {lost} events that it "
                "does not have any more, and that were not confirmed, are delivered here"
            )
            self._raise("pair-set-back", "warning", text, {"events": lost})
        if was_lost:
            self._is_back()

    def _set_back(self, queue_id: str, through: int, lost_id: str) -> int:
        """The partner's disk was set back: what it had and has lost is delivered here, like a lost queue.

        Without any such event it may also be that a crash left numbers unused there: then cursors alone are
        lowered, behind which there was nothing.

        Returns:
            How many events that are.

        Raises:
            MirrorEnded: it cannot be written; the partner's next dial tries again.
        """
        if self._store.count(lost_id):  # of another time
            lost_id = secrets.token_hex(8)
        self._is_lowered = True
        events = self._store.count_behind(queue_id, through)
        self._ledger.set_back(queue_id, through, lost_id if events else "")
        if events and not self._write_notes():
            raise MirrorEnded(f"what is known of {self._names.partner} cannot be written")
        self._store.set_back(queue_id, through, lost_id)
        self._replay.set_back(queue_id, through)
        if events:
            log.warning("partner-set-back", queue=queue_id, through=through, events=events)
        return events

    def _end_what_began_before(self) -> None:
        """A process before has raised a beginning, and died before that, or its end, was on disk."""
        firing = (self.reached.firing if self.reached is not None else frozenset[str]()) - self._has_ended
        if PAIR in firing and not self._ledger.is_lost and self._has_heard:
            self._is_back()
        if UNWRITTEN in firing and not self._is_unwritten:
            self._ledger.is_dirty = True  # to write them proves it

    def _is_lost_now(self) -> None:
        self._has_ended.discard(PAIR)
        self._ledger.lost()
        self._replay.lost()
        self._since_us = self._clock.unix_us()
        held = len(self._store)
        text = (
            f"partner {self._names.partner} was not heard for {self._names.silence_s:g} s; {held} events "
            "of it that were not confirmed are delivered here"
        )
        log.error("partner-lost", partner=self._names.partner, events=held)
        self._raise("pair-lost", "critical", text, {"events": held, "silence_s": self._names.silence_s})

    def _is_back(self) -> None:
        self._since_us = self._clock.unix_us()
        text = f"partner {self._names.partner} is back; what is left of its events is its own affair again"
        log.info("partner-back", partner=self._names.partner, taken_over=self._replay.taken_over)
        self._raise("pair-back", "info", text, {"taken_over": self._replay.taken_over})
        self._has_ended.add(PAIR)

    def _watch_mirror(self) -> None:
        """Our own events: does the partner have room for them, was it away for longer than it can hold?"""
        origin, behind = self._origin, self.behind()
        is_full = origin is not None and origin.is_full and behind > 0
        # After a restart it is not known yet whether the partner has room.
        least = 0 if self._was_behind else self._most_events // 2
        if not self._ledger.is_behind and (is_full or behind > self._most_events):
            self._ledger.set_behind(is_behind=True)
            text = (
                f"partner {self._names.partner} does not have {behind} events that recipients may need: "
                + ("its room for them is full" if is_full else "it was away for longer than it has room for")
            )
            self._raise("pair-mirror-behind", "warning", text, {"events": behind, "room": self._most_events})
        elif self._ledger.is_behind and not is_full and behind <= least and self._is_mirroring():
            self._was_behind = False
            self._ledger.set_behind(is_behind=False)
            text = f"partner {self._names.partner} has caught up with the events of this server"
            self._raise("pair-mirror-caught-up", "info", text, {"events": behind})

    def _watch_certificate(self, now_ns: int) -> None:
        """A connection outlives its certificate, the next one cannot be made: say so before."""
        self._certificate_ns = now_ns + CERTIFICATE_NS
        self._until_us = self._certificate_ends_us()
        if self._until_us is None:
            return
        left_s = (self._until_us - self._clock.unix_us()) / 1e6
        if left_s < EXPIRING_S:
            days = max(0, int(left_s // 86_400))
            text = f"the certificate for partner {self._names.partner} ends in {days} days"
            self._raise("pair-certificate-ends", "warning", text, {"until_us": self._until_us})

    def _is_mirroring(self) -> bool:
        return self._origin is not None and self._origin.state is MirrorState.MIRRORING

    def _write_notes(self) -> bool:
        """Whether they are on disk."""
        begun_ns = self._clock.monotonic_ns()
        try:
            self._ledger.notes().write(self._directory)
        except OSError as exc:  # a full disk: what was confirmed here is known in memory, and tried again
            self._ledger.is_dirty = True
            if not self._is_unwritten:
                self._is_unwritten = True
                self._has_ended.discard(UNWRITTEN)
                log.error("partner-notes-not-written", problem=str(exc))
                text = f"what was delivered for partner {self._names.partner} cannot be written: {exc}"
                self._raise("event-state-not-written", "critical", text, {"problem": str(exc)})
        else:
            self._is_lowered = False
            is_known = self.reached is not None and UNWRITTEN in self.reached.firing - self._has_ended
            if self._is_unwritten or is_known:
                self._is_unwritten = False
                self._has_ended.add(UNWRITTEN)
                text = f"what was delivered for partner {self._names.partner} is written again"
                self._raise("event-state-written", "info", text, {})
        took_ns = self._clock.monotonic_ns() - begun_ns
        self._notes_ns = begun_ns + max(AGAIN_NS, PAUSE * took_ns)
        return not self._is_unwritten


def how_far(
    queues: Sequence[EventQueue],
    later: EventQueue,
    open_seqs: tuple[int, ...],
    engine: DeliveryEngine,
    noticed: int,
    partner: str = "",
) -> Reached:
    """How far our recipients have come. Each server has rows of its own, so those of SQL do not count.

    Args:
        queues: ours, in the order of a replay.
        later: ours of what is due later.
        open_seqs: what is left in it.
        engine: has the lanes.
        noticed: the newest loss of the partner that they know of.
        partner: its name.
    """
    cursors = {
        name: (*(lane.cursors[queue.name] for queue in queues), 0)
        for name, lane in engine.lanes.items()
        if name != NAME
    }
    through = engine.done_through(NAME)
    done = {queue.queue_id: through[queue.name] for queue in queues}
    done[later.queue_id] = later.done_seq
    confirmed = MirrorConfirmed(tuple(done), cursors, done, open_seqs, later.newest_seq)
    newest = {queue.queue_id: queue.newest_seq for queue in (*queues, later)}
    passed = {name: lane.cursors[queues[-1].name] for name, lane in engine.lanes.items()}
    firing = frozenset(
        name
        for name in (PAIR, UNWRITTEN)
        if any((name, "server", partner, "") in lane.firing for lane in engine.lanes.values())
    )
    return Reached(confirmed, newest, passed, noticed, firing)


class BatchesUnderWay:
    """Which lanes had handed over a batch when the partner came or went: they look again once it is answered.

    Thread: the main loop.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def must_compose(self, lanes: Mapping[str, Lane], *, has_changed: bool) -> bool:
        """Whether batches have to be made again: at a change, and when one of those was answered."""
        if has_changed:
            self._tokens = {name: lane.token for name, lane in lanes.items() if lane.token}
            return True
        if not self._tokens:
            return False
        left = {
            name: token
            for name, token in self._tokens.items()
            if name in lanes and lanes[name].token == token
        }
        answered, self._tokens = len(left) < len(self._tokens), left
        return answered
