"""What QEMU is asked, and what its answers mean; rows as its QAPI schema documents them."""

from __future__ import annotations

import numpy as np
import pytest

from gateway_agent.qemu import (
    BOUNDARIES_NS,
    MOST_LIMIT,
    NO_LIMITS,
    DriveCounts,
    Limits,
    Refusal,
    ThrottleGroup,
    drive_limits,
    drive_statistics,
    drives_in,
)
from pmdaemon.wire.histogram import bucket_of_ns
from pmdaemon.wire.rates import Rates
from tests.support.qemu import Disk, FakeQemu

VIRTIO = Disk(qdev="/machine/peripheral/disk0/virtio-backend", node="libvirt-1-format")


def drive_of(disk: Disk):
    ((drive, _),) = drives_in([disk.statistics()])
    return drive


@pytest.mark.parametrize("name", ["disk0", "libvirt-1-format", VIRTIO.qdev])
def test_a_drive_has_all_the_names_that_people_know(name):
    assert name in drive_of(VIRTIO).names


def test_a_drive_is_addressed_by_the_path_of_its_device_or_by_its_own_id():
    assert drive_of(VIRTIO).set_command(NO_LIMITS).arguments["id"] == VIRTIO.qdev
    assert drive_of(Disk(device="drive-ide0")).set_command(NO_LIMITS).arguments["device"] == "drive-ide0"
    assert list(drives_in([Disk(node="filter-without-device").statistics()])) == []


def test_limits_of_a_drive_are_read_back_as_they_were_set():
    qemu = FakeQemu(Disk(device="d0"))
    qemu.execute(drive_of(qemu.disks[0]).set_command(Limits(500, None)))
    assert drive_limits(qemu.disks[0].block()) == Limits(500, None)
    qemu.execute(drive_of(qemu.disks[0]).set_command(NO_LIMITS))
    assert drive_limits(qemu.disks[0].block()) == NO_LIMITS
    assert drive_limits({"device": "cd0"}) == NO_LIMITS, "no medium"


def test_limits_of_a_group_replace_what_another_program_has_left():
    qemu, group = FakeQemu(groups=("tg0",)), ThrottleGroup("tg0")
    qemu.groups["tg0"] |= {"iops-read": 7, "iops-read-max": 70, "bps-write": 9}
    found = group.limits_in(qemu.execute(group.read_command()))
    assert found not in (NO_LIMITS, Limits(7, None)), "of reads alone: none of ours"
    assert qemu.execute(group.set_command(Limits(500, 1 << 20))) == {}
    assert group.limits_in(qemu.execute(group.read_command())) == Limits(500, 1 << 20)
    assert qemu.groups["tg0"]["iops-read-max"] == 0


def test_a_group_may_be_named_by_its_path():
    assert ThrottleGroup("tg0").path == ThrottleGroup("/objects/tg0").path


def test_limits_are_whole_never_above_the_rate_and_never_none_by_rounding():
    assert Limits.of(Rates(99.9, 0.2)) == Limits(99, 1)
    assert Limits.of(Rates(39.99999999999999)).iops == 40, "a division took its last bit"
    assert Limits.of(Rates(None, 1e300)) == Limits(None, MOST_LIMIT)


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [((100, None), (104, None), True), ((100, None), (106, None), False), ((100, None), (None, None), False)],
)
def test_limits_that_are_nearly_the_same(one, other, near):
    assert Limits(*one).is_near(Limits(*other), 0.05) is near


def test_statistics_count_what_failed_among_the_completed():
    disk = Disk(device="d0")
    disk.io("rd", 3, latency_us=10)
    disk.io("wr", 2, size=8192, latency_us=20)
    disk.io("rd", 1, latency_us=30, fails=True)
    disk.io("flush", 4)
    found = drive_statistics(disk.statistics())
    assert found.counts == DriveCounts(4, 2, 3 * 4096, 2 * 8192, 4, 1, 0, 0, 60_000, 40_000)
    assert found.bins is None
    assert not found.has_other_histogram


def test_bins_are_our_buckets():
    qemu = FakeQemu(Disk(device="d0", qdev="/machine/peripheral/d0"))
    disk = qemu.disks[0]
    qemu.execute(drive_of(disk).histogram_command())
    latencies_us = [0, 1, 5, 300, 12_345, 2_000_000, 90_000_000]
    for latency_us in latencies_us:
        disk.io("wr", latency_us=latency_us)
    bins = drive_statistics(disk.statistics()).bins
    assert bins is not None
    expected = np.bincount([bucket_of_ns(us * 1000) for us in latencies_us], minlength=99)
    assert (bins[0].sum(), bins[1].tolist()) == (0, expected.tolist())
    assert len(BOUNDARIES_NS) == 98


def test_a_histogram_of_another_program_is_none_of_ours():
    disk = Disk(device="d0", boundaries={"rd": [10], "wr": [10]}, bins={"rd": [1, 2], "wr": [0, 0]})
    found = drive_statistics(disk.statistics())
    assert (found.bins, found.has_other_histogram) == (None, True)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "a list of drives was expected"),
        ([3], "a drive was expected"),
    ],
)
def test_an_answer_of_another_form_says_which_was_expected(answer, problem):
    with pytest.raises(ValueError, match=problem):
        list(drives_in(answer))


def test_statistics_and_limits_of_another_form():
    with pytest.raises(ValueError, match="the statistics of a drive came without 'rd_bytes'"):
        drive_statistics({"stats": {}})
    with pytest.raises(ValueError, match="the limits of a drive came without"):
        drive_limits({"inserted": {}})
    with pytest.raises(ValueError, match="the limits of tg0 came without"):
        ThrottleGroup("tg0").limits_in({})


def test_refusals():
    assert Refusal("DeviceNotFound", "").is_absence
    assert Refusal("GenericError", "object path '/objects/x' not found").is_absence
    assert not Refusal("GenericError", "values must be").is_absence
    assert not Refusal("GenericError", "Property 'iothread.limits' not found").is_absence
