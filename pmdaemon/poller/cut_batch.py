"""CUTS: many cuts in one mailbox message, and the bounded sets of cuts beside it.

``CutsBuilder`` collects the batch that is posted at 256 KB or 20 ms, whichever comes first. The inbound
thread reads every connection into ``room``, the place right behind the last cut, so that a cut in order is
where it belongs without being copied; any other is moved there. Cuts are never parsed again. The buffer is
kept from batch to batch: measured, joining a list of copies cost 15 us a cut of 9 KB, nearly all of it page
faults of memory fresh from the kernel. The frame's head is written last, right before the first cut:

    |          HEAD_BYTES           | cut | cut | room |
              | prefix, header, pad |
              ^ the message begins here

Nearly always both recipients get the same cuts, as one message. If a cut goes to one of them only, each
gets a message of its own, joined from its cuts; order is kept for each.

``NewestCuts`` holds the newest cut of each gateway that ``services`` had no room for. Control needs the
present, not all of the past: while the mailbox of services is full, a later cut of one gateway replaces the
one that still waits, and the replaced one is counted. So services is late by as much as it takes to read
its mailbox, never by more, and no gateway is forgotten because it came last. Judging of slices loses
nothing by it: it reads what dbmanager stores. Bounded by one cut a gateway and by ``WAITING_BYTES``; beyond
that the cut that has waited longest goes. No cut is decoded for it: of one gateway, a cut that goes to
services is newer than those that went there before (``poller.positions``).

Thread: the inbound thread's, but for ``in``.

Source: DESIGN.md 3 ("A pair posts at 256 KB or 20 ms"); docs/formats/messages.md (CUTS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import MAX_CUT_BYTES

# Measured: posts of 100 KB and more cost 70 ns a KB, no header matters any more.
BATCH_BYTES: Final = 256 << 10
BATCH_AGE_NS: Final = 20_000_000  # a fiftieth of the shortest sensible reaction of the control loop
BATCH_CUTS: Final = 2048  # recv_us and offset_us take up to 18 bytes a cut of the 64 KiB header
# Beyond 64 KiB no read gets cheaper (measured); a share of 128 KiB a round is ~50 us.
ROOM_BYTES: Final = 128 << 10
HEAD_BYTES: Final = frame.PREFIX.size + frame.MAX_HEADER_BYTES + 1
WAITING_BYTES: Final = 64 << 20  # 4,000 gateways with 16 streams each take 26 MB


_Entry = tuple[int, int, str, int, int, bool, bool, bool, int, int]
"""A plain tuple, because one is made for each cut; its places:"""
_START: Final = 0
_END: Final = 1
_GATEWAY: Final = 2
_RECV_US: Final = 3
_OFFSET_US: Final = 4
_LIVE: Final = 5
_KEEP: Final = 6
_JUDGE: Final = 7
_EPOCH: Final = 8
_SEQ: Final = 9


class CutsMessage(NamedTuple):
    """One CUTS message. It may be a view into the batch: use it before the next ``add``.

    Attributes:
        keep: it goes to dbmanager.
        judge: it goes to services.
        message: the frame.
        entries: its cuts, in order; their places are in ``batch``.
    """

    keep: bool
    judge: bool
    message: bytes | memoryview
    entries: Sequence[_Entry]
    batch: memoryview

    def first_cuts(self) -> dict[str, tuple[int, int]]:
        """(epoch, seq) of the first cut of each gateway."""
        return {entry[_GATEWAY]: (entry[_EPOCH], entry[_SEQ]) for entry in reversed(self.entries)}


class CutsBuilder:
    """Cuts on their way. Thread: one.

    Attributes:
        room: ``ROOM_BYTES`` behind the last cut, to read into; another place after each cut added or taken.
    """

    def __init__(self, pair: int) -> None:
        self._pair = pair
        # A view of fixed size: assigned to a bytearray itself, each cut would be copied twice.
        self._buffer = memoryview(bytearray(HEAD_BYTES + max(BATCH_BYTES, MAX_CUT_BYTES) + ROOM_BYTES))
        self._entries: list[_Entry] = []
        self._end = HEAD_BYTES
        self.room = self._buffer[HEAD_BYTES : HEAD_BYTES + ROOM_BYTES]
        self._is_mixed = False
        self.opened_ns = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all cuts."""
        return self._end - HEAD_BYTES

    def add(
        self,
        cut: bytes | memoryview,
        gateway_id: str,
        epoch: int,
        seq: int,
        recv_unix_us: int,
        offset_us: int,
        live: bool,
        now_ns: int,
        keep: bool = True,
        judge: bool = True,
    ) -> bool:
        """Append one CUT frame; False if it must be taken first. The first one may be larger than a batch."""
        entries, start = self._entries, self._end
        end = start + len(cut)
        if not entries:
            self.opened_ns = now_ns
        elif end > HEAD_BYTES + BATCH_BYTES or len(entries) >= BATCH_CUTS:
            return False
        self._buffer[start:end] = cut  # may lie in ``room``: the two may overlap
        self._end_at(end)
        if entries and entries[0][_KEEP:_EPOCH] != (keep, judge):
            self._is_mixed = True
        entries.append((start, end, gateway_id, recv_unix_us, offset_us, live, keep, judge, epoch, seq))
        return True

    def add_placed(
        self,
        cut_bytes: int,
        gateway_id: str,
        epoch: int,
        seq: int,
        recv_unix_us: int,
        offset_us: int,
        live: bool,
        now_ns: int,
    ) -> bool:
        """``add`` of a cut at the beginning of ``room``, LIVE for services alone; False as there."""
        entries, start = self._entries, self._end
        end = start + cut_bytes
        if not entries:
            self.opened_ns = now_ns
        elif end > HEAD_BYTES + BATCH_BYTES or len(entries) >= BATCH_CUTS:
            return False
        elif entries[0][_KEEP] is live or not entries[0][_JUDGE]:
            self._is_mixed = True
        entries.append((start, end, gateway_id, recv_unix_us, offset_us, live, not live, True, epoch, seq))
        self._end_at(end)
        return True

    def _end_at(self, end: int) -> None:
        self._end = end
        self.room = self._buffer[end : end + ROOM_BYTES]

    def is_due(self, now_ns: int) -> bool:
        """Whether it is full or old enough to be posted."""
        return bool(self._entries) and (
            self.size_bytes >= BATCH_BYTES or now_ns >= self.opened_ns + BATCH_AGE_NS
        )

    def take(self) -> list[CutsMessage]:
        """The messages, for dbmanager first; the batch is empty afterwards."""
        entries, self._entries = self._entries, []
        end = self._end
        self._end_at(HEAD_BYTES)
        is_mixed, self._is_mixed = self._is_mixed, False
        if not entries:
            return []
        if not is_mixed:
            head = self._head(entries, end - HEAD_BYTES)
            begin = HEAD_BYTES - len(head)
            self._buffer[begin:HEAD_BYTES] = head
            message = self._buffer[begin:end].toreadonly()
            keep, judge = entries[0][_KEEP], entries[0][_JUDGE]
            return [CutsMessage(keep, judge, message, entries, self._buffer)]
        messages = []
        for keep in (True, False):
            chosen = [item for item in entries if (item[_KEEP] if keep else item[_JUDGE])]
            if chosen:
                messages.append(CutsMessage(keep, not keep, self._join(chosen), chosen, self._buffer))
        return messages

    def _join(self, entries: list[_Entry]) -> bytes:
        parts = [self._buffer[item[_START] : item[_END]] for item in entries]
        return b"".join([self._head(entries, sum(map(len, parts))), *parts])

    def _head(self, entries: list[_Entry], blob_bytes: int) -> bytes:
        return cuts_head(
            self._pair,
            [item[_RECV_US] for item in entries],
            [item[_OFFSET_US] for item in entries],
            [item[_LIVE] for item in entries],
            blob_bytes,
        )


