from gateway_agent.nbd.ledger import ChangeLedger


def flushed(ledger):
    ledger.flushed(ledger.mark())
    return ledger


def test_what_a_former_life_of_the_plane_wrote_is_not_known_to_be_stable():
    assert not ChangeLedger().is_covered
    assert flushed(ChangeLedger()).is_covered


def test_a_flush_covers_what_was_acknowledged_before_it_was_sent_and_nothing_else():
    ledger = ChangeLedger()
    ledger.begun()
    early = ledger.mark()
    ledger.ended(needs_flush=True)
    ledger.flushed(early)
    assert not ledger.is_covered
    late = ledger.mark()
    ledger.flushed(late)
    ledger.flushed(early)
    assert ledger.is_covered, "flushes may be answered in any order"


def test_a_change_with_fua_or_that_failed_needs_no_flush():
    ledger = flushed(ChangeLedger())
    ledger.begun()
    assert (ledger.is_covered, ledger.is_quiet(0), ledger.is_quiet(1)) == (True, False, True)
    ledger.ended(needs_flush=False)
    assert (ledger.is_covered, ledger.is_quiet(0)) == (True, True)


def test_a_connection_that_is_not_counted_makes_it_uncertain_until_a_flush_behind_its_end():
    ledger = flushed(ChangeLedger())
    ledger.uncounted(1)
    assert not flushed(ledger).is_covered
    ledger.uncounted(-1)
    assert not ledger.is_covered
    assert flushed(ledger).is_covered
