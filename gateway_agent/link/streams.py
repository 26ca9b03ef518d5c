"""The book of streams: which names stand behind each stream_id that a cut of ours mentions.

The server must hear of a stream before its first cut. Cuts may wait in the spool for hours and be sent by
another link process after the data planes that knew the names are gone, so the book is a file
(``state_dir/streams.json``), written *before* the first cut that mentions a new stream is spooled. A crash
between the two leaves a stream that no cut mentions, which harms nobody.

Bound: ``MAX_STREAMS``; the oldest are forgotten (the server has known them for long).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from gateway_agent.link import state_files
from gateway_agent.link.errors import StateFileBroken
from gateway_agent.sources.sample import StreamKey
from pmdaemon.wire import names
from pmdaemon.wire.messages.agent import StreamEntry, Streams

log = structlog.get_logger("streams")

MAX_STREAMS: Final = 16_384  # four times the rows a cut may have
_PER_FRAME: Final = (
    128  # three names of 128 bytes each: 128 entries stay below the 64 KiB of a frame's header
)
_FIX: Final = "It is begun anew: streams are announced as they are used"


class StreamNames:
    """All streams ever entered, and which of them this session's server has been told.

    Thread: the link's loop only. ``path`` None keeps the book in memory only.
    """

    def __init__(self, gateway_id: str, path: Path | None) -> None:
        self._gateway_id = gateway_id
        self._path = path
        self._streams: dict[int, StreamKey] = {}
        self._ids: dict[StreamKey, int] = {}
        self._untold: set[int] = set()
        self._dirty = False
        for fields in self._load():
            self._remember(StreamKey(*fields))

    def _load(self) -> list[list[str]]:
        if self._path is None:
            return []
        try:
            rows = state_files.read_json(self._path, _FIX) or []
        except StateFileBroken as exc:
            log.error("streams-forgotten", problem=str(exc))
            return []
        return [
            row for row in rows if isinstance(row, list) and len(row) == 3 and all(map(names.is_name, row))
        ]

    def _remember(self, key: StreamKey) -> int:
        stream_id = names.stream_id(self._gateway_id, key.volume, key.client)
        former = self._streams.pop(
            stream_id, None
        )  # its backend may have changed: the id does not contain it
        if former is not None:
            self._ids.pop(former, None)
        self._streams[stream_id] = key
        self._ids[key] = stream_id
        self._untold.add(stream_id)
        while len(self._streams) > MAX_STREAMS:
            oldest = next(iter(self._streams))
            self._ids.pop(self._streams.pop(oldest), None)
            self._untold.discard(oldest)
        return stream_id

    def enter(self, key: StreamKey) -> int:
        """The stream's id; new ones are remembered, to be saved and announced."""
        known = self._ids.get(key)
        if known is not None:
            return known
        self._dirty = True
        return self._remember(key)

    def save(self) -> None:
        """Write the book if it changed; call before spooling a cut.

        Raises:
            OSError: it could not be written; do not spool the cut.
        """
        if self._dirty and self._path is not None:
            state_files.write_json(self._path, [list(key) for key in self._streams.values()], synced=True)
        self._dirty = False

    def new_session(self) -> None:
        """Another server listens: it has been told nothing."""
        self._untold = set(self._streams)

    def announcements(self) -> Iterator[Streams]:
        """STREAMS still owed to this session; consuming them settles the debt."""
        owed = [stream_id for stream_id in self._streams if stream_id in self._untold]
        self._untold.clear()
        for start in range(0, len(owed), _PER_FRAME):
            chunk = owed[start : start + _PER_FRAME]
            yield Streams(tuple(StreamEntry(each, *self._streams[each]) for each in chunk))
