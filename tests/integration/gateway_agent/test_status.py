"""What a data plane answers to ``gateway-agent status``, over its control socket."""

import socket
import threading

from gateway_agent import status
from gateway_agent.cap_config import GroupEntry
from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.nbd.plane import Plane
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.plane_report import ReportedCaps, ReportedGroup
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from pmdaemon.wire.rates import Rates


def asked(path, *said):
    """What is found out from a plane that says this, and then nothing more."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"".join(said))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return status._ask(path, "nbd-0")
        finally:
            thread.join()


def test_a_plane_of_before_and_one_that_is_none_are_told_apart(tmp_path):
    hello = frame.encode(Kind.DP_HELLO, {"plane": "nbd-0"})
    unsupported = frame.encode(Kind.UNSUPPORTED, {"kind": int(Kind.DP_STATUS)})
    assert "of a release without status" in asked(f"{tmp_path}/1", hello, unsupported).problem
    assert "closed the connection" in asked(f"{tmp_path}/2", hello).problem
    assert isinstance(asked(f"{tmp_path}/3", b"\xff" * 64), status.PlaneProblem)
    report = frame.encode(Kind.DP_REPORT, {"plane": "nbd-0"}, b'{"volumes": []}')
    found = asked(f"{tmp_path}/4", hello, report)
    assert (found.hello.plane, found.volumes, found.handed_over) == ("nbd-0", (), None)


def test_a_plane_says_all_that_is_shown(tmp_path):
    (tmp_path / "disk").write_bytes(bytes(4096))
    export = ExportConfig(volume="vol-1", backend="b", file=str(tmp_path / "disk"), cap={"ops_per_s": 5})
    group = GroupEntry(name="night", volumes=["vol-1"], cap={"bytes_per_s": 1e6})
    config = PlaneConfig("nbd-0", [f"unix:{tmp_path}/x"], f"{tmp_path}/c", [export], groups=(group,))
    plane = Plane(config, FakeClock())
    try:
        caps = {"gen": 3, "lease_us": 9_000_000, "caps": [{"volume": "vol-1", "cost_per_s": 2.0}]}
        caps["groups"] = [{"group": "day", "volumes": {"vol-1": 1}, "ops_per_s": 70.0}]
        plane.caps(PlaneCaps.parse(caps))
        report = plane.report()
    finally:
        plane.close()
    [only] = report.volumes
    assert only.caps == Rates(ops_per_s=5.0, cost_per_s=2.0)
    assert only.group == ReportedGroup("day", Rates(ops_per_s=70.0))
    assert only.configured_group == ReportedGroup("night", Rates(bytes_per_s=1e6))
    assert (report.caps, report.cut.seconds) == (ReportedCaps(3, 9.0), 0.0)
