"""An engine with mirrors, for tests without one: it answers what it is given, or keeps streams in memory."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats.js.errors

from sla_server.cluster.messages.mirror_records import BUCKET, MirrorRecord

RECORD: Final = f"STREAM.MSG.GET.KV_{BUCKET}"
NO_STREAM: Final = nats.js.errors.NotFoundError(code=404, err_code=10059)


class FakeLink:
    """Answers of the engine by subject, and what was asked; it is the bucket of records, too."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.stream: Any = self
        self.revision = 0

    async def retry(self, attempt: Callable[[], Awaitable[Any]], _what: str, _limit_s: float) -> Any:
        return await attempt()

    async def nothing(self) -> None:
        """Of what a test has no need."""

    async def key_value(self, _bucket: str) -> FakeLink:
        return self

    async def update(self, _key: str, value: bytes, last: int) -> None:
        if last != self.revision:
            raise nats.js.errors.KeyWrongLastSequenceError
        self.record(value)

    def record(self, value: bytes) -> None:
        """Store it."""
        self.revision += 1
        message = {"seq": self.revision, "data": base64.b64encode(value).decode()}
        self.answers[RECORD] = {"message": message}

    @property
    def seen(self) -> MirrorRecord:
        """What is stored."""
        return MirrorRecord.parse(base64.b64decode(self.answers[RECORD]["message"]["data"]))

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((subject, body))
        answer = self.answers.get(subject, NO_STREAM)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def changes(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (subject, body) for subject, body in self.asked if not {"INFO", "GET"} & {*subject.split(".")}
        ]


class Died(Exception):
    """The program that promotes is gone."""


class StreamsLink(FakeLink):
    """Streams without messages, with their consumers; ``dies_at`` is the number of the change before which it
    dies."""

    def __init__(self, streams: dict[str, dict[str, Any]]) -> None:
        super().__init__({})
        self.streams = streams
        self.consumers: dict[str, set[str]] = {}
        self.dies_at = -1

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        kind, verb, *names = subject.split(".")
        if subject in self.answers or not (kind == "CONSUMER" or verb in _VERBS):
            return await super().ask(subject, body)
        if verb not in ("INFO", "NAMES"):
            if self.dies_at == len(self.changes()):
                raise Died(subject)
            self.asked.append((subject, body))
        return self._stream(verb, names, body) if kind == "STREAM" else self._consumer(verb, names)

    def _stream(self, verb: str, names: list[str], body: dict[str, Any]) -> dict[str, Any]:
        if verb == "NAMES":
            return {"streams": sorted(self.streams), "total": len(self.streams)}
        [name] = names
        if verb == "CREATE":
            last = body.get("first_seq", 1) - 1
            self.streams[name] = {"config": body, "state": {"messages": 0, "last_seq": last}}
        elif name not in self.streams:
            raise NO_STREAM
        elif verb == "DELETE":
            self.consumers.pop(name, None)
            return self.streams.pop(name)
        elif verb == "UPDATE":
            assert body.get("first_seq") == self.streams[name]["config"].get("first_seq"), "it never changes"
            self.streams[name]["config"] = body
        return self.streams[name]

    def _consumer(self, verb: str, names: list[str]) -> dict[str, Any]:
        *_, stream, name = names
        if verb == "INFO" and name not in self.consumers.get(stream, ()):
            raise NO_STREAM
        self.consumers.setdefault(stream, set()).add(name)
        return {}


_VERBS: Final = frozenset({"NAMES", "INFO", "CREATE", "UPDATE", "DELETE"})
