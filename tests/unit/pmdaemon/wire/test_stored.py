"""Messages that dbmanager reads again from its queue: of any release, and nothing of them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.wire import frame
from pmdaemon.wire.messages.server import GatewayReport, StreamsSeen
from pmdaemon.wire.messages.stored import (
    StoredExport,
    StoredGateway,
    StoredStream,
    StoredStreams,
    storable,
)

REPORT = GatewayReport(
    gateway_id="g",
    name="north",
    state="up",
    reason="up",
    address="127.0.0.1:5000",
    software="agent 1",
    epoch=7,
    at_us=5,
    offset_us=-3,
    dropped=2,
    exports=[{"volume": "v", "backend": "b", "size_bytes": 9, "read_only": True, "source": "nbd"}],
    spool=[[7, 4, 9]],
    lost_cuts=1,
    is_planned=True,
    listed=("v*",),
)
STORED = StoredGateway(
    gateway_id="g",
    name="north",
    state="up",
    reason="up",
    address="127.0.0.1:5000",
    software="agent 1",
    epoch="7",
    at_us=5,
    offset_us=-3,
    lost_cuts=3,
    is_planned=True,
    exports=(StoredExport("v", "b", 9, read_only=True),),
    volumes=("v*",),
    floors=(("g", 7, 3),),
)


def test_what_a_pair_has_reported_is_read_again() -> None:
    assert StoredGateway.read(frame.decode(REPORT.encode()).header) == STORED
    rows = [{"id": 4, "volume": "v", "client": "c", "backend": "b"}]
    streams = StoredStreams.read(StreamsSeen("g", rows).header())
    assert streams == StoredStreams("g", (StoredStream(4, "v", "c", "b"),))


def test_a_gateway_without_a_name_is_shown_by_its_id() -> None:
    assert StoredGateway.read({"gw": "g"}) == StoredGateway("g")
    assert StoredGateway("g").shown_name == "g"
    assert STORED.shown_name == "north"


@pytest.mark.parametrize("value", [None, 5, 1.5, "text", b"\xff", {"a": 1}, [5, None, {"id": "x"}], True])
def test_nothing_is_refused(value: Any) -> None:
    gateway = StoredGateway.read(dict.fromkeys(REPORT.header(), value))
    assert isinstance(gateway.name, str)
    assert gateway.exports is None or len(gateway.exports) <= 1
    assert StoredStreams.read({"gw": value, "streams": value}).streams == ()


@pytest.mark.parametrize("stream_id", [-1, 1 << 63, True, "4", None])
def test_a_stream_without_a_usable_number_is_left_out(stream_id: object) -> None:
    rows = [{"id": stream_id, "volume": "v"}, {"id": 0, "volume": "w"}]
    assert StoredStreams.read({"gw": "g", "streams": rows}).streams == (StoredStream(0, "w", "", ""),)


def test_text_is_what_every_database_keeps() -> None:
    assert storable("a\0b") == "a\ufffdb"
    assert StoredGateway.read({"gw": "g", "name": "n\0\udc80"}).name == "n\ufffd?"


@pytest.mark.parametrize(
    ("said", "epoch"), [(7, "7"), (2**64, ""), ("a\0", "a\ufffd"), ([[]], ""), (None, ""), (True, "")]
)
def test_an_epoch_is_a_number_or_a_text_that_can_be_stored(said: object, epoch: str) -> None:
    assert StoredGateway.read({"ep": said}).epoch == epoch


def test_counts_of_lost_cuts_stay_what_a_column_holds() -> None:
    most = 2**63 - 1
    assert StoredGateway.read({"dropped": most, "lost_cuts": most}).lost_cuts == most
