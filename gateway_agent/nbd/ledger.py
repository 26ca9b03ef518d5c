"""Whether a restart of an upstream can have lost something that it acknowledged.

A storage that restarts may forget each change that it acknowledged, until a flush that was sent later
succeeds. What had FUA is stable with its acknowledgement. So one number goes up with each change, and a flush
that succeeds covers those that were acknowledged when it was sent. Changes under way on any connection make
the answer uncertain, too: the acknowledgement may be on its way.

All connections of a plane to one upstream share a ledger, because a client may write on one of them and go on
with another. It begins with one change that is not covered: those of this plane's former life are not known.
A connection that may change the volume and is not counted here (``uncounted``) leaves one behind, too. Pure.

A flush that fails says that something written before is lost, perhaps another client's. A storage may say so
once on each connection that was there, and on none that is made later (Linux, and so nbdkit, whose
connections are openings of the file: what one has reported a new one does not). So the next flush
that succeeds proves nothing, and ``failed_flushes`` counts: who was there before one goes on with no
connection that is made behind it.

At an upgrade two processes serve the same volumes, each with its own ledgers: a flush at one says nothing
of a change at the other. So from then on none of both believes its ledgers (``OtherProcess``). The next one
does again when the former has ended, and a flush has covered what that may have left (``doubt``).
"""

from __future__ import annotations

from dataclasses import dataclass


class ChangeLedger:
    """See the module docstring.

    Attributes:
        failed_flushes: answered with an error, or changes with FUA that were: a part of these is a flush.
    """

    def __init__(self) -> None:
        self.failed_flushes = 0
        self._acknowledged = 1
        self._covered = 0
        self._under_way = 0
        self._uncounted = 0

    @property
    def is_covered(self) -> bool:
        """Whether a flush has covered every change that was acknowledged, on all connections."""
        return self._covered == self._acknowledged and not self._uncounted

    def is_quiet(self, own_changes: int) -> bool:
        """Whether no change is under way but ``own_changes`` of the connection that asks."""
        return self._under_way == own_changes

    def begun(self) -> None:
        """A change is about to be sent."""
        self._under_way += 1

    def ended(self, *, needs_flush: bool) -> None:
        """A change was answered, or is waited for no more; ``needs_flush`` if it succeeded without FUA."""
        self._under_way -= 1
        self._acknowledged += needs_flush

    def mark(self) -> int:
        """What a flush covers that is sent now."""
        return self._acknowledged

    def flushed(self, mark: int) -> None:
        """The flush that was sent at ``mark`` has succeeded."""
        self._covered = max(self._covered, mark)

    def doubt(self) -> None:
        """There were changes that are not counted here; none is under way."""
        self._acknowledged += 1

    def uncounted(self, change: int) -> None:
        """So many connections more, or less, that are not counted here."""
        self._uncounted += change
        self._acknowledged += change < 0


@dataclass(slots=True)
class OtherProcess:
    """Whether this plane has a former process that may not have ended, or a next one."""

    is_former: bool = False
    is_next: bool = False

    @property
    def may_serve(self) -> bool:
        """Whether another process of this plane may serve its volumes, too."""
        return self.is_former or self.is_next
