"""The announcements to ``services`` and ``dbmanager``, worded in one place.

A header holds 64 KiB, so streams are announced 100 at a time (three names of 128 characters at most each).

Source: docs/formats/messages.md (GATEWAY, STREAMS_SEEN, CAPS_STATE, GATEWAY_ALERT, GATEWAY_SPACE).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from pmdaemon.poller.gateway import Gateway
from pmdaemon.reserve import event_row, raise_event
from pmdaemon.wire.messages.agent import Hello, StreamEntry
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.messages.server import CapsState, GatewayAlert, GatewayReport, RecordRows, StreamsSeen
from pmdaemon.wire.messages.space import GatewaySpace, Space

STREAMS_A_FRAME: Final = 100


def gateway_state(gateway: Gateway, state: str, reason: str, unix_us: int, *, planned: bool = False) -> bytes:
    """A GATEWAY frame; exports, spool, features and list only with state ``up``. Takes the gateway's lock.

    Raises:
        FrameTooLarge: the exports do not fit a header.
    """
    report = GatewayReport(
        gateway_id=gateway.gateway_id,
        name=gateway.name,
        state=state,
        reason=reason,
        address=gateway.address,
        software=gateway.software,
        epoch=gateway.epoch,
        at_us=unix_us,
        offset_us=gateway.offset.offset_us,
        dropped=gateway.dropped,
        is_planned=planned or None,
    )
    if state == "up":
        with gateway.lock:
            report = replace(
                report,
                exports=gateway.exports,
                spool=gateway.record.spool(),
                features=gateway.features or None,
                listed=gateway.listed,
            )
    return report.encode()


def gateway_refused(hello: Hello, address: str, reason: str, unix_us: int) -> bytes:
    """A GATEWAY frame for a gateway that never registered."""
    return GatewayReport(
        gateway_id=hello.gateway_id,
        name=hello.name,
        state="refused",
        reason=reason,
        address=address,
        software=hello.software,
        epoch=hello.epoch,
        at_us=unix_us,
        offset_us=0,
        dropped=0,
    ).encode()


def streams_seen(gateway_id: str, streams: Iterable[StreamEntry]) -> Iterator[bytes]:
    """STREAMS_SEEN frames, ``STREAMS_A_FRAME`` streams each."""
    rest = iter(streams)
    while chunk := list(islice(rest, STREAMS_A_FRAME)):
        yield StreamsSeen(gateway_id, [stream.row() for stream in chunk]).encode()


def caps_state(
    gateway_id: str, gen: int, state: str, reason: str, unix_us: int, refused: tuple[str, ...] | None = None
) -> bytes:
    """A CAPS_STATE frame."""
    return CapsState(gateway_id, gen, state, reason, unix_us, refused).encode()


def event(kind: str, severity: str, subject: str, text: str, unix_us: int, **details: Any) -> bytes:
    """Raise an event about a gateway; returns a RECORD frame with its row."""
    row = event_row(kind, severity, "gateway", subject, text, unix_us, details)
    raise_event(row)
    return RecordRows([["events", row]], None, "pmdaemon").encode()


def alert(gateway_id: str, said: Alert) -> bytes:
    """A GATEWAY_ALERT frame: a checked ALERT with its gateway."""
    return GatewayAlert(said, gateway_id).encode()


def space(gateway_id: str, said: Space) -> bytes:
    """A GATEWAY_SPACE frame: a checked SPACE with its gateway."""
    return GatewaySpace(said, gateway_id).encode()
