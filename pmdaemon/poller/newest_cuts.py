"""The newest cut of each gateway that ``services`` had no room for.

Control needs the present, not all of the past: while the mailbox of services is full, a later cut of one
gateway replaces the one that still waits, and the replaced one is counted. So services is late by as much as
it takes to read its mailbox, never by more, and no gateway is forgotten because it came last. Judging of
slices loses nothing by it: it reads what dbmanager stores.

Bounded by one cut a gateway and by ``WAITING_BYTES``; beyond that the cut that has waited longest goes.

Thread: belongs to the inbound thread, like its only user ``poller.publisher``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pmdaemon.poller.cut_batch import BATCH_BYTES, BATCH_CUTS, CutsMessage, cuts_head
from pmdaemon.wire import frame

WAITING_BYTES: Final = 64 << 20  # 4,000 gateways with 16 streams each take 26 MB


class _Waiting(NamedTuple):
    raw: bytes
    recv_us: int
    offset_us: int
    live: bool

    def follows(self, other: _Waiting) -> bool:
        """Whether it is newer; epochs are random numbers, so between them the agent's clock decides."""
        mine, its = frame.decode(self.raw).header, frame.decode(other.raw).header
        field = "seq" if mine["ep"] == its["ep"] else "t"
        return bool(mine[field] > its[field])


class NewestCuts:
    """Cuts that wait, one a gateway, in the order in which their gateways began to wait."""

    def __init__(self, pair: int) -> None:
        self._pair = pair
        self._waiting: dict[str, _Waiting] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, letter: CutsMessage) -> int:
        """Keep what is newest of a message; returns how many cuts will never be posted because of it."""
        message = frame.decode(letter.message)
        columns = (message.header[name] for name in ("recv_us", "offset_us", "live"))
        dropped = 0
        for gateway_id, is_next, raw, *rest in zip(
            letter.gateway_ids, letter.is_next, frame.split(message.blob), *columns, strict=True
        ):
            dropped += self._put(gateway_id, _Waiting(bytes(raw), *rest), is_next=is_next)
        while self._size_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def _put(self, gateway_id: str, cut: _Waiting, *, is_next: bool) -> bool:
        """Whether one of two cuts had to go; an older one never replaces a newer one.

        ``is_next``: it is the newer one, nobody need look; looking at every cut is dear when time is short.
        """
        former = self._waiting.get(gateway_id)
        if former is not None and not is_next and not cut.follows(former):
            return True
        self._waiting[gateway_id] = cut
        self._size_bytes += len(cut.raw) - (len(former.raw) if former else 0)
        return former is not None

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
