"""Messages larger than one of the engine, in fragments: never whole in memory, on either side (C8).

The fragments are stored first, ``FRAGMENTS_AT_ONCE`` at a time beside other traffic, in a JetStream stream of
their own; then a manifest with their number, size and digest goes to the destination as an ordinary message.
The manifest is the commit: until it is stored no consumer knows of the message, and once it is, all fragments
are there.

::

    sla.f.IDENTITY.0 ... sla.f.IDENTITY.N-1     fragments of FRAGMENT_BYTES, the last one shorter
    the destination's subject                   manifest: header Sla-Fragments: N SIZE SHA256 LAST, no payload

*Early.* A message may go to its destination with the first fragments, so that it is read before the last has
come. Then the commit is a record behind all of them, and the manifest in the header is the word ``early``:

::

    the destination's subject                   header Sla-Fragments: early, no payload
    sla.f.IDENTITY.end                          N SIZE SHA256 LAST, or that it has failed

A reader waits at the fragment that has not come, for ``STALLED_S`` at most: a sender that has died says
nothing. What was read of such a message is not used, as ever before its end. The record is stored once, so a
sender that had no answer to "complete" does not make it "failed".

What a crash leaves are fragments without a manifest (*orphans*), or whose manifest was acknowledged. A
program removes its own orphans as it starts again (``unfinished``), which knows without a guess that their
sender is dead. The engine removes every fragment ``ORPHANS_S`` after it was stored. That is no measure of its
sender's life, so a sender gives up after half of it (``SENDING_S``): a manifest is never sent whose first
fragments may be gone, and its consumers have the other half at least.

Thread: the caller's; each fragment is stored and read in the link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import nats.errors
import nats.js.api
import nats.js.errors
import structlog

from pmdaemon.runtime.clock import Deadline, boot_ns
from sla_server.cluster.errors import ClusterError, ClusterRefused
from sla_server.cluster.messages import names
from sla_server.cluster.messages.errors import DestinationFull, FragmentsDamaged, SourceTooSlow
from sla_server.cluster.messages.feed import Received
from sla_server.cluster.messages.link import EngineLink, Trouble, classify
from sla_server.cluster.messages.producer import IDENTITY, MOST_DIGITS, SEND_LIMIT_S
from sla_server.cluster.messages.unfinished import UnfinishedSends

log = structlog.get_logger("messages")
STREAM: Final = names.stream_name(names.FRAGMENTS)
MANIFEST: Final = "Sla-Fragments"
EARLY: Final = "early"
END: Final = "end"
FAILED: Final = b"failed"
_NO_MESSAGE: Final = 10037
FIRST_IDENTITY: Final = "Sla-Identity"
"""Of a dead message: the one that it was sent with."""
FRAGMENT_BYTES: Final = 256 << 10
FRAGMENTS_AT_ONCE: Final = 16
"""4 MiB of memory on either side."""
ORPHANS_S: Final = 86_400.0
SENDING_S: Final = ORPHANS_S / 2
STALLED_S: Final = 2 * SEND_LIMIT_S
"""A sender gives a fragment up in half of it, and says so."""
AGAIN_S: Final = 0.1
DISCARD_S: Final = 5.0  # a failed send says so soon; what is left goes after a day


class Manifest(NamedTuple):
    """What a message of fragments is made of. Pure.

    Attributes:
        last_sequence: of its fragments in their stream: a primary that has come so far has had all of them.
    """

    fragments: int
    size_bytes: int
    digest: str
    last_sequence: int = 0

    def encode(self) -> str:
        """The header's value."""
        return f"{self.fragments} {self.size_bytes} {self.digest} {self.last_sequence}"

    @classmethod
    def parse(cls, identity: str, text: str) -> Manifest:
        """What ``encode`` has made.

        Raises:
            FragmentsDamaged: it is none.
        """
        parts = text.split(" ")
        numbers = [*parts[:2], *parts[3:]]  # the last one is not in those of the first release
        if len(parts) not in (3, 4) or not all(map(_is_number, numbers)):
            raise FragmentsDamaged(identity, f"its manifest {text[:80]!r} is none")
        return cls(int(parts[0]), int(parts[1]), parts[2], int(parts[3]) if len(parts) == 4 else 0)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


