"""The budget for backlog finds the rate that the machine can take."""

import pytest

from pmdaemon.poller.catch_up import FIRST_BYTES_PER_S, FORGET_NS, LEAST_BYTES_PER_S, CatchUp

SECOND = 10**9
MB = 1 << 20
MOST = 64 * MB


def test_it_grants_bytes_a_second_and_forgets_what_was_not_used() -> None:
    budget = CatchUp(MOST, SECOND)
    answer = 64 << 10  # what one is thought to bring before the first has come
    for now_ns in range(0, 10 * SECOND, SECOND // 1000):
        while budget.grant(now_ns):
            pass
    granted = 0
    for now_ns in range(10 * SECOND, 20 * SECOND, SECOND // 1000):
        granted += budget.grant(now_ns)
    assert granted * answer == pytest.approx(10 * FIRST_BYTES_PER_S, rel=0.02)
    burst = 0
    while budget.grant(50 * SECOND):
        burst += answer
    assert burst == FIRST_BYTES_PER_S / 4, "30 quiet seconds leave a quarter of a second's worth"


def test_a_grant_costs_what_answers_bring() -> None:
    budget = CatchUp(FIRST_BYTES_PER_S, SECOND)
    for _ in range(200):
        budget.answered(256 << 10, 0, 0)
    granted = sum(budget.grant(now_ns) for now_ns in range(SECOND, 11 * SECOND, SECOND // 1000))
    assert granted == pytest.approx(10 * FIRST_BYTES_PER_S / (256 << 10), rel=0.05)
    for _ in range(200):
        budget.answered(0, 0, 0)
    assert 0 < sum(budget.grant(11 * SECOND) for _ in range(10**6)) < 10**6, "an empty answer costs, too"


def test_answers_in_time_raise_it_up_to_the_limit_and_late_ones_halve_it_once_an_interval() -> None:
    budget = CatchUp(MOST, SECOND)
    budget.answered(FIRST_BYTES_PER_S, SECOND // 10, 0)
    assert budget.bytes_per_s == 2 * FIRST_BYTES_PER_S, "a second's worth was answered: twofold"
    for _ in range(100):
        budget.answered(MB, SECOND // 10, 0)
    assert budget.bytes_per_s == MOST
    for _ in range(10):
        budget.answered(MB, SECOND // 2, SECOND)
    assert budget.bytes_per_s == MOST / 2, "all of them were under way together"
    assert budget.grant(2 * SECOND)
    budget.refused(2 * SECOND)
    assert budget.bytes_per_s == MOST / 4
    budget.answered(10 * MB, SECOND // 10, 2 * SECOND)
    assert budget.bytes_per_s == MOST / 4 + MB, "after a setback it grows slowly"
    for now_s in range(3, 40):
        budget.grant(now_s * SECOND)
        budget.refused(now_s * SECOND)
    assert budget.bytes_per_s == LEAST_BYTES_PER_S
    assert CatchUp(LEAST_BYTES_PER_S, SECOND).bytes_per_s == LEAST_BYTES_PER_S


def test_slow_answers_never_bring_it_below_what_the_fleet_makes_and_refusals_do() -> None:
    budget = CatchUp(MOST, SECOND)
    budget.set_present(6 * MB)
    for now_s in range(60):  # a machine that is slow for a minute, whatever it is asked for
        budget.answered(256 << 10, SECOND, now_s * SECOND)
    assert 6 * MB <= budget.bytes_per_s < 12 * MB
    for now_s in range(60, 90):
        budget.grant(now_s * SECOND)
        budget.refused(now_s * SECOND)
    assert budget.bytes_per_s == LEAST_BYTES_PER_S, "dbmanager has no room"
    for now_s in range(90, 400):
        budget.answered(256 << 10, SECOND, now_s * SECOND)
    assert budget.bytes_per_s >= 6 * MB, "it has room again, and the machine is as slow as before"
    few = CatchUp(MB, SECOND)
    few.set_present(100 * MB)
    for now_s in range(60):
        few.answered(MB, SECOND // 10, now_s * SECOND)
    assert few.bytes_per_s == MB, "never above the limit"


def test_long_after_the_last_backlog_it_begins_again() -> None:
    budget = CatchUp(MOST, SECOND)
    for now_s in range(40):
        budget.grant(now_s * SECOND)
        budget.refused(now_s * SECOND)
    budget.answered(0, 0, 39 * SECOND)
    assert budget.bytes_per_s < 2 * LEAST_BYTES_PER_S
    budget.grant(FORGET_NS + 40 * SECOND)
    assert budget.bytes_per_s == FIRST_BYTES_PER_S
    granted = 1
    while budget.grant(FORGET_NS + 40 * SECOND):
        granted += 1
    assert granted == FIRST_BYTES_PER_S / 4 / (64 << 10), "what answers bring is open again, too"


def test_refusals_before_anything_was_granted_say_nothing_of_it() -> None:
    budget = CatchUp(MOST, SECOND)
    for now_s in range(30):  # dbmanager is away
        budget.refused(now_s * SECOND)
    assert budget.bytes_per_s == FIRST_BYTES_PER_S


def test_a_few_slow_links_do_not_hold_up_the_others() -> None:
    budget = CatchUp(MOST, SECOND)
    for number in range(10_000):
        is_slow = number % 10 == 0
        budget.answered(64 << 10, SECOND if is_slow else SECOND // 100, number * SECOND // 500)
    assert budget.bytes_per_s == MOST
    for number in range(10_000, 20_000):
        is_slow = number % 2 == 0
        budget.answered(64 << 10, SECOND if is_slow else SECOND // 100, number * SECOND // 500)
    assert budget.bytes_per_s < MOST / 4, "half of all answers: it is this machine"


@pytest.mark.parametrize("capacity", [2 * MB, 10 * MB, 40 * MB])
def test_it_finds_what_a_machine_can_take(capacity: int) -> None:
    """A machine that works through what it is sent at a fixed rate; an answer waits for those before it."""
    budget, answer, step_ns = CatchUp(1 << 40, SECOND), 64 << 10, SECOND // 100
    free_ns, came = 0, 0
    under_way: list[tuple[int, int]] = []  # (answered at, waited)
    late = 0
    for now_ns in range(0, 60 * SECOND, step_ns):
        while under_way and under_way[0][0] <= now_ns:
            done_ns, waited_ns = under_way.pop(0)
            budget.answered(answer, waited_ns, done_ns)
            late += waited_ns > SECOND and done_ns > 10 * SECOND
            came += answer if done_ns > 10 * SECOND else 0
        while budget.grant(now_ns):
            free_ns = max(free_ns, now_ns) + answer * SECOND // capacity
            under_way.append((free_ns, free_ns - now_ns))
    assert late == 0
    assert came > 0.6 * 50 * capacity, "most of what the machine can take is used"
