"""CUTS: many cuts in one mailbox message, posted at 256 KB or 20 ms, whichever comes first.

The cuts of one recipient must stay in order (dbmanager takes them by rising seq), so there is one batch a
recipient and no reordering. Cut frames are copied once, from the receive buffer, and never parsed again.

Source: DESIGN.md 3 ("A pair posts at 256 KB or 20 ms"); docs/formats/messages.md (CUTS).
"""

from __future__ import annotations

from typing import Final

from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

BATCH_BYTES: Final = (
    256 << 10
)  # measured: posts of 100 KB and more cost 70 ns a KB, no header matters any more
BATCH_AGE_NS: Final = 20_000_000  # a fiftieth of the shortest sensible reaction of the control loop
BATCH_CUTS: Final = 2048  # recv_us and offset_us take up to 18 bytes a cut of the 64 KiB header


class CutBatch:
    """Cuts on their way to one recipient."""

    def __init__(self, pair: int) -> None:
        self._pair = pair
        self._clear()

    def _clear(self) -> None:
        self._cuts: list[bytes] = []
        self._recv_us: list[int] = []
        self._offset_us: list[int] = []
        self._live: list[bool] = []
        self.gateway_ids: set[str] = set()
        self.size_bytes = 0
        self.opened_ns = 0

    def __len__(self) -> int:
        return len(self._cuts)

    def fits(self, cut_bytes: int) -> bool:
        """Whether another cut may join; a batch of one may be larger than ``BATCH_BYTES``."""
        return not self._cuts or (self.size_bytes + cut_bytes <= BATCH_BYTES and len(self._cuts) < BATCH_CUTS)

    def add(
        self, cut: bytes, gateway_id: str, recv_unix_us: int, offset_us: int, live: bool, now_ns: int
    ) -> None:
        """Append one CUT frame; call ``fits`` first."""
        if not self._cuts:
            self.opened_ns = now_ns
        self._cuts.append(cut)
        self._recv_us.append(recv_unix_us)
        self._offset_us.append(offset_us)
        self._live.append(live)
        self.gateway_ids.add(gateway_id)
        self.size_bytes += len(cut)

    def same_as(self, other: CutBatch) -> bool:
        """Whether both hold the same cuts, so that one message can serve two recipients."""
        return len(self) == len(other) and all(
            mine is theirs for mine, theirs in zip(self._cuts, other._cuts, strict=True)
        )

    def is_due(self, now_ns: int) -> bool:
        """Whether it is full or old enough to be posted."""
        return bool(self._cuts) and (
            self.size_bytes >= BATCH_BYTES or now_ns >= self.opened_ns + BATCH_AGE_NS
        )

    def take(self) -> tuple[bytes, set[str]]:
        """The CUTS frame and the gateways in it; the batch is empty afterwards."""
        header = {
            "pair": self._pair,
            "n": len(self._cuts),
            "recv_us": self._recv_us,
            "offset_us": self._offset_us,
            "live": self._live,
        }
        message = frame.encode(Kind.CUTS, header, b"".join(self._cuts))
        gateway_ids = self.gateway_ids
        self._clear()
        return message, gateway_ids
