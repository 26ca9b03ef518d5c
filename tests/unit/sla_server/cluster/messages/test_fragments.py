"""Fragments: what comes out is what went in, or an error."""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import nats.js.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages import fragments, unfinished
from sla_server.cluster.messages.errors import (
    DestinationFull,
    FragmentsDamaged,
    NotConfirmed,
    SourceTooSlow,
)
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
from sla_server.cluster.messages.identifiers import Identifier
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


def test_a_source_that_is_slower_than_fragments_are_kept_makes_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first fragments would be gone, and the sender would be told that all is well."""
    now_ns = [0]
    monkeypatch.setattr(fragments, "boot_ns", lambda: now_ns[0])  # hours must not pass
    link, told = FakeLink(), list[str]()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20)

    def source(hours: list[float]) -> BinaryIO:
        """A piece after each of these waits, and the end after the last."""
        left = list(hours)

        def read(_size: int) -> bytes:
            now_ns[0] += round(left.pop(0) * 3600e9) if left else 0
            return b"1" if left else b""

        return cast(BinaryIO, SimpleNamespace(read=read))

    quick = [0.0] * FRAGMENTS_AT_ONCE
    assert store.store("waits", source([30.0, 11.9])).fragments == 1, "nothing of it was stored meanwhile"
    for hours in ([*quick, 12.1], [*quick, 12.1, 0.0]):  # for its end, and for a piece
        with pytest.raises(SourceTooSlow, match=r"its source takes more than 12 h\. Gather it in a file"):
            store.store("slow", source(hours))
        assert list(link.fragments) == ["sla.f.waits.0"]
    with pytest.raises(SourceTooSlow):
        store.store_early("abc", source([*quick, 12.1, 0.0]), lambda: told.append("abc"))
    assert told == ["abc"]
    with pytest.raises(FragmentsDamaged, match="its sender has failed"):
        list(store.read(EARLY_ONE))


class Death(BaseException):
    """Of the process, which does nothing more."""


class MortalLink(FakeLink):
    """With a process that dies as it stores the record or fragment of that name."""

    dies_at = ""

    async def store(self, subject: str, data: bytes, *more: object, **options: object) -> int:
        self.die(subject)
        return await super().store(subject, data, *more, **options)

    async def purge_stream(self, stream: str, subject: str) -> None:
        self.die(subject)
        await super().purge_stream(stream, subject)

    def die(self, subject: str) -> None:
        if self.dies_at and self.dies_at in subject:
            self.dies_at = "sla.f"  # nor does it clean up
            raise Death


IDENTITY = str(Identifier(1, 2, 3))
EARLY_OF_IT = cast(Received, SimpleNamespace(identity=IDENTITY, headers={"Sla-Fragments": EARLY}))


def _restarted(link: MortalLink, directory: Path) -> FragmentStore:
    link.dies_at = ""
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, directory)
    asyncio.run(store.collect())
    return store


def test_the_next_start_removes_what_the_death_of_the_sender_has_left(tmp_path: Path) -> None:
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path)
    store.store(str(Identifier(1, 2, 2)), io.BytesIO(b"whole"))
    whole = dict(link.fragments)
    link.dies_at = f"{IDENTITY}.{FRAGMENTS_AT_ONCE}"
    with pytest.raises(Death):
        store.store(IDENTITY, io.BytesIO(FILM))
    assert len(link.fragments) >= len(whole) + FRAGMENTS_AT_ONCE
    _restarted(link, tmp_path)
    assert link.fragments == whole, "its own orphans alone"
    assert list((tmp_path / "sending").iterdir()) == []


def test_a_message_whose_sender_died_behind_its_last_fragment_stays(tmp_path: Path) -> None:
    """Perhaps its manifest is stored; its fragments go by their age."""
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path)
    manifest = store.store(IDENTITY, io.BytesIO(FILM))
    received = SimpleNamespace(identity=IDENTITY, headers={"Sla-Fragments": manifest.encode()})
    assert b"".join(_restarted(link, tmp_path).read(cast(Received, received))) == FILM
    link.dies_at = f"{Identifier(1, 2, 4)}.end"
    with pytest.raises(Death):
        store.store_early(str(Identifier(1, 2, 4)), io.BytesIO(b"film"), lambda: None)
    before = dict(link.fragments)
    _restarted(link, tmp_path)
    assert link.fragments == before


def test_readers_of_an_early_message_are_told_by_the_next_start_of_its_sender(tmp_path: Path) -> None:
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path)
    link.dies_at = f"{IDENTITY}.{FRAGMENTS_AT_ONCE}"
    with pytest.raises(Death):
        store.store_early(IDENTITY, io.BytesIO(FILM), lambda: None)
    restarted = _restarted(link, tmp_path)
    with pytest.raises(FragmentsDamaged, match="its sender has failed"):
        list(restarted.read(EARLY_OF_IT))
    assert list(link.fragments) == [f"sla.f.{IDENTITY}.end"]


@pytest.mark.parametrize("how", ["copied", "after a boot", "with another name"])
def test_what_is_written_of_another_time_or_place_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The sender may live, or its message may be whole by now: a copied machine, a disk of yesterday."""
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path / "one")
    link.dies_at = f"{IDENTITY}.{FRAGMENTS_AT_ONCE}"
    with pytest.raises(Death):
        store.store(IDENTITY, io.BytesIO(FILM))
    before, directory = dict(link.fragments), tmp_path / "one"
    if how == "copied":
        directory = shutil.copytree(directory, tmp_path / "two")
    elif how == "after a boot":
        monkeypatch.setattr(unfinished, "boot_id", lambda: "another")
    else:
        (directory / "sending" / IDENTITY).rename(directory / "sending" / "*")
    _restarted(link, directory)
    assert link.fragments == before


def test_orphans_of_a_stream_that_is_gone_and_of_one_that_does_not_answer(tmp_path: Path) -> None:
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path)
    link.dies_at = f"{IDENTITY}.0"
    with pytest.raises(Death):
        store.store(IDENTITY, io.BytesIO(FILM))

    async def silent(*_what: object, **_how: object) -> None:
        raise NotConfirmed("removal", 60, "no answer")

    link.retry = silent  # type: ignore[assignment,method-assign]  # a cluster without a majority
    _restarted(link, tmp_path)
    assert [path.name for path in (tmp_path / "sending").iterdir()] == [IDENTITY], (
        "the next start tries again"
    )

    async def gone(*_what: object, **_how: object) -> None:
        raise nats.js.errors.NotFoundError(code=404, err_code=10059, description="stream not found")

    link.retry = gone  # type: ignore[assignment,method-assign]
    _restarted(link, tmp_path)
    assert list((tmp_path / "sending").iterdir()) == []


def test_a_record_that_cannot_be_removed_makes_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would take the fragments of a whole message for orphans."""
    link = MortalLink()
    store = FragmentStore(cast(EngineLink, link), 3, 1 << 20, tmp_path)

    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:  # of the file system: this disk has no faults
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output"):
            store.store(IDENTITY, io.BytesIO(FILM))
    assert link.fragments == {}
