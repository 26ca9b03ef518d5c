"""When the acting server gives its lease up by itself, and when it may take one again.

    holds ──trouble for patience_s, another server could act──► ending ──its parts have ended──► rests
      ▲                                                                                            │
      └────── the lease is free ── may take it ◄── reaches the database for limit_s ───────────────┘

Trouble is that the database is not reached, or that a part ends again and again. It is given up for only if
another server *could act*: it reaches the database of this cluster, and has for ``limit_s``. While the
database is away for all of them nothing changes: to hand over would help nobody.

How often it can happen. The lease moves by this only to a server that was well for ``limit_s``. The one that
gave it up takes none before it has reached the database for ``limit_s`` without a break; after trouble with a
part it offers itself for none for ``PART_REST_S``, for the next one may meet the same trouble, and then both
would go on in turn. With each time within ``MEMORY_S`` a server waits twice as long before the next, up to
``MOST_PATIENCE_S``: two servers with bad links change once an hour, not each half minute.

The lease is renewed while the parts end. So no other server begins before the writer has ended; or after
``END_S``, and then the fence in the database holds the former writer out, as at a death.

``GivingUp`` is pure: states in, decision out, with the time as an argument. It is of the process ``cluster``;
what it knows ends with it, and a server that starts again needs ``limit_s`` of trouble before the next
decision. Thread: ``node-agent``. What is asked of other servers: ``offers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

END_S: Final = 60.0
"""The parts have 10 s each to stop in order, then they are killed."""
PART_REST_S: Final = 3600.0
MEMORY_S: Final = 86_400.0
MOST_PATIENCE_S: Final = 3600.0
MOST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class Situation:
    """What this server knows of itself.

    Attributes:
        is_held: it has the lease.
        away_s: for how long it has tried in vain to reach the database.
        reached_s: for how long it has reached it without a break.
        problem: with the database; "": none, or no answer at all.
        failing_s: for how long a part has ended again and again; 0: none does.
        failing: that part, and why it ended, in words.
        has_ended: the supervisor has ended all parts that act.
    """

    is_held: bool = False
    away_s: float = 0.0
    reached_s: float = 0.0
    problem: str = ""
    failing_s: float = 0.0
    failing: str = ""
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What another server has answered just now.

    Attributes:
        reached_s: for how long it has reached the database without a break.
        why_not: why it could not act; "" if it could.
    """

    node: str
    reached_s: float
    why_not: str = ""


class GivingUp:
    """See the module.

    Args:
        limit_s: ``give_up_after_s`` of the configuration; 0: never.

    Attributes:
        reason: why it is given up, from the decision until it is handed back; else "".
        successor: the node that it is given to.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.reason = ""
        self.successor = ""
        self._is_of_part = False
        self._decided_ns: list[int] = []
        self._is_due = False
        self._rests_since_ns: int | None = None
        self._part_failed_ns: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether the lease is to be handed back now."""
        return self._is_due

    @property
    def may_take(self) -> bool:
        """Whether this server may take a lease that is free."""
        return not self.reason and self._rests_since_ns is None

    def patience_s(self, now_ns: int) -> float:
        """So long trouble must last: twice as long with each time that it was given up lately."""
        self._decided_ns = [at_ns for at_ns in self._decided_ns if now_ns - at_ns < MEMORY_S * 1e9]
        longest = max(self._limit_s, MOST_PATIENCE_S)
        return min(longest, self._limit_s * 2.0 ** min(len(self._decided_ns), 32))

    def trouble(self, now: Situation, now_ns: int) -> str:
        """Why the lease should be given up, in words after "it"; "": there is no reason, or not yet."""
        if not self._limit_s or not now.is_held or self.reason:
            return ""
        limit_s = self.patience_s(now_ns)
        if now.away_s >= limit_s:
            said = now.problem or "it does not answer"
            return f"has not reached the database for {now.away_s:.0f} s (limit {limit_s:g} s): {said}"
        if now.failing_s >= limit_s:
            return (
                f"cannot keep a part running, for {now.failing_s:.0f} s (limit {limit_s:g} s): {now.failing}"
            )
        return ""

    def decide(self, now: Situation, offers: Iterable[Offer], now_ns: int) -> bool:
        """Decide with what the others have just answered; True: it is given up from now on."""
        reason = self.trouble(now, now_ns)
        able = [offer for offer in offers if not offer.why_not and offer.reached_s >= self._limit_s]
        if not reason or not able:
            return False
        self.successor = max(able, key=lambda offer: offer.reached_s).node
        self.reason = reason[:MOST_REASON]
        self._is_of_part = now.away_s < self.patience_s(now_ns)
        self._decided_ns.append(now_ns)
        return True

    def follow(self, now: Situation, now_ns: int) -> None:
        """What has changed: its parts have ended, or it is well again."""
        if self.reason:
            waited_ns = now_ns - self._decided_ns[-1]
            self._is_due = self._is_due or now.has_ended or waited_ns >= END_S * 1e9
        elif self._rests_since_ns is not None:
            rested_s = (now_ns - self._rests_since_ns) / 1e9
            if min(rested_s, now.reached_s) >= self._limit_s:
                self._rests_since_ns = None
        if self._part_failed_ns is not None and now_ns - self._part_failed_ns >= PART_REST_S * 1e9:
            self._part_failed_ns = None

    def handed_back(self, now_ns: int) -> None:
        """The lease is free, or another server's."""
        if self._is_of_part:
            self._part_failed_ns = now_ns
        self.reason, self.successor, self._is_due, self._is_of_part = "", "", False, False
        self._rests_since_ns = now_ns

    def why_not(self) -> str:
        """Why this server should be given no lease; "": it may have one."""
        if self._part_failed_ns is not None:
            return "it gave the lease up within the last hour, as a part of it did not stay up"
        if not self.may_take:
            return f"it gave the lease up, and has not reached the database for {self._limit_s:g} s since"
        return ""
