"""A SET_THRESHOLDS is the sign of a new services, or an echo."""

from __future__ import annotations

from pmdaemon.cycle.revival import PAUSE_NS, RevivalWatch

SECOND = 10**9


def alive(now_ns: int = 0) -> RevivalWatch:
    """A watch that has seen services start."""
    watch = RevivalWatch()
    watch.lease(now_ns)
    assert watch.has_restarted({}, now_ns)
    return watch


def test_first_is_a_start_even_if_prompted() -> None:
    watch = RevivalWatch()
    watch.prompted()
    assert watch.has_restarted({}, 0)
    watch.prompted()
    assert not watch.has_restarted({}, 0)


def test_prompted_is_an_echo_once() -> None:
    watch = alive()
    watch.prompted()
    watch.prompted()
    assert not watch.has_restarted({}, 1)
    assert watch.has_restarted({}, 2)


def test_pause_of_the_lease_betrays_a_restart_in_the_echo_window() -> None:
    watch = alive()
    watch.prompted()
    assert watch.has_restarted({}, PAUSE_NS + 1)  # the set came before the first lease
    watch = alive()
    watch.lease(SECOND)
    watch.prompted()
    watch.lease(SECOND + PAUSE_NS + 1)
    assert watch.has_restarted({}, SECOND + PAUSE_NS + 2)
    watch.prompted()
    assert not watch.has_restarted({}, SECOND + PAUSE_NS + 3)


def test_regular_lease_is_no_pause() -> None:
    watch = alive()
    for tick in range(1, 10):
        watch.lease(tick * SECOND)
        watch.prompted()
        assert not watch.has_restarted({}, tick * SECOND + 1)


def test_incarnation_is_exact() -> None:
    watch = RevivalWatch()
    assert watch.has_restarted({"inc": 1}, 0)
    assert not watch.has_restarted({"inc": 1}, 100 * SECOND)
    watch.prompted()
    assert watch.has_restarted({"inc": 2}, 0)
