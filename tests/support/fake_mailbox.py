"""The one mailbox of unit tests: posts are kept, takes are given, recipients may be full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.wire import frame
from pmdaemon.wire.frame import Frame
from pmdaemon.wire.kinds import Kind


class Taken:
    """A message as ``take`` returns it."""

    def __init__(self, sender: str, payload: bytes) -> None:
        self.sender = sender
        self.payload = payload
        self.sequence = 0


class FakeMailbox:
    """A mailbox in memory.

    Attributes:
        posts: every post that found room: its recipients and the message.
        posted: a row for each recipient: its name and the message decoded; ``take_posted`` removes rows.
        inbox: what the next ``take`` returns; ``deliver`` appends to it.
        full: recipients without room.
        room: how many messages one ``post_many`` finds room for.
        refusals: posts that found no room at one recipient or more.
    """

    def __init__(self) -> None:
        self.posts: list[tuple[tuple[str, ...], bytes]] = []
        self.posted: list[tuple[str, Frame]] = []
        self.inbox: list[Any] = []
        self.full: set[str] = set()
        self.room = 1 << 30
        self.refusals = 0
        self._fd: int | None = None

    # -- what the code under test does

    def post(self, recipients: str | Sequence[str], payload: bytes | memoryview) -> None:
        wanted = (recipients,) if isinstance(recipients, str) else tuple(recipients)
        if served := tuple(name for name in wanted if name not in self.full):
            self._keep(served, bytes(payload))
        if refused := tuple(name for name in wanted if name in self.full):
            self.refusals += 1
            raise MailboxFull("fake", refused)

    def post_many(self, recipient: str, payloads: Sequence[bytes]) -> None:
        room = 0 if recipient in self.full else self.room
        for payload in payloads[:room]:
            self._keep((recipient,), bytes(payload))
        if len(payloads) > room:
            raise MailboxFull("fake", (recipient,), posted=room)

    def _keep(self, recipients: tuple[str, ...], payload: bytes) -> None:
        self.posts.append((recipients, payload))
        self.posted += [(name, frame.decode(payload)) for name in recipients]

    def take(self, max_messages: int = 64, max_bytes: int = 262_144) -> list[Any]:
        taken, self.inbox = self.inbox[:max_messages], self.inbox[max_messages:]
        return taken

    def fileno(self) -> int:
        if self._fd is None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        return self._fd

    def prepare_sleep(self) -> bool:
        return not self.inbox

    def awake(self) -> None:
        pass

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    # -- what a test does

    def deliver(self, sender: str, kind: Kind, header: dict[str, Any]) -> None:
        self.inbox.append(Taken(sender, frame.encode_folding(kind, header)))
        os.eventfd_write(self.fileno(), 1)

    def take_posted(self, kind: Kind) -> list[tuple[str, dict[str, Any]]]:
        """Headers of one kind posted since the last call; others stay."""
        found = [(to, frame.unfold(one).header) for to, one in self.posted if one.kind == kind]
        self.posted = [(to, one) for to, one in self.posted if one.kind != kind]
        return found

    def to(self, recipient: str, kind: Kind | None = None) -> list[Frame]:
        """Frames posted to a recipient so far, of one kind."""
        decoded = [frame.decode(payload) for names, payload in self.posts if recipient in names]
        return [item for item in decoded if kind is None or item.kind == kind]

    def cuts_to(self, recipient: str) -> list[tuple[int, bool]]:
        """(seq, live) of all cuts posted to a recipient."""
        found = []
        for batch in self.to(recipient, Kind.CUTS):
            raws = list(frame.split(batch.blob))
            assert len(raws) == batch.header["n"] == len(batch.header["recv_us"])
            for raw, live in zip(raws, batch.header["live"], strict=True):
                found.append((frame.decode(raw).header["seq"], live))
        return found

    def states(self, recipient: str = "services") -> list[tuple[str, str]]:
        """(gateway_id, state) of the GATEWAY announcements."""
        return [(item.header["gw"], item.header["state"]) for item in self.to(recipient, Kind.GATEWAY)]