def cuts_head(
    pair: int, recv_us: list[int], offset_us: list[int], live: list[bool], blob_bytes: int
) -> bytes:
    """Prefix and header of a CUTS message; the columns have one entry a cut."""
    header = {"pair": pair, "n": len(recv_us), "recv_us": recv_us, "offset_us": offset_us, "live": live}
    return frame.encode_head(Kind.CUTS, header, blob_bytes)


class _Waiting(NamedTuple):
    raw: bytes
    recv_us: int
    offset_us: int
    live: bool


class NewestCuts:
    """Cuts that wait, one a gateway, in the order in which their gateways began to wait."""

    def __init__(self, pair: int) -> None:
        self._pair = pair
        self._waiting: dict[str, _Waiting] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, gateway_id: object) -> bool:
        return gateway_id in self._waiting  # one step of the interpreter

    def keep(self, cuts_message: CutsMessage) -> int:
        """Keep what is newest of a message; returns how many cuts will never be posted because of it."""
        newest = {entry[_GATEWAY]: entry for entry in cuts_message.entries}  # the last of each
        dropped = len(cuts_message.entries) - len(newest)
        waiting, batch = self._waiting, cuts_message.batch
        for gateway_id, entry in newest.items():
            former = waiting.get(gateway_id)
            if former is not None:
                dropped += 1
                self._size_bytes -= len(former.raw)
            raw = bytes(batch[entry[_START] : entry[_END]])
            self._size_bytes += len(raw)
            waiting[gateway_id] = _Waiting(raw, entry[_RECV_US], entry[_OFFSET_US], entry[_LIVE])
        while self._size_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def first(self) -> tuple[Sequence[str], bytes]:
        """A CUTS message of those that have waited longest, with its gateways; ``posted`` removes them."""
        names: list[str] = []
        size_bytes = 0
        for gateway_id, cut in self._waiting.items():
            size_bytes += len(cut.raw)
            if names and (size_bytes > BATCH_BYTES or len(names) >= BATCH_CUTS):
                break
            names.append(gateway_id)
        return names, self._message(names)

    def posted(self, gateway_ids: Sequence[str]) -> None:
        """Services has them."""
        for gateway_id in gateway_ids:
            self._drop(gateway_id)

    def _drop(self, gateway_id: str) -> None:
        self._size_bytes -= len(self._waiting.pop(gateway_id).raw)

    def _message(self, names: Sequence[str]) -> bytes:
        cuts = [self._waiting[name] for name in names]
        size_bytes = sum(len(cut.raw) for cut in cuts)
        recv_us, offset_us = [cut.recv_us for cut in cuts], [cut.offset_us for cut in cuts]
        head = cuts_head(self._pair, recv_us, offset_us, [cut.live for cut in cuts], size_bytes)
        return b"".join([head, *(cut.raw for cut in cuts)])
