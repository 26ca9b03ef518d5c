"""The page and API over a real web server, with rows and a live feed that the test decides."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pmdaemon.runtime.stop import Stop
from sla_server.api.acting import ALONE, ActingServer
from sla_server.api.config import ApiConfig
from sla_server.api.server import WebServer, open_listener
from tests.support import api, world

PAST_S = 120


class Site:
    """A web server with a feed that the test decides."""

    def __init__(
        self,
        folder: Path,
        snapshot: Callable[[int], dict[str, Any]] | None = world.snapshot,
        *,
        listen: str = "127.0.0.1:0",
        nodes: tuple[str, ...] = (),
        acting: ActingServer = ALONE,
        **config: Any,
    ) -> None:
        self.folder = folder
        self.config = config
        self.nodes = nodes
        self.acting = acting
        self.stop = Stop()
        self.mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {}))
        self.source = world.World()
        self.source.shift_us = time.time_ns() // 1000 - api.NOW_US
        self.source.settle()
        self.snapshot = snapshot
        self.start(listen)

    def start(self, listen: str) -> None:
        settings = ApiConfig(listen=listen, **self.config)
        listener = open_listener(listen)
        self.server = WebServer(
            settings,
            self.folder,
            self.source,
            self.mailbox,
            listener,
            self.stop,
            nodes=self.nodes,
            acting=self.acting,
        )
        if self.acting.runtime_dir is not None:
            self.server.context.metrics.folder = self.acting.runtime_dir / "metrics"
        if os.environ.get("SLA_SCREENSHOTS"):  # a picture of the overview has a past to show
            for shown in world.lived(time.time_ns() // 1000, PAST_S):
                self.server.context.live.put(shown)
        self.threads = [
            threading.Thread(target=target, daemon=True) for target in (self.server.serve, self._feed)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def url(self) -> str:
        return self.server.address

    def _feed(self) -> None:
        while True:
            if self.snapshot is not None:
                shown = self.snapshot(time.time_ns() // 1000)
                events = shown.get("events", ())
                if events == api.events(len(events)):  # of the rig's time: as of now
                    shown["events"] = self.source.happened(len(events))
                self.server.context.live.put(shown)
            if self.stop.wait(0.5):
                return

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)
        self.server.listener.close()
        assert not any(thread.is_alive() for thread in self.threads)
