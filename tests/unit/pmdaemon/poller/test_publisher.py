"""Batches and mail: order, limits, and what becomes of mail nobody has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pmdaemon.poller import cut_batch, pair
from pmdaemon.poller.cut_batch import BATCH_AGE_NS, BATCH_BYTES, BATCH_CUTS, CutsBuilder
from pmdaemon.poller.publisher import NEWEST_RETRY_NS, NEWS_BYTES, NEWS_RETRY_NS, CutPublisher
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import MAX_CUT_BYTES
from tests.support.fake_mailbox import FakeMailbox
from tests.support.gateways import GATEWAY, make_cut


@pytest.fixture
def box() -> Iterator[FakeMailbox]:
    made = FakeMailbox()
    yield made
    made.close()


class Post:
    def __init__(self, box: FakeMailbox) -> None:
        self.rewound: list[dict[str, tuple[int, int]]] = []
        self.publisher = CutPublisher(box, 0, lambda first_cuts, _now_ns: self.rewound.append(first_cuts))

    def cut(
        self, seq: int, *, keep: bool = True, judge: bool = True, live: bool = False, now_ns: int = 0
    ) -> None:
        self.publisher.cut(
            make_cut(seq=seq),
            GATEWAY,
            7,
            seq,
            keep=keep,
            judge=judge,
            live=live,
            recv_unix_us=1000 + seq,
            offset_us=-5,
            now_ns=now_ns,
        )


def test_batch_waits_20_ms_and_goes_out_as_one_message_for_both(box: FakeMailbox) -> None:
    post = Post(box)
    post.cut(1, now_ns=100)
    post.cut(2, now_ns=200)
    post.publisher.flush(100 + BATCH_AGE_NS - 1)
    assert box.posts == []
    assert post.publisher.due_ns() == 100 + BATCH_AGE_NS
    post.publisher.flush(100 + BATCH_AGE_NS)
    assert [names for names, _ in box.posts] == [("dbmanager", "services")]
    header = box.to("services")[0].header
    assert header == {
        "pair": 0,
        "n": 2,
        "recv_us": [1001, 1002],
        "offset_us": [-5, -5],
        "live": [False, False],
    }
    assert [bytes(raw) for raw in frame.split(box.to("services")[0].blob)] == [
        make_cut(seq=1),
        make_cut(seq=2),
    ]
    assert post.publisher.due_ns() is None
    assert post.publisher.posted_cuts == 2


def test_full_batch_goes_at_once() -> None:
    box = FakeMailbox()
    post = Post(box)
    size = len(make_cut())
    for seq in range(1, BATCH_BYTES // size + 2):
        post.cut(seq)
    assert len(box.to("dbmanager")) == 1
    assert len(box.to("dbmanager")[0].blob) <= BATCH_BYTES
    box.close()


def test_live_goes_to_services_only_and_order_is_kept_per_recipient(box: FakeMailbox) -> None:
    post = Post(box)
    post.cut(1)
    post.cut(9, keep=False, live=True)
    post.cut(2, judge=False)
    post.cut(3)
    post.publisher.flush(BATCH_AGE_NS)
    assert box.cuts_to("dbmanager") == [(1, False), (2, False), (3, False)]
    assert box.cuts_to("services") == [(1, False), (9, True), (3, False)]


def test_dbmanager_without_room_rewinds_those_gateways_and_services_is_served(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"dbmanager"}
    post.cut(1)
    post.publisher.flush(BATCH_AGE_NS)
    assert post.rewound == [{GATEWAY: (7, 1)}]
    assert box.cuts_to("services") == [(1, False)]
    assert post.publisher.refused_keeping == 1
    assert post.publisher.posted_cuts == 0
    posted_bytes = post.publisher.posted_bytes
    assert posted_bytes == len(box.posts[0][1])
    post.cut(1, judge=False)
    post.publisher.post_cuts()
    assert post.publisher.posted_bytes == posted_bytes, "nobody had room"
    post.rewound.pop()
    box.full = set()
    post.cut(1, judge=False)
    post.publisher.flush(BATCH_AGE_NS)
    assert box.cuts_to("dbmanager") == [(1, False)]
    assert len(post.rewound) == 1


def test_a_cut_behind_one_that_was_refused_is_not_posted_either(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"dbmanager"}
    last = BATCH_BYTES // len(make_cut()) + 1
    for seq in range(1, last):
        post.cut(seq)
    post.publisher.cut(make_cut(OTHER, seq=5), OTHER, 7, 5, recv_unix_us=1, offset_us=0, now_ns=0)
    assert list(post.rewound[0]) == [GATEWAY], "the batch was full"
    box.full = set()
    post.publisher.post_cuts()
    assert box.cuts_to("dbmanager") == [(5, False)], "nothing of it was refused"
    box.full = {"dbmanager"}
    for seq in range(1, last + 1):
        post.cut(seq)
    box.full = set()
    post.publisher.post_cuts()
    assert box.cuts_to("dbmanager") == [(5, False)], "the last one would leave a hole"
    assert (last, False) in box.cuts_to("services")


OTHER = "00000000-0000-4000-8000-0000000000ff"


def test_services_without_room_gets_each_gateways_newest_cut_later(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"services"}
    for seq in (1, 2):
        post.cut(seq)
    other = make_cut(seq=7)
    post.publisher.cut(other, OTHER, 7, 7, recv_unix_us=1, offset_us=0, now_ns=0)
    post.publisher.flush(BATCH_AGE_NS)
    post.cut(3, now_ns=BATCH_AGE_NS)
    post.publisher.flush(2 * BATCH_AGE_NS)
    assert post.publisher.dropped_live_cuts == 2
    assert post.rewound == []
    assert box.cuts_to("dbmanager") == [(1, False), (2, False), (7, False), (3, False)]
    assert box.cuts_to("services") == []
    box.full = set()
    post.publisher.flush(2 * NEWEST_RETRY_NS)
    assert box.cuts_to("services") == [(3, False), (7, False)]
    assert box.to("services")[0].header["recv_us"] == [1003, 1]
    post.publisher.flush(3 * NEWEST_RETRY_NS)
    assert len(box.to("services")) == 1, "each is posted once"


def test_a_waiting_cut_is_not_overtaken(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"services"}
    post.cut(1)
    post.cut(9, keep=False, live=True)
    post.publisher.post_cuts()
    assert post.publisher.dropped_live_cuts == 1
    box.full = set()
    post.publisher.cut(make_cut(seq=7), OTHER, 7, 7, recv_unix_us=1, offset_us=0, now_ns=0)
    post.publisher.post_cuts()
    assert box.cuts_to("services") == [], "what waits goes first"
    post.publisher.flush(0)
    assert box.cuts_to("services") == [(9, True), (7, False)]


def test_without_room_at_services_no_cut_is_decoded(
    box: FakeMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post(box)
    box.full = {"services"}
    decoded: list[int] = []
    decode = frame.decode

    def counting(view: memoryview | bytes) -> frame.Frame:
        decoded.append(len(view))
        return decode(view)

    monkeypatch.setattr(frame, "decode", counting)  # counts work, which shows nowhere else
    for seq in range(1, 11):
        post.cut(seq, keep=False, live=True)
        post.publisher.post_cuts()
    assert post.publisher.dropped_live_cuts == 9
    assert decoded == []


def test_a_full_mailbox_is_not_asked_again_at_every_flush(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"services"}
    post.cut(1)
    post.publisher.post_cuts()
    post.publisher.flush(1)
    tries = box.refusals
    post.publisher.flush(2)
    post.publisher.flush(NEWEST_RETRY_NS)
    assert box.refusals == tries
    assert post.publisher.due_ns() == 1 + NEWEST_RETRY_NS, "also if nothing else happens"
    post.publisher.flush(1 + NEWEST_RETRY_NS)
    assert box.refusals == tries + 1
    post.publisher.news(make_cut(), "services")
    box.room, box.full = 0, set()
    post.publisher.flush(1 + 2 * NEWEST_RETRY_NS)
    assert post.publisher.due_ns() == 1 + 3 * NEWEST_RETRY_NS, "news goes first, and is not waited for busily"
    box.room = 1
    post.publisher.flush(1 + 3 * NEWEST_RETRY_NS)
    assert box.cuts_to("services") == [(1, False)]
    assert post.publisher.due_ns() is None


def test_news_without_room_is_not_tried_again_at_every_flush(
    box: FakeMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post(box)
    box.full = {"services"}
    post.publisher.news(news(1), "services")
    tries: list[int] = []
    post_many = box.post_many

    def counting(recipient: str, payloads: Sequence[bytes]) -> None:
        tries.append(len(payloads))
        post_many(recipient, payloads)

    monkeypatch.setattr(box, "post_many", counting)  # the fake counts refusals of single posts only
    for now_ns in (1, 2, NEWS_RETRY_NS):
        post.publisher.flush(now_ns)
    assert tries == [1]
    box.full = set()
    post.publisher.flush(1 + NEWS_RETRY_NS)
    assert (tries, post.publisher.waiting_news) == ([1, 1], 0)


def test_what_waits_for_services_is_bounded_by_its_bytes(
    box: FakeMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = len(make_cut())
    monkeypatch.setattr(cut_batch, "WAITING_BYTES", 3 * size_bytes)  # the real limit takes 4,000 gateways
    post = Post(box)
    box.full = {"services"}
    for number in range(5):
        post.publisher.cut(
            make_cut(seq=number + 1),
            f"gateway-{number}",
            7,
            number + 1,
            recv_unix_us=1,
            offset_us=0,
            now_ns=0,
        )
    post.publisher.post_cuts()
    assert post.publisher.dropped_live_cuts == 2
    box.full = set()
    post.publisher.flush(0)
    assert box.cuts_to("services") == [(3, False), (4, False), (5, False)]


def test_what_waits_goes_out_in_messages_of_a_batch(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"services"}
    count = 2 * BATCH_BYTES // len(make_cut())
    for number in range(count):
        post.publisher.cut(make_cut(seq=1), f"gateway-{number}", 7, 1, recv_unix_us=1, offset_us=0, now_ns=0)
    post.publisher.post_cuts()
    box.full = set()
    post.publisher.flush(0)
    assert len(box.cuts_to("services")) == count
    assert all(len(item.blob) <= BATCH_BYTES for item in box.to("services"))
    assert post.publisher.dropped_live_cuts == 0


def news(number: int) -> bytes:
    return frame.encode(Kind.GATEWAY_ALERT, {"n": number})


def test_refused_news_waits_in_order_and_cuts_do_not_overtake_it(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"dbmanager"}
    post.publisher.news(news(1), "dbmanager", "services")
    box.full = set()
    post.publisher.news(news(2), "dbmanager", "services")
    post.cut(1)
    post.publisher.post_cuts()
    assert box.to("dbmanager") == []
    assert post.rewound == [{GATEWAY: (7, 1)}]
    assert [item.header.get("n") for item in box.to("services", Kind.GATEWAY_ALERT)] == [1, 2]
    assert post.publisher.waiting_news == 2
    post.publisher.flush(0)
    assert [item.header["n"] for item in box.to("dbmanager")] == [1, 2]
    assert post.publisher.waiting_news == 0


def test_readings_neither_push_out_news_nor_hold_up_cuts_for_long(box: FakeMailbox) -> None:
    """4,000 gateways send the space of their pools within a minute, whether services has room or not."""
    post = Post(box)
    box.full = {"services"}
    reading = frame.encode(Kind.GATEWAY_SPACE, {}, bytes(1 << 16))
    post.publisher.news(news(1), "services")
    assert [post.publisher.reading(reading, "services") for _ in range(1000)] == [False] * 1000
    assert (post.publisher.waiting_news, post.publisher.dropped_news) == (1, 0)
    box.full = set()
    post.publisher.flush(0)
    assert post.publisher.reading(reading, "services")
    assert len(box.to("services", Kind.GATEWAY_SPACE)) == 1


def test_waiting_news_is_bounded_and_the_loss_counted(box: FakeMailbox) -> None:
    post = Post(box)
    box.full = {"services"}
    message = frame.encode(Kind.GATEWAY_ALERT, {}, bytes(1 << 19))
    for _ in range(80):
        post.publisher.news(message, "services", "dbmanager")
    assert post.publisher.waiting_news * len(message) <= NEWS_BYTES
    assert post.publisher.dropped_news == 80 - post.publisher.waiting_news > 0
    assert post.publisher.neglected() == []  # it could not take more yet
    box.full = set()
    post.publisher.flush(0)
    assert post.publisher.neglected() == ["services"]
    assert post.publisher.neglected() == []


def test_largest_legal_cut_and_the_largest_number_of_cuts_fit_a_frame() -> None:
    batch = CutsBuilder(255)
    large = bytes(MAX_CUT_BYTES)
    assert batch.add(large, GATEWAY, 7, 1, 2**62, -(2**62), False, 0)
    assert not batch.add(bytes(8), GATEWAY, 7, 1, 2**62, -(2**62), False, 0)
    assert len(batch) == 1
    assert len(frame.decode(batch.take()[0].message).blob) == len(large)
    for _ in range(BATCH_CUTS):
        assert batch.add(bytes(8), GATEWAY, 7, 1, 2**62, -(2**62), True, 0)
    assert not batch.add(bytes(8), GATEWAY, 7, 1, 2**62, -(2**62), True, 0)
    (letter,) = batch.take()
    assert letter.keep
    assert letter.judge
    assert frame.decode(letter.message).header["n"] == BATCH_CUTS
    assert letter.first_cuts() == {GATEWAY: (7, 1)}
    assert len(batch) == 0


def test_a_pair_is_announced_also_when_dbmanager_has_no_room_at_first(box: FakeMailbox) -> None:
    publisher = Post(box).publisher
    box.full = {"dbmanager"}
    pair.announce(publisher, pair.announcement(3, restarts=2, reason="killed"))
    assert (box.posted, publisher.waiting_news) == ([], 1)
    box.full = set()
    publisher.flush(0)
    [(recipient, message)] = box.posted
    assert (recipient, message.kind) == ("dbmanager", Kind.RECORD)
    process, event = message.header["rows"]
    assert process[0] == "processes"
    assert (process[1]["name"], process[1]["restarts"]) == ("pair-3", 2)
    assert (event[0], event[1]["kind"], event[1]["subject"]) == ("events", "process-restarted", "pair-3")
