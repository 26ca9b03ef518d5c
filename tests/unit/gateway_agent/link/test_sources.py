"""The host source on captured /proc trees, the nbd source's one-question rule, samples from DP_CUT."""

import psutil
import pytest

from gateway_agent.config import HostConfig
from gateway_agent.errors import SourceReadFailed
from gateway_agent.sources.host import HostSource, read_disks
from gateway_agent.sources.nbd import NbdSource
from gateway_agent.sources.sample import StreamKey, from_dp_cut
from pmdaemon.errors import BadCut
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from tests.support.link import Bench, FakePlane
from tests.support.paths import FIXTURES

PROC = FIXTURES / "proc"
DEVICES = HostConfig().devices


@pytest.fixture
def proc(monkeypatch):
    """Chooses which captured /proc psutil reads."""

    def choose(name: str) -> None:
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(PROC / name))

    choose("one")
    return choose


def column(sample, name):
    values = sample.counters[cut.COL[name]].tolist()
    return dict(zip([key.volume for key in sample.streams], values, strict=True))


def source_of(clock, **more) -> HostSource:
    return HostSource(
        clock,
        more.pop("gateway", "gw-a"),
        DEVICES,
        more.pop("backends", {}),
        size_of=lambda _device: 512,
        **more,
    )


def test_one_row_a_whole_device_with_the_difference_of_two_readings(proc):
    clock = FakeClock()
    source = source_of(clock, backends={"vda": "b7"})
    proc("two")
    clock.advance(1)
    source.ask()
    sample = source.sample
    assert sample.streams[:1] == (StreamKey("host:gw-a:nvme0n1", "host", "gw-a:nvme0n1"),)
    assert set(column(sample, "reads")) == {"host:gw-a:vda", "host:gw-a:nvme0n1", "host:gw-a:nvme1n1"}
    vda = {name: column(sample, name)["host:gw-a:vda"] for name in cut.COLUMNS}
    assert (vda["arrived"], vda["reads"], vda["writes"]) == (13, 10, 3)
    assert (vda["read_bytes"], vda["write_bytes"]) == (80 * 512, 64 * 512)
    assert vda["lat_sum_us"] == vda["svc_sum_us"] == 50_000
    assert vda["cost_milli"] == 13_000 + 1000 * 144 * 512 // 65_536
    assert (vda["cum_reads"], vda["cum_write_bytes"]) == (10, 64 * 512)
    assert sample.streams[-1] == StreamKey("host:gw-a:vda", "host", "b7")
    assert (sample.end_ns - sample.start_ns, sample.threshold_version) == (10**9, None)


def test_devices_of_two_hosts_are_two_volumes_on_two_backends(proc):
    streams = set()
    for gateway in ("gw-a", "gw-b"):
        proc("one")
        source = source_of(FakeClock(), gateway=gateway)
        proc("two")
        source.ask()
        streams |= {(key.volume, key.backend) for key in source.sample.streams if "vda" in key.volume}
    assert streams == {("host:gw-a:vda", "gw-a:vda"), ("host:gw-b:vda", "gw-b:vda")}


def test_an_idle_device_and_a_new_one_count_nothing(proc):
    source = source_of(FakeClock())
    proc("two")
    source.ask()
    assert column(source.sample, "arrived")["host:gw-a:nvme0n1"] == 0
    assert column(source.sample, "arrived")["host:gw-a:nvme1n1"] == 0


def test_counts_stay_until_they_are_spooled(proc):
    clock = FakeClock()
    source = source_of(clock)
    proc("two")
    source.ask()
    first = source.sample
    source.ask()
    assert source.sample is first
    source.spooled()
    clock.advance(1)
    source.ask()
    assert column(source.sample, "reads")["host:gw-a:vda"] == 0
    assert column(source.sample, "cum_reads")["host:gw-a:vda"] == 10
    assert source.sample.start_ns == first.end_ns


def test_a_replaced_device_starts_anew(proc):
    proc("two")
    source = source_of(FakeClock())
    proc("one")
    source.ask()
    assert column(source.sample, "reads")["host:gw-a:vda"] == 0
    assert column(source.sample, "cum_reads")["host:gw-a:vda"] == 0


def test_unreadable_counters_are_an_error_of_this_time_only(proc):
    readings = iter([read_disks(), OSError("gone"), read_disks()])

    def reader():
        value = next(readings)
        if isinstance(value, OSError):
            raise value
        return value

    source = source_of(FakeClock(), reader=reader)
    with pytest.raises(SourceReadFailed, match="host"):
        source.ask()
    source.ask()
    assert source.sample is not None


def test_a_device_with_a_name_is_called_by_it(proc):
    kernel_names = {"/dev/mapper/vg0-data": "vda", "vg0/gone": ""}
    clock = FakeClock()
    source = HostSource(
        clock,
        "gw-a",
        ["nvme0n1", *kernel_names],
        {"/dev/mapper/vg0-data": "array-1"},
        size_of=lambda _device: 512,
        find=kernel_names.__getitem__,
    )
    proc("two")
    source.ask()
    assert column(source.sample, "reads") == {"host:gw-a:nvme0n1": 0, "host:gw-a:vg0-data": 10}
    assert {key.volume: key.backend for key in source.sample.streams}["host:gw-a:vg0-data"] == "array-1"
    assert {export["volume"] for export in source.exports()} == {"host:gw-a:nvme0n1", "host:gw-a:vg0-data"}


