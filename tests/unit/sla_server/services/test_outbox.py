"""Messages that wait for room."""

from __future__ import annotations

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.services.outbox import Outbox
from tests.support.fake_mailbox import FakeMailbox


def made(limit_bytes: int = 1000) -> tuple[Outbox, FakeMailbox, FakeMailbox]:
    main, app = FakeMailbox(), FakeMailbox()
    return Outbox({"*": main, "appserver": app}, limit_bytes), main, app


def lease(number: int) -> bytes:
    return frame.encode(Kind.LEASE, {"n": number})


def numbers(mailbox: FakeMailbox) -> list[tuple[str, int]]:
    return [(to, header["n"]) for to, header in mailbox.take_posted(Kind.LEASE)]


def test_each_recipient_has_its_mailbox_and_its_order() -> None:
    outbox, main, app = made()
    for number, to in enumerate(["pair-0", "appserver", "pair-1", "pair-0"]):
        outbox.put(to, lease(number))
    outbox.flush()
    assert numbers(main) == [("pair-0", 0), ("pair-0", 3), ("pair-1", 2)]
    assert numbers(app) == [("appserver", 1)]
    assert outbox.waiting() == 0


def test_one_full_recipient_holds_up_nobody_else() -> None:
    outbox, main, _ = made()
    main.full = {"pair-0"}
    outbox.put("pair-0", lease(0))
    outbox.put("pair-1", lease(1))
    outbox.flush()
    assert numbers(main) == [("pair-1", 1)]
    assert (outbox.waiting("pair-0"), outbox.full) == (1, 1)
    main.full = set()
    outbox.flush()
    assert numbers(main) == [("pair-0", 0)]


def test_what_finds_room_is_posted_and_the_rest_waits_in_order() -> None:
    outbox, main, _ = made()
    for number in range(5):
        outbox.put("pair-0", lease(number))
    main.room = 3
    outbox.flush()
    assert numbers(main) == [("pair-0", number) for number in range(3)]
    assert (outbox.waiting("pair-0"), outbox.full) == (2, 1)
    outbox.flush()
    assert numbers(main) == [("pair-0", 3), ("pair-0", 4)]
    assert outbox.waiting() == 0


def test_a_newer_state_takes_the_place_of_one_that_waits() -> None:
    outbox, main, _ = made()
    main.full = {"pair-0"}
    for number in range(1000):
        assert outbox.put("pair-0", lease(number), key="lease")
    main.full = set()
    outbox.flush()
    assert numbers(main) == [("pair-0", 999)]


def test_what_does_not_fit_is_counted() -> None:
    outbox, main, _ = made(limit_bytes=2 * len(lease(0)))
    assert [outbox.put("pair-0", lease(number)) for number in range(3)] == [True, True, False]
    assert outbox.lost == 1
    outbox.flush()
    assert numbers(main) == [("pair-0", 0), ("pair-0", 1)]
    assert outbox.put("pair-0", lease(4))
