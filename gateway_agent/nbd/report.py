"""What ``gateway-agent status`` shows of one data plane, as of now. Reads, and changes nothing.

Rates and mean delays are those of the newest cut; how long it was and how old it is are said beside them, so
a plane that no link collects from shows that. What is under way, and its age, are of this moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.caps import CapsInForce
from gateway_agent.nbd.cuts import CutMaker, LastCut
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.groups import CONFIGURED, SERVER
from gateway_agent.nbd.volume import Volume
from pmdaemon.runtime.config import masked
from pmdaemon.wire.cut import COL
from pmdaemon.wire.messages.plane_report import (
    HandedOver,
    PlaneReport,
    ReportedCaps,
    ReportedCut,
    ReportedGroup,
    ReportedStream,
    ReportedVolume,
)
from pmdaemon.wire.messages.planes import DpHello

MOST_NAMED: Final = 16
"""Clients that share a stream and are named; the newest."""


def plane_report(
    hello: DpHello,
    exports: ExportTable,
    caps: CapsInForce,
    cuts: CutMaker,
    now_ns: int,
    handed_over: HandedOver | None = None,
) -> PlaneReport:
    """What one plane says of itself; ``hello`` as it would be sent now."""
    last, lease_end_ns = cuts.last, caps.lease_end_ns
    streams: dict[str, list[StreamAccount]] = {}
    for stream in cuts.table.streams:
        streams.setdefault(stream.volume, []).append(stream)
    groups = _groups_of(caps)
    lease_left_s = None if lease_end_ns is None else max(lease_end_ns - now_ns, 0) / 1e9
    return PlaneReport(
        hello=hello,
        caps=ReportedCaps(caps.generation, lease_left_s),
        thresholds=cuts.thresholds.version,
        cut=ReportedCut((last.end_ns - last.start_ns) / 1e9, (now_ns - last.end_ns) / 1e9),
        leaving=exports.leaving(),
        volumes=tuple(
            _volume(volume, caps, groups.get(name, {}), streams.get(name, []), last, now_ns)
            for name, volume in exports.volumes.items()
        ),
        handed_over=handed_over,
        whole_clients=caps.whole_clients,
    )


def _volume(
    volume: Volume,
    caps: CapsInForce,
    groups: Mapping[str, ReportedGroup],
    streams: list[StreamAccount],
    last: LastCut,
    now_ns: int,
) -> ReportedVolume:
    export = volume.export
    rows = (_stream(stream, last, now_ns) for stream in streams)
    return ReportedVolume(
        volume=export.volume,
        backend=export.backend,
        storage=export.file if export.file is not None else masked(export.upstream or ""),
        read_only=export.read_only,
        size_bytes=volume.facts.size_bytes if volume.facts is not None else None,
        caps=caps.of(export.volume),
        client_caps=caps.of_clients(export.volume),
        group=groups.get(SERVER),
        configured_group=groups.get(CONFIGURED),
        streams=tuple(row for row in rows if row.connections or row.ios_per_s or row.errors_per_s),
    )


def _groups_of(caps: CapsInForce) -> dict[str, dict[str, ReportedGroup]]:
    """By volume, and by where the group is from."""
    found: dict[str, dict[str, ReportedGroup]] = {}
    for (origin, name), cap in caps.groups.items():
        for volume in cap.weights:
            found.setdefault(volume, {})[origin] = ReportedGroup(name, cap.rates)
    return found


def _stream(stream: StreamAccount, last: LastCut, now_ns: int) -> ReportedStream:
    seconds, row = (last.end_ns - last.start_ns) / 1e9, last.rows.get(stream)

    def total(*columns: str) -> int:
        return sum(row[COL[name]] for name in columns) if row is not None else 0

    def a_second(*columns: str) -> float:
        return total(*columns) / seconds if seconds else 0.0

    ios = total("reads", "writes")
    gauges = [session.gauges() for session in stream.sessions]
    arrived = [pending[0] for session in stream.sessions for pending in session.outstanding(now_ns)]
    return ReportedStream(
        client=stream.client,
        members=tuple(stream.members)[-MOST_NAMED:],
        member_count=len(stream.members),
        connections=len(stream.sessions),
        reads_per_s=a_second("reads"),
        writes_per_s=a_second("writes"),
        ios_per_s=a_second("reads", "writes", "others"),
        bytes_per_s=a_second("read_bytes", "write_bytes"),
        errors_per_s=a_second("errors"),
        latency_us=total("lat_sum_us") / ios if ios else None,
        delay_us=total("delay_sum_us") / ios if ios else None,
        inflight=sum(gauge[0] for gauge in gauges),
        held=sum(gauge[1] for gauge in gauges),
        oldest_s=max((now_ns - min(arrived)) / 1e9, 0.0) if arrived else None,
    )