def test_a_device_that_a_pattern_fits_too_has_one_volume(proc):
    source = HostSource(FakeClock(), "gw-a", ["vd?", "/dev/disk/by-id/x"], {}, find=lambda _name: "vda")
    proc("two")
    source.ask()
    assert [key.volume for key in source.sample.streams] == ["host:gw-a:x"]


def test_exports_of_the_host(proc):
    exports = source_of(FakeClock()).exports()
    assert exports[-1] == {
        "volume": "host:gw-a:vda", "backend": "gw-a:vda", "size_bytes": 512, "read_only": False,
        "source": "host",
    }  # fmt: skip


def test_host_and_plane_share_a_cut(proc, tmp_path):
    plane = FakePlane()
    bench = Bench(tmp_path, plane, sources=[source_of(plane.clock)])
    bench.connect_server()
    proc("two")
    plane.io(reads=2)
    bench.clock.advance(1)
    bench.poll(start=(42, 1))
    one = bench.server.cuts[42, 1]
    assert sorted(one.column("reads").tolist()) == [2, 10]
    exports = {export["volume"]: export["source"] for export in bench.server.last(Kind.REGISTER)["exports"]}
    assert (exports["vol-1"], exports["host:gw-a:vda"]) == ("nbd", "host")


def test_a_source_that_fails_is_told_and_the_others_go_on(proc, tmp_path):
    plane = FakePlane()
    host = source_of(plane.clock)
    bench = Bench(tmp_path, plane, sources=[host])
    bench.connect_server()
    host._reader = lambda: (_ for _ in ()).throw(OSError("gone"))
    plane.io(reads=2)
    bench.poll(start=(42, 1))
    assert bench.server.reads() == 2
    assert bench.server.last(Kind.ALERT)["kind"] == "source-failed"


def answer(plane: FakePlane, got: int) -> frame.Frame:
    return frame.decode(plane._collect(got))


def test_one_question_at_a_time_and_got_moves_only_when_spooled():
    plane, sent = FakePlane(), []
    source = NbdSource("nbd-0", sent.append, got=0)
    source.ask()
    assert sent == []  # not before its hello
    source.introduced([])
    source.ask()
    source.ask()
    source.answered(answer(plane, 0))
    source.ask()
    assert [frame.decode(data).header for data in sent] == [{"got": 0}]
    source.spooled()
    source.ask()
    assert frame.decode(sent[-1]).header == {"got": source.mark} == {"got": 1001}


def test_an_answer_that_was_not_spooled_is_asked_for_again_on_a_new_connection():
    plane, sent = FakePlane(), []
    plane.io(reads=6)
    source = NbdSource("nbd-0", sent.append, got=0)
    source.introduced([])
    source.ask()
    source.answered(answer(plane, 0))
    source.disconnected()
    source.connected()
    source.introduced([])
    source.ask()
    assert [frame.decode(data).header["got"] for data in sent] == [0, 0]
    source.answered(answer(plane, 0))
    assert column(source.sample, "reads") == {"vol-1": 6}


def test_a_repetition_of_what_is_spooled_is_dropped():
    plane = FakePlane()
    source = NbdSource("nbd-0", lambda _data: None, got=0)
    source.introduced([])
    source.ask()
    source.answered(answer(plane, 0))
    source.spooled()
    source.ask()
    source.answered(answer(plane, 0))
    assert source.sample is None
    assert (source.questions, source.answers) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"id": 0}, "positive"),
        ({"id": "x"}, "'id'"),
        ({"end_ns": 0}, "backwards"),
        ({"streams": []}, "streams"),
        ({"streams": [{"index": 0, "volume": "a b", "client": "c", "backend": "b"}]}, "no valid name"),
        ({"streams": [7]}, "not a map"),
        ({"n": 2}, "columns need"),
        ({"tg": None}, "'tg'"),
    ],
)
def test_a_dp_cut_that_contradicts_itself_is_refused(changes, problem):
    good = answer(FakePlane(), 0)
    bad = frame.decode(frame.encode(Kind.DP_CUT, {**good.header, **changes}, good.blob))
    assert from_dp_cut("p", good).streams == (StreamKey("vol-1", "c", "b0"),)
    with pytest.raises(BadCut, match=problem):
        from_dp_cut("p", bad)


@pytest.mark.parametrize("key", ["id", "start_ns", "end_ns", "start_us"])
def test_what_a_dp_cut_has_in_place_of_a_number_is_quoted_in_short(key):
    good = answer(FakePlane(), 0)
    header = {**good.header, key: ["\x1b[2J" * 10_000, *range(1000)]}
    with pytest.raises(BadCut, match=f"'{key}' is ") as caught:
        from_dp_cut("p", frame.decode(frame.encode(Kind.DP_CUT, header, good.blob)))
    text = str(caught.value)
    assert len(text) < 300
    assert text.isprintable()
