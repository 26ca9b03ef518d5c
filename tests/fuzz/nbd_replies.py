"""Replies in chunks, put together and held to the protocol; shares no code with the gateway's readers."""

from __future__ import annotations

import numpy as np

from gateway_agent.nbd import protocol as p
from tests.fuzz.nbd_model import Request, describe

NONE, DATA, HOLE, STATUS = 0, 1, 2, 5
ERROR, ERROR_OFFSET = 0x8001, 0x8002


class Assembly:
    """What has come of the reply to one request.

    Attributes:
        error: of the first error chunk; 0 without one.
        data: of a read.
        extents: (length, state) of a block status.
    """

    def __init__(self, request: Request, context_id: int | None) -> None:
        self._request = request
        self._context_id = context_id
        is_read = request.command == p.Cmd.READ and request.errors == {0}
        self.data = bytearray(request.length if is_read else 0)
        self._seen = np.zeros(len(self.data), bool)
        self._contents = 0
        self.error = 0
        self.extents: list[tuple[int, int]] = []

    def add(self, kind: int, flags: int, payload: bytes) -> bool:
        """One chunk; returns whether it is the last one."""
        what = f"chunk {kind:#x} of {len(payload)} bytes to {describe(self._request)}"
        assert flags in (0, 1), f"{what}: flags {flags:#x}"
        if kind in (ERROR, ERROR_OFFSET):
            self._add_error(kind, payload, what)
        elif kind in (DATA, HOLE):
            self._add_content(kind, payload, what)
        elif kind == STATUS:
            self._add_status(payload, what)
        else:
            assert (kind, payload, flags) == (NONE, b"", 1), what
        if flags and not self.error:
            self._check_whole(what)
        return bool(flags)

    def _add_error(self, kind: int, payload: bytes, what: str) -> None:
        error, size = int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:6], "big")
        payload[6 : 6 + size].decode()
        assert error, what
        assert len(payload) == 6 + size + (8 if kind == ERROR_OFFSET else 0), what
        if kind == ERROR_OFFSET:
            at = int.from_bytes(payload[-8:], "big") - self._request.offset
            assert 0 <= at < self._request.length, f"{what}: an error {at} bytes behind its begin"
        self.error = self.error or error

    def _add_content(self, kind: int, payload: bytes, what: str) -> None:
        assert self._request.command == p.Cmd.READ, what
        at = int.from_bytes(payload[:8], "big") - self._request.offset
        size = int.from_bytes(payload[8:], "big") if kind == HOLE else len(payload) - 8
        assert size > 0, what
        assert 0 <= at <= len(self.data) - size, f"{what}: {size} bytes at {at}"
        assert not self._seen[at : at + size].any(), f"{what}: twice"
        self._seen[at : at + size] = True
        if kind == DATA:
            self.data[at : at + size] = payload[8:]
        self._contents += 1
        assert self._contents == 1 or not self._request.flags & p.CMD_FLAG_DF, f"{what}: fragmented"

    def _add_status(self, payload: bytes, what: str) -> None:
        assert self._request.command == p.Cmd.BLOCK_STATUS, what
        assert not self.extents, f"{what}: a second one"
        assert int.from_bytes(payload[:4], "big") == self._context_id, what
        assert len(payload) > 4, what
        assert len(payload) % 8 == 4, what
        self.extents = [
            (int.from_bytes(payload[n : n + 4], "big"), int.from_bytes(payload[n + 4 : n + 8], "big"))
            for n in range(4, len(payload), 8)
        ]
        lengths = [length for length, _ in self.extents]
        assert all(lengths), what
        assert sum(lengths[:-1]) < self._request.length, f"{what}: {self.extents}"
        if self._request.flags & p.CMD_FLAG_REQ_ONE:
            assert len(lengths) == 1, what
            assert lengths[0] <= self._request.length, f"{what}: {self.extents}"

    def _check_whole(self, what: str) -> None:
        if self._request.command == p.Cmd.READ:
            assert self._seen.all(), f"{what}: {int((~self._seen).sum())} bytes are missing"
        if self._request.command == p.Cmd.BLOCK_STATUS:
            assert self.extents, f"{what}: without a status"

    def zeroes(self) -> list[tuple[int, int]]:
        """(offset, length) of what a block status says is zero, within its request."""
        found, at, end = [], self._request.offset, self._request.offset + self._request.length
        for length, state in self.extents:
            if state & 2 and at < end:
                found.append((at, min(at + length, end) - at))
            at += length
        return found
