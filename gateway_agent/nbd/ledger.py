"""Whether a restart of an upstream can have lost something that it acknowledged.

A storage that restarts may forget each change that it acknowledged, until a flush that was sent later
succeeds. What had FUA is stable with its acknowledgement. So one number goes up with each change, and a flush
that succeeds covers those that were acknowledged when it was sent. Changes under way on any connection make
the answer uncertain, too: the acknowledgement may be on its way.

All connections of a plane to one upstream share a ledger, because a client may write on one of them and go on
with another. It begins with one change that is not covered: those of this plane's former life are not known.
A connection that may change the volume and is not counted here (``uncounted``) leaves one behind, too. Pure.

A flush speaks for what was acknowledged while its connection was there. Before, the storage may have been
restarted: connections that are older notice that later, if its host went down, and what they wrote is gone
though the flush succeeds. So each connection has its own answer (``CountedConnection``): a flush of a later
one covers what the earlier one knows only where all that was acknowledged before the later one was made is
covered for the earlier one already.

    earlier    ── write A ─────── (host restarts, A is gone) ──────────────────── notices
    later                                    made ── write B ── flush: covers B, and A for itself only

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
        acknowledged: number of the newest change that was.
        is_whole: whether every connection that may change something is counted here.
    """

    def __init__(self) -> None:
        self.failed_flushes = 0
        self.acknowledged = 1
        self._covered = 0  # for a connection that is made now
        self._under_way = 0
        self._uncounted = 0
        self._connections: dict[CountedConnection, None] = {}  # in the order in which they were made

    @property
    def is_whole(self) -> bool:
        """See the class."""
        return not self._uncounted

    def joined(self) -> CountedConnection:
        """A connection was made whose changes are counted."""
        made = CountedConnection(self)
        self.renewed(made)
        return made

    def renewed(self, connection: CountedConnection) -> None:
        """It was made again; what is covered for its client stays so."""
        self._connections.pop(connection, None)
        self._connections[connection] = None
        connection.born, connection.covered = self.acknowledged, self._covered

    def left(self, connection: CountedConnection) -> None:
        """It has ended."""
        self._connections.pop(connection, None)

    def begun(self) -> None:
        """A change is about to be sent."""
        self._under_way += 1

    def ended(self, *, needs_flush: bool) -> None:
        """A change was answered, or is waited for no more; ``needs_flush`` if it succeeded without FUA."""
        self._under_way -= 1
        self.acknowledged += needs_flush

    def is_quiet(self, own_changes: int) -> bool:
        """Whether no change is under way but ``own_changes`` of the connection that asks."""
        return self._under_way == own_changes

    def flushed(self, mark: int, by: CountedConnection) -> None:
        """The flush that was sent at ``mark`` has succeeded on this connection."""
        self._covered = max(self._covered, mark)
        is_earlier = True
        for each in self._connections:
            is_earlier = is_earlier and each is not by
            if not is_earlier or each.covered >= by.born:
                each.covered = max(each.covered, mark)

    def doubt(self) -> None:
        """There were changes that are not counted here, at any time; none is under way."""
        self.acknowledged += 1
        for each in self._connections:
            each.born = self.acknowledged

    def uncounted(self, change: int) -> None:
        """So many connections more, or less, that are not counted here."""
        self._uncounted += change
        if change < 0:
            self.doubt()


class CountedConnection:
    """What the ledger knows of one connection; see the module docstring.

    Attributes:
        born: the newest change that may have been acknowledged before it was made.
        covered: the newest change that is stable as far as its client is concerned, with all before it.

    Args:
        ledger: of its upstream; asked for one by ``joined``.
    """

    def __init__(self, ledger: ChangeLedger) -> None:
        self.ledger = ledger
        self.born = self.covered = 0

    @property
    def is_covered(self) -> bool:
        """Whether a flush has covered every change that was acknowledged, on all connections."""
        return self.covered == self.ledger.acknowledged and self.ledger.is_whole

    def mark(self) -> int:
        """What a flush covers that is sent now."""
        return self.ledger.acknowledged

    def flushed(self, mark: int) -> None:
        """The flush that was sent here at ``mark`` has succeeded."""
        self.ledger.flushed(mark, self)


@dataclass(slots=True)
class OtherProcess:
    """Whether this plane has a former process that may not have ended, or a next one."""

    is_former: bool = False
    is_next: bool = False

    @property
    def may_serve(self) -> bool:
        """Whether another process of this plane may serve its volumes, too."""
        return self.is_former or self.is_next
