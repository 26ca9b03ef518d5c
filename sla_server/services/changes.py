"""Changes of the agreements, one after another, each in force only when it is durable.

Three things change the catalog: ``apply``, ``delete``, and volumes that appear (patterns then mean more).
Each is made from the catalog as it is when its turn comes, recorded, and put in force when dbmanager has
answered; so what gateways are told is never undone by a crash, and two changes never build on the same
version.

Belongs to the main loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pmdaemon.runtime.clock import Clock
from sla_server.services.catalog import Catalog, Change
from sla_server.services.record_sender import RecordSender

MAX_WAITING: Final = 64
Make = Callable[[Catalog, int], Change | None]
Done = Callable[[Change, str], None]


@dataclass(frozen=True, slots=True)
class AgreementChange:
    """One change.

    Attributes:
        make: builds it from the catalog and the time (us); None: there is nothing to do, and it has told
            its asker so
        done: called with the change and an error text, empty if it is in force
    """

    make: Make
    done: Done


class AgreementChanges:
    """See the module. ``catalog`` is the one in force."""

    def __init__(
        self, catalog: Catalog, journal: RecordSender, clock: Clock, on_change: Callable[[Catalog], None]
    ) -> None:
        self.catalog = catalog
        self._journal = journal
        self._clock = clock
        self._on_change = on_change
        self._waiting: deque[AgreementChange] = deque()
        self._busy = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is on its way."""
        return not self._busy and not self._waiting

    def submit(self, job: AgreementChange) -> bool:
        """Queue a change; False if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(job)
        self._next()
        return True

    def _next(self) -> None:
        while self._waiting and not self._busy:
            job = self._waiting.popleft()
            change = job.make(self.catalog, self._clock.unix_us())
            if change is None:
                continue
            self._busy = True
            self._journal.append(change.rows, self._finisher(job, change))

    def _finisher(self, job: AgreementChange, change: Change) -> Callable[[bool, str], None]:
        def finish(ok: bool, error: str) -> None:
            self._busy = False
            if ok and change.catalog != self.catalog:
                self.catalog = change.catalog
                self._on_change(change.catalog)
            job.done(change, "" if ok else error)
            self._next()

        return finish
