"""Fragments: what comes out is what went in, or an error."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import nats.js.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages import fragments
from sla_server.cluster.messages.errors import DestinationFull, FragmentsDamaged, NotConfirmed
from sla_server.cluster.messages.feed import Received
from sla_server.cluster.messages.fragments import (
    EARLY,
    FRAGMENT_BYTES,
    FRAGMENTS_AT_ONCE,
    Assembly,
    FragmentStore,
    Manifest,
    fragment_subject,
    fragments_identity,
)
from sla_server.cluster.messages.link import EngineLink


def _manifest(pieces: list[bytes]) -> Manifest:
    whole = b"".join(pieces)
    return Manifest(len(pieces), len(whole), hashlib.sha256(whole).hexdigest())


@given(st.lists(st.binary(max_size=5), max_size=6), st.lists(st.binary(max_size=5), max_size=6))
def test_only_what_was_sent_passes(sent: list[bytes], came: list[bytes]) -> None:
    manifest = Manifest.parse("x", _manifest(sent).encode())
    assert manifest == _manifest(sent)
    assembly, is_whole = Assembly("x", manifest), True
    try:
        for piece in came:
            assembly.add(piece)
        assembly.finish()
    except FragmentsDamaged:
        is_whole = False
    assert is_whole == (b"".join(came) == b"".join(sent))


def test_words() -> None:
    assembly = Assembly("abc", _manifest([b"12", b"3"]))
    assembly.add(b"12")
    with pytest.raises(FragmentsDamaged, match="message abc: 2 of 3 bytes came"):
        assembly.finish()
    assembly.add(b"4")
    with pytest.raises(FragmentsDamaged, match="digest differs"):
        assembly.finish()
    assert Manifest.parse("abc", "1 2 y") == Manifest(1, 2, "y", 0)  # of the first release
    for bad in ("", "1 2", "1 x y", "-1 2 y", "1 2 y z", "1 2 y 3 4", f"1 {'9' * 5000} y"):
        with pytest.raises(FragmentsDamaged, match="manifest"):
            Manifest.parse("abc", bad)
    assert fragment_subject("abc", 3) == "sla.f.abc.3"


def test_a_dead_message_has_the_fragments_of_the_first() -> None:
    alive = SimpleNamespace(identity="abc", headers={})
    dead = SimpleNamespace(identity="dead:films:abc", headers={"Sla-Identity": "abc"})
    assert fragments_identity(cast(Received, alive)) == fragments_identity(cast(Received, dead)) == "abc"


class FakeLink:
    """A stream of fragments in memory, of which a new primary has so many for the first readers."""

    def __init__(self) -> None:
        self.stream = self
        self.fragments: dict[str, bytes] = {}
        self.reached: list[int] = []
        self.reads = 0
        self.room = 100

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    async def retry(self, attempt: Callable[[], Awaitable[Any]], _what: str, _limit_s: float) -> Any:
        while True:
            try:
                return await attempt()
            except TimeoutError:
                continue

    async def make_stream(self, _config: object) -> None:
        pass

    async def store(self, subject: str, data: bytes, *_more: object, **_options: object) -> int:
        if subject in self.fragments:  # known by its identity
            return len(self.fragments)
        if len(self.fragments) >= self.room:
            raise nats.js.errors.APIError(code=503, err_code=10077, description="maximum bytes exceeded")
        self.fragments[subject] = data
        return len(self.fragments)

    async def get_last_msg(self, _stream: str, subject: str) -> SimpleNamespace:
        self.reads += 1
        if self.reached or subject not in self.fragments:
            raise nats.js.errors.NotFoundError(code=404, err_code=10037, description="no message found")
        return SimpleNamespace(data=self.fragments[subject])

    async def purge_stream(self, _stream: str, subject: str) -> None:
        prefix = subject.removesuffix("*")
        self.fragments = {key: data for key, data in self.fragments.items() if not key.startswith(prefix)}

    async def stream_info(self, _stream: str) -> SimpleNamespace:
        last_seq = self.reached.pop() if self.reached else len(self.fragments)
        return SimpleNamespace(state=SimpleNamespace(last_seq=last_seq))


def test_a_fragment_that_a_new_primary_does_not_know_yet_is_not_lost() -> None:
    link = FakeLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    manifest = store.store("abc", io.BytesIO(b"film"))
    received = cast(Received, SimpleNamespace(identity="abc", headers={"Sla-Fragments": manifest.encode()}))
    link.reached = [0, 0]
    assert b"".join(store.read(received)) == b"film"
    assert link.reads == 3
    link.fragments = {"another": b""}
    with pytest.raises(FragmentsDamaged, match="fragment 0 is not stored"):
        list(store.read(received))


def test_a_fragment_that_comes_between_two_questions_is_not_lost() -> None:
    """The primary says that it lacks one, has got it when it is asked how far it is, and so it is there."""
    link = FakeLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    manifest = store.store("abc", io.BytesIO(b"film"))
    received = cast(Received, SimpleNamespace(identity="abc", headers={"Sla-Fragments": manifest.encode()}))
    link.reached = [1]
    assert b"".join(store.read(received)) == b"film"


def test_a_failed_send_leaves_no_fragments() -> None:
    link = FakeLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    store.store("one", io.BytesIO(b"film"))
    link.room = 4
    with pytest.raises(DestinationFull):
        store.store("two", io.BytesIO(bytes(6 * FRAGMENT_BYTES)))
    assert list(link.fragments) == ["sla.f.one.0"]


def test_a_source_that_has_nothing_just_now_is_not_taken_for_its_end() -> None:
    link = FakeLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    pieces: list[bytes | None] = [b"half", None, b"rest", b""]
    source = SimpleNamespace(read=lambda _size: pieces.pop(0))
    with pytest.raises(BlockingIOError, match="give one that waits"):
        store.store("one", cast(BinaryIO, source))
    assert link.fragments == {}


EARLY_ONE = cast(Received, SimpleNamespace(identity="abc", headers={"Sla-Fragments": EARLY}))
FILM = bytes(range(256)) * (FRAGMENT_BYTES // 256) * (2 * FRAGMENTS_AT_ONCE) + b"the end"


def test_what_is_sent_early_is_read_before_the_last_fragment_has_come() -> None:
    link, found = FakeLink(), list[bytes]()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    reading = store.read(EARLY_ONE)

    def announce() -> None:
        assert len(link.fragments) == FRAGMENTS_AT_ONCE
        found.extend(next(reading) for _ in range(FRAGMENTS_AT_ONCE))

    store.store_early("abc", io.BytesIO(FILM), announce)
    assert b"".join([*found, *reading]) == FILM
    assert b"".join(store.read(EARLY_ONE)) == FILM  # as one that was handed out later
    store.remove("abc")
    assert link.fragments == {}


def test_an_early_message_of_nothing_has_an_end() -> None:
    announced: list[str] = []
    store = FragmentStore(cast(EngineLink, FakeLink()), 3, 1 << 20)
    store.store_early("abc", io.BytesIO(b""), lambda: announced.append("abc"))
    assert announced == ["abc"]
    assert list(store.read(EARLY_ONE)) == []


def test_readers_of_an_early_message_find_that_its_sender_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes | None] = [b"1" * FRAGMENT_BYTES] * FRAGMENTS_AT_ONCE + [None]
    source = SimpleNamespace(read=lambda _size: pieces.pop(0))
    store = FragmentStore(cast(EngineLink, FakeLink()), 3, 1 << 20)
    with pytest.raises(BlockingIOError):
        store.store_early("abc", cast(BinaryIO, source), lambda: None)
    with pytest.raises(FragmentsDamaged, match="its sender has failed"):
        list(store.read(EARLY_ONE))
    link = FakeLink()
    link.fragments[fragment_subject("abc", 0)] = b"1"  # a sender that has died says nothing
    monkeypatch.setattr(fragments, "STALLED_S", 0.0)
    reading = FragmentStore(cast(EngineLink, link), 3, 1 << 20).read(EARLY_ONE)
    assert next(reading) == b"1"
    with pytest.raises(FragmentsDamaged, match="has stored no more of it"):
        next(reading)


def test_an_early_message_whose_end_comes_late_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FragmentStore(cast(EngineLink, FakeLink()), 3, 1 << 20)
    store.store_early("abc", io.BytesIO(FILM), lambda: None)
    monkeypatch.setattr(fragments, "STALLED_S", 0.0)  # the time was over when the end was found
    assert b"".join(store.read(EARLY_ONE)) == FILM


def test_an_end_that_had_no_answer_is_not_made_a_failure() -> None:
    class Unanswered(FakeLink):
        async def store(self, subject: str, data: bytes, *more: object, **options: object) -> int:
            stored = await super().store(subject, data, *more, **options)
            if subject.endswith(".end"):
                raise NotConfirmed(subject, 60, "no answer")
            return stored

    store = FragmentStore(cast(EngineLink, Unanswered()), 3, 1 << 20)
    with pytest.raises(NotConfirmed):
        store.store_early("abc", io.BytesIO(FILM), lambda: None)
    assert b"".join(store.read(EARLY_ONE)) == FILM


def test_an_early_message_that_no_consumer_may_have_leaves_no_fragments() -> None:
    link = FakeLink()
    link.room = 4
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)
    with pytest.raises(DestinationFull):
        store.store_early("abc", io.BytesIO(FILM), lambda: None)
    assert link.fragments == {}