class Assembly:
    """Checks that fragments are those of the manifest, one after the other. Pure.

    Attributes:
        manifest: None: it is not known yet.
    """

    def __init__(self, identity: str, manifest: Manifest | None) -> None:
        self._identity = identity
        self.manifest = manifest
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def add(self, fragment: bytes) -> None:
        """The next one.

        Raises:
            FragmentsDamaged: together they are longer than the message.
        """
        self._size_bytes += len(fragment)
        self._digest.update(fragment)
        if self.manifest is not None and self._size_bytes > self.manifest.size_bytes:
            raise FragmentsDamaged(
                self._identity, f"it is longer than the {self.manifest.size_bytes} bytes sent"
            )

    def finish(self) -> None:
        """All were added.

        Raises:
            FragmentsDamaged: they are not what was sent.
        """
        assert self.manifest is not None  # whoever finishes has read it
        if self._size_bytes != self.manifest.size_bytes:
            problem = f"{self._size_bytes} of {self.manifest.size_bytes} bytes came"
            raise FragmentsDamaged(self._identity, problem)
        if self._digest.hexdigest() != self.manifest.digest:
            raise FragmentsDamaged(self._identity, "its digest differs from that of what was sent")


def fragment_subject(identity: str, place: int | str) -> str:
    """Where one fragment is stored, or the record at their end."""
    return f"sla.f.{identity}.{place}"


def fragments_identity(received: Received) -> str:
    """The identity that fragments of a message are stored under; a copy in ``_DMQ`` has one of its own."""
    return received.headers.get(FIRST_IDENTITY, received.identity)


