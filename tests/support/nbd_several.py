"""A session of upstream mode with several connections, whose openings the test answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd import upstream_further, upstream_return
from gateway_agent.nbd.upstream_handshake import Agreed
from tests.support.nbd import FakeSocket, Rig
from tests.support.nbd_proxy import Pair, upstream_of


class Opening:
    """An attempt to connect; it is answered by the test."""

    def __init__(self, made: list[Opening], on_ready: Any, on_failed: Any) -> None:
        self.made, self.on_ready, self.on_failed = made, on_ready, on_failed
        made.append(self)

    def cancel(self) -> None:
        self.made.remove(self)


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[Opening]:
    made: list[Opening] = []

    def opening(_loop: Any, _uri: str, on_ready: Any, on_failed: Any, **_how: Any) -> Opening:
        return Opening(made, on_ready, on_failed)

    monkeypatch.setattr(upstream_return, "UpstreamOpening", opening)
    monkeypatch.setattr(upstream_further, "UpstreamOpening", opening)
    return made


class Several:
    """A session with up to ``most`` connections, of which ``opened`` are there."""

    def __init__(
        self,
        openings: list[Opening],
        most: int = 3,
        opened: int = 3,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
        reconnect_s: float = 0.0,
        **rig: Any,
    ) -> None:
        self.openings, self.mode = openings, mode
        self.agreed = Agreed(structured=True, context_id=5) if mode.structured else None
        self.rig = Rig(**rig)
        settings: dict[str, Any] = {
            "volume": "vol-1",
            "backend": "disk",
            "upstream": self.rig.export.upstream,
        }
        settings |= {"upstream_connections": most, "reconnect_s": reconnect_s}
        self.rig.volume.export = ExportConfig.model_validate(settings)
        self.pair = Pair(self.rig, mode=mode, agreed=self.agreed)
        self.fars, self.near, self.session = [self.pair.far], self.pair.near, self.pair.session
        while len(self.fars) < opened:
            self.open_next()

    def open_next(self, **other: Any) -> FakeSocket:
        """The connection that the session waits for."""
        opening = self.openings.pop()
        self.fars.append(FakeSocket())
        upstream = upstream_of(self.rig, self.fars[-1], self.agreed)
        upstream = replace(upstream, **other)
        opening.on_ready(upstream, upstream.facts)
        return self.fars[-1]

    def say(self, *data: bytes) -> None:
        self.pair.say(*data)

    def answer(self, far: int, *data: bytes) -> None:
        self.rig.deliver(self.fars[far], b"".join(data))

    def end(self, far: int) -> None:
        self.pair.end(self.fars[far])

    def sent(self) -> list[bytes]:
        return [bytes(far.sent) for far in self.fars]

    @property
    def is_kept(self) -> bool:
        return not (self.near.is_shut or self.session.is_closed)
