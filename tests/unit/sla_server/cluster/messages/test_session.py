"""The end of a session, whatever its parts do, and what a large message leaves that was refused."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sla_server.cluster.messages.catalogue import Destination
from sla_server.cluster.messages.errors import DestinationFull, MessagesError, NotConfirmed
from sla_server.cluster.messages.fragments import Manifest
from sla_server.cluster.messages.producer import Outgoing
from sla_server.cluster.messages.session import MessageSession


def test_a_handler_that_runs_on_keeps_nothing_open() -> None:
    """What the session holds would else be kept from all others for as long as the process lives."""
    ended: list[str] = []

    def part(name: str) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: ended.append(name))

    def runs_on() -> None:
        raise TimeoutError("a handler runs on")

    parts: dict[str, object] = {
        "_lock": threading.Lock(),
        "_is_closed": False,
        "_consumers": [part("consumer")],
        "_outboxes": {"q": part("outbox")},
        "_pool": SimpleNamespace(close=runs_on),
        "link": part("link"),
        "identifiers": part("identifiers"),
    }
    session = MessageSession.__new__(MessageSession)  # its constructor would connect
    for name, value in parts.items():
        setattr(session, name, value)
    close: Callable[[], None] = session.close
    with pytest.raises(TimeoutError, match="runs on"):
        close()
    assert ended == ["consumer", "outbox", "link", "identifiers"]


@pytest.mark.parametrize(
    ("problem", "discarded"),
    [(DestinationFull("q", "maximum bytes"), ["7"]), (NotConfirmed("it", 60, "no answer"), [])],
)
def test_a_large_message_that_was_refused_leaves_no_fragments(
    problem: MessagesError, discarded: list[str]
) -> None:
    """One that is not confirmed may be stored: a consumer may have its manifest already."""
    removed: list[str] = []

    def add(message: Outgoing, **_options: object) -> None:
        message.done.set_exception(problem)

    session = MessageSession.__new__(MessageSession)  # its constructor would connect
    parts: dict[str, object] = {
        "identifiers": SimpleNamespace(make=lambda: 7),
        "_fragments": SimpleNamespace(store=lambda *_: Manifest(1, 1, "x"), discard=removed.append),
        "_outbox": lambda _name: SimpleNamespace(add=add, destination=Destination("q")),
    }
    for name, value in parts.items():
        setattr(session, name, value)
    with pytest.raises(type(problem)):
        session.send_large("q", io.BytesIO(b"1"))
    assert removed == discarded
