"""Which cuts of one gateway were received, which are durable, and where the next answer starts.

Theory of operation. The agent keeps every cut until it is acknowledged. Per epoch there are two positions:

    ... durable ...|... received, on its way into the queue ...|... still with the agent ...
                   ^ ack[epoch]                                ^ received[epoch]

A poll asks for what follows ``received`` (``from``) and acknowledges ``ack``. A *rewind* sets ``received``
back to ``ack``: everything between is asked for again, and dbmanager drops what it has already. If a batch
finds no room at dbmanager, ``received`` is set back only to what was posted before. A poll that
is under way during a rewind still asks for the old position; keeping its answer would put cut 8 into the
queue before 5..7 are sent again. So each rewind counts, each poll remembers the count it was sent under,
and the cuts of an answer to an older count are judged but *not kept*: they come again.

Several epochs: the agent was restarted with cuts in its spool. They are answered oldest epoch first; a cut
of a later epoch says that the earlier ones are exhausted. Cuts missing within an answer are those the agent
does not hold any more; they are counted (``skipped_cuts``). Normally the cut's own ``gap`` says so to
dbmanager; if it does not (``leaves_hole``), the epoch's *floor* is raised and announced in GATEWAY's
``spool``, because dbmanager takes no cut behind a hole and would have us ask for the missing ones for ever.

``received`` returns a verdict for both recipients. ``services`` lives in the present: it gets a cut only if
that is newer than all it got before of this gateway. So a cut that goes ahead as LIVE is not judged again in
its turn, nor are those before it, which services would ignore; an earlier epoch is past once a cut of a later
one was judged. One number an epoch (``judged``) says so, however long dbmanager takes nothing.

Invariants: floor[e], ack[e] <= received[e]; positions only grow, except ``received`` in a rewind, and
``ack`` when another dbmanager knows less (a restored database).

``Watermarks`` is what dbmanager has on disk, by gateway and epoch. WATERMARKS opens an *incarnation* of
dbmanager: what it names is durable, everything else that was on its way is in doubt and must be asked for
again. Further WATERMARKS and DURABLE of the same incarnation only advance. A notice of another incarnation
than the open one is a leftover in the mailbox and is ignored. While a gateway's record holds an epoch, its
high water is there, and ``Watermarks`` keeps what it was when the record began: a notice comes for each
poll, and would else be entered twice.

Thread: no locks of their own; the gateway's lock guards its positions, the registry's the watermarks
(``poller.gateway``).

Source: DESIGN.md 4; docs/formats/messages.md (WATERMARKS, DURABLE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pmdaemon.errors import BadCut
from pmdaemon.poller.catch_up import BEYOND, CatchUp, RefusalBackoff
from pmdaemon.wire.messages.server import HighWaters

# A backlog so short costs hardly more than the newest cut alone, which would come as well.
FREE_CUTS: Final = 4
LAG_NS: Final = 10 * 10**9  # durability without progress for this long: ask again (DESIGN.md 4)
FULL_LAG_NS: Final = 120 * 10**9  # while dbmanager refuses batches: far above what its mailbox holds
MAX_POLLS_OUT: Final = 64  # more unanswered polls than a session can have before it counts as lost


class CutVerdict(NamedTuple):
    """What to do with a cut.

    Attributes:
        keep: send it to dbmanager.
        judge: send it to services.
    """

    keep: bool
    judge: bool


_BOTH: Final = CutVerdict(keep=True, judge=True)
_KEEP: Final = CutVerdict(keep=True, judge=False)
_JUDGE: Final = CutVerdict(keep=False, judge=True)
_DROP: Final = CutVerdict(keep=False, judge=False)


class PollRequest(NamedTuple):
    """The record's part of a POLL header."""

    ack: list[list[int]]
    start: list[int]


_PollOut = tuple[int, int, int]
"""(number, sent_ns, rewinds so far) of a poll that is not answered: a plain tuple, one is made a poll."""


