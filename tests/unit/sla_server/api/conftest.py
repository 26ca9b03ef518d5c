from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from sla_server.api.context import AppContext
from sla_server.api.mailbox_thread import MailboxThread
from tests.support import api


class Browser(FlaskClient):
    """Asks the address that the server is configured for."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        return super().open(*args, **{"base_url": "http://127.0.0.1:8411", **kwargs})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mailbox() -> Iterator[api.AnsweringMailbox]:
    """Says yes to everything."""
    made = api.AnsweringMailbox(answer=lambda header: (True, 200, {"op": header["op"]}))
    yield made
    made.close()


@pytest.fixture
def source() -> api.FakeSource:
    return api.FakeSource()


@pytest.fixture
def context(mailbox: api.AnsweringMailbox, clock: FakeClock, source: api.FakeSource) -> AppContext:
    made = api.make_context(mailbox, clock, source, max_body_bytes=100_000)
    mailbox.thread = MailboxThread(mailbox, made.live, made.operations, Stop())
    return made


@pytest.fixture
def web(context: AppContext) -> FlaskClient:
    app = dashboard.create_app(context)
    app.test_client_class = Browser
    return app.test_client()


@pytest.fixture
def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {api.TOKEN}"}
