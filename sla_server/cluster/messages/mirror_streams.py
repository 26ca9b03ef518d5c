"""JetStream streams as mirrors need them: their names, what their leaders say, their removal.

A mirror is called ``SLA_DOMAIN_mNODE``; no domain's own stream has such a name, for its underscores are
doubled (``names.encode``). Thread: the link's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Final

import nats.errors
import nats.js.errors

from sla_server.cluster.messages.errors import BadName, MirrorRefused
from sla_server.cluster.messages.link import EngineLink

LIMIT_S: Final = 60.0
PASSED_OVER: Final = "_passed-over"
"""Token of a subject at which a promotion uses up sequences; no destination has this name."""
PROMOTED_LAST: Final = "sla-promoted-last"
FILE_NAME: Final = 255
_MIRROR: Final = re.compile(r"(SLA_(?:[A-Za-z0-9-]|__|_d)+)_m([A-Za-z0-9][A-Za-z0-9-]*)")
Info = dict[str, Any]
"""The engine's answer about a stream."""


def mirror_name(stream: str, node: str) -> str:
    """The mirror of a domain's stream on a node. Pure.

    Raises:
        BadName: both names together are too long for the engine's directory.
        MirrorRefused: the stream is a mirror itself.
    """
    refuse_mirror(stream)
    name = f"{stream}_m{node.lower()}"  # as in the tag by which the engine finds it
    if len(name) > FILE_NAME:
        raise BadName("mirror", name, f"it is a directory of the engine, of {FILE_NAME} characters at most")
    if parts_of(name) is None:
        raise BadName("node", node, "a node's name has letters, digits and - only")
    return name


def parts_of(name: str) -> tuple[str, str] | None:
    """Primary and node of a mirror; None: the stream is none. Pure."""
    found = _MIRROR.fullmatch(name)
    return (found[1], found[2]) if found else None


def refuse_mirror(name: str) -> None:
    """See that it is no mirror.

    Raises:
        MirrorRefused: it is one.
    """
    if (parts := parts_of(name)) is not None:
        raise MirrorRefused(
            f"{name} is a mirror itself, of {parts[0]}: what it lacks a mirror of it would lack, too, and say"
            " that it has everything. Make one of the destination"
        )


def behind(primary: Mapping[str, Any], mirror: Mapping[str, Any]) -> int:
    """How many messages the primary has that the mirror has not come to, from the engine's states. Pure.

    Never too few: gaps between those that are missing count as messages.
    """
    lacking = primary["last_seq"] - max(mirror["last_seq"], primary["first_seq"] - 1)
    return int(max(0, min(lacking, primary["messages"])))


def is_set_back(primary: Mapping[str, Any], mirror: Mapping[str, Any]) -> bool:
    """Whether a primary has stored less than was copied from it; ``mirror`` is the older answer. Pure."""
    return bool(primary["last_seq"] < mirror["last_seq"])


async def shares_history(link: EngineLink, own: Info, primary: Info) -> bool | None:
    """Whether a message that both have is the same in both; None: the mirror lacks it, so nothing is known.

    True as well where they have none in common. The engine copies a message with the time of its storing.
    """
    there, here = primary["state"], own["state"]
    begin, last = max(there["first_seq"], here["first_seq"]), min(there["last_seq"], here["last_seq"])
    if not there["messages"] or not here["messages"] or begin > last:
        return True
    wanted = {"seq": int(begin), "next_by_subj": ">"}
    found = await _message(link, primary["config"]["name"], wanted)
    if found is None or found["seq"] > last:
        return True
    copy = await _message(link, own["config"]["name"], {"seq": int(found["seq"])})
    return None if copy is None else bool(copy["time"] == found["time"])


async def _message(link: EngineLink, stream: str, wanted: dict[str, object]) -> Info | None:
    try:
        return dict((await link.ask(f"STREAM.MSG.GET.{stream}", wanted))["message"])
    except nats.js.errors.NotFoundError:
        return None


def holders_of(info: Info) -> tuple[str, ...]:
    """Nodes that have the primary or a backup. Pure."""
    cluster = info.get("cluster") or {}
    peers = [str(peer.get("name", "")) for peer in cluster.get("replicas") or ()]
    return tuple(name for name in (str(cluster.get("leader") or ""), *peers) if name)


def is_served(info: Info) -> bool:
    """Whether the stream is a domain's: has its subjects, and is neither a copy nor being promoted. Pure."""
    config = info["config"]
    subjects = [text for text in config.get("subjects") or () if not text.endswith(f".{PASSED_OVER}")]
    return not config.get("mirror") and bool(subjects)


def promoted_last(info: Info) -> int:
    """Up to which sequence a promotion has taken messages from a lost primary; 0: there was none. Pure."""
    text = str((info["config"].get("metadata") or {}).get(PROMOTED_LAST, ""))
    return int(text) if text.isascii() and text.isdigit() else 0


async def stream_info(link: EngineLink, stream: str, *, details: bool = False) -> Info | None:
    """What a stream's leader says; None: it has none, or there is no such stream."""
    try:
        return await link.ask(f"STREAM.INFO.{stream}", {"deleted_details": True} if details else {})
    except nats.js.errors.APIError as exc:
        if (exc.code or 503) >= 500 or isinstance(exc, nats.js.errors.NotFoundError):
            return None
        raise
    except (TimeoutError, nats.errors.TimeoutError, nats.errors.NoRespondersError):
        return None


async def stream_names(link: EngineLink) -> set[str]:
    """All streams, from the leader of all nodes; for ``retry``."""
    found: set[str] = set()
    while True:
        answer = await link.ask("STREAM.NAMES", {"offset": len(found)})
        more = answer.get("streams") or ()
        found |= set(more)
        if not more or len(found) >= int(answer.get("total", 0)):
            return found


async def both(link: EngineLink, mirror: str) -> tuple[Info | None, Info | None]:
    """Mirror and primary, in this order: so nothing seems to be copied that is not stored yet."""
    parts = parts_of(mirror)
    assert parts is not None
    return await stream_info(link, mirror), await stream_info(link, parts[0])


async def delete_stream(link: EngineLink, stream: str) -> None:
    """Have the cluster forget a stream, also one whose copies do not run and so give no answer.

    Raises:
        NotConfirmed: the cluster has no majority; repeat it.
    """

    async def attempt() -> None:
        with contextlib.suppress(
            nats.js.errors.NotFoundError,
            TimeoutError,
            nats.errors.TimeoutError,
            nats.errors.NoRespondersError,
        ):
            await link.ask(f"STREAM.DELETE.{stream}", {})
        if stream in await stream_names(link):
            raise TimeoutError("it is still there")

    await link.retry(attempt, f"removal of stream {stream}", LIMIT_S)
