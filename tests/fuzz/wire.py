"""The wire: whatever a gateway sends to a pair, and whatever a server sends to an agent.

A case is a session of right frames in which some are changed: values of any type for any key, deep nests,
bytes flipped, frames repeated, left out, cut in two. The oracle:

* another gateway of the same pair is polled and its cut is kept, as if nothing had happened;
* no connection met a defect of ours (``connection_faults``), though one would end that connection alone;
* the memory taken by a frame is bounded by its size (``structure``);
* everything that the pair passes on is accepted by services and dbmanager: it was checked where it came in;
* an agent's session accepts a frame or raises WireError, and what it says of it is short and printable.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final

from pmdaemon.errors import WireError
from pmdaemon.wire import cut, frame
from pmdaemon.wire.frame import MAX_DEPTH
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Hello, Registration, Schema, Streams
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.messages.certificates import Enrol
from pmdaemon.wire.session import AgentSession, SessionState
from sla_server.db.ingest.intake import HighWater, IngestIntake
from tests.fuzz import Counts
from tests.support.fake_mailbox import Taken
from tests.support.gateways import GATEWAY, hello, make_cut, register, schema, streams
from tests.support.pair import OTHER, PairRig
from tests.support.services import Bench as ServicesBench

Header = dict[str, Any]
NOW_US: Final = 1_800_000_000_000_000
HANDSHAKE: Final = (hello(), schema(), register(((7, 1, 2),)), streams())
ALERT: Final = {"kind": "plane-died", "severity": "info", "text": "y", "at_us": NOW_US, "details": {"a": 1}}
RIGHT: Final[tuple[tuple[int, Header, bytes], ...]] = (
    *(
        (item.kind, item.header, bytes(item.blob))
        for item in map(frame.decode, (*HANDSHAKE, make_cut(rows=2)))
    ),
    (Kind.REPLY, {"poll": 1, "sent_ns": 1, "wall_us": NOW_US, "cuts": 1, "dropped": 0}, b""),
    (Kind.CAPS_ACK, {"gen": 1, "ok": True, "reason": "why"}, b""),
    (Kind.THRESHOLDS_ACK, {"version": 1}, b""),
    (Kind.ALERT, ALERT, b""),
    (Kind.ENROL, {"token": "t", "gw": GATEWAY, "csr": b"x"}, b""),
    (Kind.RENEW, {"csr": b"x"}, b""),
    *((kind, {"code": "c", "text": "t", "reason": "r", "kind": 1}, b"") for kind in (33, 34, 35, 9, 18, 50)),
)
FROM_SERVER: Final[tuple[tuple[int, Header], ...]] = (
    (Kind.WELCOME, {"proto": 1, "features": [], "software": "s", "interval_us": 10**6, "server_us": 1}),
    (Kind.REGISTERED, {"ok": True}),
    (Kind.POLL, {"poll": 1, "sent_ns": 1, "ack": [[7, 1]], "from": [7, 2], "lease": True}),
    (Kind.CAPS, {"gen": 1, "lease_us": 10**6, "caps": [{"volume": "v", "cost_per_s": 5.0}]}),
    (
        Kind.THRESHOLDS,
        {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "any", "threshold_us": 5}]},
    ),
    (Kind.CERTIFICATE, {"cert": b"x", "ca": b"y"}),
    (Kind.ERROR, {"code": "c", "text": "t"}),
    (Kind.BYE, {"reason": "r"}),
    (Kind.UNSUPPORTED, {"kind": 5}),
)
KEYS: Final = sorted({key for _, header, _ in RIGHT for key in header} | {"gap", "id", "volume", "x"})
EDGES: Final = (
    0,
    1,
    -1,
    255,
    1 << 31,
    (1 << 53) - 1,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
TEXTS: Final = ("", GATEWAY, OTHER, "nbd", "info", "a", "\x1b]0;x\x07", "\0", "\u202e", "x" * 300, "x" * 3000)
FLOATS: Final = (0.0, -1.5, math.nan, math.inf, -math.inf, 1e308)
CHECKS: Final[dict[int, Callable[[Header], Any]]] = {
    Kind.HELLO: Hello.parse,
    Kind.SCHEMA: Schema.parse,
    Kind.REGISTER: Registration.parse,
    Kind.STREAMS: lambda header: Streams.parse(header, GATEWAY),
    Kind.ALERT: lambda header: Alert.parse(header, NOW_US),
    Kind.ENROL: Enrol.parse,
}


def value(chance: Random, depth: int = 4) -> Any:
    """Any value that msgpack can write."""
    kind = chance.randrange(12)
    if kind < 3:
        return chance.choice(EDGES)
    if kind < 6:
        return chance.choice(TEXTS)
    if kind == 6:
        return chance.choice(FLOATS)
    if kind == 7:
        return chance.choice((None, True, False, b"", chance.randbytes(16), chance.randbytes(300)))
    if kind == 8:
        nested: Any = 1
        for _ in range(chance.choice((2, MAX_DEPTH - 2, MAX_DEPTH + 1, 900))):
            nested = [nested] if chance.random() < 0.9 else {"k": nested}
        return nested
    if not depth:
        return 0
    if kind == 9:
        return [None] * chance.choice((0, 1, 3, 300, 9000))
    if kind == 10:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {
        chance.choice((*KEYS, b"k", "y" * 50)): value(chance, depth - 1) for _ in range(chance.randrange(4))
    }


def changed(chance: Random, header: Header) -> Header:
    """The same header with some values replaced, at any depth, or left out."""
    made = dict(header)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        key = chance.choice(KEYS if not made or chance.random() < 0.1 else sorted(made, key=str))
        held = made.get(key)
        if isinstance(held, list) and held and chance.random() < 0.5:
            inner = chance.choice(held)
            made[key] = [*held, changed(chance, inner) if isinstance(inner, dict) else value(chance)]
        elif isinstance(held, dict) and chance.random() < 0.5:
            made[key] = changed(chance, held)
        elif chance.random() < 0.1:
            made.pop(key, None)
        else:
            made[key] = value(chance)
    return made


def encoded(chance: Random, kind: int, header: Header, blob: bytes = b"") -> bytes:
    """A frame of it; sometimes with flipped bytes."""
    try:
        made = bytearray(frame.encode(kind, header, blob))
    except WireError:  # above a limit of ours already
        return b""
    if chance.random() < 0.3:
        for _ in range(chance.randint(1, 4)):
            made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made)


def session(chance: Random) -> list[bytes]:
    """What a bad gateway says: the handshake and more, with some frames changed."""
    said: list[bytes] = []
    whole = chance.random() < 0.7
    for step in (*range(4), *(chance.randrange(len(RIGHT)) for _ in range(chance.randrange(6)))):
        kind, header, blob = RIGHT[step]
        is_kept = step < 4 and (whole or chance.random() < 0.8)
        new_blob = blob if chance.random() < 0.8 else chance.randbytes(chance.randrange(200))
        said.append(encoded(chance, kind, header if is_kept else changed(chance, header), new_blob))
        if chance.random() < 0.1:
            said.append(said[-1])
    return [data for data in said if data]


def said(error: WireError) -> None:
    """What is said of a refused frame is short and harmless, whatever was in it."""
    text = str(error)
    assert len(text) < 1000, text
    assert text.isprintable(), text


def structure(data: bytes) -> None:
    """A frame is refused, or nests no deeper than it may and has no more items than bytes."""
    try:
        header = frame.decode(data).header
    except WireError as exc:
        said(exc)
        return
    items, waiting = 0, [(header, 1)]
    while waiting:
        inner, depth = waiting.pop()
        assert depth <= MAX_DEPTH, depth
        held = [*inner.values(), *inner] if isinstance(inner, dict) else inner
        items += len(held)
        waiting += [(item, depth + 1) for item in held if isinstance(item, dict | list)]
    assert items <= len(data), (items, len(data))


def parsers(chance: Random) -> bool:
    """One header into its parser; whether it was refused."""
    kind, header, _ = chance.choice([item for item in RIGHT if item[0] in CHECKS])
    try:
        data = frame.encode(kind, changed(chance, header))
    except WireError:
        return True
    structure(data)
    try:
        CHECKS[kind](frame.decode(data).header)
    except WireError as exc:
        said(exc)
        return True
    return False


def agent_side(chance: Random) -> bool:
    """What a hostile server sends to an agent; whether it was refused."""
    link = AgentSession()
    link.opened(Hello.of(GATEWAY, "g", 1, "s"))
    steps = list(FROM_SERVER[: chance.randrange(4)])
    steps += [chance.choice(FROM_SERVER) for _ in range(chance.randrange(1, 5))]
    try:
        for kind, header in steps:
            if link.state is SessionState.CONNECTED and kind == Kind.REGISTERED:
                continue
            list(link.receive(encoded(chance, kind, changed(chance, header))))
    except WireError as exc:
        said(exc)
        return True
    return False


def pair(chance: Random) -> bool:
    """A bad gateway beside a good one; whether the bad one was refused."""
    rig = PairRig()
    try:
        rig.watermarks()
        good, bad = rig.up(OTHER), rig.dial()
        data = b"".join(session(chance))
        at = chance.randrange(len(data)) if data and chance.random() < 0.3 else len(data)
        bad.send(data[:at])
        rig.step()
        rig.pass_time(1.1)
        with contextlib.suppress(OSError):  # it may be closed already
            bad.send(data[at:])
        for poll in rig.polls(good):
            good.answer(poll)
        rig.pass_time(0.3)
        assert rig.counters["connection_faults"] == 0, "a defect of ours ended a connection"
        kept = [
            frame.decode(raw).header["seq"]
            for batch in rig.mailbox.to("dbmanager", Kind.CUTS)
            for raw in frame.split(batch.blob)
            if frame.decode(raw).header["gw"].hex() == OTHER.replace("-", "")
        ]
        # Without TLS a gateway is who it says it is, and the newer session of one gateway wins.
        is_replaced = rig.counters["superseded_sessions"] > 0
        assert kept == [1] or is_replaced, f"cuts of the other gateway: {kept}"
        passed_on(rig)
        return rig.counters["refused_sessions"] > 0
    finally:
        rig.close()


def unsound_cuts(payload: bytes) -> int:
    """Cuts of a message whose columns cannot be true; a pair does not look at these, services refuse each."""
    message = frame.decode_own(payload)
    if message.kind != Kind.CUTS:
        return 0
    return sum(not cut.are_sound([cut.view(raw)]) for raw in frame.split(message.blob))


def passed_on(rig: PairRig) -> None:
    """Services and dbmanager accept all that the pair has posted."""
    services, intake = ServicesBench(), IngestIntake(1, HighWater([]))
    unsound = 0
    for recipients, payload in rig.mailbox.posts:
        if "services" in recipients:
            unsound += unsound_cuts(payload)
            services.core.on_message("pair-0", payload, 1, NOW_US)
    services.tick(1)
    services.tick(1)
    refused = services.core.bad_frames - unsound
    assert refused == 0, f"services refused what the pair passed on, or took what it must refuse: {refused}"
    assert services.record_sender.lost == 0
    mail = [
        Taken("pair-0", payload) for recipients, payload in rig.mailbox.posts if "dbmanager" in recipients
    ]
    intake.absorb(mail)
    wrong = {
        name: intake.counts[name] for name in ("malformed", "unknown", "rows_refused") if intake.counts[name]
    }
    assert not wrong, f"dbmanager refused what the pair passed on: {wrong}"


STEPS: Final[tuple[Callable[[Random], bool], ...]] = (*[parsers] * 6, *[agent_side] * 4, pair)


def one(seed: int, case: int) -> bool:
    """One case; whether it was refused."""
    chance = Random(f"{seed}/{case}")
    try:
        return STEPS[case % len(STEPS)](chance)
    except Exception as exc:
        raise AssertionError(f"seed {seed}, case {case}: {type(exc).__name__}: {exc}") from exc


def run(seconds: float, seed: int) -> Counts:
    """See ``tests.fuzz``."""
    end_s, case, refused = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end_s:
        refused += one(seed, case)
        case += 1
    return Counts(case, refused)
