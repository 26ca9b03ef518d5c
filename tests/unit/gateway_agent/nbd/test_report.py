"""DP_REPORT: its bytes are those of releases before, and ``gateway-agent status`` reads them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.cuts import LastCut
from gateway_agent.nbd.report import plane_report
from pmdaemon.errors import MalformedFrame
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.plane_report import DpReport, HandedOver, PlaneReport
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from pmdaemon.wire.messages.planes import DpHello
from pmdaemon.wire.rates import Rates
from tests.support.paths import FIXTURES

GOLDEN = FIXTURES / "golden" / "planes" / "dp_report.bin"
NOW_NS = 20_000_000_000
FEATURES = ("client-caps", "group-caps", "other-client-caps", "burst-caps")
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


def made() -> DpReport:
    busy, idle = Stream("vol-1", "host-a", (19_500_000_000, 19_000_000_000)), Stream("vol-1", "gone")
    counted = row(reads=40, writes=10, read_bytes=8192, errors=1, lat_sum_us=5000, delay_sum_us=700)
    last = LastCut(16_000_000_000, 18_000_000_000, {busy: counted})  # type: ignore[dict-item]
    cuts = SimpleNamespace(
        last=last, table=SimpleNamespace(streams=[busy, idle]), thresholds=SimpleNamespace(version=5)
    )
    files = (("vol-1", "/srv/disk", None), ("vol-2", None, "nbd://user:secret@array/x"))
    volumes = {
        name: SimpleNamespace(
            export=SimpleNamespace(
                volume=name, backend="b", file=path, upstream=upstream, read_only=not path
            ),
            facts=SimpleNamespace(size_bytes=4096) if path else None,
        )
        for name, path, upstream in files
    }
    exports = SimpleNamespace(leaving=lambda: {"vol-9": 2}, volumes=volumes)
    caps = CapsInForce({"vol-1": Rates(ops_per_s=5.0)})
    caps.apply(PlaneCaps.parse(CAPS), NOW_NS)
    exported = {"volume": "vol-1", "backend": "b", "size_bytes": 4096, "read_only": False, "source": "nbd"}
    hello = DpHello("nbd-0", 4711, [exported], ["unix:x"], False, "c0ffee", ("a problem",), None, FEATURES)
    report = plane_report(hello, exports, caps, cuts, NOW_NS, HandedOver(3, 12.5))  # type: ignore[arg-type]
    return DpReport("nbd-0", report)


def test_its_bytes_are_those_of_before() -> None:
    assert made().encode() == GOLDEN.read_bytes()


def test_what_is_read_is_what_was_written() -> None:
    found = DpReport.parse(frame.decode(GOLDEN.read_bytes()), "nbd-0")
    assert found.encode() == GOLDEN.read_bytes()
    assert found.report.volumes[0].caps == Rates(ops_per_s=5.0, cost_per_s=2.5)
    assert found.report.volumes[1].size_bytes is None


def test_the_burst_of_a_cap_is_said_where_it_has_one() -> None:
    document = made().report.document()
    document["volumes"][0]["caps"] = said = {"ops_per_s": 5.0, "burst_s": 30.0}
    found = PlaneReport.parse(document, "nbd-0")
    assert found.volumes[0].caps == Rates(ops_per_s=5.0, burst_s=30.0)
    assert found.document()["volumes"][0]["caps"] == said


def test_whole_clients_are_said_where_there_are_any() -> None:
    document = made().report.document()
    assert "whole_clients" not in document
    document["whole_clients"] = said = {"host-a": {"ops_per_s": 5.0, "burst_s": 2.0}}
    found = PlaneReport.parse(document, "nbd-0")
    assert found.whole_clients == {"host-a": Rates(ops_per_s=5.0, burst_s=2.0)}
    assert found.document()["whole_clients"] == said


def test_a_plane_of_before_leaves_keys_out() -> None:
    document = made().report.document()
    for key in ("config", "problems", "features", "handed_over", "leaving"):
        del document[key]
    for volume in document["volumes"]:
        del volume["group"]
        for stream in volume["streams"]:
            del stream["members"], stream["member_count"]
    found = PlaneReport.parse(json.loads(json.dumps(document)), "nbd-0")
    assert (found.handed_over, found.leaving, found.volumes[0].group) == (None, {}, None)
    assert found.volumes[0].streams[0].members == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("volumes", {}, "'volumes' is {}, expected a list of maps"),
        ("volumes", [{"volume": 5}], "'volume' is 5, expected text"),
        ("caps", {"generation": "x"}, "'generation' is 'x', expected an integer"),
        ("cut", {"seconds": True}, "'seconds' is True, expected a number"),
        ("leaving", [], "'leaving' is \\[\\], expected a map"),
    ],
)
def test_what_is_wrong_in_it_is_named(key: str, value: object, words: str) -> None:
    with pytest.raises(MalformedFrame, match=words):
        PlaneReport.parse(made().report.document() | {key: value}, "nbd-0")


def test_a_blob_that_is_no_object_is_refused() -> None:
    for blob in (b"[]", b"{", b"[" * 100_000):
        received = frame.decode(frame.encode(Kind.DP_REPORT, {"plane": "nbd-0"}, blob))
        with pytest.raises(MalformedFrame, match="DP_REPORT: the blob is"):
            DpReport.parse(received, "nbd-0")
