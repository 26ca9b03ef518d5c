"""Random histories against plain lists, in both forms: senders and recipients, urgent posts, views, batches
released and given back, restarts of anybody; rings of which a quarter is reserved at first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pmdaemon.mailbox import Mailbox, Message, View, attach
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.mailbox.ring import directory_bytes
from tests.support import mailbox
from tests.support.mailbox import abandon, audit, make_mesh

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
many = st.tuples(
    st.just("post_many"),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 60), min_size=1, max_size=7),
    st.booleans(),
)
views = st.tuples(st.just("take_views"), st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 400))
releases = st.tuples(st.just("release"), st.sampled_from(NAMES))
returns = st.tuples(st.just("give_back"), st.sampled_from(NAMES), st.integers(0, 1 << 6))
restarts = st.tuples(st.just("restart"), st.sampled_from(NAMES), st.booleans())
histories = st.lists(
    st.one_of(posts, posts, posts, many, takes, takes, views, looks, releases, returns, restarts), max_size=60
)


class Entry(NamedTuple):
    order: int  # of all posts of all senders
    payload: bytes
    sequence: int
    urgent: bool
    sender: str


class RouteModel:
    """One (sender, recipient): what is outstanding in the order of posting, and what was taken of it.

    ``slots`` are (position in the ring, newest sequence) from the oldest slot not released on; ``written`` is
    where the ring goes on.
    """

    def __init__(self) -> None:
        self.posted: list[Entry] = []  # from the oldest slot not released on
        self.slots: list[tuple[int, int]] = []
        self.written = 0
        self.in_hand: set[int] = set()
        self.released: set[int] = set()

    def has_room(self, size: int) -> bool:
        used = self.written - self.slots[0][0] if self.slots else 0
        return len(self.slots) < QUOTA and used + -(-size // 8) * 8 <= RING_BYTES

    def how_many_fit(self, sizes: list[int]) -> int:
        """A single payload is a message like any other, several are a bundle with a directory."""
        fitting = [n for n in range(2, len(sizes) + 1) if self.has_room(directory_bytes(n) + sum(sizes[:n]))]
        return max(fitting, default=int(self.has_room(sizes[0])))

    def due(self) -> list[Entry]:
        return [entry for entry in self.posted if entry.sequence not in self.in_hand | self.released]

    def release(self) -> None:
        self.released |= self.in_hand
        self.in_hand.clear()
        waiting = [entry.sequence for entry in self.posted if entry.sequence not in self.released]
        while self.slots and (not waiting or self.slots[0][1] < waiting[0]):
            _, newest = self.slots.pop(0)
            self.posted = [entry for entry in self.posted if entry.sequence > newest]


class World:
    """The real segment beside the model."""

    def __init__(self, path: Path) -> None:
        self.path = make_mesh(path, *NAMES, ring_bytes=RING_BYTES, slots=SLOTS, first_bytes=64)
        self.boxes: dict[str, Mailbox] = {name: attach(self.path, name) for name in NAMES}
        self.routes = {(a, b): RouteModel() for a in NAMES for b in NAMES if a != b}
        self.sequence = dict.fromkeys(NAMES, 0)
        self.batch: dict[str, list[Message | View]] = {name: [] for name in NAMES}
        self.posts = 0

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
            self.note(sender, name, payload, urgent)
            self.note_slot(sender, name, size)

    def note_slot(self, sender: str, recipient: str, span: int) -> None:
        """A slot was filled; only the mailbox knows whether a bundle left the ring's end out."""
        route = self.routes[sender, recipient]
        real = self.boxes[sender]._outlets[recipient][0].written
        position = real - -(-span // 8) * 8
        assert position == route.written or position % RING_BYTES == 0
        route.slots.append((position, self.sequence[sender]))
        route.written = real

    def note(self, sender: str, recipient: str, payload: bytes, urgent: bool) -> None:
        self.posts += 1
        entry = Entry(self.posts, payload, self.sequence[sender], urgent, sender)
        self.routes[sender, recipient].posted.append(entry)

    def post_many(self, sender: str, recipient: str, sizes: list[int], urgent: bool) -> None:
        if sender == recipient:
            return
        payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
        posted = self.routes[sender, recipient].how_many_fit(sizes)
        if posted < len(payloads):
            with pytest.raises(MailboxFull) as caught:
                self.boxes[sender].post_many(recipient, payloads, urgent=urgent)
            assert caught.value.posted == posted
        else:
            self.boxes[sender].post_many(recipient, payloads, urgent=urgent)
        for payload in payloads[:posted]:
            self.sequence[sender] += 1
            self.note(sender, recipient, payload, urgent)
        if posted:
            self.note_slot(
                sender, recipient, sum(sizes[:posted]) + (directory_bytes(posted) if posted > 1 else 0)
            )

    def mine(self, name: str) -> list[RouteModel]:
        return [route for (_, to), route in self.routes.items() if to == name]

    def due(self, name: str) -> list[list[Entry]]:
        """What is due to ``name``: one queue for each sender, or in the form `shared` one for all."""
        entries = sorted(entry for route in self.mine(name) for entry in route.due())
        entries.sort(key=lambda entry: not entry.urgent)
        if mailbox.FORM == "shared":
            return [entries]
        return [[entry for entry in entries if entry.sender == sender] for sender in NAMES]

    def take(self, name: str, max_messages: int, max_bytes: int) -> None:
        self.check_taken(name, max_messages, max_bytes, self.boxes[name].take)

    def take_views(self, name: str, max_messages: int, max_bytes: int) -> None:
        old = [message.payload for message in self.batch[name]]
        self.check_taken(name, max_messages, max_bytes, self.boxes[name].take_views)
        for payload in old:
            if isinstance(payload, memoryview):
                with pytest.raises(ValueError, match="released"):
                    payload.tobytes()

    def check_taken(
        self,
        name: str,
        max_messages: int,
        max_bytes: int,
        take: Callable[[int, int], Sequence[Message | View]],
    ) -> None:
        self.forget_batch(name)
        due = self.due(name)
        got = take(max_messages, max_bytes)
        self.batch[name] = list(got)
        for queue in due:
            senders = {entry.sender for entry in queue}
            mine = [(m.sender, bytes(m.payload), m.sequence) for m in got if m.sender in senders]
            expected = [(entry.sender, entry.payload, entry.sequence) for entry in queue[: len(mine)]]
            assert mine == expected
        for message in got:
            self.routes[message.sender, name].in_hand.add(message.sequence)
        size = sum(len(message.payload) for message in got)
        assert len(got) <= max_messages
        assert size <= max_bytes or len(got) == 1
        assert bool(got) == any(due)
        if len(got) < max_messages and size < max_bytes:
            # It stopped short of both limits: only because the next message is too large for the rest.
            rest = [queue[0] for queue in self.due(name) if queue]
            assert not rest or any(size + len(entry.payload) > max_bytes for entry in rest)

    def forget_batch(self, name: str) -> None:
        for route in self.mine(name):
            route.release()
        self.batch[name] = []

    def release(self, name: str) -> None:
        self.boxes[name].release()
        self.forget_batch(name)

    def give_back(self, name: str, which: int) -> None:
        returned = [message for number, message in enumerate(self.batch[name]) if which >> number & 1]
        self.boxes[name].give_back(returned)
        for message in returned:
            self.routes[message.sender, name].in_hand.discard(message.sequence)
            self.batch[name].remove(message)

    def look(self, name: str) -> None:
        self.forget_batch(name)
        assert self.boxes[name].prepare_sleep() == (not any(self.due(name)))
        self.boxes[name].awake()

    def restart(self, name: str, orderly: bool) -> None:
        if orderly:
            self.forget_batch(name)
            self.boxes[name].close()
        for route in self.mine(name):
            route.in_hand.clear()  # whoever dies with a batch in hand is given it again
        self.batch[name] = []
        old, self.boxes[name] = self.boxes[name], attach(self.path, name)
        assert self.boxes[name].incarnation == old.incarnation + 1
        for (sender, recipient), route in self.routes.items():
            if sender == name:  # counted again when nothing is linked
                route.written = self.boxes[name]._outlets[recipient][0].written
        if not orderly:
            abandon(old)

    def finish(self) -> None:
        for name in NAMES:
            while any(self.due(name)):
                self.take(name, 64, 1 << 20)
            assert self.boxes[name].take() == []
            self.forget_batch(name)
        for name in NAMES:
            for other in NAMES:
                self.post(name, [other], RING_BYTES - 1, False)
            audit(self.boxes[name])
            self.boxes[name].close()


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories)
def test_the_mailbox_behaves_like_plain_lists(
    tmp_path_factory: pytest.TempPathFactory, form: str, history: list[tuple[str, ...]]
) -> None:
    world = World(tmp_path_factory.mktemp("model") / "main")
    for action, *arguments in history:
        getattr(world, action)(*arguments)
    world.finish()
