"""Messages that wait for room, or for their answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pmdaemon.mailbox import OTHERS, MailboxSender, Resend
from pmdaemon.mailbox.errors import MessageTooLarge
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.fake_mailbox import FakeMailbox


def made(limit_bytes: int = 1000) -> tuple[MailboxSender, FakeMailbox, FakeMailbox]:
    main, app = FakeMailbox(), FakeMailbox()
    return MailboxSender({"*": main, "appserver": app}, limit_bytes), main, app


def lease(number: int) -> bytes:
    return frame.encode(Kind.LEASE, {"n": number})


def numbers(mailbox: FakeMailbox) -> list[tuple[str, int]]:
    return [(to, header["n"]) for to, header in mailbox.take_posted(Kind.LEASE)]


def test_each_recipient_has_its_mailbox_and_its_order() -> None:
    sender, main, app = made()
    for number, to in enumerate(["pair-0", "appserver", "pair-1", "pair-0"]):
        sender.put(to, lease(number))
    sender.flush()
    assert numbers(main) == [("pair-0", 0), ("pair-0", 3), ("pair-1", 2)]
    assert numbers(app) == [("appserver", 1)]
    assert sender.waiting() == 0


def test_one_full_recipient_holds_up_nobody_else() -> None:
    sender, main, _ = made()
    main.full = {"pair-0"}
    sender.put("pair-0", lease(0))
    sender.put("pair-1", lease(1))
    sender.flush()
    assert numbers(main) == [("pair-1", 1)]
    assert (sender.waiting("pair-0"), sender.full) == (1, 1)
    main.full = set()
    sender.flush()
    assert numbers(main) == [("pair-0", 0)]


def test_what_finds_room_is_posted_and_the_rest_waits_in_order() -> None:
    sender, main, _ = made()
    for number in range(5):
        sender.put("pair-0", lease(number))
    main.room = 3
    sender.flush()
    assert numbers(main) == [("pair-0", number) for number in range(3)]
    assert (sender.waiting("pair-0"), sender.full) == (2, 1)
    sender.flush()
    assert numbers(main) == [("pair-0", 3), ("pair-0", 4)]
    assert sender.waiting() == 0


def test_a_newer_state_takes_the_place_of_one_that_waits() -> None:
    sender, main, _ = made()
    main.full = {"pair-0"}
    for number in range(1000):
        assert sender.put("pair-0", lease(number), key="lease")
    main.full = set()
    sender.flush()
    assert numbers(main) == [("pair-0", 999)]


def test_what_does_not_fit_is_counted() -> None:
    sender, main, _ = made(limit_bytes=2 * len(lease(0)))
    assert [sender.put("pair-0", lease(number)) for number in range(3)] == [True, True, False]
    assert sender.lost == 1
    sender.flush()
    assert numbers(main) == [("pair-0", 0), ("pair-0", 1)]
    assert sender.put("pair-0", lease(4))


def test_beyond_its_limits_a_sender_drops_the_oldest_and_names_the_recipient_once() -> None:
    main = FakeMailbox()
    by_bytes = MailboxSender({OTHERS: main}, 3 * len(lease(0)), drop_oldest=True)
    by_number = MailboxSender({OTHERS: main}, 1 << 20, limit_messages=3, drop_oldest=True)
    for sender in (by_bytes, by_number):
        main.full = {"pair-0"}
        for number in range(5):
            sender.send(lease(number), "pair-0", "pair-1")
        assert [to for to, _ in numbers(main)] == ["pair-1"] * 5
        assert (sender.lost, sender.waiting(), sender.overflowed()) == (2, 3, [])
        main.full = set()
        sender.flush()
        assert numbers(main) == [("pair-0", number) for number in (2, 3, 4)]
        assert sender.overflowed() == ["pair-0"]
        assert sender.overflowed() == []


def test_a_message_larger_than_the_limit_is_kept_alone() -> None:
    main = FakeMailbox()
    main.full = {"pair-0"}
    sender = MailboxSender({OTHERS: main}, 1, drop_oldest=True)
    sender.send(lease(0), "pair-0")
    sender.send(lease(1), "pair-0")
    assert (sender.waiting("pair-0"), sender.lost) == (1, 1)


def test_what_is_sent_goes_out_at_once_unless_something_waits_there() -> None:
    sender, main, app = made()
    main.full = {"pair-0"}
    sender.send(lease(0), "pair-0", "pair-1", "appserver")
    main.full = set()
    sender.send(lease(1), "pair-0", "pair-1", "appserver")
    assert numbers(main) == [("pair-1", 0), ("pair-1", 1)]
    assert numbers(app) == [("appserver", 0), ("appserver", 1)]
    sender.flush()
    assert numbers(main) == [("pair-0", 0), ("pair-0", 1)]


def test_what_can_never_be_posted_is_reported_and_holds_up_nothing() -> None:
    class Small(FakeMailbox):
        def post(self, recipients: str | Sequence[str], payload: bytes) -> None:
            if len(payload) > 100:
                raise MessageTooLarge("services", str(recipients), len(payload), 100)
            super().post(recipients, payload)

        def post_many(self, recipient: str, payloads: Sequence[bytes]) -> None:
            for payload in payloads:
                if len(payload) > 100:
                    raise MessageTooLarge("services", recipient, len(payload), 100)
            super().post_many(recipient, payloads)

    main, reported = Small(), []
    sender = MailboxSender(
        {OTHERS: main}, 1 << 20, on_undeliverable=lambda recipient, _error: reported.append(recipient)
    )
    large = frame.encode(Kind.LEASE, {"n": "x" * 200})
    sender.send(large, "pair-0")
    assert reported == ["pair-0"]
    for payload in (lease(0), large, lease(1)):
        sender.put("pair-0", payload)
    sender.flush()
    assert reported == ["pair-0"] * 2
    assert numbers(main) == [("pair-0", 0), ("pair-0", 1)]
    assert sender.waiting() == 0
    raising = MailboxSender({OTHERS: main}, 1 << 20)
    with pytest.raises(MessageTooLarge):
        raising.send(large, "pair-0")
    raising.put("pair-0", large)
    with pytest.raises(MessageTooLarge):
        raising.flush()


def test_messages_stay_until_they_are_answered_and_go_out_again_in_order() -> None:
    main = FakeMailbox()
    sender = MailboxSender({OTHERS: main}, 1 << 20, resend=Resend(first_ns=5, last_ns=20))
    assert sender.put_all("pair-0", [(number, lease(number)) for number in range(3)])
    assert sender.flush(100) == 0
    assert len(numbers(main)) == 3
    assert sender.answered("pair-0", 1, 100)
    assert not sender.answered("pair-0", 1, 100)
    assert not sender.answered("pair-0", 7, 100)
    assert not sender.answered("pair-1", 0, 100)
    assert (sender.waiting(), sender.flush(104)) == (2, 0)
    assert sender.flush(105) == 3
    assert numbers(main) == [("pair-0", number) for number in range(3)]
    assert (sender.flush(114), sender.flush(115)) == (0, 3)  # the pause has doubled
    assert sender.answered("pair-0", 0, 115)
    assert sender.answered("pair-0", 2, 115)
    assert (sender.waiting(), sender.waiting_bytes("pair-0"), sender.flush(200)) == (0, 0, 0)


def test_messages_that_belong_together_are_kept_all_or_none() -> None:
    sender = MailboxSender({OTHERS: FakeMailbox()}, 2 * len(lease(0)), resend=Resend(1, 1))
    assert not sender.put_all("pair-0", [(number, lease(number)) for number in range(3)])
    assert (sender.lost, sender.waiting()) == (3, 0)
    assert sender.put_all("pair-0", [(number, lease(number)) for number in range(2)])
