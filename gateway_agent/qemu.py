"""What QEMU is asked by QMP about drives and throttle groups, and what its answers mean. Pure.

    place           limits set by                    read back by        statistics
    drive of a VM   block_set_io_throttle            query-block         query-blockstats
    throttle group  qom-set /objects/NAME limits     qom-get             none

Of a drive QEMU counts what its guest device did: I/Os, bytes, failures, summed times, and latencies in a
histogram once it was given the edges of one (block-latency-histogram-set); ours are the edges of
``wire.histogram``, so its bins are our buckets. A time runs from the guest's request to its answer, with what
QEMU's throttle held it back. It does not know what is outstanding. Of an NBD export of qemu-storage-daemon
nothing is counted at all: such a daemon has no guest devices.

A drive has several names, all of which are looked for: the id of ``-drive``, the id of ``-device`` (also as a
path in the object model, as libvirt writes it) and the name of its block node.

Limits of QEMU are whole numbers a second, with 0 for none. All fields of a group are set, as QEMU keeps what
is not named and refuses mixtures: a burst needs its rate, a total excludes rates of reads and writes.

A QEMU that its guest has taken over may answer anything. Every number is checked where it is read, so that
it costs the volumes of this process, and none of another.

Source: QEMU's qapi/block-core.json, block.json and qom.json, of 2.5 to 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.histogram import BUCKETS, EDGES_NS
from pmdaemon.wire.rates import Rates, whole_rate

MOST_LIMIT: Final = 10**15
"""QEMU refuses more."""
BOUNDARIES_NS: Final = [int(edge) for edge in EDGES_NS[1:BUCKETS]]
"""Shape (98,): between our 99 buckets."""
STATISTICS: Final = "query-blockstats"
DRIVES: Final = "query-block"
MOST_COUNTED: Final = 1 << 62
_PERIPHERAL: Final = "/machine/peripheral/"
_SETTABLE: Final = ("bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr")
_GROUP_KINDS: Final = ("bps-total", "bps-read", "bps-write", "iops-total", "iops-read", "iops-write")


class Command(NamedTuple):
    """A command of QMP."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """QEMU's answer to a command that it does not carry out."""

    kind: str
    text: str

    @property
    def is_absence(self) -> bool:
        """Whether what was named is not there; without the property asked for it is something else."""
        is_else = self.text.startswith("Property ")
        return self.kind == "DeviceNotFound" or ("not found" in self.text.lower() and not is_else)


class QmpRequest(NamedTuple):
    """Commands to carry out in this order."""

    number: int
    commands: tuple[Command, ...]


class QmpConnected(NamedTuple):
    """A monitor can be asked; ``daemon`` is the identity of its process."""

    name: str
    daemon: str


class QmpAnswer(NamedTuple):
    """Answers to all commands of a request, in order: what QEMU returned, or a ``Refusal``."""

    name: str
    number: int
    at_ns: int
    results: list[Any]


class QmpLost(NamedTuple):
    """A monitor cannot be asked now.

    Attributes:
        was_connected: until now it could.
        is_off: no QEMU process is there, as far as is known; else one may run that cannot be reached.
    """

    name: str
    reason: str
    was_connected: bool
    is_off: bool


QmpEvent = QmpConnected | QmpAnswer | QmpLost


class Limits(NamedTuple):
    """A second, for reads and writes together; None without a limit."""

    iops: int | None = None
    bytes_per_s: int | None = None

    @classmethod
    def of(cls, rates: Rates) -> Limits:
        """Whole numbers that do not exceed the rates; 1 at least, as 0 is no limit."""
        return cls(*(_whole(rate) for rate in (rates.ops_per_s, rates.bytes_per_s)))

    def is_near(self, other: Limits, ratio: float) -> bool:
        """Whether both limit the same, within a share."""
        pairs = zip(self, other, strict=True)
        return all(a == b or (a and b and abs(a - b) <= max(1.0, ratio * b)) for a, b in pairs)


NO_LIMITS: Final = Limits()


def _whole(rate: float | None) -> int | None:
    return None if rate is None else min(max(1, whole_rate(rate)), MOST_LIMIT)


