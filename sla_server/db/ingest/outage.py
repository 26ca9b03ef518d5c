"""The state of a database that is away, from the first failure to the first success. Pure: no clock, no I/O.

While it lasts the writer tries again with backoff, the queue holds, the intake goes on, and ``problem`` is
told every other second (PRESSURE). Afterwards one event ``database-away`` tells of it, in the database.
"""

from __future__ import annotations

from typing import Any, Final

from pmdaemon.wire.messages.server import DAMAGED, Problem
from sla_server.db.ingest.inventory import event_row

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_LIMIT_S: Final = 15.0


class Outage:
    """Whether the database is away.

    Attributes:
        since_us: first failure, 0 while it works.
        reason: of the newest failure.
        tries: failures since.
        problem: the same for PRESSURE, None while it works. Replaced whole: any thread may read it.
    """

    def __init__(self) -> None:
        self.since_us = 0
        self.reason = ""
        self.tries = 0
        self.problem: Problem | None = None

    @property
    def is_on(self) -> bool:
        """Whether the database is away."""
        return self.tries > 0

    def failed(self, now_us: int, reason: str, *, is_damage: bool = False) -> None:
        """A transaction failed; ``is_damage``: and will go on to fail, ``reason`` says what to do."""
        self.since_us = self.since_us or now_us
        self.reason = reason
        self.tries += 1
        text = f"the database cannot be used: {reason}. The ingest queue holds what arrives"
        damage = Problem(DAMAGED, self.since_us, reason)
        self.problem = damage if is_damage else Problem("database", self.since_us, text)

    def wait_s(self) -> float:
        """How long to wait before the next try: doubled each time, 15 s at most."""
        return float(min(BACKOFF_FIRST_S * 2 ** min(self.tries - 1, 10), BACKOFF_LIMIT_S))

    def event(self, now_us: int, queue_bytes: int) -> dict[str, Any]:
        """A row of ``events`` that tells of it."""
        seconds = (now_us - self.since_us) / 1e6
        return event_row(
            (self.since_us, self.reason),
            self.since_us,
            "database-away",
            "critical",
            element="dbmanager",
            subject="database",
            text=f"the database could not be used for {seconds:.1f} s ({self.reason}); "
            "nothing was lost, the ingest queue held everything",
            details={"seconds": seconds, "tries": self.tries, "queue_bytes": queue_bytes},
        )

    def ended(self) -> None:
        """A transaction succeeded."""
        self.since_us, self.reason, self.tries, self.problem = 0, "", 0, None
