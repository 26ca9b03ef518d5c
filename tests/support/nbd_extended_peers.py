"""A storage and a client with extended headers, for where QEMU is older than 8.2.

Both are written from the protocol document (doc/proto.md, extension EXTENDED_HEADERS) and use nothing of the
gateway, so that a misreading of it there is none here. They are no other people's programs all the same:
``tests/e2e/test_nbd_extended.py`` has QEMU's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

READ, WRITE, DISC, FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS = 0, 1, 2, 3, 4, 6, 7
PAYLOAD_LEN: Final = 1 << 5
NONE, OFFSET_DATA, OFFSET_HOLE, STATUS_EXT, ERROR = 0, 1, 2, 6, 0x8001
HOLE_AND_ZERO: Final = 3
_ABORT, _GO, _INFO, _SET_META, _EXTENDED = 2, 7, 6, 10, 11
_ACK, _REP_INFO, _REP_META, _UNSUPPORTED = 1, 3, 4, 0x8000_0001
_OPTION: Final = struct.Struct(">8sII")
_ANSWER: Final = struct.Struct(">QIII")
_ANSWER_MAGIC: Final = 0x0003_E889_0455_65A9
_REQUEST: Final = struct.Struct(">IHHQQQ")
_REQUEST_MAGIC: Final = 0x21E4_1C71
_CHUNK_MAGIC: Final = 0x6E8A_278C  # of the same form: flags, type, cookie, offset of the request, length
_DONE: Final = 1
_FLAGS: Final = 0x1 | 0x4 | 0x20 | 0x40 | 0x80 | 0x100  # has flags, flush, trim, zeroes, DF, multi-conn
_BLOCK: Final = 4096
_MOST: Final = 32 << 20


class Asked(NamedTuple):
    """A request as the storage got it."""

    command: int
    flags: int
    offset: int
    length: int


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class ExtendedStorage:
    """Blocks of zeroes, but for those that were written; a thread for each connection.

    Attributes:
        asked: all requests, in the order of their arrival.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.asked: list[Asked] = []
        self._size_bytes = size_bytes
        self._blocks: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="extended-storage")
        self._threads.append(thread)
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._socks:
            with contextlib.suppress(OSError):  # its peer has left, or it is closed
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            self._socks.append(sock)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
            _exactly(sock, 4)
            if self._negotiate(sock):
                while self._answer(sock):
                    pass
        except (EOFError, OSError):
            pass  # the peer is gone, or the test is at its end
        finally:
            sock.close()

    def _negotiate(self, sock: socket.socket) -> bool:
        def say(option: int, kind: int, data: bytes = b"") -> None:
            sock.sendall(_ANSWER.pack(_ANSWER_MAGIC, option, kind, len(data)) + data)

        while True:
            _, option, length = _OPTION.unpack(_exactly(sock, _OPTION.size))
            _exactly(sock, length)
            if option in (_GO, _INFO):
                say(option, _REP_INFO, struct.pack(">HQH", 0, self._size_bytes, _FLAGS))
                say(option, _REP_INFO, struct.pack(">HIII", 3, 1, _BLOCK, _MOST))
            elif option == _SET_META:
                say(option, _REP_META, struct.pack(">I", 1234) + b"base:allocation")
            if option in (_GO, _INFO, _SET_META, _EXTENDED, _ABORT):
                say(option, _ACK)
            else:
                say(option, _UNSUPPORTED)
            if option in (_GO, _ABORT):
                return option == _GO

    def _answer(self, sock: socket.socket) -> bool:
        magic, flags, command, cookie, offset, length = _REQUEST.unpack(_exactly(sock, _REQUEST.size))
        if magic != _REQUEST_MAGIC:
            raise EOFError  # what follows is not understood
        with self._lock:
            self.asked.append(Asked(command, flags, offset, length))

        def say(kind: int, payload: bytes = b"", done: int = _DONE) -> None:
            sock.sendall(
                _REQUEST.pack(_CHUNK_MAGIC, done, kind, cookie, offset, len(payload)) + payload
            )  # fmt: skip

        blocks = range(offset // _BLOCK, (offset + length) // _BLOCK)
        if command == DISC:
            return False
        if command == WRITE:
            data = _exactly(sock, length)
            for at, block in enumerate(blocks):
                self._blocks[block] = data[at * _BLOCK : (at + 1) * _BLOCK]
        elif command in (TRIM, WRITE_ZEROES):
            for block in [each for each in self._blocks if each in blocks]:
                del self._blocks[block]
        elif command == READ:
            for block in blocks:
                place = struct.pack(">Q", block * _BLOCK)
                if block in self._blocks:
                    say(OFFSET_DATA, place + self._blocks[block], 0)
                else:
                    say(OFFSET_HOLE, place + struct.pack(">I", _BLOCK), 0)
        if command == BLOCK_STATUS:
            extents = self._extents(offset, offset + length)
            body = b"".join(struct.pack(">QQ", *each) for each in extents)
            say(STATUS_EXT, struct.pack(">II", 1234, len(extents)) + body)
        else:
            say(NONE)
        return True

    def _extents(self, begin: int, end: int) -> list[tuple[int, int]]:
        found, at = [], begin
        for place in sorted(block * _BLOCK for block in self._blocks if begin <= block * _BLOCK < end):
            if place > at:
                found.append((place - at, HOLE_AND_ZERO))
            found.append((_BLOCK, 0))
            at = place + _BLOCK
        return [*found, (end - at, HOLE_AND_ZERO)] if end > at else found


class Answer(NamedTuple):
    """What came to one request.

    Attributes:
        kinds: of its chunks.
        data: of a read, put together.
        extents: of a block status.
        error: number, and 0.
    """

    kinds: list[int]
    data: bytes
    extents: list[tuple[int, int]]
    error: int


class ExtendedClient:
    """One request after the other. ``size_bytes`` is that of the export."""

    def __init__(self, sock: socket.socket, export: str) -> None:
        self._sock = sock
        self._cookie = 0
        name = export.encode()
        assert _exactly(sock, 18)[:16] == b"NBDMAGICIHAVEOPT"
        sock.sendall(struct.pack(">I", 3))
        assert self._ask(_EXTENDED) == []
        query = struct.pack(">II", 1, 15) + b"base:allocation"
        (context,) = self._ask(_SET_META, struct.pack(">I", len(name)) + name + query)
        assert context[4:] == b"base:allocation"
        self._context_id = context[:4]
        infos = self._ask(_GO, struct.pack(">I", len(name)) + name + struct.pack(">H", 0))
        (self.size_bytes,) = (
            struct.unpack_from(">Q", info, 2)[0] for info in infos if info[:2] == b"\0\0"
        )  # fmt: skip

    def _ask(self, option: int, data: bytes = b"") -> list[bytes]:
        """What is said before the acknowledgement."""
        self._sock.sendall(_OPTION.pack(b"IHAVEOPT", option, len(data)) + data)
        said = []
        while True:
            magic, which, kind, length = _ANSWER.unpack(_exactly(self._sock, _ANSWER.size))
            assert (magic, which) == (_ANSWER_MAGIC, option)
            body = _exactly(self._sock, length)
            assert kind < 1 << 31, body
            if kind == _ACK:
                return said
            said.append(body)

    def do(self, command: int, offset: int, length: int, data: bytes = b"", flags: int = 0) -> Answer:
        self._cookie += 1
        flags |= PAYLOAD_LEN if data else 0
        head = _REQUEST.pack(_REQUEST_MAGIC, flags, command, self._cookie, offset, length)
        self._sock.sendall(head + data)
        answer, found = (
            Answer([], b"", [], 0),
            bytearray(length if command == READ and length <= _MOST else 0),
        )
        while True:
            magic, done, kind, cookie, begin, size = _REQUEST.unpack(_exactly(self._sock, _REQUEST.size))
            assert (magic, cookie, begin) == (_CHUNK_MAGIC, self._cookie, offset)
            body = _exactly(self._sock, size)
            answer.kinds.append(kind)
            if kind == OFFSET_DATA:
                at = struct.unpack_from(">Q", body)[0] - offset
                found[at : at + size - 8] = body[8:]
            elif kind == STATUS_EXT:
                count = struct.unpack_from(">I", body, 4)[0]
                assert (body[:4], size) == (self._context_id, 8 + 16 * count)
                answer.extents.extend(struct.iter_unpack(">QQ", body[8:]))
            elif kind & 0x8000:
                answer = answer._replace(error=struct.unpack_from(">I", body)[0])
            if done:
                return answer._replace(data=bytes(found))

    def leave(self) -> None:
        self._sock.sendall(_REQUEST.pack(_REQUEST_MAGIC, 0, DISC, 0, 0, 0))
        assert self._sock.recv(1) == b""
