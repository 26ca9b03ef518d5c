"""By what two cooperating servers see that the disk of one was set back: its openings.

An opening is drawn at random each time the queues are opened, before anything is added to them. With it are
kept the numbers of the newest records then. So a list of openings names the history of the queues, and two
lists show how far two histories are one: up to the end of the last opening that both have.

    sent by the partner before     A@0  B@50  C@80        it was sent events up to 100
    sent by the partner now        A@0  B@50  D@60        its disk was set back to 60, and is at 130 now
    one history                    up to 60

The newest number alone does not tell it: at 130 the partner has again as many as we got of it.

The file ``openings.json`` is on disk before the first event that is added after it. A disk that does not take
it leaves no file: then nothing is known to be of one history, which costs repeats. It is removed where no
partner is configured, because events are added then without an opening.

What is not seen: a queue that is put back without this file to a state that was given up before; and a
machine that goes on in the midst of a process (a snapshot with its memory), since it opens nothing. Only a
newest number below the one that we got tells of these.

Thread: ``begin`` and ``forget`` main, at an opening; the rest is pure.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pmdaemon.runtime.files import sync_directory, write_whole
from pmdaemon.wire.messages.mirror import MOST_OPENINGS, MirrorHello

log = structlog.get_logger("pair")
FILE: Final = "openings.json"
Cursor = Annotated[int, Field(ge=0)]


class Opening(NamedTuple):
    """One opening: its random id, and by queue id the newest number at that time."""

    opening_id: str
    newest: Mapping[str, int]


class _Stored(BaseModel):
    """The file: the oldest opening first."""

    model_config = ConfigDict(strict=True)
    openings: list[tuple[str, dict[str, Cursor]]]


def begin(directory: Path, newest: Mapping[str, int]) -> list[Opening]:
    """Draw an opening for queues to which nothing was added since they were opened.

    One in which nothing was added gives its place to it, but for the first one. Beyond ``MOST_OPENINGS`` the
    oldest goes.

    Args:
        directory: of the file.
        newest: by queue id, the number of the newest record of each: an opening after a crash leaves a number
            unused, which may have been given to an event that was lost.

    Returns:
        The newest ones, this one last.

    Raises:
        OSError: neither could the file be written, nor removed.
    """
    found = _read(directory)
    if len(found) > 1 and found[-1].newest == dict(
        newest
    ):  # else a start of an idle server would share nothing
        found.pop()
    found = [*found, Opening(secrets.token_hex(8), newest)][-MOST_OPENINGS:]
    try:
        stored = _Stored(openings=[(each.opening_id, dict(each.newest)) for each in found])
        write_whole(directory / FILE, stored.model_dump_json(), synced=True)
    except OSError as exc:
        log.error("opening-not-written", problem=str(exc), effect="the partner may deliver events again")
        forget(directory)
        return found[-1:]
    return found


def forget(directory: Path) -> None:
    """Events are added without an opening from now on.

    Durability: the file is gone on return.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        (directory / FILE).unlink()
        sync_directory(directory)


def openings_in(hello: MirrorHello) -> list[Opening]:
    """The openings that a partner says."""
    ids = [queue.queue_id for queue in hello.queues]
    return [
        Opening(each.opening_id, dict(zip(ids, each.newest_seqs, strict=True))) for each in hello.openings
    ]


def shared_through(known: Sequence[Opening], said: Sequence[Opening], queue_id: str, newest_seq: int) -> int:
    """Up to which number a queue of the partner is still what it was; ``newest_seq`` if nothing tells.

    Args:
        known: openings that it has sent before.
        said: those that it has sent now.
        queue_id: of the queue.
        newest_seq: its newest number now.
    """
    if not known or not said:  # a former release, or its first start after one
        return newest_seq
    places = {each.opening_id: place for place, each in enumerate(said)}
    shared = [(at, places[each.opening_id]) for at, each in enumerate(known) if each.opening_id in places]
    if not shared:
        return 0
    here, there = shared[-1]
    following = [*known[here + 1 :], *said[there + 1 :]]  # of one whose queues alone were set back, too
    return min([newest_seq, *(each.newest.get(queue_id, 0) for each in following)])


def lost_queue_id(known: Sequence[Opening], queue_id: str, through: int) -> str:
    """An id for what the partner has lost of a queue: the same again if a crash interrupts its keeping.

    Args:
        known: openings that it had sent before; without any the id is drawn at random.
        queue_id: of the queue.
        through: up to where it is what it was.
    """
    if not known:
        return secrets.token_hex(8)
    return hashlib.sha256(f"{known[-1].opening_id} {queue_id} {through}".encode()).hexdigest()[:16]


def _read(directory: Path) -> list[Opening]:
    try:
        found = _Stored.model_validate_json((directory / FILE).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as exc:
        log.error("openings-unreadable", problem=str(exc).partition("\n")[0])
        return []
    return [Opening(*each) for each in found.openings]
