"""DP_REPORT: its bytes are those that releases before this one have sent, and ``gateway-agent status`` reads."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.cuts import LastCut
from gateway_agent.nbd.report import plane_report
from pmdaemon.wire import cut, frame
from pmdaemon.wire.messages.planes import DpHello, DpReport
from pmdaemon.wire.rates import Rates
from tests.support.paths import FIXTURES

GOLDEN = FIXTURES / "golden" / "planes" / "dp_report.bin"
NOW_NS = 20_000_000_000
CAPS = {
    "gen": 7,
    "lease_us": 9_000_000,
    "caps": [{"volume": "vol-1", "cost_per_s": 2.5}],
    "clients": [{"volume": "vol-1", "client": "host-a", "ops_per_s": 10}],
    "groups": [{"group": "night", "volumes": {"vol-1": 1, "vol-2": 2}, "bytes_per_s": 1e6}],
}


class Stream:
    """A stream of two connections, one with an I/O under way, or of none."""

    def __init__(self, volume: str, client: str, arrived_ns: tuple[int, ...] = ()) -> None:
        self.volume, self.client, self.members = volume, client, [client, "host-b"]
        self.sessions = [self._session(each) for each in arrived_ns]

    @staticmethod
    def _session(arrived_ns: int) -> SimpleNamespace:
        return SimpleNamespace(gauges=lambda: (3, 1), outstanding=lambda _now: [(arrived_ns, 0)])


def row(**counted: int) -> list[int]:
    return [counted.get(name, 0) for name in cut.COLUMNS]


def made() -> tuple[DpHello, dict[str, Any]]:
    busy, idle = Stream("vol-1", "host-a", (19_500_000_000, 19_000_000_000)), Stream("vol-1", "gone")
    counted = row(reads=40, writes=10, read_bytes=8192, errors=1, lat_sum_us=5000, delay_sum_us=700)
    last = LastCut(16_000_000_000, 18_000_000_000, {busy: counted})  # type: ignore[dict-item]
    cuts = SimpleNamespace(
        last=last, table=SimpleNamespace(streams=[busy, idle]), thresholds=SimpleNamespace(version=5)
    )
    files = (("vol-1", "/srv/disk", None), ("vol-2", None, "nbd://user:secret@array/x"))
    volumes = {
        name: SimpleNamespace(
            export=SimpleNamespace(volume=name, backend="b", file=path, upstream=upstream, read_only=not path),
            facts=SimpleNamespace(size_bytes=4096) if path else None,
        )
        for name, path, upstream in files
    }
    exports = SimpleNamespace(leaving=lambda: {"vol-9": 2}, volumes=volumes)
    caps = CapsInForce({"vol-1": Rates(ops_per_s=5.0)})
    caps.apply(CAPS, NOW_NS)
    exported = {"volume": "vol-1", "backend": "b", "size_bytes": 4096, "read_only": False, "source": "nbd"}
    hello = DpHello("nbd-0", 4711, [exported], ["unix:x"], False, "c0ffee", ("a problem",))
    return hello, plane_report(exports, caps, cuts, NOW_NS)


def test_its_bytes_are_those_of_before() -> None:
    hello, found = made()
    found = hello.header() | found
    found["handed_over"] = {"connections": 3, "drain_left_s": 12.5}
    raw = DpReport("nbd-0").encode_with(json.dumps(found).encode())
    assert raw == GOLDEN.read_bytes()
