"""Services of a server whose term has ended: what waits for them is not taken, and nothing is decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pmdaemon.mailbox import Mailbox
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.term import Term
from sla_server.services import process
from sla_server.services.core import Services
from sla_server.services.sql_worker import SqlWorker


class Untouched:
    """Whatever is asked of it is a mistake."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_server_that_stood_still_and_has_lost_its_term_takes_no_message_and_makes_no_step(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """All its gateways seem lost: their connections have ended. Another server has them."""
    monkeypatch.setattr(process, "TICK_S", 0.001)
    stop = Stop()

    class Ended(Term):
        looks = 0

        def is_on(self) -> bool:
            self.looks += 1
            if self.looks == 5:
                stop.set("the supervisor ends it")
            return False

    term = Ended(tmp_path, 7)
    services, worker = cast(Services, Untouched()), cast(SqlWorker, Untouched())
    boxes = [cast(Mailbox, Untouched()) for _ in range(2)]
    process._loop(services, worker, boxes[0], boxes[1], FakeClock(), stop, term)  # what ``run`` does last
    assert term.looks == 5
