"""CUTS: many cuts in one mailbox message, posted at 256 KB or 20 ms, whichever comes first.

The inbound thread reads every connection into ``room``, the place right behind the last cut, so that a usual
cut is where it belongs without being copied; any other is moved there. Cuts are never parsed again. The
buffer is kept from batch to batch: measured, joining a list of copies cost 15 us a cut of 9 KB, nearly all of
it page faults of memory fresh from the kernel. The frame's head is written last, right before the first cut:

    |          HEAD_BYTES           | cut | cut | room |
              | prefix, header, pad |
              ^ the message begins here

Nearly always both recipients get the same cuts, as one message. If a cut goes to one of them only, each gets
a message of its own, joined from its cuts; order is kept for each.

Source: DESIGN.md 3 ("A pair posts at 256 KB or 20 ms"); docs/formats/messages.md (CUTS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import MAX_CUT_BYTES

BATCH_BYTES: Final = (
    256 << 10
)  # measured: posts of 100 KB and more cost 70 ns a KB, no header matters any more
BATCH_AGE_NS: Final = 20_000_000  # a fiftieth of the shortest sensible reaction of the control loop
BATCH_CUTS: Final = 2048  # recv_us and offset_us take up to 18 bytes a cut of the 64 KiB header
ROOM_BYTES: Final = (
    128 << 10
)  # beyond 64 KiB no read gets cheaper (measured); a share of 128 KiB a round is ~50 us
HEAD_BYTES: Final = frame.PREFIX.size + frame.MAX_HEADER_BYTES + 1


class CutsMessage(NamedTuple):
    """One CUTS message. ``message`` may be a view into the batch: post it before the next ``add``.

    Attributes:
        keep: it goes to dbmanager.
        judge: it goes to services.
        cuts: how many.
        gateway_ids: whose, each cut's.
        is_next: of each cut, whether it is surely newer than all of its gateway that came before.
    """

    keep: bool
    judge: bool
    cuts: int
    message: bytes | memoryview
    gateway_ids: Sequence[str]
    is_next: Sequence[bool]


_Entry = tuple[int, int, str, int, int, bool, bool, bool, bool]
"""A plain tuple, because one is made for each cut; its places:"""
_START: Final = 0
_END: Final = 1
_GATEWAY: Final = 2
_RECV_US: Final = 3
_OFFSET_US: Final = 4
_LIVE: Final = 5
_KEEP: Final = 6
_JUDGE: Final = 7
_NEXT: Final = 8


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
        recv_unix_us: int,
        offset_us: int,
        live: bool,
        now_ns: int,
        keep: bool = True,
        judge: bool = True,
        is_next: bool = False,
    ) -> bool:
        """Append one CUT frame; False if it must be taken first. The first one may be larger than a batch.

        ``is_next``: no newer one of its gateway came before.
        """
        entries, start = self._entries, self._end
        end = start + len(cut)
        if not entries:
            self.opened_ns = now_ns
        elif end > HEAD_BYTES + BATCH_BYTES or len(entries) >= BATCH_CUTS:
            return False
        self._buffer[start:end] = cut  # may lie in ``room``: the two may overlap
        self._end_at(end)
        if not (keep and judge):
            self._is_mixed = True
        entries.append((start, end, gateway_id, recv_unix_us, offset_us, live, keep, judge, is_next))
        return True

    def add_placed(
        self, cut_bytes: int, gateway_id: str, recv_unix_us: int, offset_us: int, now_ns: int
    ) -> bool:
        """``add`` for both recipients of a next cut, at the beginning of ``room``; False as there."""
        entries, start = self._entries, self._end
        end = start + cut_bytes
        if not entries:
            self.opened_ns = now_ns
        elif end > HEAD_BYTES + BATCH_BYTES or len(entries) >= BATCH_CUTS:
            return False
        entries.append((start, end, gateway_id, recv_unix_us, offset_us, False, True, True, True))
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
            return [CutsMessage(True, True, len(entries), message, _gateways(entries), _nexts(entries))]
        letters = []
        for keep in (True, False):
            chosen = [item for item in entries if (item[_KEEP] if keep else item[_JUDGE])]
            if chosen:
                joined = self._join(chosen)
                letters.append(
                    CutsMessage(keep, not keep, len(chosen), joined, _gateways(chosen), _nexts(chosen))
                )
        return letters

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


def _gateways(entries: list[_Entry]) -> list[str]:
    return [item[_GATEWAY] for item in entries]


def _nexts(entries: list[_Entry]) -> list[bool]:
    return [item[_NEXT] for item in entries]
