"""A TCP proxy on loopback that notes which frames a server sends, also to an agent that has gone."""

from __future__ import annotations

import asyncio
import contextlib

from pmdaemon.wire.frame import FrameReader
from tests.support.cutting_proxy import PIECE_BYTES, CuttingProxy


class RecordingProxy(CuttingProxy):
    """Forwards plain links. When an agent ends its connection the server's side stays open.

    Attributes:
        kinds: of all frames that the server has sent, in their order. Read it from any thread.
        open_links: connections that the server has not ended.
    """

    def __init__(self, target_port: int) -> None:
        self.kinds: list[int] = []
        self.open_links = 0
        self._target_port = target_port
        super().__init__(target_port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        self.open_links += 1
        up = asyncio.ensure_future(self._pump(reader, there))
        self._tasks.add(up)
        frames = FrameReader()
        try:
            with contextlib.suppress(OSError):
                while data := await there_reader.read(PIECE_BYTES):
                    self.kinds += [frame.kind for frame in frames.feed(data)]
                    with contextlib.suppress(OSError):
                        writer.write(data)
                        await writer.drain()
        finally:
            self.open_links -= 1
            up.cancel()
            self._tasks.discard(up)
            there.close()
            writer.close()
