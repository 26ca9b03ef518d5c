"""Names are looked up in threads of their own, which a machine without memory may not have."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.network import Resolver

FOUND = [(2, 1, 6, "", ("192.0.2.1", 25))]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_lookup_for_which_there_was_no_thread_is_made_by_the_next_call(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: threading.Thread) -> None:
        raise error

    def lookup(*_what: Any) -> Any:
        return FOUND

    resolver = Resolver(lookup)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(OSError, match="no thread"):
            resolver.resolve("mail.example", 25, Deadline(60.0))
    assert resolver.running == 0
    assert resolver.resolve("mail.example", 25, Deadline(60.0)) == FOUND
