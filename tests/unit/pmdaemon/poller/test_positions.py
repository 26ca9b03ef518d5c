"""Positions of one gateway: stated cases, and a model of agent, wire and dbmanager that loses nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.errors import BadCut
from pmdaemon.poller.catch_up import BEYOND, FIRST_PAUSE_NS, LONGEST_PAUSE_NS, CatchUp
from pmdaemon.poller.positions import LAG_NS, MAX_POLLS_OUT, CutPositions, CutVerdict, PollRequest
from tests.support.slots import values_of

BOTH, NEITHER = CutVerdict(True, True), CutVerdict(False, False)
KEEP, JUDGE = CutVerdict(True, False), CutVerdict(False, True)


class Budget(CatchUp):
    """Grants so many requests."""

    def __init__(self, grants: int) -> None:
        super().__init__(1 << 40, 10**9)
        self.grants = grants

    def grant(self, now_ns: int) -> bool:
        self.grants -= 1
        return self.grants >= 0


PLENTY = Budget(1 << 50)


def fresh(epoch: int = 7, spool: Any = (), durable: Any = None) -> CutPositions:
    record = CutPositions()
    record.register(epoch, spool, durable or {})
    return record


def ask(record: CutPositions, poll: int, now_ns: int, budget: CatchUp) -> PollRequest:
    asked = record.poll(poll, now_ns, budget)
    assert asked is not None, "services has read all it got"
    return asked


def take(record: CutPositions, *seqs: int, epoch: int = 7, live: bool = False) -> list[CutVerdict]:
    return [record.received(epoch, seq, live, 0) for seq in seqs]


def test_from_follows_the_last_received_and_ack_what_is_durable() -> None:
    record = fresh()
    assert ask(record, 1, 0, PLENTY) == ([], [7, 1])
    assert take(record, 1, 2) == [BOTH, BOTH]
    assert record.answered(1) == 0
    record.durable(7, 1, 5)
    assert ask(record, 2, 0, PLENTY) == ([[7, 1]], [7, 3])
    assert record.behind_cuts == 1


def test_after_a_refusal_only_what_was_refused_is_asked_for_again() -> None:
    record = fresh(epoch=9, spool=[(3, 1, 2)])
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, epoch=3)
    take(record, 1, 2, 3, epoch=9)
    record.answered(1)
    record.refused(0, 0.5, 9, 2)
    assert ask(record, 2, FIRST_PAUSE_NS, PLENTY).start == [9, 2], "the others wait in the mailbox"
    assert record.behind_cuts == 3
    record.answered(2)
    record.refused(0, 0.5, 3, 2)
    assert ask(record, 3, 10 * FIRST_PAUSE_NS, PLENTY).start == [3, 2]
    record.answered(3)
    record.durable(3, 2, 0)
    record.refused(0, 0.5, 3, 1)  # it was in an earlier batch too, which is durable
    assert ask(record, 4, 20 * FIRST_PAUSE_NS, PLENTY).start == [9, 1]


def test_a_new_session_starts_behind_what_is_durable() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, 3)
    record.durable(7, 1, 0)
    record.register(7, [(7, 2, 3)], {7: 1})
    assert record.oldest_poll_sent_ns is None
    assert ask(record, 2, 0, PLENTY).start == [7, 2]
    assert take(record, 2, 3, 4) == [KEEP, KEEP, BOTH]  # services has had 2 and 3


def test_spool_that_lost_its_oldest_cuts() -> None:
    record = fresh(spool=[(7, 57, 60)])
    assert ask(record, 1, 0, PLENTY).start == [7, 57]
    assert take(record, 57) == [BOTH]
    assert record.skipped_cuts == 0
    assert record.behind_cuts == 1


def test_answer_to_a_poll_sent_before_a_rewind_is_not_kept() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, 3)
    record.answered(1)
    record.durable(7, 1, 0)
    assert ask(record, 2, 0, PLENTY).start == [7, 4]
    record.rewind()
    assert take(record, 4, 5) == [JUDGE, JUDGE]  # 2 and 3 must come into the queue first
    record.answered(2)
    assert ask(record, 3, 0, PLENTY).start == [7, 2]
    assert take(record, 2, 3, 4, 5, 6) == [KEEP, KEEP, KEEP, KEEP, BOTH]
    assert record.not_kept_cuts == 2


def test_unasked_cut_is_not_kept() -> None:
    assert take(fresh(), 1) == [JUDGE]


def test_live_cut_is_judged_once_and_kept_when_it_comes_in_order() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    assert take(record, 1, 2) == [BOTH, BOTH]
    assert take(record, 9, 9, live=True) == [JUDGE, NEITHER]
    assert take(record, 2, live=True) == [NEITHER]
    assert take(record, 3, 9, 10) == [KEEP, KEEP, BOTH]  # services has a newer one than 3
    assert record.skipped_cuts == 5


def test_a_cut_of_an_earlier_epoch_is_kept_and_not_judged_once_a_later_one_was() -> None:
    record = fresh(epoch=9, spool=[(3, 1, 2), (9, 1, 1)])
    ask(record, 1, 0, PLENTY)
    assert take(record, 1, epoch=3) == [BOTH]
    assert take(record, 1, epoch=9, live=True) == [JUDGE]
    assert take(record, 2, epoch=3) == [KEEP]
    assert take(record, 1, 2, epoch=9) == [KEEP, BOTH]


def test_repeats_are_dropped_and_counted() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, 3)
    assert take(record, 2, 3) == [NEITHER, NEITHER]
    assert record.repeated_cuts == 2


def test_several_epochs_are_asked_for_oldest_first() -> None:
    record = fresh(epoch=9, spool=[(3, 1, 2), (5, 10, 11), (9, 1, 1)], durable={3: 2})
    assert ask(record, 1, 0, PLENTY) == ([[3, 2]], [5, 10])
    assert take(record, 10, 11, epoch=5) == [BOTH, BOTH]
    assert ask(record, 2, 0, PLENTY).start == [9, 1]
    assert take(record, 1, epoch=9) == [BOTH]
    record.durable(5, 11, 0)
    record.answered(1)
    # epoch 3 was acknowledged in an answered poll: over. 5 is acknowledged in the next.
    assert ask(record, 3, 0, PLENTY).ack == [[5, 11]]
    record.answered(3)
    assert ask(record, 4, 0, PLENTY).ack == []
    with pytest.raises(BadCut, match="epoch 3"):
        take(record, 1, epoch=3)


def test_a_later_epoch_exhausts_the_earlier() -> None:
    record = fresh(epoch=9, spool=[(3, 1, 5)])
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, epoch=3)
    assert take(record, 1, epoch=9) == [BOTH]
    assert record.skipped_cuts == 3
    assert ask(record, 2, 0, PLENTY).start == [9, 2]


def test_an_earlier_epoch_whose_end_the_agent_dropped_is_over_once_what_came_of_it_is_durable() -> None:
    record = fresh(epoch=9, spool=[(3, 1, 5)])
    ask(record, 1, 0, PLENTY)
    take(record, 1, 2, epoch=3)
    take(record, 1, epoch=9)
    record.answered(1)
    record.durable(3, 1, 0)
    record.durable(9, 1, LAG_NS)
    assert record.lags(1 + LAG_NS), "of the earlier one something is missing, whatever the later one does"
    record.rewind()
    assert ask(record, 2, 0, PLENTY).start == [3, 2]
    take(record, 2, epoch=3)
    record.answered(2)
    record.durable(3, 2, 0)
    assert ask(record, 3, 0, PLENTY) == ([[3, 2], [9, 1]], [9, 2])
    record.answered(3)
    assert record.behind_cuts == 0
    assert record.poll_single_epoch(4, 0) == (9, 1, 2), "the short way, and no budget for backlog"


def test_another_dbmanager_that_knows_less_is_told_what_the_agent_has_forgotten() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    take(record, *range(1, 10))
    record.answered(1)
    record.durable(7, 6, 0)
    ask(record, 2, 0, PLENTY)  # tells the agent to forget up to 6
    record.durable(7, 8, 0)
    record.restart({7: 2})  # restored from a backup
    assert record.spool() == [[7, 7, 6]]
    assert ask(record, 3, 0, PLENTY) == ([[7, 2]], [7, 7])
    record.register(7, [], {})
    assert ask(record, 4, 0, PLENTY).start == [7, 7]


def test_hole_that_the_cut_does_not_admit() -> None:
    record = fresh()
    ask(record, 1, 0, PLENTY)
    take(record, 1)
    assert not record.leaves_hole(7, 2, 0)
    assert not record.leaves_hole(7, 5, 3)
    assert record.leaves_hole(7, 5, 2)
    take(record, 5)
    record.give_up_before(7, 5)
    record.rewind()
    assert ask(record, 2, 0, PLENTY).start == [7, 5]
    assert record.spool() == [[7, 5, 4]]
    assert not record.leaves_hole(99, 1, 0)


def test_spool_names_every_epoch_oldest_first() -> None:
    record = fresh(epoch=9, spool=[(3, 4, 8)])
    assert record.spool() == [[3, 4, 8], [9, 1, 0]]


def test_lag_counts_from_the_last_progress() -> None:
    record = fresh()
    assert not record.lags(10**15)
    ask(record, 1, 0, PLENTY)
    record.received(7, 1, False, 100)
    record.received(7, 2, False, 200)
    assert not record.lags(100 + LAG_NS)
    assert record.lags(101 + LAG_NS)
    record.durable(7, 1, LAG_NS)
    assert not record.lags(2 * LAG_NS)
    assert record.lags(2 * LAG_NS + 1)
    record.durable(7, 2, LAG_NS)
    assert not record.lags(10**15)


def test_durable_of_an_unknown_epoch_or_backwards_is_nothing() -> None:
    record = fresh(durable={7: 5})
    record.durable(7, 3, 0)
    record.durable(99, 3, 0)
    assert ask(record, 1, 0, PLENTY) == ([[7, 5]], [7, 6])


def test_answers_to_polls() -> None:
    record = fresh()
    ask(record, 1, 100, PLENTY)
    ask(record, 2, 200, PLENTY)
    assert record.answered(5) is None
    assert record.oldest_poll_sent_ns == 100
    assert record.answered(2) == 200  # the agent left out the first
    assert record.answered(1) is None
    ask(record, 3, 300, PLENTY)
    record.unsent(3)
    assert record.oldest_poll_sent_ns is None
    for poll in range(10, 10 + 2 * MAX_POLLS_OUT):
        ask(record, poll, poll, PLENTY)
    assert record.oldest_poll_sent_ns == 10 + MAX_POLLS_OUT


def test_an_hour_without_dbmanager_is_judged_once_and_leaves_nothing_behind() -> None:
    """Every batch is refused; each answer brings the same first cuts, and the newest as LIVE."""
    record = fresh()
    judged = []
    for newest in range(29, 3600):
        ask(record, newest, 0, PLENTY)
        verdicts = take(record, *range(1, 29)) + take(record, newest, live=True)
        judged += [
            seq for seq, verdict in zip((*range(1, 29), newest), verdicts, strict=True) if verdict.judge
        ]
        record.rewind()
        record.answered(newest)
    assert judged == list(range(1, 3600))
    ask(record, 3600, 0, PLENTY)
    assert set(take(record, *range(1, 3600))) == {KEEP}
    assert record.answered_in_order(3600, 7, 3600, 0) == 0, "nothing is left of it"


def test_a_gateway_with_a_backlog_is_asked_for_it_while_the_budget_lasts() -> None:
    record, scarce = fresh(spool=[(7, 1, 40)]), Budget(0)
    assert record.poll_single_epoch(1, 0) is None, "it registered with more than the next cut"
    assert ask(record, 1, 0, scarce).start == [7, BEYOND]
    assert take(record, 41, live=True) == [JUDGE]
    record.answered(1)
    assert record.backlog_poll is None
    scarce.grants = 1
    assert ask(record, 2, 10**9, scarce).start == [7, 1]
    assert record.backlog_poll == 2
    assert set(take(record, *range(1, 31))) == {KEEP}  # services had 41
    record.answered(2)
    assert ask(record, 3, 10**9 + 1, scarce).start == [7, BEYOND]
    assert take(record, 42, live=True) == [JUDGE]
    record.answered(3)
    scarce.grants = 1
    assert ask(record, 4, 2 * 10**9, scarce).start == [7, 31]
    assert take(record, *range(31, 44)) == [*[KEEP] * 12, BOTH]
    record.answered(4)
    assert not record.has_backlog
    assert record.poll_single_epoch(5, 2 * 10**9 + 1) == (7, 0, 44), "who has caught up needs no budget"


def test_after_a_refusal_only_the_newest_is_asked_for_until_the_pause_is_over() -> None:
    record = fresh()
    now_ns, pauses_s = 0, []
    for poll in range(1, 8):
        assert ask(record, poll, now_ns, PLENTY).start == [7, 1]
        assert take(record, 1)[0].keep
        record.answered(poll)
        record.refused(now_ns, 0.5, 7, 1)
        record.refused(now_ns, 0.5, 7, 1)  # a second batch with its cuts, refused together with the first
        began_ns = now_ns
        while ask(record, poll, now_ns, PLENTY).start == [7, BEYOND]:
            assert record.answered(poll) is not None
            now_ns += 10**9
        assert record.answered(poll) is not None
        pauses_s.append((now_ns - began_ns) // 10**9)
    assert pauses_s == [1, 2, 4, 8, 5, 10, 7], "the longest differ: none in step with dbmanager's own times"
    for seq in range(1, 5):
        record.durable(7, seq, now_ns)
    assert record.poll_single_epoch(9, now_ns) is not None, "the short way is open again"
    record.refused(now_ns, 0.5, 7, 5)
    assert ask(record, 10, now_ns + FIRST_PAUSE_NS, PLENTY).start == [7, 5], (
        "what becomes durable undoes the doubling"
    )


def test_a_spool_of_the_largest_numbers_is_not_sent_whole_while_there_is_no_budget() -> None:
    last = (1 << 63) - 1
    record = fresh(spool=[(7, last - 40, last)])
    _epoch, first = ask(record, 1, 0, Budget(0)).start
    assert first > last, "behind all that the agent holds: the newest alone"


def test_every_other_poll_is_left_out_while_there_is_no_room_at_either_recipient() -> None:
    record = fresh()

    def start(poll: int, is_unread: bool) -> list[int] | None:
        asked = record.poll(poll, 0, PLENTY, is_unread)
        record.answered(poll)
        return None if asked is None else asked.start

    assert start(1, is_unread=True) == [7, 1], "dbmanager has room"
    record.refused(0, 0.5, 7, 1)
    newest = [7, BEYOND]
    assert [start(poll, is_unread=True) for poll in range(2, 8)] == [None, newest] * 3
    assert [start(poll, is_unread=False) for poll in range(8, 11)] == [newest] * 3
    assert record.oldest_poll is None
    behind, scarce = fresh(spool=[(7, 1, 40)]), Budget(1)
    assert behind.poll(1, 0, scarce, is_unread=True) is not None, "there is budget for its backlog"
    assert behind.poll(2, 0, scarce, is_unread=True) is None


class EveryOther(CatchUp):
    """Grants every other request."""

    asked = 0

    def grant(self, now_ns: int) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


class World:
    """An agent with a spool, a dbmanager that takes cuts only in order, and the record between them."""

    def __init__(self) -> None:
        self.epoch, self.seq = 1, 0
        self.spool: list[tuple[int, int]] = []
        self.mailbox: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []  # dbmanager, in memory
        self.high: dict[int, int] = {}  # dbmanager, on disk
        self.stored: list[tuple[int, int]] = []
        self.judged: list[tuple[int, int]] = []
        self.wire: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]] = []
        self.poll_id = 0
        self.now_ns = 0
        self.budget = EveryOther(1 << 40, 10**9)
        self.record = CutPositions()
        self.register()

    def register(self) -> None:
        rows = []
        for epoch in dict.fromkeys(item[0] for item in self.spool):
            seqs = [seq for other, seq in self.spool if other == epoch]
            rows.append((epoch, seqs[0], seqs[-1]))
        self.wire.clear()
        self.record.register(self.epoch, rows, dict(self.high))

    def cut(self) -> None:
        self.seq += 1
        self.spool.append((self.epoch, self.seq))

    def restart_agent(self) -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        self.register()

    def poll(self, backlog: int) -> None:
        """The agent answers at once; what it sends is on the wire until ``arrive``."""
        self.poll_id += 1
        twin = copy.deepcopy(self.record)
        single = self.record.poll_single_epoch(self.poll_id, self.now_ns)
        asked = ask(self.record if single is None else twin, self.poll_id, self.now_ns, self.budget)
        if single is not None:  # the short way does what the long one does
            epoch, acked, first = single
            assert asked == PollRequest([[epoch, acked]] if acked else [], [epoch, first])
            assert values_of(twin) == values_of(self.record)
        self.cut()
        acked = dict(map(tuple, asked.ack))
        self.spool = [item for item in self.spool if item[1] > acked.get(item[0], 0)]
        order = list(dict.fromkeys(item[0] for item in self.spool))
        start = tuple(asked.start)
        at = order.index(start[0]) if start[0] in order else 0
        wanted = [
            item
            for item in self.spool
            if order.index(item[0]) > at or (item[0] == start[0] and item[1] >= start[1])
        ]
        live = [] if self.spool[-1] in wanted[:backlog] else [self.spool[-1]]
        self.wire.append((self.poll_id, wanted[:backlog], live))

    def arrive(self, refuse: bool, posted: int = 0) -> None:
        """The oldest answer arrives; its batch is posted, or refused but for what was posted before."""
        if not self.wire:
            return
        poll, cuts, live = self.wire.pop(0)
        if len(cuts) == 1 and not live and not refuse and self.arrive_usually(poll, *cuts[0]):
            return
        if not cuts and live and self.arrive_live(poll, *live[0]):
            return
        batch = []
        for items, is_live in ((cuts, False), (live, True)):
            for epoch, seq in items:
                verdict = self.record.received(epoch, seq, is_live, self.now_ns)
                batch += [(epoch, seq)] * verdict.keep
                self.judged += [(epoch, seq)] * verdict.judge
        if refuse and batch[posted:]:
            self.record.refused(self.now_ns, 0.0, *batch[posted])
            batch = batch[:posted]
        self.mailbox += batch
        assert self.record.answered(poll) is not None

    def arrive_usually(self, poll: int, epoch: int, seq: int) -> bool:
        """The short way, if it is open: with the effect of the long one. Else nothing has changed."""
        twin = copy.deepcopy(self.record)
        sent_ns = self.record.answered_in_order(poll, epoch, seq, self.now_ns)
        if sent_ns is not None:
            assert twin.received(epoch, seq, False, self.now_ns) == CutVerdict(keep=True, judge=True)
            assert twin.answered(poll) == sent_ns
            self.mailbox.append((epoch, seq))
            self.judged.append((epoch, seq))
        assert values_of(twin) == values_of(self.record)
        return sent_ns is not None

    def arrive_live(self, poll: int, epoch: int, seq: int) -> bool:
        """The short way of the newest cut alone, likewise."""
        twin = copy.deepcopy(self.record)
        sent_ns = self.record.answered_live(poll, epoch, seq)
        if sent_ns is not None:
            assert twin.received(epoch, seq, True, self.now_ns) == JUDGE
            assert twin.answered(poll) == sent_ns
            self.judged.append((epoch, seq))
        assert values_of(twin) == values_of(self.record)
        return sent_ns is not None

    def store(self) -> None:
        """dbmanager takes its mail: what does not follow its high water is a hole, and must never be."""
        for epoch, seq in self.mailbox:
            assert seq <= self.high.get(epoch, 0) + 1, "a hole: cuts would be lost"
            if seq > self.high.get(epoch, 0):
                self.high[epoch] = seq
                self.stored.append((epoch, seq))
                self.record.durable(epoch, seq, self.now_ns)
        self.mailbox.clear()

    def restart_dbmanager(self) -> None:
        """Mail it had not made durable is gone."""
        self.mailbox.clear()
        self.record.restart(dict(self.high))


@given(
    st.lists(
        st.sampled_from(
            [
                "poll",
                "poll2",
                "arrive",
                "arrive",
                "refuse",
                "refuse2",
                "store",
                "agent",
                "db",
                "again",
                "wait",
            ]
        )
    )
)
@settings(max_examples=400)
def test_nothing_is_lost_or_stored_twice(steps: list[str]) -> None:
    world = World()
    for step in steps:
        match step:
            case "poll":
                world.poll(100)
            case "poll2":
                world.poll(2)
            case "arrive":
                world.arrive(refuse=False)
            case "refuse":
                world.arrive(refuse=True)
            case "refuse2":
                world.arrive(refuse=True, posted=2)
            case "store":
                world.store()
            case "agent":
                world.restart_agent()
            case "db":
                world.restart_dbmanager()
            case "again":
                world.register()
            case "wait":
                world.now_ns += FIRST_PAUSE_NS
    world.now_ns += LONGEST_PAUSE_NS
    for _ in range(4):  # quiet times: everything made so far must come through
        world.poll(100)
        while world.wire:
            world.arrive(refuse=False)
        world.store()
    made = [
        (epoch, seq) for epoch in range(1, world.epoch + 1) for seq in range(1, world.high.get(epoch, 0) + 1)
    ]
    assert sorted(world.stored) == made
    assert world.judged == sorted(set(world.judged)), "each once, and none after a newer one"
    assert world.spool[-1][1] - world.high[world.epoch] in (0, 1)
    assert [item for item in world.spool if item[1] > world.high.get(item[0], 0)] in ([], world.spool[-1:])
