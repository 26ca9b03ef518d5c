"""The command line against the real API application, called in process, over the API tests' fakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

import dashboard
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from sla_server.api.context import AppContext
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.cli.client import Client
from sla_server.cli.main import cli
from sla_server.cli.tables import KINDS
from tests.support import api

SERVER = "http://127.0.0.1:8411"


@dataclass
class Terminal:
    """Runs ``sla`` against the application."""

    context: AppContext
    mailbox: api.AnsweringMailbox
    source: api.FakeSource
    transport: httpx.BaseTransport
    clock: FakeClock
    config: Path | None = None

    def __call__(self, *arguments: str, text: str | None = None) -> Result:
        client = Client(SERVER, config=self.config, transport=self.transport)
        return CliRunner().invoke(cli, list(arguments), obj=client, input=text, catch_exceptions=False)

    @property
    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        return [(header["op"], header["body"]) for header in self.mailbox.posted]


@pytest.fixture
def sla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Terminal]:
    for name in ("SLA_SERVER", "SLA_CONFIG", "SLA__DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLA_TOKEN", api.TOKEN)
    clock, source = FakeClock(), api.FakeSource()
    mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {}))
    context = replace(api.make_context(mailbox, clock, source), nodes=("n1", "n2"))
    context.metrics.folder = tmp_path / "metrics"
    mailbox.thread = MailboxThread(mailbox, context.live, context.operations, Stop())
    context.live.put(api.snapshot())
    yield Terminal(context, mailbox, source, httpx.WSGITransport(app=dashboard.create_app(context)), clock)
    mailbox.close()


def name_of(kind: str) -> tuple[str, ...]:
    """The name that ``sla get KIND`` needs, of what the rig has."""
    return {"AGREEMENT": ("erp-gold",), "VOLUME": ("erp-db",), "BACKEND": ("disk-0",)}.get(KINDS[kind].of, ())


def replace_sleep(monkeypatch: pytest.MonkeyPatch, module: Any, sleep: Callable[[float], None]) -> None:
    """Let one module sleep in another way; ``time.sleep`` itself is also that of threads of libraries."""
    clock = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    clock.sleep = sleep
    monkeypatch.setattr(module, "time", clock)
