"""The dbmanager process in a thread of the test, its mailboxes, and the neighbours that post to it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from sla_server.db import process

RING = 1 << 20


class Peer:
    """Another participant: posts, and waits for answers."""

    def __init__(self, path, name):
        self.box = attach(path, name)
        self._seen = []

    def post(self, payload):
        self.box.post("dbmanager", payload)

    def arrived(self, kind):
        """Headers of that kind that are there now; others are dropped."""
        frames = [frame.decode(message.payload) for message in self.box.take()]
        return [parsed.header for parsed in frames if parsed.kind == kind]

    def expect(self, kind, accept=lambda _header: True):
        """The next frame of ``kind`` whose header is accepted; others before it are dropped."""
        deadline = Deadline(120)
        while True:
            while self._seen:
                parsed = frame.decode(self._seen.pop(0).payload)
                if parsed.kind == kind and accept(parsed.header):
                    return parsed.header
            assert not deadline.passed, f"no {kind.name} came"
            self.box.wait(0.05)
            self._seen += self.box.take()


def make_config(directory, settings, data_dir):
    """What ``process.run`` needs: segments with every neighbour under ``directory``."""
    runtime_dir = directory / "run"
    runtime_dir.mkdir(mode=0o700)
    routes = []
    for name in ("pair-0", "services", "supervisor"):
        routes += [Route(name, "dbmanager", RING), Route("dbmanager", name, RING)]
    names = ("supervisor", "services", "dbmanager", "pair-0")
    create_segment(runtime_dir / "main.mbx", Layout(names, tuple(routes), 256))
    names = ("appserver", "services", "dbmanager", "supervisor")
    pairs = (("appserver", "services"), ("services", "appserver"), ("dbmanager", "appserver"))
    app_routes = tuple(Route(sender, recipient, 4096) for sender, recipient in pairs)
    create_segment(runtime_dir / "app.mbx", Layout(names, app_routes, 64))
    settings = settings.model_copy(update={"flush_interval_s": 0.05})
    return SimpleNamespace(
        runtime_dir=runtime_dir,
        data_dir=data_dir,
        database=settings,
        volume_ownership="open",
        first_sight_volumes=10_000,
        cluster=None,
    )


class Peers:
    """Its neighbours in the main segment."""

    def __init__(self, config):
        main = config.runtime_dir / "main.mbx"
        self.pair, self.services, self.supervisor = (
            Peer(main, name) for name in ("pair-0", "services", "supervisor")
        )

    def close(self):
        for peer in (self.pair, self.services, self.supervisor):
            peer.box.close()


class Running:
    """``run`` in a thread of the test."""

    def __init__(self, config):
        self.stop = Stop()
        self.status = None
        self._config = config
        self._thread = threading.Thread(target=self._run, name="dbmanager")

    def _run(self):
        self.status = process.run(self._config, self.stop)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_exc):
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