class FragmentStore:
    """Stores and reads fragments for one session.

    Args:
        link: of the session.
        replicas, max_bytes: of the stream of all fragments, if it is made here.
        directory: of the session, whose lock it has; None: orphans are left to their age.
    """

    def __init__(
        self, link: EngineLink, replicas: int, max_bytes: int, directory: Path | None = None
    ) -> None:
        self._link = link
        self._unfinished = UnfinishedSends(directory)
        self._config = nats.js.api.StreamConfig(
            name=STREAM,
            subjects=["sla.f.>"],
            retention=nats.js.api.RetentionPolicy.LIMITS,
            discard=nats.js.api.DiscardPolicy.NEW,
            max_age=ORPHANS_S,
            max_bytes=max_bytes,
            num_replicas=replicas,
        )

    def store(self, identity: str, source: BinaryIO) -> Manifest:
        """Store all of ``source`` under ``identity``; the caller then sends the manifest.

        Raises:
            DestinationFull: there is no room for fragments.
            SourceTooSlow: ``source`` took longer than ``SENDING_S``.
            NotConfirmed: perhaps some are stored; begin again with another identity.
            OSError: of ``source``, or of the session's directory.

        Fragments of a failed call are removed at once where that can be, else by the next start of the
        program, else after ``ORPHANS_S``.
        """
        self._unfinished.begin(identity)
        try:
            manifest = self._store(identity, source)
            self._unfinished.end(identity)
            return manifest
        except BaseException:
            self.discard(identity)
            raise

    def store_early(self, identity: str, source: BinaryIO, announce: Callable[[], None]) -> None:
        """Store all of ``source``; ``announce`` sends ``EARLY``, once the first of it is stored.

        Raises:
            DestinationFull, SourceTooSlow, NotConfirmed, OSError: as of ``store``; consumers find that it has
                failed.
            ClusterError: of ``announce``.
        """
        is_announced = False

        def announce_once() -> None:
            nonlocal is_announced
            if not is_announced:
                is_announced = True  # whatever becomes of it, a consumer may have it
                announce()

        self._unfinished.begin(identity, is_early=True)
        try:
            manifest = self._store(identity, source, announce_once)
            announce_once()
            self._unfinished.end(identity)
            self._store_end(identity, manifest.encode().encode(), SEND_LIMIT_S)
        except BaseException:
            if is_announced:
                self._fail(identity)
            else:
                self.discard(identity)
            raise

    async def _end(self, identity: str, data: bytes, limit_s: float) -> None:
        subject = fragment_subject(identity, END)
        what = f"the end of {identity}"
        await self._link.store(subject, data, {IDENTITY: subject}, stream=STREAM, what=what, limit_s=limit_s)

    def _store_end(self, identity: str, data: bytes, limit_s: float) -> None:
        try:
            self._link.run(self._end(identity, data, limit_s))
        except ClusterRefused as exc:
            if isinstance(exc.__cause__, nats.errors.Error) and classify(exc.__cause__) is Trouble.FULL:
                raise DestinationFull(STREAM, str(exc.__cause__)) from exc
            raise

    def _fail(self, identity: str) -> None:
        """Let readers know; without it they find out after ``STALLED_S``. Fragments go after ``ORPHANS_S``.

        They stay: a record "complete" that had no answer may be stored, and then they are a whole message.
        """
        try:
            self._store_end(identity, FAILED, DISCARD_S)
            self._unfinished.end(identity)
        except (ClusterError, OSError) as exc:
            log.info("fragments-left", identity=identity, until_s=ORPHANS_S, problem=str(exc))

    def _store(
        self, identity: str, source: BinaryIO, announce: Callable[[], None] = lambda: None
    ) -> Manifest:
        self._link.run(self._link.retry(self._make_stream, "the stream of fragments", SEND_LIMIT_S))
        digest, size_bytes, place, last_sequence = hashlib.sha256(), 0, 0, 0
        begun_ns = 0
        while group := _read_group(source):
            begun_ns = begun_ns or boot_ns()  # of the first that is stored, not of what is waited for before
            _check_pace(identity, begun_ns)
            for fragment in group:
                digest.update(fragment)
                size_bytes += len(fragment)
            last_sequence = max(last_sequence, self._link.run(self._store_group(identity, place, group)))
            place += len(group)
            announce()
        _check_pace(identity, begun_ns or boot_ns())  # the end of the source may have been long in coming
        return Manifest(place, size_bytes, digest.hexdigest(), last_sequence)

    def read(self, received: Received) -> Iterator[bytes]:
        """The fragments of a received message, in order, as they come; the digest is known only at the end.

        Raises:
            FragmentsDamaged: at the fragment that is missing, or at the end; or its sender has failed.
            NotConfirmed: no node answers.
        """
        text, identity, place = received.headers.get(MANIFEST, ""), fragments_identity(received), 0
        assembly = Assembly(received.identity, None)
        if text != EARLY:
            assembly.manifest = Manifest.parse(received.identity, text)
        stalled = Deadline(STALLED_S)
        while (manifest := assembly.manifest) is None:
            # Before the fragments: of a message that has its end all of them are there.
            assembly.manifest = self._link.run(self._read_end(identity))
            group = [] if assembly.manifest else self._link.run(self._read_there(identity, place))
            for fragment in group:
                assembly.add(fragment)
                yield fragment
            place += len(group)
            if group:
                stalled = Deadline(STALLED_S)
            elif assembly.manifest is None:
                if stalled.passed:
                    problem = f"its sender has stored no more of it for {STALLED_S:g} s"
                    raise FragmentsDamaged(identity, problem)
                time.sleep(AGAIN_S)
        for first in range(place, manifest.fragments, FRAGMENTS_AT_ONCE):
            places = range(first, min(first + FRAGMENTS_AT_ONCE, manifest.fragments))
            for fragment in self._link.run(self._read_group(identity, places, manifest.last_sequence)):
                assembly.add(fragment)
                yield fragment
        assembly.finish()

    async def _read_end(self, identity: str) -> Manifest | None:
        """What the record at the end says; None: there is none yet.

        Raises:
            FragmentsDamaged: the sender has failed.
        """
        if (data := await self._read_one(identity, END)) == FAILED:
            raise FragmentsDamaged(identity, "its sender has failed in the midst of it")
        return None if data is None else Manifest.parse(identity, data.decode(errors="replace"))

    async def _read_there(self, identity: str, first: int) -> list[bytes]:
        """Fragments from this one on, as far as they have come; they are stored beside each other."""
        if (fragment := await self._read_one(identity, first)) is None:
            return []
        places = range(first + 1, first + FRAGMENTS_AT_ONCE)
        more = await asyncio.gather(*(self._read_one(identity, place) for place in places))
        return [
            fragment,
            *(each for each in itertools.takewhile(lambda each: each is not None, more) if each),
        ]

    async def _read_one(self, identity: str, place: int | str) -> bytes | None:
        """What is stored there; None: nothing, as far as the primary has come."""

        async def attempt() -> bytes | None:
            try:
                return (
                    await self._link.stream.get_last_msg(STREAM, fragment_subject(identity, place))
                ).data or b""
            except nats.js.errors.NotFoundError as exc:
                if exc.err_code != _NO_MESSAGE:
                    raise
                return None

        return await self._link.retry(attempt, f"fragment {place} of {identity}", SEND_LIMIT_S)

    def remove(self, identity: str, limit_s: float = SEND_LIMIT_S) -> None:
        """Remove a message's fragments at once; else they go after ``ORPHANS_S``."""
        self._link.run(self._purge(identity, limit_s))

    async def _purge(self, identity: str, limit_s: float) -> None:
        async def attempt() -> Any:
            return await self._link.stream.purge_stream(STREAM, subject=f"sla.f.{identity}.*")

        await self._link.retry(attempt, f"removal of fragments of {identity}", limit_s)

    def discard(self, identity: str) -> None:
        """``remove`` for fragments that no one will read: as well as it can be done in ``DISCARD_S``."""
        try:
            self.remove(identity, DISCARD_S)
            self._unfinished.end(identity)
        except (ClusterError, OSError) as exc:
            log.info("fragments-left", identity=identity, until_s=ORPHANS_S, problem=str(exc))

    async def collect(self) -> None:
        """Remove what a process has left that had this session's directory and has died; never fails."""
        for identity, is_early in list(self._unfinished.left.items()):
            try:
                with contextlib.suppress(nats.js.errors.NotFoundError):  # the stream has gone, too
                    await self._purge(identity, SEND_LIMIT_S)
                    if is_early:  # whoever waits for the next fragment need not wait for ``STALLED_S``
                        await self._end(identity, FAILED, SEND_LIMIT_S)
                self._unfinished.end(identity)
            except (ClusterError, OSError, nats.errors.Error) as exc:
                log.info("fragments-left", identity=identity, until_s=ORPHANS_S, problem=str(exc))
            else:
                log.info("fragments-collected", identity=identity)

    async def _make_stream(self) -> None:
        await self._link.make_stream(self._config)

    async def _store_group(self, identity: str, first: int, group: list[bytes]) -> int:
        async def store(place: int, fragment: bytes) -> int:
            subject = fragment_subject(identity, place)
            return await self._link.store(
                subject,
                fragment,
                {IDENTITY: subject},
                stream=STREAM,
                what=f"fragment {place} of {identity}",
                limit_s=SEND_LIMIT_S,
            )

        # All of them have ended before one's error goes up: what it leads to is the removal of them all.
        results = await asyncio.gather(
            *(store(first + at, fragment) for at, fragment in enumerate(group)), return_exceptions=True
        )
        for problem in results:
            if isinstance(problem, nats.errors.Error) and classify(problem) is Trouble.FULL:
                raise DestinationFull(STREAM, str(problem)) from problem
            if isinstance(problem, BaseException):
                raise problem
        return max(result for result in results if isinstance(result, int))

    async def _read_group(self, identity: str, places: range, last_sequence: int) -> list[bytes]:
        async def read(place: int) -> bytes:
            has_all = False

            async def attempt() -> bytes:
                nonlocal has_all
                try:
                    message = await self._link.stream.get_last_msg(STREAM, fragment_subject(identity, place))
                except nats.js.errors.NotFoundError as exc:
                    if exc.err_code != _NO_MESSAGE:
                        raise
                    if has_all:
                        raise FragmentsDamaged(
                            identity, f"fragment {place} is not stored (any more)"
                        ) from exc
                    # After a failover it has not come so far yet. If it has by now, it had perhaps not when
                    # it was asked for the fragment: once more, then.
                    reached = (await self._link.stream.stream_info(STREAM)).state.last_seq
                    has_all = reached >= last_sequence
                    raise TimeoutError(f"the primary has {reached} of {last_sequence} messages") from exc
                return message.data or b""

            return await self._link.retry(attempt, f"fragment {place} of {identity}", SEND_LIMIT_S)

        return list(await asyncio.gather(*(read(place) for place in places)))


def _check_pace(identity: str, begun_ns: int) -> None:
    if boot_ns() - begun_ns > SENDING_S * 1e9:
        raise SourceTooSlow(identity, SENDING_S)


def _read_group(source: BinaryIO) -> list[bytes]:
    group: list[bytes] = []
    while len(group) < FRAGMENTS_AT_ONCE and (fragment := _read(source)):
        group.append(fragment)
    return group


def _read(source: BinaryIO) -> bytes:
    fragment: bytes | None = source.read(FRAGMENT_BYTES)
    if fragment is None:  # not the end: what has come would be stored as the whole message
        raise BlockingIOError("the source does not block and has nothing just now; give one that waits")
    return fragment
