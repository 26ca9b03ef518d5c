"""Readers of space: what the commands wrote, and what it means."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pmdaemon.runtime.commands import CommandFailed
from pmdaemon.space.config import SpaceConfig, SpaceSource
from pmdaemon.space.readers import SpaceUnreadable, read
from pmdaemon.space.words import shown_bytes
from pmdaemon.wire.messages.space import MAX_SPACE_VOLUMES, Space

NOW_US = 1_800_000_000_000_000
STAT = "4096 1000 400 300 200 50\n"


def answers(**said: str | Exception) -> Callable[[Sequence[str]], str]:
    """Runs no command: the text of each by its name, ``dmsetup status`` by ``status``."""

    def run(argv: Sequence[str]) -> str:
        name = argv[1] if argv[0] == "dmsetup" else argv[0]
        found = said.get(name, CommandFailed(argv[0], "there is no such program; install it"))
        if isinstance(found, Exception):
            raise found
        return found

    return run


def taken(
    run: Callable[[Sequence[str]], str], exported: dict[str, str] | None = None, **source: Any
) -> Space:
    return read(SpaceSource(name="data", **source), run, exported or {}, NOW_US)


def volume(name: str, size: int, used: int | None, in_use: bool | None, served: str = "") -> dict[str, Any]:
    return {"name": name, "size_bytes": size, "used_bytes": used, "volume": served, "in_use": in_use}


def test_a_file_system_is_as_full_as_df_says() -> None:
    """1000 blocks, 400 free, of them 300 for users: 600 of 900 are used; 150 of 200 inodes."""
    found = taken(answers(stat=STAT), kind="path", path="/srv", backend="disk-1")
    assert found == Space("data", "path", "disk-1", 900 * 4096, 600 * 4096, 0.75, 0, 0, (), NOW_US)


def test_a_file_system_without_inodes_has_no_second_figure() -> None:
    assert taken(answers(stat="4096 10 4 4 0 0"), kind="path", path="/srv").other_ratio is None


def test_image_files_are_volumes_and_losetup_says_which_are_attached() -> None:
    listing = "1048576 100 a b.img\0" + "4096 8 c.img\0"
    loops = json.dumps({"loopdevices": [{"back-file": "/srv/c.img"}]})
    found = taken(
        answers(stat=STAT, find=listing, losetup=loops),
        {"/srv/a b.img": "vol-1"},
        kind="loop",
        path="/srv/",
    )
    assert found.volumes == (
        volume("a b.img", 1 << 20, 51_200, False, "vol-1"),
        volume("c.img", 4096, 4096, True),
    )
    assert (found.volume_count, found.provisioned_bytes) == (2, (1 << 20) + 4096)
    assert taken(answers(stat=STAT, find=listing), kind="loop", path="/srv").volumes[1]["in_use"] is None
    assert taken(answers(stat=STAT, find="", losetup=""), kind="loop", path="/srv").volumes == ()


def lv(
    name: str, size: int, data: str = "", pool: str = "", attr: str = "-wi-a-----", opened: str = ""
) -> Any:
    return {
        "lv_name": name, "lv_size": str(size), "data_percent": data, "pool_lv": pool, "lv_attr": attr,
        "metadata_percent": "12.50" if attr[0] == "t" else "", "lv_device_open": opened,
    }  # fmt: skip


LVS = json.dumps(
    {
        "report": [
            {
                "lv": [
                    lv("root", 400, opened="open"),
                    lv("my-old", 100),
                    lv("tp", 1000, "25.00", attr="twi-aotz--"),
                    lv("thin1", 3000, "5.00", "tp", "Vwi-aotz--", "open"),
                ]
            }
        ]
    }
)
VGS = json.dumps({"report": [{"vg": [{"vg_size": "2000", "vg_free": "500"}]}]})


def test_a_volume_group_has_its_volumes_without_those_in_a_thin_pool() -> None:
    found = taken(answers(lvs=LVS, vgs=VGS), {"/dev/mapper/vg-my--old": "vol-9"}, kind="lvm", group="vg")
    assert (found.size_bytes, found.used_bytes, found.other_ratio) == (2000, 1500, None)
    assert found.volumes == (
        volume("tp", 1000, 250, True),
        volume("root", 400, 400, True),
        volume("my-old", 100, 100, False, "vol-9"),
    )


def test_a_thin_pool_of_lvm_has_its_own_volumes_and_its_metadata() -> None:
    source: Any = {"kind": "lvm", "group": "vg", "device": "tp", "serves": {"thin1": "vol-2"}}
    found = taken(answers(lvs=LVS, vgs=VGS), **source)
    assert (found.size_bytes, found.used_bytes, found.other_ratio) == (1000, 250, 0.125)
    assert found.volumes == (volume("thin1", 3000, 150, True, "vol-2"),)
    assert found.provisioned_bytes == 3000
    with pytest.raises(SpaceUnreadable, match="volume group vg has no pool tq"):
        taken(answers(lvs=LVS), kind="lvm", group="vg", device="tq")


DM = {
    "status": "pool: 0 409600 thin-pool 1 12/96 1600/3200 - rw discard_passdown\n"
    "t1: 0 2097152 thin 102400 2097151\nt2: 0 100 thin Fail\nother: 0 8 thin 8 7\nroot: 0 8 linear \n",
    "table": "pool: 0 409600 thin-pool 253:1 253:2 128 0 0\nt1: 0 2097152 thin 253:3 1\n"
    "t2: 0 100 thin 253:3 2\nother: 0 8 thin 253:9 1\nroot: 0 8 linear 8:1 0\n",
    "info": "253 3 2 pool\n253 4 1 t1\n253 5 0 t2\n253 8 1 other\n253 0 1 root\n",
}


def test_a_thin_pool_of_the_device_mapper() -> None:
    found = taken(answers(**DM), {"/dev/mapper/t1": "vol-1"}, kind="thin", device="pool")
    assert (found.size_bytes, found.used_bytes) == (3200 * 65_536, 1600 * 65_536)
    assert found.other_ratio == 12 / 96
    assert found.volumes == (
        volume("t1", 1 << 30, 102_400 * 512, True, "vol-1"),
        volume("t2", 51_200, None, False),
    )
    with pytest.raises(SpaceUnreadable, match="no thin pool root"):
        taken(answers(**DM), kind="thin", device="root")
    failed = {**DM, "status": "pool: 0 409600 thin-pool Fail\n"}
    with pytest.raises(SpaceUnreadable, match="has failed"):
        taken(answers(**failed), kind="thin", device="pool")


def test_zfs_counts_what_can_still_be_written() -> None:
    said = "tank\tfilesystem\t-\t600\t400\t10\ntank/v\tvolume\t2000\t500\t400\t300\n"
    found = taken(answers(zfs=said), {"/dev/zvol/tank/v": "vol-3"}, kind="zfs", dataset="tank")
    assert (found.size_bytes, found.used_bytes) == (1000, 600)
    assert found.volumes == (volume("tank/v", 2000, 300, None, "vol-3"),)


SNMP = """\
.1.3.6.1.2.1.25.2.3.1.1.36 36
.1.3.6.1.2.1.25.2.3.1.2.36 .1.3.6.1.2.1.25.2.1.4
.1.3.6.1.2.1.25.2.3.1.3.1 "Physical memory"
.1.3.6.1.2.1.25.2.3.1.3.36 "/"
.1.3.6.1.2.1.25.2.3.1.3.37 "/vol/big data"
.1.3.6.1.2.1.25.2.3.1.4.1 1024
.1.3.6.1.2.1.25.2.3.1.4.36 4096
.1.3.6.1.2.1.25.2.3.1.4.37 4096
.1.3.6.1.2.1.25.2.3.1.5.1 24684084
.1.3.6.1.2.1.25.2.3.1.5.36 66053021
.1.3.6.1.2.1.25.2.3.1.5.37 -1294967296
.1.3.6.1.2.1.25.2.3.1.6.1 12141916
.1.3.6.1.2.1.25.2.3.1.6.36 7659828
.1.3.6.1.2.1.25.2.3.1.6.37 2000000000
"""
"""As snmpbulkwalk of net-snmp 5.9.3 wrote what its snmpd answered; the row 37 is made up."""


def test_a_storage_of_another_host_is_a_row_of_its_table() -> None:
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(argv)
        return SNMP

    found = taken(run, kind="snmp", host="filer", storage="/", backend="disk-1")
    assert found == Space("data", "snmp", "disk-1", 66053021 * 4096, 7659828 * 4096, None, 0, 0, (), NOW_US)
    big = taken(run, kind="snmp", host="filer", storage="/vol/big data", settings="/etc/sla/snmp")
    assert (big.size_bytes, big.used_bytes) == (3_000_000_000 * 4096, 2_000_000_000 * 4096)
    assert [argv[:3] for argv in asked] == [
        ["snmpbulkwalk", "-m", ""],
        ["env", "SNMPCONFPATH=/etc/sla/snmp", "snmpbulkwalk"],
    ]
    assert all(list(argv[-2:]) == ["filer", ".1.3.6.1.2.1.25.2.3.1"] for argv in asked)


def test_the_largest_volumes_are_named_and_all_are_counted() -> None:
    listing = "".join(f"{number} 0 f{number:03}\0" for number in range(MAX_SPACE_VOLUMES + 10))
    found = taken(answers(stat=STAT, find=listing), kind="loop", path="/srv")
    assert (len(found.volumes), found.volume_count) == (MAX_SPACE_VOLUMES, MAX_SPACE_VOLUMES + 10)
    assert found.volumes[-1]["name"] == "f010"
    assert Space.parse({**found.header(), "volumes": list(found.volumes)}, NOW_US) == found


@pytest.mark.parametrize(
    ("said", "source", "problem"),
    [
        ({"stat": "x y"}, {"kind": "path", "path": "/srv"}, "is not understood: ValueError"),
        (
            {"stat": CommandFailed("stat", "exit status 1: no")},
            {"kind": "path", "path": "/x"},
            "exit status 1: no",
        ),
        ({"lvs": "{}"}, {"kind": "lvm", "group": "vg"}, "is not understood: KeyError"),
        ({"lvs": "no"}, {"kind": "lvm", "group": "vg"}, "is not understood: JSONDecodeError"),
        ({}, {"kind": "zfs", "dataset": "tank"}, "there is no such program"),
        (
            {"snmpbulkwalk": SNMP},
            {"kind": "snmp", "host": "filer", "storage": "/vol"},
            "filer has no storage /vol, but /, /vol/big data, Physical memory",
        ),
        (
            {"snmpbulkwalk": ".1.3.6.1.2.1.25.2.3.1 No Such Object available on this agent at this OID"},
            {"kind": "snmp", "host": "filer", "storage": "/"},
            "none: it does not answer this table",
        ),
        (
            {"snmpbulkwalk": SNMP.replace("1.4.36 4096", "1.4.36 many")},
            {"kind": "snmp", "host": "filer", "storage": "/"},
            "is not understood: ValueError",
        ),
    ],
)
def test_what_cannot_be_read_says_why(said: Any, source: Any, problem: str) -> None:
    with pytest.raises(SpaceUnreadable) as caught:
        taken(answers(**said), **source)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("the space of data cannot be read: ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"kind": "path"}, "set path"),
        ({"kind": "lvm", "path": "/x"}, "set group"),
        ({"kind": "zfs", "dataset": "tank", "path": "/x"}, "path has no use"),
        ({"kind": "path", "path": "srv"}, "a path from / on"),
        ({"kind": "lvm", "group": "-a"}, "not begin with -"),
        ({"kind": "snmp", "host": "filer"}, "set storage"),
        ({"kind": "snmp", "host": "-v3", "storage": "/"}, "not begin with -"),
        ({"kind": "snmp", "host": "a", "storage": "/", "settings": "x"}, "a path from / on"),
        ({"kind": "zfs", "dataset": "tank", "settings": "/x"}, "settings has no use"),
        ({"kind": "tape", "path": "/x"}, "kind"),
        ({"kind": "path", "path": "/x", "backend": "a b"}, "letters, digits"),
    ],
)
def test_a_wrong_source_is_refused(source: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SpaceSource(name="data", **source)


def test_two_sources_of_one_name_are_refused() -> None:
    source = {"name": "a", "kind": "path", "path": "/x"}
    with pytest.raises(ValueError, match=r"two .* have the name a"):
        SpaceConfig(source=[source, source])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="64 at most"):
        SpaceConfig(source=[{**source, "name": f"a{number}"} for number in range(65)])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("said", "source"),
    [
        ({"stat": "4096 100 150 50 10 5"}, {"kind": "path", "path": "/x"}),  # more is free than there is
        ({"stat": "4096 100 50 50 10 15"}, {"kind": "path", "path": "/x"}),
        ({"stat": f"4096 100 50 {2**64 - 1} 10 5"}, {"kind": "path", "path": "/x"}),
        ({"zfs": ""}, {"kind": "zfs", "dataset": "tank/x"}),
        ({"lvs": '{"report": []}'}, {"kind": "lvm", "group": "vg"}),
        ({"lvs": "[" * 100_000}, {"kind": "lvm", "group": "vg"}),
    ],
)
def test_figures_that_cannot_be_true_are_sent_to_no_server(said: Any, source: Any) -> None:
    """The server ends the session of an agent that sends them, and the next round would end the next one."""
    with pytest.raises(SpaceUnreadable):
        taken(answers(**said), **source)


def test_sparse_files_may_add_up_to_more_than_is_counted() -> None:
    listing = f"{5 << 60} 0 a\0{5 << 60} 0 b\0"
    found = taken(answers(stat=STAT, find=listing), kind="loop", path="/srv")
    assert (found.provisioned_bytes, found.volume_count) == (2**63 - 1, 2)


def test_sizes_in_words() -> None:
    assert [shown_bytes(size) for size in (0, 1023, 1536, 5 << 30, 1 << 70)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 GiB", "1024.0 EiB",
    ]  # fmt: skip
