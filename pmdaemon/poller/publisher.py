"""Posts what a pair sends to ``services`` and ``dbmanager``; never waits, never loses silently.

Three kinds of messages with different promises:

* *Cuts.* A batch that dbmanager cannot take is not kept here: the cuts are still with their
  agents. ``on_refused`` rewinds those gateways to the first of them, and they are asked for again. For
  services the newest cut of each gateway waits here (``poller.cut_batch``) until there is room; the older
  ones it replaces are counted.
* *News* (GATEWAY, STREAMS_SEEN, CAPS_STATE, GATEWAY_ALERT). No process asks for news again, so it is queued
  for recipients without room (``mailbox.sender``) and posted at the next ``flush``. While news waits for
  a recipient no cuts are posted to it, so that a stream is announced before its first cut.
  Above ``NEWS_BYTES`` the oldest is dropped and counted, and once the rest is delivered every session has to
  be announced to that recipient again (``neglected``), or it would miss some gateways for ever.
* *Readings* (GATEWAY_SPACE) are dropped and counted while news waits: the next one says the same, and those
  of a fleet would push out news and hold up cuts.

Thread: belongs to the inbound thread, the only poster of the pair's mailbox.

Source: M2, P10; DESIGN.md 3, 4.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final

import structlog

from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.mailbox.sender import OTHERS, MailboxSender, PostingMailbox
from pmdaemon.poller.cut_batch import BATCH_AGE_NS, CutsBuilder, CutsMessage, NewestCuts

SERVICES: Final = "services"
DBMANAGER: Final = "dbmanager"
NEWS_BYTES: Final = 32 << 20  # 4,000 gateways with 16 volumes and streams each, announced twice
NEWS_RETRY_NS: Final = 20_000_000
NEWEST_RETRY_NS: Final = 100_000_000  # a full mailbox holds a second of its reader's work, and more
MOST_RETRIED: Final = 8  # messages of waiting cuts a flush: 2 MB, a few ms between two reads
log = structlog.get_logger("publisher")


class CutPublisher:
    """What a pair posts.

    Attributes:
        refused_keeping: batches dbmanager had no room for; their gateways were rewound.
        refused_ns: when the last of them was (monotonic); None before the first.
        dropped_live_cuts: cuts that a later one of their gateway replaced before services had room.
        posted_cuts: cuts posted to dbmanager.
        posted_bytes: bytes of CUTS messages given to the mailbox.
        batch: the cuts on their way; read into its ``room``.
        unread: the gateways whose newest cut waits for room at services. Any thread may look a gateway up.
    """

    def __init__(
        self, poster: PostingMailbox, pair: int, on_refused: Callable[[dict[str, tuple[int, int]], int], None]
    ) -> None:
        self._poster = poster
        self._on_refused = on_refused
        self.batch = CutsBuilder(pair)
        self.unread = self._newest = NewestCuts(pair)
        self._retry_ns = self._news_retry_ns = 0  # no sooner, because there was no room just now
        self._news = MailboxSender({OTHERS: poster}, NEWS_BYTES, drop_oldest=True)
        self.refused_keeping = 0
        self.refused_ns: int | None = None
        self.dropped_live_cuts = 0
        self.posted_cuts = 0
        self.posted_bytes = 0

    # -- news

    def news(self, message: bytes, *recipients: str) -> None:
        """Post an announcement, behind what already waits for the same recipient."""
        self._news.send(message, *recipients)

    def reading(self, message: bytes, recipient: str) -> bool:
        """Post what its next one makes good, unless news waits there; whether it was posted or waits now."""
        if self._news.waiting_bytes(recipient):
            return False
        self._news.send(message, recipient)
        return True

    def neglected(self) -> list[str]:
        """Recipients that have taken what waited but not what was dropped before; named once."""
        return self._news.overflowed()

    @property
    def waiting_news(self) -> int:
        """Announcements that wait for room."""
        return self._news.waiting()

    @property
    def dropped_news(self) -> int:
        """Announcements dropped because too much waited."""
        return self._news.lost

    # -- cuts

    def cut(
        self,
        cut: bytes | memoryview,
        gateway_id: str,
        epoch: int,
        seq: int,
        recv_unix_us: int,
        offset_us: int,
        now_ns: int,
        *,
        keep: bool = True,
        judge: bool = True,
        live: bool = False,
    ) -> None:
        """Add one CUT frame to the batch (it is copied), posting what is full.

        ``judge``: only of a cut that is newer than all of its gateway that were given so before. ``keep`` is
        undone if an earlier cut of its gateway finds no room at dbmanager now: this one would leave a hole.
        """
        add, times = self.batch.add, (recv_unix_us, offset_us, live, now_ns)
        if not add(cut, gateway_id, epoch, seq, *times, keep, judge):
            keep = keep and gateway_id not in self.post_cuts()
            if keep or judge:
                add(cut, gateway_id, epoch, seq, *times, keep, judge)

    def flush(self, now_ns: int) -> None:
        """Try waiting news, then post the batches that are due."""
        if self.waiting_news and now_ns >= self._news_retry_ns:
            self._news.flush()
            self._news_retry_ns = now_ns + NEWS_RETRY_NS if self.waiting_news else 0
        if self._newest and now_ns >= self._retry_ns:
            self._retry_newest(now_ns)
        if self.batch.is_due(now_ns):
            self.post_cuts()

    def due_ns(self) -> int | None:
        """When ``flush`` is next needed; None if nothing waits."""
        due = [self.batch.opened_ns + BATCH_AGE_NS] if len(self.batch) else []
        if self._newest:
            due.append(self._retry_ns)
        return min(due, default=None)

    def post_cuts(self) -> Container[str]:
        """Post what is batched now, as one message if both recipients get the same cuts.

        Returns:
            Gateways whose cuts found no room at dbmanager.
        """
        refused: dict[str, tuple[int, int]] = {}
        for message in self.batch.take():
            refused |= self._post_message(message)
        return refused

    def _post_message(self, cuts: CutsMessage) -> dict[str, tuple[int, int]]:
        """Returns the first cut of each gateway that dbmanager has no room for."""
        names = [name for name, wanted in ((DBMANAGER, cuts.keep), (SERVICES, cuts.judge)) if wanted]
        refused = [name for name in names if self._has_waiting(name)]
        free = [name for name in names if name not in refused]
        if free:
            refused += self._post(free, cuts.message)
        if len(refused) < len(names):
            self.posted_bytes += len(cuts.message)
        if SERVICES in refused:
            self.dropped_live_cuts += self._newest.keep(cuts)
        if DBMANAGER in refused:
            self.refused_keeping += 1
            self.refused_ns = self.batch.opened_ns  # now, or a moment ago
            first = cuts.first_cuts()
            self._on_refused(first, self.refused_ns)
            return first
        if cuts.keep:
            self.posted_cuts += len(cuts.entries)
        return {}

    def _has_waiting(self, name: str) -> bool:
        """Whether a cut posted to this recipient now would overtake something."""
        return bool(self._news.waiting(name) or (name == SERVICES and self._newest))

    def _retry_newest(self, now_ns: int) -> None:
        for _ in range(MOST_RETRIED):
            if not self._newest:
                return
            gateway_ids, message = self._newest.first()
            if self._news.waiting(SERVICES) or self._post([SERVICES], message):
                self._retry_ns = now_ns + NEWEST_RETRY_NS
                return
            self._newest.posted(gateway_ids)
            self.posted_bytes += len(message)

    def _post(self, names: Sequence[str], message: bytes | memoryview) -> list[str]:
        """Post; returns the recipients without room."""
        try:
            self._poster.post(names, message)
        except MailboxFull as exc:
            log.debug("mailbox-full", recipients=",".join(exc.recipients))
            return [name for name in names if name in exc.recipients]
        return []
