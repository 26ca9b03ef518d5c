"""The end of a session, whatever its parts do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

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
