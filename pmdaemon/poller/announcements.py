"""The announcements to ``services`` and ``dbmanager``, worded in one place.

A header holds 64 KiB, so streams are announced 100 at a time (three names of 128 characters at most each).

Source: docs/formats/messages.md (GATEWAY, STREAMS_SEEN, CAPS_STATE, GATEWAY_ALERT).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final
from uuid import uuid4

from pmdaemon.poller.gateway import Gateway
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Alert, Hello, StreamEntry

STREAMS_A_FRAME: Final = 100


def gateway_state(gateway: Gateway, state: str, reason: str, unix_us: int) -> bytes:
    """A GATEWAY frame; exports and spool are named only with state ``up``. Takes the gateway's lock.

    Raises:
        FrameTooLarge: the exports do not fit a header.
    """
    header: dict[str, Any] = {
        "gw": gateway.gateway_id,
        "name": gateway.name,
        "state": state,
        "reason": reason,
        "address": gateway.address,
        "software": gateway.software,
        "ep": gateway.epoch,
        "at_us": unix_us,
        "offset_us": gateway.offset.offset_us,
        "dropped": gateway.dropped,
    }
    if state == "up":
        header["exports"] = gateway.exports
        with gateway.lock:
            header["spool"] = gateway.record.spool()
    return frame.encode(Kind.GATEWAY, header)


def gateway_refused(hello: Hello, address: str, reason: str, unix_us: int) -> bytes:
    """A GATEWAY frame for a gateway that never registered."""
    return frame.encode(
        Kind.GATEWAY,
        {
            "gw": hello.gateway_id,
            "name": hello.name,
            "state": "refused",
            "reason": reason,
            "address": address,
            "software": hello.software,
            "ep": hello.epoch,
            "at_us": unix_us,
            "offset_us": 0,
            "dropped": 0,
        },
    )


def streams_seen(gateway_id: str, streams: Iterable[StreamEntry]) -> Iterator[bytes]:
    """STREAMS_SEEN frames, ``STREAMS_A_FRAME`` streams each."""
    rest = iter(streams)
    while chunk := list(islice(rest, STREAMS_A_FRAME)):
        yield frame.encode(Kind.STREAMS_SEEN, {"gw": gateway_id, "streams": _rows(chunk)})


def _rows(streams: Sequence[StreamEntry]) -> list[dict[str, Any]]:
    return [
        {"id": item.stream_id, "volume": item.volume, "client": item.client, "backend": item.backend}
        for item in streams
    ]


def caps_state(gateway_id: str, gen: int, state: str, reason: str, unix_us: int) -> bytes:
    """A CAPS_STATE frame."""
    return frame.encode(
        Kind.CAPS_STATE,
        {"gw": gateway_id, "gen": gen, "state": state, "reason": reason, "at_us": unix_us},
    )


def event(kind: str, severity: str, subject: str, text: str, unix_us: int, **details: Any) -> bytes:
    """A RECORD frame with one row of ``events``, about a gateway."""
    row = {
        "event_id": str(uuid4()),
        "at_us": unix_us,
        "kind": kind,
        "severity": severity,
        "element": "gateway",
        "subject": subject,
        "text": text,
        "details": details,
    }
    return frame.encode(Kind.RECORD, {"rows": [["events", row]], "req": None, "from": "pmdaemon"})


def alert(gateway_id: str, said: Alert) -> bytes:
    """A GATEWAY_ALERT frame: a checked ALERT with its gateway."""
    return frame.encode(Kind.GATEWAY_ALERT, {**said.header(), "gw": gateway_id})
