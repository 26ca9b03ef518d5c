"""File mode without workers: requests are done in the loop, in batches; one send for a batch's replies.

Fast while the file answers from memory; a file that blocks stalls every volume of the plane, so such
files get workers (``worker_session``) or a process of their own behind upstream mode.

Reads go straight into the reply buffer behind their header. A write's payload is written piece by piece as
it arrives, so it needs no buffer of its own; it is answered when its last piece is written.
"""

from __future__ import annotations

import socket

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.account import FAILED_BIT, Stream
from gateway_agent.nbd.intake import Request
from gateway_agent.nbd.replies import Finished
from gateway_agent.nbd.session import Session
from gateway_agent.nbd.storage import Storage
from gateway_agent.nbd.volume import Context, Volume


class FileSession(Session):
    """See the module docstring.

    Invariant: ``intake.sent_pos`` is the end of what is done: whole requests, or a piece of the first write.
    """

    def __init__(
        self, context: Context, sock: socket.socket, volume: Volume, stream: Stream, storage: Storage,
        facts: p.ExportFacts,
    ) -> None:  # fmt: skip
        super().__init__(context, sock, volume, stream, facts)
        self.admitted = self._requests = type(self.intake.queue)()
        self._storage = storage
        self._write_error = 0

    def push(self, now_ns: int) -> None:
        """Do admitted requests while the client takes the replies."""
        while self._requests and self._out.is_empty and not self.is_closed:
            if not self._do_batch():
                break
        self._settle()

    def _do_batch(self) -> bool:
        """Do as many requests as one reply buffer holds; False when the first one waits for its payload."""
        scratch, filled = self._context.scratch, 0
        finished: list[Finished] = []
        base_pos, clock = self._out.queued_pos, self._context.clock
        while self._requests:
            request = self._requests[0]
            reply_bytes = 16 + (request[3] if request[2] == p.Cmd.READ else 0)
            if filled + reply_bytes > len(scratch):
                if filled:
                    break
                scratch = memoryview(bytearray(reply_bytes))  # one read larger than the buffer
            error = self._do(request, scratch[filled + 16 : filled + reply_bytes])
            if error is None:
                break
            self._requests.popleft()
            cookie = request[1]
            p.SIMPLE_REPLY.pack_into(scratch, filled, p.SIMPLE_REPLY_MAGIC, error, cookie)
            filled += 16 if error else reply_bytes
            arrived_ns, sent_ns, word, _ = self.inflight.pop(cookie)
            word |= FAILED_BIT if error else 0
            finished.append((base_pos + filled, word, arrived_ns, sent_ns, clock.monotonic_ns()))
        if filled:
            self._reply(scratch[:filled], finished)
        return bool(filled)

    def _do(self, request: Request, into: memoryview) -> int | None:
        """Error number, or None when a write's payload has not arrived whole."""
        _, _, command, length, offset, flags, end_pos = request
        if command == p.Cmd.WRITE:
            return self._do_write(length, offset, flags, end_pos)
        self.intake.sent_pos = end_pos
        if command == p.Cmd.READ:
            return self._storage.read(into, offset)
        return self._storage.run(command, offset, length, flags)

    def _do_write(self, length: int, offset: int, flags: int, end_pos: int) -> int | None:
        intake = self.intake
        begin_pos = end_pos - length
        piece_pos = max(intake.sent_pos, begin_pos)
        piece_end = min(intake.end_pos, end_pos)
        if piece_pos < piece_end and not self._write_error:
            piece = intake.span(piece_pos, piece_end)
            fua = bool(flags & p.CMD_FLAG_FUA)
            self._write_error = self._storage.write(piece, offset + piece_pos - begin_pos, fua=fua)
        intake.sent_pos = max(piece_end, piece_pos)
        if piece_end < end_pos:
            return None
        error, self._write_error = self._write_error, 0
        return error

    def _reply_error(self, cookie: int, error: int, word: int, arrived_ns: int, now_ns: int) -> None:
        end_pos = self._out.queued_pos + p.SIMPLE_REPLY_BYTES
        self._reply(p.simple_reply(cookie, error), [(end_pos, word, arrived_ns, now_ns, now_ns)])

    def _release_storage(self) -> None:
        self._requests.clear()
