"""Random histories against plain lists: several senders and recipients, urgent posts, restarts of anybody."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox.errors import MailboxFull
from tests.unit.mailbox.support import abandon, audit, make_mesh

NAMES = ("a", "b", "c")
RING_BYTES = 256
SLOTS = 12
QUOTA = (SLOTS - 1) // 2

posts = st.tuples(
    st.just("post"),
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True),
    st.one_of(st.integers(0, 40), st.integers(0, RING_BYTES - 1)),
    st.booleans(),
)
takes = st.tuples(st.just("take"), st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 400))
looks = st.tuples(st.just("look"), st.sampled_from(NAMES))
restarts = st.tuples(st.just("restart"), st.sampled_from(NAMES), st.booleans())
histories = st.lists(st.one_of(posts, posts, posts, takes, takes, looks, restarts), max_size=60)


class Entry(NamedTuple):
    payload: bytes
    sequence: int
    urgent: bool


class RouteModel:
    """One (sender, recipient): what is outstanding in the order of posting, and what was taken of it."""

    def __init__(self) -> None:
        self.posted: list[Entry] = []  # from the oldest entry not taken on
        self.taken: set[int] = set()

    def has_room(self, size: int) -> bool:
        used = sum(-(-len(entry.payload) // 8) * 8 for entry in self.posted)
        return len(self.posted) < QUOTA and used + -(-size // 8) * 8 <= RING_BYTES

    def due(self) -> list[Entry]:
        left = [entry for entry in self.posted if entry.sequence not in self.taken]
        return [entry for entry in left if entry.urgent] + [entry for entry in left if not entry.urgent]

    def take(self, sequence: int) -> None:
        self.taken.add(sequence)
        while self.posted and self.posted[0].sequence in self.taken:
            self.posted.pop(0)


class World:
    """The real segment beside the model."""

    def __init__(self, path: Path) -> None:
        self.path = make_mesh(path, *NAMES, ring_bytes=RING_BYTES, slots=SLOTS)
        self.boxes: dict[str, Mailbox] = {name: attach(self.path, name) for name in NAMES}
        self.routes = {(a, b): RouteModel() for a in NAMES for b in NAMES if a != b}
        self.sequence = dict.fromkeys(NAMES, 0)

    def post(self, sender: str, recipients: list[str], size: int, urgent: bool) -> None:
        recipients = [name for name in recipients if name != sender]
        served = [name for name in recipients if self.routes[sender, name].has_room(size)]
        refused = tuple(name for name in recipients if name not in served)
        payload = bytes([self.sequence[sender] % 251]) * size
        if refused:
            with pytest.raises(MailboxFull) as caught:
                self.boxes[sender].post(recipients, payload, urgent=urgent)
            assert caught.value.recipients == refused
        else:
            self.boxes[sender].post(recipients, payload, urgent=urgent)
        if served:
            self.sequence[sender] += 1
        for name in served:
            self.routes[sender, name].posted.append(Entry(payload, self.sequence[sender], urgent))

    def take(self, name: str, max_messages: int, max_bytes: int) -> None:
        due = {sender: route.due() for (sender, to), route in self.routes.items() if to == name}
        got = self.boxes[name].take(max_messages, max_bytes)
        for sender, expected in due.items():
            mine = [(m.payload, m.sequence) for m in got if m.sender == sender]
            assert mine == [(entry.payload, entry.sequence) for entry in expected[: len(mine)]]
            for _, sequence in mine:
                self.routes[sender, name].take(sequence)
        size = sum(len(message.payload) for message in got)
        assert len(got) <= max_messages
        assert size <= max_bytes or len(got) == 1
        assert bool(got) == any(due.values())
        if len(got) < max_messages and size < max_bytes:
            # It stopped short of both limits: only because the next message is too large for the rest.
            rest = [queue[0] for queue in self.due(name) if queue]
            assert not rest or any(size + len(entry.payload) > max_bytes for entry in rest)

    def due(self, name: str) -> list[list[Entry]]:
        return [route.due() for (_, to), route in self.routes.items() if to == name]

    def look(self, name: str) -> None:
        assert self.boxes[name].prepare_sleep() == (not any(self.due(name)))
        self.boxes[name].awake()

    def restart(self, name: str, orderly: bool) -> None:
        if orderly:
            self.boxes[name].close()
        old, self.boxes[name] = self.boxes[name], attach(self.path, name)
        assert self.boxes[name].incarnation == old.incarnation + 1
        if not orderly:
            abandon(old)

    def finish(self) -> None:
        for name in NAMES:
            while any(self.due(name)):
                self.take(name, 64, 1 << 20)
            assert self.boxes[name].take() == []
        for name in NAMES:
            for other in NAMES:
                self.post(name, [other], RING_BYTES - 1, False)
            audit(self.boxes[name])
            self.boxes[name].close()


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories)
def test_the_mailbox_behaves_like_plain_lists(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, ...]]
) -> None:
    world = World(tmp_path_factory.mktemp("model") / "main")
    for action, *arguments in history:
        getattr(world, action)(*arguments)
    world.finish()