class _Epoch:
    """Positions within one epoch. ``last`` is None for the running epoch, else its last cut in the spool.

    The agent holds nothing at or below ``floor``, for whatever reason. ``judged`` is the newest that went to
    services, or ``BEYOND`` once a cut of a later epoch did.
    """

    __slots__ = ("ack", "acked_to_agent", "floor", "judged", "last", "number", "over_poll", "received")

    def __init__(self, number: int, floor: int, last: int | None, ack: int, judged: int = 0) -> None:
        self.number = number
        self.judged = judged
        self.floor = floor
        self.last = last
        self.ack = ack
        self.received = max(ack, floor)
        self.acked_to_agent = 0
        self.over_poll: int | None = None  # the first poll that acknowledged its last cut

    @property
    def exhausted(self) -> bool:
        return self.last is not None and self.received >= self.last

    @property
    def has_ended(self) -> bool:
        """Whether all of it that is not lost is durable."""
        return self.last is not None and max(self.ack, self.floor) >= self.last

    @property
    def is_behind(self) -> bool:
        return self.received > max(self.ack, self.floor)


class CutPositions:
    """Positions of one gateway; outlives its sessions.

    Attributes:
        backlog_poll: the last poll that asked for backlog out of the budget.
        rewinds: how often ``received`` was set back.
        skipped_cuts: cuts the agent no longer had when asked.
        repeated_cuts: cuts that came again and were dropped here.
        not_kept_cuts: cuts of an answer that a rewind had overtaken.
    """

    __slots__ = (
        "_epochs",
        "_over",
        "_pause",
        "_polls",
        "_single_epoch",
        "_spooled",
        "_waiting_since_ns",
        "_was_spared",
        "backlog_poll",
        "not_kept_cuts",
        "repeated_cuts",
        "rewinds",
        "skipped_cuts",
    )

    def __init__(self) -> None:
        self.backlog_poll: int | None = None
        self.rewinds = 0
        self.skipped_cuts = 0
        self.repeated_cuts = 0
        self.not_kept_cuts = 0
        self._epochs: dict[int, _Epoch] = {}  # in spool order, the running one last
        self._single_epoch: _Epoch | None = None  # the running epoch while there is no other: nearly always
        self._over: dict[int, int] = {}  # what was durable of epochs that have ended
        self._polls: tuple[_PollOut, ...] = ()  # those not answered, oldest first: nearly always one or none
        self._waiting_since_ns: int | None = None
        self._pause: RefusalBackoff | None = None  # until the first refusal
        self._was_spared = False  # the last poll was left out
        self._spooled = 0  # the last cut of the running epoch that the agent held when it registered

    # -- session and watermarks

    def register(self, epoch: int, spool: Sequence[tuple[int, int, int]], durable: Mapping[int, int]) -> None:
        """A new session, or a changed spool: start behind what is durable.

        Args:
            epoch: the running epoch (HELLO).
            spool: (epoch, first seq, last seq), oldest first; may or may not name the running epoch.
            durable: high water per epoch, from WATERMARKS and DURABLE.
        """
        former = self._epochs
        epochs = {}
        for number, first, last in (*(item for item in spool if item[0] != epoch), (epoch, 1, None)):
            epochs[number] = position = _Epoch(number, first - 1, last, durable.get(number, 0))
            if number in former:
                position.floor = max(position.floor, former[number].floor, former[number].acked_to_agent)
                position.judged = former[number].judged
        floor, self._spooled = next(
            ((first - 1, last) for named, first, last in spool if named == epoch), (0, 0)
        )
        epochs[epoch].floor = max(floor, epochs[epoch].floor)
        self._set_epochs(epochs)
        self._over = {}
        self._polls = ()
        self.rewind()

    def _set_epochs(self, epochs: dict[int, _Epoch]) -> None:
        self._epochs = epochs
        self._single_epoch = next(iter(epochs.values())) if len(epochs) == 1 else None

    def rewind(self) -> None:
        """Ask again for everything that is not durable."""
        self.rewinds += 1
        self._waiting_since_ns = None
        for position in self._epochs.values():
            position.received = max(position.ack, position.floor)

    def refused(self, now_ns: int, spread: float, epoch: int, seq: int) -> None:
        """A batch found no room at dbmanager: ask again, after a pause (``RefusalBackoff``).

        What was posted before waits in its mailbox and will be durable: it is not asked for again, or it
        would take the room, and dbmanager's time, of what is new.

        Args:
            now_ns: monotonic.
            spread: the gateway's own number, 0 <= spread < 1.
            epoch: of its first cut in the batch.
            seq: of that cut.
        """
        self._pause = self._pause or RefusalBackoff()
        self._pause.refused(now_ns, spread)
        if epoch not in self._epochs:
            self.rewind()
            return
        self.rewinds += 1
        is_after = False
        for number, position in self._epochs.items():
            if number == epoch:
                is_after = True
                position.received = max(position.ack, position.floor, min(position.received, seq - 1))
            elif is_after:
                position.received = max(position.ack, position.floor)
        if not any(position.is_behind for position in self._epochs.values()):
            self._waiting_since_ns = None

    def restart(self, durable: Mapping[int, int]) -> None:
        """Another dbmanager: only what it names is durable, what was acknowledged to the agent is gone."""
        self._over = {}
        for epoch, position in self._epochs.items():
            position.floor = max(position.floor, position.acked_to_agent)
            position.ack = durable.get(epoch, 0)
        self.rewind()

    def spool(self) -> list[list[int]]:
        """[epoch, first seq the agent may still hold, last seq known], oldest epoch first."""
        rows = []
        for epoch, position in self._epochs.items():
            first = max(position.floor, position.acked_to_agent) + 1
            last = position.received if position.last is None else position.last
            rows.append([epoch, first, max(last, first - 1)])
        return rows

    def leaves_hole(self, epoch: int, seq: int, gap: int) -> bool:
        """Whether a cut in order does not follow the last one, even over the ``gap`` it admits."""
        position = self._epochs.get(epoch)
        return position is not None and seq - 1 - gap > position.received

    def give_up_before(self, epoch: int, seq: int) -> None:
        """The agent has no cut below ``seq`` that we lack: they are lost for good."""
        position = self._epochs[epoch]
        position.floor = max(position.floor, seq - 1)

    def high_water(self) -> list[tuple[int, int]]:
        """(epoch, seq) durable, as far as notices came here: those of ``durable`` that were taken."""
        current = [(epoch, item.ack) for epoch, item in self._epochs.items() if item.ack]
        return [*self._over.items(), *current]

    def durable(self, epoch: int, seq: int, now_ns: int) -> bool:
        """Notice of dbmanager that all up to ``seq`` is on disk; False if the epoch is not held here."""
        position = self._single_epoch
        if position is None or position.number != epoch:
            position = self._epochs.get(epoch)
        if position is None:
            return False
        if seq <= position.ack:
            return True
        position.ack = seq
        if self._pause is not None:
            self._pause = self._pause.accepted(now_ns)
        if seq > position.received:
            position.received = seq
        behind = position.received > seq and position.received > position.floor
        if position is not self._single_epoch:
            for earlier in self._epochs.values():
                if earlier is position:
                    break
                if earlier.is_behind:
                    return True  # no progress of what was posted before
            behind = any(item.is_behind for item in self._epochs.values())
        self._waiting_since_ns = now_ns if behind else None
        return True

    def lags(self, now_ns: int, limit_ns: int = LAG_NS) -> bool:
        """Whether something received has waited ``limit_ns`` for durability without any progress."""
        return self._waiting_since_ns is not None and now_ns - self._waiting_since_ns > limit_ns

    @property
    def behind_cuts(self) -> int:
        """Cuts received and not known to be durable."""
        return sum(item.received - max(item.ack, item.floor) for item in self._epochs.values())

    # -- polls and answers

    @property
    def has_backlog(self) -> bool:
        """Whether the agent is known to hold more than the next cut."""
        position = self._single_epoch
        if position is None:
            return True
        return position.judged > position.received or position.received + 1 < self._spooled

    def poll(self, poll: int, now_ns: int, catch_up: CatchUp, is_unread: bool = False) -> PollRequest | None:
        """Account for a poll that is about to leave, and say what it asks for.

        Args:
            poll: its number.
            now_ns: monotonic.
            catch_up: the pair's budget for backlog.
            is_unread: services has not taken the last cut of this gateway yet.

        Returns:
            None if this poll should be left out: it could ask for the newest cut alone, for which services
            has no room either. The next one leaves in any case, with its acknowledgement and lease.
        """
        asks_newest = self._asks_newest(poll, now_ns, catch_up)
        self._was_spared = asks_newest and is_unread and not self._was_spared
        if self._was_spared:
            return None
        self._polls = (*self._polls[-MAX_POLLS_OUT + 1 :], (poll, now_ns, self.rewinds))
        start: list[int] = []
        ack: list[list[int]] = []
        for epoch, position in self._epochs.items():
            if position.ack:
                ack.append([epoch, position.ack])
                position.acked_to_agent = max(position.acked_to_agent, position.ack)
            if position.over_poll is None and position.has_ended:
                position.over_poll = poll
            if not start and not position.exhausted:
                start = [epoch, position.received + 1]
        if asks_newest:
            start = [epoch, BEYOND]  # of the running epoch, the last
        return PollRequest(ack, start)

    def _asks_newest(self, poll: int, now_ns: int, catch_up: CatchUp) -> bool:
        """Whether there is room for the newest cut alone."""
        if self._pause is not None and now_ns < self._pause.until_ns:
            return True
        if self.has_backlog and not self._backlog_is_short():
            if not catch_up.grant(now_ns):
                return True
            self.backlog_poll = poll
        return False

    def _backlog_is_short(self) -> bool:
        position = self._single_epoch
        if position is None:
            return False
        return max(position.judged, self._spooled) - position.received <= FREE_CUTS

    def poll_single_epoch(self, poll: int, now_ns: int) -> tuple[int, int, int] | None:
        """``poll`` of one epoch without backlog, no other poll out: (epoch, durable, first cut asked for)."""
        position = self._single_epoch
        if position is None or self._polls or self._pause is not None or self.has_backlog:
            return None
        self._polls = ((poll, now_ns, self.rewinds),)
        ack = position.ack
        if ack > position.acked_to_agent:
            position.acked_to_agent = ack
        return position.number, ack, position.received + 1

    def answered_in_order(self, poll: int, epoch: int, seq: int, now_ns: int) -> int | None:
        """The next cut of the only epoch and the REPLY behind it, in one step.

        As ``received``, with the verdict to keep and to judge, and ``answered`` would account for them.

        Returns:
            When the poll was sent; None in any other case: nothing was changed, take those two.
        """
        position, polls = self._single_epoch, self._polls
        if position is None or len(polls) != 1:
            return None
        number, sent_ns, rewinds = polls[0]
        if number != poll or rewinds != self.rewinds:
            return None
        if epoch != position.number or seq != position.received + 1 or seq <= position.judged:
            return None
        self._polls = ()
        position.received = position.judged = seq
        if self._waiting_since_ns is None:
            self._waiting_since_ns = now_ns
        return sent_ns

    def answered_live(self, poll: int, epoch: int, seq: int) -> int | None:
        """The newest cut of the only epoch, as LIVE, and the REPLY behind it, in one step.

        As ``received``, with the verdict to judge alone, and ``answered`` would account for them.

        Returns:
            As ``answered_in_order``.
        """
        position, polls = self._single_epoch, self._polls
        if position is None or len(polls) != 1 or polls[0][0] != poll or poll == self.backlog_poll:
            return None
        if epoch != position.number or seq <= position.judged:
            return None
        self._polls = ()
        position.judged = seq
        return polls[0][1]

    def answered(self, poll: int) -> int | None:
        """A REPLY closes the answer to ``poll``: when it was sent (monotonic ns), None if it is unknown.

        Older polls the agent left out are forgotten. An old epoch whose last cut was acknowledged in an
        answered poll has ended.
        """
        polls = self._polls
        for place, (number, sent_ns, _) in enumerate(polls):
            if number == poll:
                self._polls = polls[place + 1 :]
                if len(self._epochs) > 1:
                    self._forget_epochs([number for number, _, _ in polls[: place + 1]])
                return sent_ns
        return None

    def _forget_epochs(self, passed: Sequence[int]) -> None:
        # Not those acknowledged by a poll under way: an answer to an earlier one may yet hold their cuts.
        over = [epoch for epoch, position in self._epochs.items() if position.over_poll in passed]
        for epoch in over:
            if ack := self._epochs.pop(epoch).ack:
                self._over[epoch] = ack
        self._set_epochs(self._epochs)

    def unsent(self, poll: int) -> None:
        """A poll accounted for did not leave: its session had ended."""
        self._polls = tuple(item for item in self._polls if item[0] != poll)
        for position in self._epochs.values():
            if position.over_poll == poll:
                position.over_poll = None

    @property
    def oldest_poll(self) -> int | None:
        """Number of the oldest unanswered poll; None when nothing is awaited."""
        return self._polls[0][0] if self._polls else None

    @property
    def oldest_poll_sent_ns(self) -> int | None:
        """When the oldest unanswered poll was sent; None when nothing is awaited."""
        return self._polls[0][1] if self._polls else None

    def received(self, epoch: int, seq: int, live: bool, now_ns: int) -> CutVerdict:
        """A cut arrived.

        Raises:
            BadCut: its epoch was announced neither by HELLO nor in REGISTER.spool.
        """
        position = self._epochs.get(epoch)
        if position is None:
            raise BadCut(f"epoch {epoch} was not announced in HELLO or REGISTER")
        judge = seq > position.judged
        if not live and seq <= position.received:
            self.repeated_cuts += 1
            return _DROP
        if judge:
            self._judge(position, seq)
        if live:
            return _JUDGE if judge else _DROP
        if not self._polls or self._polls[0][2] != self.rewinds:
            self.not_kept_cuts += 1
            return _JUDGE if judge else _DROP
        self._advance(epoch, position, seq, now_ns)
        return _BOTH if judge else _KEEP

    def _judge(self, position: _Epoch, seq: int) -> None:
        position.judged = seq
        for earlier in self._epochs.values():
            if earlier is position:
                break  # at once, when there is one epoch
            earlier.judged = BEYOND

    def _advance(self, epoch: int, position: _Epoch, seq: int, now_ns: int) -> None:
        for earlier, other in self._epochs.items():
            if earlier == epoch:
                break  # at once, when there is one epoch
            if other.last is not None and not other.exhausted:
                self.skipped_cuts += other.last - other.received
                other.last = other.received  # the agent has no more of it: it has ended once that is durable
        self.skipped_cuts += seq - position.received - 1
        position.received = seq
        if self._waiting_since_ns is None:
            self._waiting_since_ns = now_ns


class Watermarks:
    """High water per (gateway, epoch). ``incarnation`` is None until the first WATERMARKS."""

    def __init__(self) -> None:
        self.incarnation: int | None = None
        self._high: dict[str, dict[int, int]] = {}

    def open(self, incarnation: int, notice: HighWaters) -> bool:
        """Take a WATERMARKS; True if it opens another incarnation, so that every gateway must rewind."""
        is_new = incarnation != self.incarnation
        if is_new:
            self.incarnation = incarnation
            self._high.clear()
        self._raise(notice)
        return is_new

    def learn(self, notice: HighWaters) -> None:
        """Take what is durable of the open incarnation: rows that no record holds, or held until now."""
        self._raise(notice)

    def of(self, gateway_id: str) -> dict[int, int]:
        """Epoch to high water of one gateway (a copy)."""
        return dict(self._high.get(gateway_id, {}))

    def _raise(self, notice: HighWaters) -> None:
        known = self._high.get
        for gateway_id, epoch, seq in notice:
            epochs = known(gateway_id)
            if epochs is None:
                self._high[gateway_id] = {epoch: seq}
            elif seq > epochs.get(epoch, 0):
                epochs[epoch] = seq