@dataclass(frozen=True, slots=True)
class ThrottleGroup:
    """A throttle group by its id, or by its path in the object model."""

    name: str

    @property
    def path(self) -> str:
        """Where it is in the object model."""
        return self.name if self.name.startswith("/") else f"/objects/{self.name}"

    def read_command(self) -> Command:
        """Asks for its limits."""
        return Command("qom-get", {"path": self.path, "property": "limits"})

    def set_command(self, limits: Limits) -> Command:
        """Puts limits in force."""
        value = {name: 0 for kind in _GROUP_KINDS for name in (kind, f"{kind}-max")}
        value |= {f"{kind}-max-length": 1 for kind in _GROUP_KINDS}
        value |= {"iops-size": 0, "iops-total": limits.iops or 0, "bps-total": limits.bytes_per_s or 0}
        return Command("qom-set", {"path": self.path, "property": "limits", "value": value})

    def limits_in(self, answer: Any) -> Limits:
        """Its limits in an answer to ``read_command``.

        Raises:
            ValueError: the answer has another form.
        """
        try:
            separate = [answer[f"{kind}-{way}"] for kind in ("iops", "bps") for way in ("read", "write")]
            return _as_limits(answer["iops-total"], answer["bps-total"], separate)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"the limits of {self.name} came without {exc}") from exc


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive of a VM, as it was found in an answer.

    Attributes:
        names: that it has.
        address: by which commands find it, as their arguments.
    """

    names: frozenset[str]
    address: tuple[str, str]

    def set_command(self, limits: Limits) -> Command:
        """Puts limits in force."""
        value = dict.fromkeys(_SETTABLE, 0)
        value |= {"iops": limits.iops or 0, "bps": limits.bytes_per_s or 0}
        return Command("block_set_io_throttle", dict([self.address]) | value)

    def histogram_command(self) -> Command:
        """Makes QEMU count latencies in our buckets, from now on."""
        edges = {"boundaries-read": BOUNDARIES_NS, "boundaries-write": BOUNDARIES_NS}
        return Command("block-latency-histogram-set", {"id": self.address[1], **edges})


def drives_in(answer: Any) -> Iterator[tuple[Drive, Mapping[str, Any]]]:
    """Each drive in an answer to ``query-block`` or ``query-blockstats``, and what is said of it.

    Raises:
        ValueError: the answer has another form.
    """
    if not isinstance(answer, list):
        raise ValueError(f"a list of drives was expected, not {excerpt(answer)}")
    for row in answer:
        if not isinstance(row, dict):
            raise ValueError(f"a drive was expected, not {excerpt(row)}")
        device, path = _name(row.get("device")), _name(row.get("qdev"))
        inserted = row.get("inserted")
        node = row.get("node-name") or (inserted.get("node-name") if isinstance(inserted, dict) else "")
        known = {device, path, _name(node)}
        if path.startswith(_PERIPHERAL):
            known.add(path.removeprefix(_PERIPHERAL).split("/")[0])
        address = ("id", path) if path else ("device", device)
        if address[1]:
            yield Drive(frozenset(known - {""}), address), row


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole_number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST_COUNTED:
        raise ValueError(f"{excerpt(value)} is no count")
    return value


def drive_limits(row: Mapping[str, Any]) -> Limits:
    """Limits of a drive in a row of ``query-block``; of one without a medium there are none.

    Raises:
        ValueError: the row has another form.
    """
    inserted = row.get("inserted")
    if not isinstance(inserted, dict):
        return NO_LIMITS
    try:
        separate = [inserted[f"{kind}_{way}"] for kind in ("iops", "bps") for way in ("rd", "wr")]
        return _as_limits(inserted["iops"], inserted["bps"], separate)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"the limits of a drive came without {exc}") from exc


def _as_limits(iops: Any, size: Any, separate: list[Any]) -> Limits:
    """Limits of reads or of writes alone are shown as what they are not: no total of ours."""
    if any(separate):
        return Limits(-1, -1)
    return Limits(*(_whole_number(value) or None for value in (iops, size)))


class DriveCounts(NamedTuple):
    """What a drive's guest device did since it was made. Failed I/Os are among the completed ones."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    others: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    failed_others: int = 0
    read_ns: int = 0
    write_ns: int = 0


Bins = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DriveStatistics:
    """A drive in an answer to ``query-blockstats``.

    Attributes:
        bins: shape (2, 99), reads and writes by our buckets; None without such histograms.
        has_other_histogram: it counts into bins of other edges, which another program has set.
    """

    counts: DriveCounts
    bins: Bins | None = None
    has_other_histogram: bool = False


def drive_statistics(row: Mapping[str, Any]) -> DriveStatistics:
    """What a row of ``query-blockstats`` says.

    Raises:
        ValueError: the row has another form.
    """
    try:
        stats: Mapping[str, Any] = row["stats"]
        failed = [
            _whole_number(stats.get(f"failed_{kind}_operations", 0))
            for kind in ("rd", "wr", "flush", "unmap")
        ]
        done = [_whole_number(stats.get(f"{kind}_operations", 0)) for kind in ("rd", "wr", "flush", "unmap")]
        counts = DriveCounts(
            done[0] + failed[0],
            done[1] + failed[1],
            _whole_number(stats["rd_bytes"]),
            _whole_number(stats["wr_bytes"]),
            sum(done[2:]) + sum(failed[2:]),
            failed[0],
            failed[1],
            sum(failed[2:]),
            _whole_number(stats["rd_total_time_ns"]),
            _whole_number(stats["wr_total_time_ns"]),
        )
        histograms = [stats.get(f"{kind}_latency_histogram") for kind in ("rd", "wr")]
        if not all(histograms):
            return DriveStatistics(counts, has_other_histogram=any(histograms))
        if any(list(each["boundaries"]) != BOUNDARIES_NS for each in histograms if each):
            return DriveStatistics(counts, has_other_histogram=True)
        rows = [[_whole_number(value) for value in each["bins"]] for each in histograms if each]
        if [len(row) for row in rows] != [BUCKETS, BUCKETS]:
            raise ValueError(f"histograms of {len(rows[0])} and {len(rows[1])} bins, expected {BUCKETS}")
        return DriveStatistics(counts, np.array(rows, dtype=np.int64))
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"the statistics of a drive came without {exc}") from exc
