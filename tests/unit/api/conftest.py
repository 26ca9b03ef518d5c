from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from sla_server.api.bridge import Bridge
from sla_server.api.parts import Parts
from tests.unit.api import fakes


class Browser(FlaskClient):
    """Asks the address that the server is configured for."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        return super().open(*args, **{"base_url": "http://127.0.0.1:8411", **kwargs})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def box() -> Iterator[fakes.FakeBox]:
    """Says yes to everything."""
    made = fakes.FakeBox(answer=lambda header: (True, 200, {"op": header["op"]}))
    yield made
    made.close()


@pytest.fixture
def source() -> fakes.FakeSource:
    return fakes.FakeSource()


@pytest.fixture
def parts(box: fakes.FakeBox, clock: FakeClock, source: fakes.FakeSource) -> Parts:
    made = fakes.make_parts(box, clock, source, max_body_bytes=100_000)
    box.bridge = Bridge(box, made.live, made.calls, Stop())
    return made


@pytest.fixture
def web(parts: Parts) -> FlaskClient:
    app = dashboard.create_app(parts)
    app.test_client_class = Browser
    return app.test_client()


@pytest.fixture
def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {fakes.TOKEN}"}
