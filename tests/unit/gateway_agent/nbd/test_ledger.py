from gateway_agent.nbd.ledger import ChangeLedger


def flushed(connection):
    connection.flushed(connection.mark())
    return connection


def changed(ledger):
    """A change was acknowledged, on whichever connection."""
    ledger.begun()
    ledger.ended(needs_flush=True)


def test_what_a_former_life_of_the_plane_wrote_is_not_known_to_be_stable():
    assert not ChangeLedger().joined().is_covered
    assert flushed(ChangeLedger().joined()).is_covered


def test_a_flush_covers_what_was_acknowledged_before_it_was_sent_and_nothing_else():
    ledger = ChangeLedger()
    ours = ledger.joined()
    ledger.begun()
    early = ours.mark()
    ledger.ended(needs_flush=True)
    ours.flushed(early)
    assert not ours.is_covered
    late = ours.mark()
    ours.flushed(late)
    ours.flushed(early)
    assert ours.is_covered, "flushes may be answered in any order"


def test_a_change_with_fua_or_that_failed_needs_no_flush():
    ledger = ChangeLedger()
    ours = flushed(ledger.joined())
    ledger.begun()
    assert (ours.is_covered, ledger.is_quiet(0), ledger.is_quiet(1)) == (True, False, True)
    ledger.ended(needs_flush=False)
    assert (ours.is_covered, ledger.is_quiet(0)) == (True, True)


def test_a_connection_that_is_not_counted_makes_it_uncertain_until_a_flush_behind_its_end():
    ledger = ChangeLedger()
    ours = flushed(ledger.joined())
    ledger.uncounted(1)
    assert not flushed(ours).is_covered
    ledger.uncounted(-1)
    assert not ours.is_covered
    assert flushed(ours).is_covered


def test_a_flush_says_nothing_to_earlier_connections_of_what_was_written_before_its_own_was_made():
    """The storage may have been restarted in between, and the earlier ones do not know yet."""
    ledger = ChangeLedger()
    first, second = flushed(ledger.joined()), ledger.joined()
    changed(ledger)
    third = flushed(ledger.joined())
    assert (first.is_covered, second.is_covered, third.is_covered) == (False, False, True)
    assert flushed(ledger.joined()).is_covered, "it never saw what may be lost"
    changed(ledger)
    flushed(third)
    assert (first.is_covered, second.is_covered) == (False, False)
    flushed(second)
    assert (first.is_covered, second.is_covered, third.is_covered) == (True, True, True)


def test_from_then_on_where_all_was_covered_when_it_was_made_a_later_flush_covers_for_all():
    ledger = ChangeLedger()
    first = flushed(ledger.joined())
    later = ledger.joined()
    changed(ledger)
    flushed(later)
    assert first.is_covered
    changed(ledger)
    flushed(ledger.joined())
    assert not first.is_covered
    flushed(later)
    assert first.is_covered


def test_one_that_was_made_again_is_the_latest():
    ledger = ChangeLedger()
    first, second = flushed(ledger.joined()), ledger.joined()
    ledger.renewed(first)
    changed(ledger)
    flushed(first)
    assert second.is_covered, "nothing was uncovered when it was made again"
    changed(ledger)
    ledger.renewed(first)
    flushed(first)
    assert (first.is_covered, second.is_covered) == (True, False)


def test_what_was_not_counted_may_be_older_than_every_connection():
    ledger = ChangeLedger()
    first, later = flushed(ledger.joined()), ledger.joined()
    ledger.doubt()
    flushed(later)
    assert (first.is_covered, later.is_covered) == (False, True)
    flushed(first)
    assert first.is_covered


def test_one_that_has_ended_is_no_more_asked_for():
    ledger = ChangeLedger()
    for _ in range(1000):
        ledger.left(ledger.joined())
    assert flushed(ledger.joined()).is_covered
    assert len(ledger._connections) == 1, "what it remembers does not grow"
