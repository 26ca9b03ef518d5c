"""Messages handed to recipients, and how a recipient searches for them: plain values.

Holds no state and touches no shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pmdaemon.mailbox.layout import Layout
from pmdaemon.mailbox.ring import PayloadRing

THRESHOLD_FIRST: Final = 1_024  # scans; urgent posts announce themselves, so skipping is not expected


class Message(NamedTuple):
    """A message taken.

    Attributes:
        sequence: of the sender's posts to all recipients: it rises, and goes on over restarts of the sender.
    """

    sender: str
    payload: bytes
    sequence: int


class View(NamedTuple):
    """A message taken without a copy: ``payload`` is valid until its batch is released, then raises."""

    sender: str
    payload: memoryview
    sequence: int


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How a recipient searches (M5).

    Attributes:
        threshold: scans between two resets at first, and always unless ``adaptive``; None for no such resets
            (then only `invalid`, `urgent` and `returned` remain). A quarter of it is the idle interval.
        adaptive: let it move between THRESHOLD_MIN and THRESHOLD_MAX.
        enabled: False to search from the head each time, for comparison.
    """

    threshold: int | None = THRESHOLD_FIRST
    adaptive: bool = True
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class ListPlace:
    """Where a list is, and which of its messages are for this recipient.

    Attributes:
        first_sender, senders: whose slots it links: one sender's, or those of all.
        head_word, front_word: see the layout. recipient: its number.
        rings: by ADDRESS (sender << 16 | recipient), with the sender's name. where: for errors.
    """

    layout: Layout
    first_sender: int
    senders: int
    head_word: int
    front_word: int
    recipient: int
    rings: dict[int, tuple[str, PayloadRing]]
    where: str
